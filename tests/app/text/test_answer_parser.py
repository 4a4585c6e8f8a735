import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.text.answer_parser import AnswerParser
from reprise.app.text.answer_parts import AnswerParts, TextPiece, Wanted
from reprise.app.text.families.table import FAMILIES
from reprise.app.text.families.thoughts import THINK

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "}"], "b": {"c": "\\""}}}\n</tool_call>'
ARGUMENTS = '{"a": [1, "}"], "b": {"c": "\\""}}'


FAMILY_OF = {"tags": FAMILIES["hermes"], "bare": FAMILIES["llama"], None: None}


def parser(style: str | None = "tags", *, parallel: bool = True, thinks: bool = False, in_thought: bool = False):
    wanted = Wanted(tools={"add": {}, "sub": {}}, parallel=parallel)
    thoughts = THINK if thinks or in_thought else None
    return AnswerParser(wanted, calls=FAMILY_OF[style], thoughts=thoughts, in_thought=in_thought)


def read(parsing: AnswerParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return what the pieces add up to; fail if the parser's own sums differ."""
    content, reasoning, calls, written = "", "", [], AnswerParts()
    for parts in [*(parsing.push(piece) for piece in pieces), parsing.flush()]:
        written.add(parts)
        content += parts.content
        reasoning += parts.reasoning
        for index, call, arguments in parts.calls:
            if call is not None:
                assert index == len(calls)
                calls.append([call.name, ""])
            calls[index][1] += arguments
    assert (parsing.content, parsing.reasoning) == (content, reasoning)
    assert [(call.name, call.arguments) for call in parsing.calls] == [tuple(call) for call in calls]
    in_order = [piece if isinstance(piece, TextPiece) else piece.call for piece in written.pieces]
    assert parsing.said == [one for one in in_order if one is not None]
    return content, reasoning, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        ("tags", "Just text <tool", "Just text <tool", []),
        ("tags", CALL, "", [("add", ARGUMENTS)]),
        ("tags", f"Let me see. \n{CALL}\n{CALL}\n", "Let me see.", [("add", ARGUMENTS)] * 2),
        ("tags", f"{CALL} and more", " and more", [("add", ARGUMENTS)]),
        ("tags", 'a <tool_call>{"name": "rm", "arguments": {}}</tool_call>',
         'a <tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
        ("tags", "a <tool_call>\nno JSON</tool_call> b", "a <tool_call>\nno JSON</tool_call> b", []),
        ("tags", '<tool_call>{"arguments": {"a": 1}, "name": "sub"}</tool_call>', "", [("sub", '{"a": 1}')]),
        ("tags", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
        ("tags", '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
        ("bare", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ("bare", ' {"name": "add", "parameters": {}}; {"name": "sub", "parameters": {"b": 2}}', "",
         [("add", "{}"), ("sub", '{"b": 2}')]),
        ("bare", '[{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {}}]', "",
         [("add", '{"a": 1}'), ("sub", "{}")]),
        ("bare", '{"name": "Ann"}', '{"name": "Ann"}', []),
        ("bare", "Hello {", "Hello {", []),
        (None, CALL, CALL, []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_an_answer_says(style, text, content, calls, size):
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(parser(style), pieces) == (content, "", calls)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_thoughts_stand_apart(size):
    for text, in_thought in (
        (f"<think>\nHm {{}}\n\n</think>\n\nYes.{CALL}", False),
        ("Hm {}\n</think>Yes." + CALL, True),
    ):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        parsing = parser(thinks=True, in_thought=in_thought)
        assert read(parsing, pieces) == ("Yes.", "Hm {}", [("add", ARGUMENTS)])
    assert read(parser(thinks=True), ["<think>on and on"]) == ("", "on and on", [])
    assert read(parser(thinks=True), [" <thin"]) == (" <thin", "", [])
    assert read(parser(thinks=False), ["<think>x</think>"])[0] == "<think>x</think>"


def test_one_call_where_calls_are_not_parallel():
    assert read(parser(parallel=False), [CALL, "\n", CALL]) == ("", "", [("add", ARGUMENTS)])


def test_arguments_are_shown_while_they_are_written():
    parsing = parser()
    shown = []
    for char in CALL:
        shown += [arguments for _, _, arguments in parsing.push(char).calls if arguments]
    assert len(shown) == len(ARGUMENTS)
    assert json.loads("".join(shown)) == json.loads(ARGUMENTS)


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "add", ',
        '"arguments": ',
        "{",
        "}",
        '"',
        "\\",
        "<think>",
        "</think>",
        "\n",
    ]
)


@given(
    texts=st.lists(PIECES | st.text("a {}<>", max_size=3), max_size=12),
    cuts=st.lists(st.integers(1, 4), max_size=40),
    style=st.sampled_from(["tags", "bare", None]),
    thinks=st.booleans(),
)
def test_where_the_text_is_cut_does_not_matter(texts, cuts, style, thinks):
    text = "".join(texts)
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    pieces.append(text[start:])
    whole = read(parser(style, thinks=thinks), [text])
    assert read(parser(style, thinks=thinks), pieces) == whole
    if style is None and not thinks:
        assert whole == (text, "", [])


@given(
    thought=st.text(alphabet="ab<>/think\n", max_size=20).filter(lambda text: "</think>" not in text),
    said=st.text(alphabet="ab<\n", max_size=10),
    cuts=st.lists(st.integers(0, 50), max_size=6),
    in_thought=st.booleans(),
)
def test_where_a_thought_ends_does_not_depend_on_how_the_text_comes(thought, said, cuts, in_thought):
    text = ("" if in_thought else "<think>") + thought + "</think>" + said
    parsing = parser(thinks=True, in_thought=in_thought)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    read(parsing, [text[start:end] for start, end in itertools.pairwise(edges)])
    assert parsing.thought_chars == len(text) - len(said)


TAGS = [CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", "<", "<think>", "</think>", " ", "\n", "\n\n", "Hm"]
JSON = [
    '{"name": "add", "arguments": {',
    '"a": 1',
    "}",
    "}}",
    '{"name"',
    ": ",
    '"sub"',
    ', "parameters": {}',
    "; ",
    "[",
    "]",
]
PIECES = st.lists(st.sampled_from([*TAGS, *JSON]), max_size=12)


@given(
    pieces=PIECES,
    style=st.sampled_from(["tags", "bare", None]),
    thinks=st.booleans(),
    in_thought=st.booleans(),
    parallel=st.booleans(),
    sizes=st.lists(st.integers(1, 9), max_size=40),
)
def test_pieces_that_show_nothing_may_come_with_the_next_one(pieces, style, thinks, in_thought, parallel, sizes):
    """A server that goes on with an answer takes the tokens of each shown piece in at once."""
    text, cuts = "".join(pieces), [0]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    parts = [text[a:b] for a, b in itertools.pairwise([*cuts, max(len(text), cuts[-1])])]
    first, second = (parser(style, parallel=parallel, thinks=thinks, in_thought=in_thought) for _ in range(2))
    held = ""
    for piece in parts:
        held += piece
        shown = first.push(piece)
        if shown:
            assert plain(second.push(held)) == plain(shown)
            held = ""
    second.push(held)
    assert plain(second.flush()) == plain(first.flush())
    assert second.thought_chars == first.thought_chars


def plain(parts: AnswerParts) -> tuple[object, ...]:
    """The parts without the random ids of calls, and each call's arguments in one piece."""
    calls: dict[int, list[str]] = {}
    for index, call, arguments in parts.calls:
        entry = calls.setdefault(index, ["", ""])
        entry[0] += "" if call is None else call.name
        entry[1] += arguments
    return parts.content, parts.reasoning, calls
