import json
import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.errors import ApiError
from reprise.app.http import body as bodies
from reprise.app.http.body import check_body, mended, parse_json
from reprise.app.schemas.fields import is_deeper


@pytest.fixture(autouse=True, scope="module")
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_LEVELS", 12)
        patch.setattr(bodies, "MAX_CALL_LEVELS", 20)
        patch.setattr(bodies, "MAX_NUMBERS", {"n": 2, "logprobs": 4, "top_logprobs": 4})
        counted = {"messages": 3, "input": 3, "items": 3, "stop": 1, "stop_sequences": 1, "tools": 1}
        patch.setattr(bodies, "MAX_ITEMS", counted)
        patch.setattr(bodies, "MAX_SCHEMA_LEVELS", 4)
        patch.setattr(bodies, "MAX_SCHEMA_BYTES", 100)
        yield


def nested(levels: int) -> dict:
    return {} if levels == 1 else {"a": nested(levels - 1)}


def formatted(schema: object) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def block(given: object) -> dict:
    return {"messages": [{"content": [{"type": "tool_use", "input": given}]}]}


def call(given: object) -> dict:
    return {"messages": [{"tool_calls": [{"function": {"arguments": given}}]}]}


@pytest.mark.parametrize(
    ("allowed", "refused", "param"),
    [
        ({"messages": [1] * 3}, {"messages": [1] * 4}, "messages"),
        ({"input": [1] * 3}, {"input": [1] * 4}, "input"),
        ({"items": [1] * 3}, {"items": [1] * 4}, "items"),
        ({"n": 2}, {"n": 3}, "n"),
        ({"logprobs": 4}, {"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 4}, {"top_logprobs": 5}, "top_logprobs"),
        ({"stop": ["a"]}, {"stop": ["a", "b"]}, "stop"),
        ({"stop_sequences": ["a"]}, {"stop_sequences": ["a", "b"]}, "stop_sequences"),
        ({"tools": [{}]}, {"tools": [{}, {}]}, "tools"),
        (nested(12), nested(13), None),
        (block(nested(20)), block(nested(21)), None),
        (call(nested(20)), call(nested(21)), None),
        ({"input": [{"arguments": nested(20)}]}, {"input": [{"arguments": nested(21)}]}, None),
        (block([nested(6)]), block([nested(7)]), None),
        (formatted(nested(4)), formatted(nested(5)), "response_format"),
        (formatted({"a": "x" * 80}), formatted({"a": "x" * 100}), "response_format"),
        ({"guided_json": nested(4)}, {"guided_json": nested(5)}, "guided_json"),
        (
            {"structured_outputs": {"json": nested(4)}},
            {"structured_outputs": {"json": nested(5)}},
            "structured_outputs",
        ),
        ({"text": {"format": {"schema": nested(4)}}}, {"text": {"format": {"schema": nested(5)}}}, "text"),
        (
            {"output_config": {"format": {"schema": nested(4)}}},
            {"output_config": {"format": {"schema": nested(5)}}},
            "output_config",
        ),
    ],
)
def test_a_limit_is_the_last_thing_that_passes(allowed, refused, param):
    check_body(allowed)
    with pytest.raises(ApiError) as error:
        check_body(refused)
    assert (error.value.status, error.value.param) == (400, param)


def test_schemas_of_tools_are_bounded_by_the_body_alone():
    for tool in ({"parameters": nested(9)}, {"function": {"parameters": {"a": "x" * 1000}}}):
        check_body({"tools": [tool]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def depth(value: object) -> int:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, inner), default=0)
    return 0


@given(value=JSON, levels=st.integers(0, 6))
def test_levels_are_counted_right(value, levels):
    assert is_deeper(value, levels) == (depth(value) > levels)


@given(value=JSON, levels=st.integers(0, 6))
def test_nothing_is_counted_inside_of_what_is_left_out(value, levels):
    assert is_deeper({"a": [value], "b": value}, levels, but=[value]) == (levels < 2)


NAMES = ("messages", "input", "items", "n", "logprobs", "stop", "tools", "response_format", "text", "guided_json")


@given(body=st.dictionaries(st.sampled_from(NAMES), JSON))
def test_no_body_is_too_odd_to_be_checked(body):
    refusal: ApiError | None = None
    try:
        check_body(json.loads(json.dumps(body)))
    except ApiError as error:
        refusal = error
    assert refusal is None or refusal.status == 400


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (r"half \ud83d", "half \ufffd"),
        (r"\udE00 other half", "\ufffd other half"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\ud83d\ude00 \\ud83d \n \ud83d", "\U0001f600 \\ud83d \n \ufffd"),
    ],
)
def test_half_of_a_character_becomes_a_mark(sent, read):
    assert parse_json(b'{"content": "' + sent.encode() + b'"}') == {"content": read}


ESCAPES = ["\\", "\\\\", r"\ud83d", r"\uDE00", r"\u0041", r"\n", "u", "d83d", "x"]


@given(escapes=st.lists(st.sampled_from(ESCAPES), max_size=12).map("".join))
def test_halves_are_found_escape_by_escape(escapes):
    one = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F]..)|.)", re.DOTALL)
    expected = one.sub(lambda escape: r"\ufffd" if escape["half"] else escape[0], escapes)
    assert mended(escapes.encode()) == expected.encode()


@pytest.mark.parametrize("text", ["\\", r"\n", r"\\", "x"])
def test_a_body_of_escapes_takes_little_time(text):
    data = text.encode() * ((6 << 20) // len(text)) + rb'\ud83d"'
    started_s = time.process_time()
    mended(data)
    assert time.process_time() - started_s < 0.9  # 2 s when each escape was matched by itself


def test_a_byte_order_mark_is_no_part_of_the_body():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
