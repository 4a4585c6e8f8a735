import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.schemas.offered import flat_name, offered
from reprise.app.schemas.past.parts import Losses

FUNCTION = {"type": "function", "name": "f"}
CUSTOM = {"type": "custom", "name": "c"}
KINDS = ("function", "custom", "namespace")


@pytest.mark.parametrize("kind", ["web_search", "tool_search", "mcp", "code_interpreter", "bash_20250124"])
def test_what_another_server_would_run_is_left_out_with_a_word(kind):
    losses = Losses()
    assert offered([{"type": kind}, FUNCTION, {"type": kind}], losses, KINDS) == [FUNCTION]
    assert losses.names == [f"tools.{kind}"]


def test_the_tools_of_a_namespace_stand_beside_the_others():
    losses = Losses()
    space = {"type": "namespace", "name": "hub", "tools": [FUNCTION, {"type": "web_search"}, CUSTOM]}
    assert offered([CUSTOM, space], losses, KINDS) == [
        CUSTOM,
        {**FUNCTION, "namespace": "hub"},
        {**CUSTOM, "namespace": "hub"},
    ]
    assert losses.names == ["tools.web_search"]
    within = {"type": "namespace", "name": "a", "tools": [space]}
    assert offered([within], losses, KINDS) == []
    assert losses.names == ["tools.web_search", "tools.namespace"]
    assert flat_name("f", "hub") == "hub__f"
    assert flat_name("f", None) == "f"


@pytest.mark.parametrize("tools", [{}, {"tools": None}, {"tools": []}])
def test_a_namespace_without_tools_is_left_out_with_a_word(tools):
    losses = Losses()
    assert offered([{"type": "namespace", "name": None, **tools}, FUNCTION], losses, KINDS) == [FUNCTION]
    assert losses.names == ["tools.namespace"]


@pytest.mark.parametrize("tool", [5, None, {}, {"type": 5}, {"name": "f"}, {"type": "namespace", "tools": 5}])
def test_what_is_no_tool_is_left_to_the_schema(tool: Any):
    found = offered([tool], Losses(), ("function", "namespace"))
    assert found == [tool] or tool == {"type": "namespace", "tools": 5}


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "tools", "name"]), inner),
    max_leaves=8,
)


@given(tools=JSON)
def test_no_list_is_too_odd(tools):
    before = json.dumps(tools)
    offered(tools, Losses(), KINDS)
    assert json.dumps(tools) == before
