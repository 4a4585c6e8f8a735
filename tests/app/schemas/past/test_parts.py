import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.schemas.past.parts import MAX_LINE_CHARS, Losses, asked_at, content_of, line, placeholder, readable


def encoded(data: bytes, media_type: str = "") -> str:
    text = base64.b64encode(data).decode()
    return f"data:{media_type};base64,{text}" if media_type else text


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


TEXTS = [
    ({"type": "text", "text": "a"}, "a"),
    ({"type": "summary_text", "text": "a"}, "a"),
    ({"type": "refusal", "refusal": "I will not."}, "I will not."),
    (document(type="text", media_type="text/plain", data="a\nb"), "a\nb"),
    ({**document(type="text", data="a"), "title": "T", "context": "C"}, "T\nC\na"),
    (document(type="base64", media_type="text/csv", data=encoded(b"1,2")), "1,2"),
    (document(type="content", content=[{"type": "text", "text": "a"}, {"type": "image"}]), "a"),
    ({"type": "input_file", "filename": "a.txt", "file_data": encoded(b"hi", "text/plain")}, "a.txt\nhi"),
    ({"type": "file", "file": {"filename": "a.py", "file_data": encoded(b"x = 1")}}, "a.py\nx = 1"),
    ({"type": "tool_reference", "tool_name": "grep"}, "[tool: grep]"),
    (
        {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "found"}]},
        "T\nS\nfound",
    ),
    ({"type": "compaction", "content": "So far: nothing."}, "So far: nothing."),
    ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "a\n b"}},
     '[web_search: {"query": "a\\n b"}]'),
    ({"type": "web_search_tool_result", "content": [{"type": "web_search_result", "title": "T", "url": "U"}]},
     "[web_search_tool_result: T U]"),
    ({"type": "web_search_tool_result", "content": {"type": "error", "error_code": "unavailable"}},
     "[web_search_tool_result: unavailable]"),
]  # fmt: skip
PLACEHOLDERS = [
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "image"),
    ({"type": "input_image", "image_url": "x"}, "image"),
    ({"type": "image", "source": {"type": "base64", "data": "AA"}}, "image"),
    ({"type": "input_audio", "input_audio": {}}, "audio"),
    ({"type": "video_url"}, "video"),
    ({"type": "file", "file": {"filename": "a.pdf", "file_data": encoded(b"a", "application/pdf")}}, "file a.pdf"),
    ({"type": "file", "file": {"file_id": "file-1"}}, "file"),
    ({"type": "input_file", "filename": "x", "file_data": encoded(b"\xff\xfe")}, "file x"),
    ({"type": "input_file", "file_data": encoded(b"%PDF-1.7 plain")}, "file"),
    (document(type="url", url="https://a"), "file"),
    ({**document(type="base64", media_type="application/pdf", data="AA=="), "title": "T"}, "file T"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "text"), TEXTS)
@pytest.mark.parametrize("is_asked", [False, True])
def test_what_has_a_text_becomes_it_wherever_it_stands(part, text, is_asked):
    losses = Losses()
    assert readable([part], losses, field="messages", is_asked=is_asked)[0]["text"] == text
    assert losses.names == []


@pytest.mark.parametrize(("part", "what"), PLACEHOLDERS)
def test_what_has_none_is_a_placeholder_in_the_history_and_stays_where_it_is_asked_about(part, what):
    losses = Losses()
    (shown,) = readable([part], losses, field="messages", is_asked=False)
    assert shown == {"type": "text", "text": f"[{what}: not shown, this model reads text]"}
    assert losses.names == [f"messages.{part['type']}"]
    assert readable([part], losses, field="messages", is_asked=True) == [part]


@pytest.mark.parametrize("kind", ["hologram", "connector_text", "container"])
def test_an_unknown_part_is_left_out_of_the_history_alone(kind):
    said = {"type": "text", "text": "a"}
    losses = Losses()
    assert readable([said, {"type": kind}], losses, field="input", is_asked=False) == [said]
    assert losses.names == [f"input.{kind}"]
    assert readable([said, {"type": kind}], losses, field="input", is_asked=True) == [said, {"type": kind}]


