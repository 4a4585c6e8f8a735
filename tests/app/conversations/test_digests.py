"""Tests that digests tell conversations apart, and forgive what clients add and drop freely."""

import pytest

from reprise.app.conversations.digests import canonical, link


def answer(arguments: object, **fields: object) -> dict:
    function = {"name": "save", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "function": function}], **fields}


@pytest.mark.parametrize(
    ("sent", "edited"),
    [
        ({"annotations": {"owner": "bob"}}, {"annotations": {"owner": "eve"}}),
        ({"refusal": "no"}, {"refusal": "yes"}),
        ({"force": None}, {}),
        ({"paths": []}, {"paths": {}}),
    ],
)
def test_all_of_a_calls_arguments_counts(sent, edited):
    assert link(b"", answer(sent)) != link(b"", answer(edited))


def test_all_of_a_tools_schema_counts():
    tools = [{"name": "f", "parameters": {"properties": {name: {"default": None}}}} for name in ("refusal", "notes")]
    plain = {"name": "f", "parameters": {"properties": {"notes": {}}}}
    assert len({canonical(tool) for tool in [*tools, plain]}) == 3


def test_fields_that_clients_add_and_drop_do_not_count():
    added = answer({"a": 1}, refusal=None, annotations=[{"type": "url"}], audio=None, function_call={})
    assert link(b"", added) == link(b"", answer({"a": 1}))
