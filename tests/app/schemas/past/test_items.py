import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.schemas.past.items import _CONVERTERS, input_items
from reprise.app.schemas.past.parts import Losses
from reprise.app.schemas.responses import ResponseRequest

HELLO = {"type": "message", "role": "user", "content": "Hello"}
SHOWN = "[image: not shown, this model reads text]"
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA"}


def between(*items: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return what stands for items between two questions, and what was lost."""
    losses = Losses()
    settled: Any = input_items([HELLO, *items, HELLO], losses)
    assert settled[0] == settled[-1] == HELLO
    return settled[1:-1], losses.names


def call(name: str, arguments: str, call_id: str = "c") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(text: str, call_id: str = "c") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def said(text: str, role: str = "assistant") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


CONVERTED = [
    ({"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
     [call("local_shell", '{"command": ["ls"], "type": "exec"}')]),
    ({"type": "local_shell_call_output", "id": "c", "output": "ok"}, [output("ok")]),
    ({"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}, [call("shell", '{"commands": ["ls"]}')]),
    ({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": "b", "outcome": {}}]},
     [output("a\nb")]),
    ({"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
     [call("apply_patch", '{"path": "a", "type": "delete_file"}')]),
    ({"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}, [output("")]),
    ({"type": "tool_search_call", "call_id": "c", "arguments": {"q": 1}}, [call("tool_search", '{"q": 1}')]),
    ({"type": "tool_search_output", "call_id": "c", "tools": [{"name": "a"}, {"name": "b"}]},
     [output("[tools: a, b]")]),
    ({"type": "mcp_call", "id": "m", "server_label": "hub", "name": "f", "arguments": "{}", "output": "ok"},
     [call("hub__f", "{}", "m"), output("ok", "m")]),
    ({"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "error": "no"},
     [call("f", "{}", "m"), output("no", "m")]),
    ({"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}}, [said("[web search: q]")]),
    ({"type": "file_search_call", "id": "w", "queries": ["q"], "results": None}, [said('[file search: ["q"]]')]),
    ({"type": "code_interpreter_call", "id": "w", "code": "x = 1\ny"}, [said("[code: x = 1 y]")]),
    ({"type": "agent_message", "author": "lead/reader", "content": [{"type": "input_text", "text": "Done."}]},
     [said("[message of lead/reader]\nDone.", "user")]),
]  # fmt: skip
LOST = [
    *({"type": kind} for kind in ("additional_tools", "mcp_list_tools", "mcp_approval_request", "hologram")),
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "web_search_call", "id": "w", "status": "completed"},
    {"type": "tool_search_call", "call_id": None, "arguments": {}},
    {"type": "agent_message", "content": []},
    {"type": "local_shell_call"},
    {"type": "mcp_call", "id": 5, "name": {}},
]


@pytest.mark.parametrize(("item", "stands"), CONVERTED, ids=lambda value: str(value)[:30])
def test_an_item_of_another_server_is_converted(item, stands):
    assert between(item) == (stands, [])


@pytest.mark.parametrize("item", LOST, ids=lambda item: str(item)[:40])
def test_an_item_of_which_nothing_can_be_told_is_left_out_with_a_word(item):
    assert between(item) == ([], [f"input.{item['type']}"])


def test_images_of_other_servers_are_placeholders():
    assert between({"type": "image_generation_call", "id": "i", "result": "AA"}) == (
        [said(SHOWN)],
        ["input.image_generation_call"],
    )
    screen = {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}
    assert between(screen) == ([output(SHOWN)], ["input.computer_screenshot"])
    seen = {"type": "function_call_output", "call_id": "c", "output": [IMAGE]}
    (shown,), lost = between(seen)
    assert (shown["output"], lost) == ([{"type": "text", "text": SHOWN}], ["input.input_image"])


def test_only_what_a_user_asks_now_is_left_to_be_refused():
    asked = {"role": "user", "content": [IMAGE]}
    assert input_items([asked], Losses()) == [asked]
    assert input_items([said("Hi"), asked], Losses())[1] == asked
    (earlier, _, _) = input_items([asked, said("No."), HELLO], Losses())
    assert earlier["content"] == [{"type": "text", "text": SHOWN}]
    assert input_items([HELLO, {"type": "hologram"}], Losses()) == [HELLO, {"type": "hologram"}]
    trigger = {"type": "compaction_trigger"}
    assert input_items([trigger, HELLO], Losses()) == [trigger, HELLO]


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio", "hologram"])
def test_what_was_refused_is_history_for_the_next_question(kind):
    losses = Losses()
    settled: Any = input_items([{"role": "user", "content": [{"type": kind}]}, HELLO], losses)
    assert ResponseRequest.model_validate({"input": settled}).input[0].role == "user"
    assert losses.names == [f"input.{kind}"]


def test_a_tool_that_returned_nothing_has_an_empty_result():
    for kind in ("function_call_output", "custom_tool_call_output"):
        (shown,), lost = between({"type": kind, "call_id": "c", "output": None})
        assert (shown["output"], lost) == ("", [])


def valid(item: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what is stored of an item between two questions, and what was lost."""
    (settled,), lost = between(item)
    (_, found, _) = ResponseRequest.model_validate({"input": [HELLO, settled, HELLO]}).input
    return found.as_stored(), lost


@pytest.mark.parametrize(
    ("item", "field", "stands"),
    [
        ({"type": "function_call", "name": "f", "arguments": None}, "arguments", "{}"),
        ({"type": "function_call", "name": "f"}, "arguments", "{}"),
        ({"type": "function_call", "name": "f", "arguments": [1]}, "arguments", "[1]"),
        ({"type": "custom_tool_call", "name": "f", "input": None}, "input", ""),
        ({"type": "custom_tool_call", "name": "f", "input": {"a": 1}}, "input", '{"a": 1}'),
        ({"type": "function_call_output", "output": {"b": 1, "a": [2]}}, "output", '{"a": [2], "b": 1}'),
        ({"type": "custom_tool_call_output", "output": 7}, "output", "7"),
        ({"type": "function_call_output", "output": [{"type": "input_text", "text": None}]}, "output", ""),
    ],
    ids=str,
)
def test_calls_and_results_have_a_text_whatever_came_back(item, field, stands):
    found, lost = valid({"call_id": "c", **item})
    assert (found[field], lost) == (stands, [])


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": [{"type": "output_text", "text": None}]}])
def test_an_answer_without_content_is_empty(content):
    found, _ = valid({"type": "message", "role": "assistant", **content})
    assert found["content"][0]["text"] == ""
    asked = {"role": "user", "content": None}
    assert input_items([HELLO, asked], Losses()) == [HELLO, asked]


@pytest.mark.parametrize("name", ["content", "summary"])
def test_a_thought_of_another_form_is_left_out_with_a_word(name):
    found, lost = valid({"type": "reasoning", name: {"text": "Hm."}})
    assert (found["content"], found["summary"], lost) == ([], [], ["input.reasoning"])


@pytest.mark.parametrize("kind", [{}, {"type": None}])
def test_an_id_alone_refers_to_an_item(kind):
    assert valid({"id": "msg_1", **kind}) == ({"type": "item_reference", "id": "msg_1"}, [])
    with pytest.raises(ValueError, match="content"):
        ResponseRequest.model_validate({"input": input_items([{"id": "msg_1", "role": "user"}], Losses())})


def test_an_id_that_is_too_long_is_cut_alike_in_the_call_and_its_result():
    made, _ = valid(call("f", "{}", "i" * 300))
    found, _ = valid(output("1", "i" * 300))
    assert made["call_id"] == found["call_id"]
    assert len(found["call_id"]) == 256


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("call_id", "id", "action", "output", "tools", "arguments", "content", "queries", "code", "name", "role")
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from([*_CONVERTERS, "message", "reasoning", "x", 1])}, optional=dict.fromkeys(FIELDS, JSON)
)


@given(items=st.lists(ITEMS | JSON, max_size=4) | JSON)
def test_no_item_is_too_odd_and_each_is_read_alike_every_time(items):
    before = json.dumps(items)
    assert input_items(items, Losses()) == input_items(items, Losses())
    assert json.dumps(items) == before


def test_a_message_may_say_that_it_has_no_type():
    """Generated clients send null for what they leave out."""
    untyped: dict[str, Any] = {"type": None, "role": "user", "content": "Hello"}
    assert input_items([untyped], Losses()) == [{"role": "user", "content": "Hello"}]
    assert input_items([{"type": None, "id": "msg_1"}], Losses()) == [{"type": "item_reference", "id": "msg_1"}]
    ResponseRequest.model_validate({"model": "m", "input": input_items([untyped, said("Hi"), untyped], Losses())})
