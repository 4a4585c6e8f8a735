from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.text.answer_parts import Wanted
from reprise.app.text.tokenizer import ChatTokenizer
from reprise.app.turn.answer import Answer, Delta, tokens_within
from reprise.app.turn.prepare import plain_parser
from reprise.engine.messages import Output, TokenLogprob


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(model_dir)


def outputs(
    token_ids: list[int], sizes: list[int], reason: str | None = "stop", logprobs: bool = False
) -> list[Output]:
    """The tokens in outputs of the given sizes, the rest one by one."""
    found, start = [], 0
    while start < len(token_ids):
        size = sizes.pop(0) if sizes else 1
        chunk = token_ids[start : start + size]
        start += len(chunk)
        found.append(
            Output(
                request_id="r",
                choice=0,
                token_ids=chunk,
                logprobs=[TokenLogprob(logprob=-1.0, top=[(token, -1.0)]) for token in chunk] if logprobs else None,
                finish_reason=reason if start >= len(token_ids) else None,
                report=None,
                timings=None,
                error=None,
                error_code=None,
            )
        )
    return found


def play(choice: Answer, arriving: list[Output]) -> list[Delta]:
    deltas = []
    for output in arriving:
        if (delta := choice.push(output)) is not None:
            deltas.append(delta)
        if choice.finish_reason is not None:
            break
    return deltas


def make(tokenizer: ChatTokenizer, *stops: str, min_tokens: int = 0) -> Answer:
    return Answer(index=0, tokenizer=tokenizer, min_tokens=min_tokens, parser=plain_parser(Wanted(stops=stops)))


TEXTS = st.text("ab Ünï🎉STOP", max_size=30)


@given(text=TEXTS, stop=st.text("abSTOP🎉", min_size=1, max_size=3), sizes=st.lists(st.integers(1, 5), max_size=10))
def test_a_stop_string_cuts_the_text_wherever_tokens_and_outputs_end(tokenizer, text, stop, sizes):
    choice = make(tokenizer, stop)
    ids = [*tokenizer.encode(text), 2]
    deltas = play(choice, outputs(ids, sizes, logprobs=True))
    expected = text.split(stop)[0]
    assert choice.text == expected == "".join(delta.parts.content for delta in deltas)
    assert [delta.finish_reason for delta in deltas][-1] == choice.finish_reason == "stop"
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert choice.stopped_by_string == (stop in text)
    kept = tokenizer.decode(choice.token_ids[: choice.kept_tokens], skip_special_tokens=True)
    assert expected.startswith(kept)
    if stop in text:
        # One more token would go beyond the answer, or bring no whole character of it.
        more = tokenizer.decode(choice.token_ids[: choice.kept_tokens + 1], skip_special_tokens=True)
        assert more == kept or not expected.startswith(more)
    shown = [entry for delta in deltas for entry in delta.logprobs or []]
    assert len(shown) >= choice.kept_tokens
    assert [entry["bytes"] for entry in shown] == [
        list(tokenizer.token_text(token)[1]) for token in choice.token_ids[: len(shown)]
    ]
    if stop not in text:
        assert len(shown) == len(ids)


@given(text=TEXTS, sizes=st.lists(st.integers(1, 5), max_size=10))
def test_without_stops_the_text_is_that_of_all_tokens(tokenizer, text, sizes):
    choice = make(tokenizer)
    play(choice, outputs([*tokenizer.encode(text), 2], sizes))
    assert choice.text == text


def test_a_stop_string_is_shown_where_that_was_asked_for(tokenizer):
    wanted = Wanted(stops=("STOP", "TOP"), shows_stop=True)
    choice = Answer(index=0, tokenizer=tokenizer, min_tokens=0, parser=plain_parser(wanted))
    play(choice, outputs([*tokenizer.encode("one STOP two"), 2], []))
    assert (choice.text, choice.content, choice.finish_reason) == ("one STOP", "one STOP", "stop")


def test_special_tokens_are_shown_where_that_was_asked_for(tokenizer):
    parser = plain_parser(Wanted())
    choice = Answer(index=0, tokenizer=tokenizer, min_tokens=0, parser=parser, skip_special_tokens=False)
    play(choice, outputs([*tokenizer.encode("one"), 2], []))
    assert choice.text == "one<|im_end|>"


def test_an_answer_cut_inside_a_character_shows_that(tokenizer):
    ids = tokenizer.encode("🎉" * 2)[:-1]
    choice = make(tokenizer)
    deltas = play(choice, outputs(ids, [], reason="length"))
    assert choice.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert choice.text.endswith("\ufffd")
    assert deltas[-1].finish_reason == "length"


def test_stop_strings_do_not_count_in_the_first_min_tokens(tokenizer):
    ids = tokenizer.encode("STOP one STOP two")
    first = len(tokenizer.encode("STOP"))
    choice = make(tokenizer, "STOP", min_tokens=first)
    play(choice, outputs([*ids, 2], []))
    assert choice.text == "STOP one "
    assert tokenizer.decode(choice.token_ids[: choice.kept_tokens], skip_special_tokens=True) == "STOP one "


def test_a_stop_string_of_one_token_does_not_count_as_the_last_of_the_first_min_tokens(tokenizer):
    stop = next(text for text in ("e", "a", ".") if len(tokenizer.encode(text)) == 1)
    token = tokenizer.encode(stop)[0]
    choice = make(tokenizer, stop, min_tokens=2)
    play(choice, outputs([token] * 4, [], reason="length"))
    assert choice.token_ids == [token] * 3, "the third is the first that may stop it"
    assert choice.finish_reason == "stop"


@given(gaps=st.lists(st.integers(0, 3), max_size=12), end=st.integers(0, 40))
def test_tokens_within_counts_whole_tokens_and_no_trailing_fragments(gaps, end):
    ends, total = [], 0
    for gap in gaps:
        total += gap
        ends.append(total)
    count = tokens_within(ends, end)
    assert all(value <= end for value in ends[:count])
    assert count == 0 or gaps[count - 1] > 0
    assert not any(gaps[index] > 0 and ends[index] <= end for index in range(count, len(ends)))
