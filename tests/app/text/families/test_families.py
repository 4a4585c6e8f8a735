"""Tests every family: what its template shows is found, and what its models write is read."""

import json
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reprise.app.settings.sections import CallFamily, ThoughtFamily
from reprise.app.text.answer_parts import Wanted
from reprise.app.text.families.table import FAMILIES
from reprise.app.text.families.thoughts import THOUGHTS
from tests.app.text.families.samples import SAMPLES, Read, form_in_text, form_of, read_text, read_tokens, written
from tests.example_counts import examples

BY_SHAPE: dict[str, list[str]] = {}
for _family in sorted(SAMPLES):
    BY_SHAPE.setdefault(type(FAMILIES[_family].taught).__name__, []).append(_family)
EVERY = pytest.mark.parametrize("family", sorted(SAMPLES))
TOOLS: dict[str, dict[str, Any]] = {
    "look_up": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "is_exact": {"type": "boolean"},
            "nothing": {"type": "null"},
            "names": {"type": "array", "items": {"type": "string"}},
            "more": {"type": "object"},
            "maybe": {"type": ["string", "null"]},
        },
        "required": ["place"],
    },
    "no_arguments": {},
}
ARGUMENTS = {
    "place": 'Zürich "HB"\\\n ',
    "days": 3,
    "share": -0.25,
    "is_exact": True,
    "nothing": None,
    "names": ["a, b", "]"],
    "more": {"in": {"side": [1, {}]}},
    "maybe": None,
}
WANTED = Wanted(tools=TOOLS)


def test_every_family_has_a_sample_and_a_name_in_the_settings() -> None:
    assert set(FAMILIES) == set(SAMPLES) == set(get_args(CallFamily)) - {"auto"}
    assert set(THOUGHTS) == set(get_args(ThoughtFamily)) - {"auto", "none"}
    assert {family.thoughts for family in FAMILIES.values()} - {""} <= set(THOUGHTS)


@EVERY
def test_a_template_shows_its_family(family: str) -> None:
    described = form_of(family).described
    assert described == {"calls": family, "thoughts": SAMPLES[family].thoughts, "tools_in": "template"}


@EVERY
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_with_arguments_of_every_type_are_read(family: str, size: int) -> None:
    calls = [("look_up", ARGUMENTS), ("no_arguments", {})]
    if family == "harmony":
        calls = calls[:1]  # each call ends an answer
    before = "" if family in ("llama", "pythonic", "harmony") else "I look. "
    read, answer = read_tokens(family, before + written(family, calls), WANTED, size=size)
    assert read.calls == calls
    assert (read.content, read.reasoning) == (before.strip(), "")
    assert answer.finish_reason == "tool_calls"
    if size == 1 and family not in ("pythonic", "olmo", "lfm2"):
        assert read.num_parts > 12


@EVERY
def test_a_thought_and_a_call_are_told_apart(family: str) -> None:
    opening, closing = SAMPLES[family].thought
    call = [("look_up", {"place": "Rome"})]
    read, answer = read_tokens(family, f"{opening}Where? {closing}{written(family, call)}", WANTED)
    assert (read.content, read.reasoning.strip(), read.calls) == ("", "Where?", call)
    text = "A day in May." if family != "harmony" else "<|channel|>final<|message|>A day in May."
    read, answer = read_tokens(family, f"{opening}When?{closing}{text}", WANTED)
    assert (read.content, read.reasoning, read.calls) == ("A day in May.", "When?", [])
    tokens = len(answer.token_ids) - len(answer._tokenizer.encode(text)) - 1
    # White space after a thought, or the header of a message, is not counted.
    assert tokens - 11 <= answer.reasoning_tokens <= tokens


@pytest.mark.parametrize("family", sorted(set(SAMPLES) - {"llama", "pythonic", "harmony"}))
def test_a_call_inside_a_thought_ends_it(family: str) -> None:
    call = [("look_up", {"place": "Rome"})]
    opening, closing = SAMPLES[family].thought
    read, answer = read_tokens(family, f"{opening}I look.\n{written(family, call)}{closing}", WANTED)
    assert (read.content, read.reasoning, read.calls) == ("", "I look.", call)
    assert answer.finish_reason == "tool_calls"
    read, _ = read_tokens(family, f"{opening}<tool_call>, [TOOL_CALLS] and such.{closing}Yes.", WANTED)
    assert (read.content, read.calls) == ("Yes.", [])