@pytest.mark.parametrize("content", [None, "a", 5, {}, []])
def test_what_is_no_list_of_parts_is_left_to_the_schema(content):
    assert readable(content, Losses(), field="messages", is_asked=False) == content


@pytest.mark.parametrize(
    ("roles", "place"),
    [
        ("", None),
        ("s", None),
        ("uu", 1),  # the first was refused, or never answered
        ("uaus", 2),
        ("uauuu", 4),
        ("uat", None),
        ("uaua", 2),  # the last is to be gone on with
        ("ua", 0),
        ("a", None),
    ],
)
def test_a_request_asks_about_the_last_message_of_a_user_that_has_no_answer(roles, place):
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    assert asked_at([names[role] for role in roles]) == place


@pytest.mark.parametrize(
    ("part", "text"), [("a", "a"), ({"text": "a"}, "a"), ({"type": "input_text", "text": "a"}, "a"),
                       ({"type": "text", "text": {"value": "a", "annotations": []}}, "a")],
)  # fmt: skip
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_part_whose_meaning_is_plain_is_a_text(part, text, is_asked):
    losses = Losses()
    found = readable([part, {"type": "text", "text": "b"}], losses, field="messages", is_asked=is_asked)
    assert found == [{"type": "text", "text": text}, {"type": "text", "text": "b"}]
    assert losses.names == []


@pytest.mark.parametrize(
    ("part", "text", "lost"),
    [
        (5, "5", []), ([1, "a"], '[1, "a"]', []), ({"type": "text", "text": 5}, "5", []),
        ({"type": "text"}, None, ["messages.text"]), ({"type": "input_text"}, None, ["messages.input_text"]),
        (None, None, ["messages.part"]), ({}, None, ["messages.part"]), ({"type": 5}, None, ["messages.part"]),
        ({"text": None}, None, ["messages.part"]),
    ],
)  # fmt: skip
def test_a_malformed_part_is_converted_or_left_out_of_the_history_alone(part, text, lost):
    losses = Losses()
    found = readable([part], losses, field="messages", is_asked=False)
    assert (found, losses.names) == ([] if text is None else [{"type": "text", "text": text}], lost)
    assert readable([part], Losses(), field="messages", is_asked=True) == [part]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("a", "a"), (None, None), (5, "5"), ({"type": "text", "text": "a"}, [{"type": "text", "text": "a"}]),
        ({"a": 1}, '{"a": 1}'), (["a"], [{"type": "text", "text": "a"}]),
    ],
)  # fmt: skip
def test_a_content_of_another_type_is_one_part_or_its_json(content, found):
    assert content_of(content, Losses(), field="messages", is_asked=False) == found
    if not isinstance(content, list):
        assert content_of(content, Losses(), field="messages", is_asked=True) == content


def test_a_text_that_is_null_is_empty_in_the_history_alone():
    part = {"type": "text", "text": None}
    assert readable([part], Losses(), field="messages", is_asked=False) == [{"type": "text", "text": ""}]
    assert readable([part], Losses(), field="messages", is_asked=True) == [part]


def test_a_line_is_one_and_bounded():
    assert line("code", " a\n\tb ") == "[code: a b]"
    assert line("code", "") == "[code]"
    assert len(line("code", "x" * 9999)) == MAX_LINE_CHARS + len("[code: ]")
    assert line("call", {"b": 1, "a": 2}) == line("call", {"a": 2, "b": 1})
    assert placeholder("image") == "[image: not shown, this model reads text]"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KINDS = [*sorted({part["type"] for part, _ in (*TEXTS, *PLACEHOLDERS)}), "unknown"]
FIELDS = (
    "text",
    "source",
    "content",
    "file",
    "file_data",
    "filename",
    "title",
    "name",
    "input",
    "tool_name",
    "refusal",
)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(KINDS)}, optional=dict.fromkeys(FIELDS, JSON))


@given(parts=st.lists(PARTS | JSON, max_size=4))
def test_no_part_is_too_odd_and_each_is_read_alike_every_time(parts):
    before = json.dumps(parts)
    once, twice = (readable(parts, Losses(), field="messages", is_asked=False) for _ in range(2))
    assert once == twice
    assert json.dumps(parts) == before
    assert all(isinstance(part["text"], str) for part in once if isinstance(part, dict) and part not in parts)
