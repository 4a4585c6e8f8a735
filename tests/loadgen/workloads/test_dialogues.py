import gzip
import json
import random

import pytest

from reprise.loadgen.workloads import dialogues

SHAREGPT = [
    {"conversations": [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 80}] * 2},
    {"conversations": [{"from": "gpt", "value": "I begin"}]},
    {"other": 1},
    "no record",
]
OURS = [{"turns": [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b" * 80}] * 2}]


@pytest.mark.parametrize("records", [SHAREGPT, OURS], ids=["sharegpt", "ours"])
@pytest.mark.parametrize("layout", ["list", "lines", "gzip"])
def test_files_of_dialogues(tmp_path, records, layout):
    text = json.dumps(records) if layout == "list" else "\n".join(map(json.dumps, records))
    path = tmp_path / ("d.jsonl.gz" if layout == "gzip" else "d.json")
    path.write_bytes(gzip.compress(text.encode()) if layout == "gzip" else text.encode())
    ((script,), unusable) = dialogues.read(path)
    assert unusable == len(records) - 1
    assert [(turn.prompt_tokens, turn.answer_tokens, turn.text) for turn in script] == [(10, 20, "a" * 40)] * 2


def test_what_is_said_twice_in_a_row_is_one_message(tmp_path):
    said = [("system", "s"), ("gpt", "hello"), ("human", "one"), ("human", "two"), ("gpt", ""), ("gpt", "yes"),
            ("human", "unanswered")]  # fmt: skip
    path = tmp_path / "d.json"
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in said]}]))
    (script,) = dialogues.read(path).scripts
    assert [turn.text for turn in script] == ["one\ntwo"]


def test_what_nobody_answers_is_counted(tmp_path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps([*OURS, {}, {"turns": [{"role": "user", "content": "hello?"}]}, *OURS]))
    scripts, unusable = dialogues.read(path)
    assert (len(scripts), unusable) == (2, 2)


@pytest.mark.parametrize(("text", "why"), [("[{}]", "no conversations"), ("[{", "not JSON")])
def test_a_file_without_dialogues_is_refused(tmp_path, text, why):
    path = tmp_path / "none.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        dialogues.read(path)


def test_the_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(f'{json.dumps(OURS[0])}\n\n{{"turns": ?}}\n')
    with pytest.raises(ValueError, match="line 3, column 11"):
        dialogues.read(path)


def test_all_are_chosen_before_any_comes_again(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [{"role": "user", "content": f"{n}"}, {"role": "assistant",
                    "content": "x"}]}) for n in range(5)))  # fmt: skip
    scripts = dialogues.read(path).scripts
    chosen = dialogues.choose(scripts, random.Random(2), 12)
    assert len(chosen) == 12
    assert set(chosen[:5]) == set(chosen[5:10]) == set(scripts)
    assert chosen[:5] != scripts
