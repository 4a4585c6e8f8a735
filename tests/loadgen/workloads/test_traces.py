import gzip
import json
import random
import re

import pytest

from reprise.loadgen.workloads import traces
from reprise.loadgen.workloads.workload import message, scaled

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 700, "output_length": 30, "hash_ids": [0, 3]},
    {"timestamp": 6000, "input_length": 1600, "output_length": 10, "hash_ids": [0, 1, 4, 5]},
]


def texts(tmp_path, *, scale: float = 1.0, seed: int = 0) -> list[list[str]]:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, MOONCAKE)).encode()))
    found = traces.conversations(traces.read(path), speed=2.0)
    # Requests of one stamp are spread up to the next; the first is at 0; twice as fast.
    assert [c.start_s for c in found] == [0.0, 0.75, 1.5]
    turns = [scaled(c.turns, scale)[0] for c in found]
    return [message(turn, random.Random(0), seed).split() for turn in turns]


def test_equal_blocks_are_equal_text(tmp_path):
    first, second, third = texts(tmp_path)
    assert [len(first), len(second), len(third)] == [1100, 700, 1600]
    assert first[:512] == second[:512] == third[:512]
    assert first[:1024] == third[:1024]
    assert first[512:700] != second[512:]
    assert first[1024:] != third[1024:1100]
    assert texts(tmp_path) == [first, second, third]
    assert texts(tmp_path, seed=1)[0] != first


def test_prefixes_stay_shared_when_lengths_are_scaled(tmp_path):
    first, second, third = texts(tmp_path, scale=0.1)
    assert [len(first), len(second), len(third)] == [110, 70, 160]
    assert first[:51] == second[:51]
    assert first[:102] == third[:102]
    assert first[51:70] != second[51:]


def test_azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.5000000,396,109\n2023-11-16 18:15:46.0000000,374,44\n"
    )
    first, second = traces.conversations(traces.read(path), speed=1.0)
    assert (first.start_s, first.turns[0].prompt_tokens, first.turns[0].answer_tokens) == (0.0, 374, 44)
    assert second.start_s == 4.5


def test_sessions_of_burstgpt_become_conversations(tmp_path):
    path = tmp_path / "burst.csv"
    rows = ["10,a,ChatGPT,100,50,150", "20,b,ChatGPT,7,0,7", "30,a,ChatGPT,190,20,210", "45,,GPT-4,60,5,65"]
    path.write_text("\n".join(["Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens", *rows]))
    conversation, alone = traces.conversations(traces.read(path), speed=1.0)
    assert [(t.prompt_tokens, t.answer_tokens, t.due_s) for t in conversation.turns] == [(100, 50, 0), (40, 20, 20)]
    assert (alone.start_s, len(alone.turns)) == (35.0, 1)


_AZURE, _BURST = "TIMESTAMP,ContextTokens,GeneratedTokens", "Timestamp,Session ID,Request tokens,Response tokens"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([json.dumps(MOONCAKE[0]), '{"timestamp": 1}'], "line 2: Object missing required field `input_length`"),
        ([json.dumps(MOONCAKE[0]), "", '{"timestamp": "x"'], "line 3: Expected `float`, got `str`"),
        ([json.dumps(MOONCAKE[0]), "nonsense"], "line 2: JSON is malformed"),
        ([json.dumps(MOONCAKE[0]), '{"x":' + "[" * 200_000], "line 2: maximum recursion depth"),
        ([json.dumps({**MOONCAKE[0], "input_length": 1 << 31})], "line 1: Expected `int` <= 1073741824"),
        (
            [_AZURE, "2023-11-16 18:15:46,374,44", "2023-11-16 18:15:50,many,44"],
            "line 3: ContextTokens is 'many', which",
        ),
        ([_AZURE, "2023-11-16 18:15:46,374"], "line 2: GeneratedTokens is None, which is no number"),
        ([_AZURE, "yesterday,374,44"], "line 2: TIMESTAMP is 'yesterday', which is no time"),
        ([_AZURE, "2023-11-16 18:15:46,3e9,44"], "line 2: ContextTokens of 3e+09 tokens"),
        ([_BURST, "10,a,100,50", "nan,a,100,50"], "line 3: Timestamp is 'nan', which is no number"),
        ([_BURST, "10,a,100,50", f'20,"{"a" * 200_000}",100,50'], "line 3: field larger than field limit"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path, lines, problem):
    path = tmp_path / "trace"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a trace that can be read: {problem}")):
        traces.read(path)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace|requests"):
        traces.read(path)