@EVERY
def test_calls_of_unknown_functions_stay_text(family: str) -> None:
    read, answer = read_tokens(family, written(family, [("remove", {"place": "all of it"})]), WANTED)
    assert read.calls == []
    assert "remove" in read.content
    assert "all of it" in read.content
    assert answer.finish_reason == "stop"


@EVERY
def test_a_call_that_max_tokens_has_cut(family: str) -> None:
    """The parts of its arguments that are there are told; a call whose name is cut is text."""
    whole = written(family, [("look_up", {"place": "Rome", "days": 3})])
    read, _ = read_tokens(family, whole[: whole.index("ome")], WANTED, end="")
    if family in ("pythonic", "olmo", "lfm2"):  # an argument is read when it is complete
        assert read.calls == [("look_up", "")]
    else:
        assert read.calls is not None
        assert read.calls[0][1].removeprefix('{"place": "').rstrip('"') == "R"
    read, _ = read_tokens(family, whole[: whole.index("_up")], WANTED, end="")
    assert read.calls == []


@EVERY
def test_one_call_where_calls_are_not_parallel(family: str) -> None:
    text = written(family, [("look_up", {"place": "Rome"}), ("look_up", {"place": "Oslo"})])
    read, _ = read_tokens(family, text, Wanted(tools=TOOLS, parallel=False))
    assert (read.content, read.calls) == ("", [("look_up", {"place": "Rome"})])


@EVERY
def test_stop_strings_act_on_the_content_alone(family: str) -> None:
    opening, closing = SAMPLES[family].thought
    call = written(family, [("look_up", {"place": "END of the world"})])
    wanted = Wanted(tools=TOOLS, stops=("END", "look_up"))
    read, answer = read_tokens(family, f"{opening}At the END.{closing}{call}", wanted)
    assert (read.reasoning.strip(), read.calls) == ("At the END.", [("look_up", {"place": "END of the world"})])
    assert not answer.stopped_by_string
    text = "The " if family != "harmony" else "<|channel|>final<|message|>The "
    read, answer = read_tokens(family, f"{opening}At the END.{closing}{text}END. And more.", wanted)
    assert (read.reasoning.strip(), read.content, answer.finish_reason) == ("At the END.", "The ", "stop")
    kept = answer._tokenizer.decode(answer.token_ids[: answer.kept_tokens], skip_special_tokens=True)
    assert kept == answer.text
    assert kept.endswith("The ")


@EVERY
def test_special_tokens_that_mean_nothing_are_left_out(family: str) -> None:
    special = "".join(token for token in SAMPLES[family].special if token not in ("<|call|>",))
    if family == "harmony":
        return
    read, _ = read_tokens(family, f"Just {special}text", WANTED)
    assert (read.content + read.reasoning).replace(" ", "") == "Justtext"


NAMES = st.text("abc_", min_size=1, max_size=3)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(-1e6, 1e6)
    | st.text("ab ,'\"\\\n\t{}[]<é🎉", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = {"s": "string", "i": "integer", "n": "number", "b": "boolean", "a": "array", "o": "object"}
TYPED: dict[str, Any] = {
    "string": st.text("ab ,'\"\\\n\t{}[]<>/=é🎉", max_size=12),
    "integer": st.integers(-(10**6), 10**6),
    "number": st.floats(-1e6, 1e6),
    "boolean": st.booleans(),
    "array": st.lists(VALUES, max_size=3),
    "object": st.dictionaries(NAMES, VALUES, max_size=3),
}
ROUND_TRIP: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {key: {"type": kind} for key, kind in KEYS.items()}},
    "g_2": {},
}
CALLS = st.lists(
    st.tuples(st.just("f"), st.fixed_dictionaries({}, optional={key: TYPED[kind] for key, kind in KEYS.items()}))
    | st.tuples(
        st.just("g_2"), st.dictionaries(st.sampled_from(["x", "y_z"]), st.integers(0, 9) | st.booleans(), max_size=2)
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("shape", sorted(BY_SHAPE))
@settings(max_examples=examples(2000))
@given(data=st.data(), calls=CALLS, cuts=st.lists(st.integers(1, 30), max_size=30))
def test_what_a_template_writes_is_read_back(
    shape: str, data: st.DataObject, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    family = data.draw(st.sampled_from(BY_SHAPE[shape]))
    sample = SAMPLES[family]
    if sample.values == "text":  # such a format has no way to write its own tags
        shown = json.dumps(calls)
        assume("</" not in shown and "<|" not in shown)
    text = written(family, calls)
    if family == "harmony":
        text = text.replace("<|call|><|start|>assistant", "<|call|>")
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    read = read_text(form_in_text(family).parser(Wanted(tools=ROUND_TRIP), in_thought=False), [*pieces, text[start:]])
    assert read.calls == calls
    assert (read.content, read.reasoning) == ("", "")


FRAGMENTS = st.sampled_from(
    [
        *sorted({marker for family in FAMILIES.values() for marker in family.markers}),
        *sorted({mark for thoughts in THOUGHTS.values() for mark in thoughts.markers}),
        *(
            '{"name": "f", ',
            '"arguments": {',
            '"parameters": ',
            '"f"',
            "f(",
            "s=",
            "'",
            ")",
            "{",
            "}",
            "[",
            "]",
            ",",
            ";",
        ),
        *(
            '"s": "x',
            '"',
            "\\",
            ": ",
            "\n",
            " ",
            "call:f{",
            "s:",
            "functions.f:0",
            "f",
            "remove",
            "to=functions.f ",
            "json",
        ),
        *("<parameter=s>", "<function=f>", "é", "🎉", "true", "None", "-1", "Hm."),
    ]
)
GARBAGE = st.lists(FRAGMENTS, max_size=14).map("".join)


CUTS = st.lists(st.integers(1, 9), max_size=60)
DAMAGE = st.tuples(st.integers(0, 400), st.integers(0, 12), FRAGMENTS | st.just(""))  # place, length, what comes there


@pytest.mark.sweep(4)
@EVERY
@settings(max_examples=examples(200))
@given(text=GARBAGE, cuts=CUTS, in_thought=st.booleans(), parallel=st.booleans())
def test_garbage_is_read_alike_however_it_is_cut(
    family: str, text: str, cuts: list[int], in_thought: bool, parallel: bool
) -> None:
    whole = read_whole_and_cut(family, text, cuts, in_thought=in_thought, parallel=parallel)
    # Without calls all of the text is said, but for the marks of thoughts.
    for read in (whole, read_text(form_in_text(family).parser(Wanted(), in_thought=in_thought), [text])):
        if family != "harmony" and not read.calls:
            said = _squeezed(read.reasoning + read.content)
            assert _is_within(said, _squeezed(text))
            marks = (*FAMILIES[family].ignored * 14, *FAMILIES[family].wrap, *SAMPLES[family].thought)
            assert len(_squeezed(text)) - len(said) <= sum(map(len, marks)) + 1


@pytest.mark.sweep(4)
@EVERY
@settings(max_examples=examples(200))
@given(
    calls=CALLS,
    damages=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 12), FRAGMENTS | st.just("")), min_size=1, max_size=3
    ),
    cuts=CUTS,
    in_thought=st.booleans(),
)
def test_damaged_calls_are_read_alike_however_they_are_cut(
    family: str,
    calls: list[tuple[str, dict[str, Any]]],
    damages: list[tuple[int, int, str]],
    cuts: list[int],
    in_thought: bool,
) -> None:
    text = "I look. " * in_thought + written(family, calls) + " So."
    for place, length, new in damages:
        start = place % len(text)
        text = text[:start] + new + text[start + length :]
    read_whole_and_cut(family, text, cuts, in_thought=in_thought, parallel=True)


def read_whole_and_cut(family: str, text: str, cuts: list[int], *, in_thought: bool, parallel: bool) -> Read:
    """Return what is read of a text; fail if it is something else when the text comes in pieces."""
    wanted = Wanted(tools=ROUND_TRIP, parallel=parallel)
    whole_parser, cut_parser = (form_in_text(family).parser(wanted, in_thought=in_thought) for _ in range(2))
    whole = read_text(whole_parser, [text])
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    read = read_text(cut_parser, [*pieces, text[start:]])
    assert (read.content, read.reasoning, read.calls) == (whole.content, whole.reasoning, whole.calls)
    assert cut_parser.thought_chars == whole_parser.thought_chars
    return whole


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _is_within(part: str, whole: str) -> bool:
    """Whether the characters of `part` come in `whole` in the same order."""
    rest = iter(whole)
    return all(char in rest for char in part)
