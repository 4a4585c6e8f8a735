"""Finds out how a model writes calls and thoughts, by rendering a probe with its chat template.

What a template renders for tools, a call and a result shows the markers that the model was taught. The words of its
source show less: a template may mention tools without rendering them, and markers that it never writes.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from reprise.app.text.families.table import FAMILIES, OWN, UNKNOWN, Family
from reprise.app.text.families.thoughts import THINK, THOUGHTS, Thoughts
from reprise.app.text.template import TemplateError

Message = dict[str, Any]
Render = Callable[[list[Message], list[dict[str, Any]] | None, dict[str, Any], bool], str]
"""Renders (messages, tools, template arguments, whether to open an answer). Raises TemplateError."""

AUTO, NONE = "auto", "none"
_NAME, _PLACE, _RESULT = "probe_forecast", "Probeville", "probe result"
_SHORT_ID, _LONG_ID = "probe0001", "call_0123456789abcdef01234567"
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Probe.",
            "parameters": {"type": "object", "properties": {"probe_place": {"type": "string"}}, "required": []},
        },
    }
]
_USER: Message = {"role": "user", "content": "Probe?"}
_THINKING = {"enable_thinking": True, "thinking": True}


@dataclass(frozen=True, slots=True)
class Found:
    """The form of a model, as far as its template shows it."""

    calls: Family = OWN
    thoughts: Thoughts | None = THINK
    thinks: bool = False  # there was a sign of thoughts; without one a leading <think> is read as a thought too
    knows_tools: bool = False  # it renders tools
    tools_in_system: bool = False  # it renders those that a system message brings, in a field `tools`, as JSON
    shows_calls: bool = True  # it renders earlier calls
    takes_objects: bool = True  # it renders arguments that are objects; otherwise only their JSON
    short_ids: bool = False  # it refuses ids of calls that are not of 9 letters and digits


def find(render: Render | None, tokens: Iterable[str], *, calls: str = AUTO, thoughts: str = AUTO) -> Found:
    """Examine a model. render: its template, if it has one. tokens: the texts of its added tokens. calls, thoughts: the
    names that overrule what is found."""
    found = Found() if render is None else _examined(render, "\n".join(tokens))
    if calls != AUTO:
        family = FAMILIES[calls]
        found = replace(found, calls=family, short_ids=found.short_ids or family.short_ids)
        if thoughts == AUTO and family.thoughts:
            thoughts = family.thoughts
    if thoughts != AUTO:
        marks = None if thoughts == NONE else THOUGHTS[thoughts]
        found = replace(found, thoughts=marks, thinks=marks is not None)
    return found


def _examined(render: Render, tokens: str) -> Found:
    def text(messages: list[Message], tools: list[dict[str, Any]] | None, *, opens: bool = False, **args: Any) -> str:
        try:
            return render(messages, tools, args, opens)
        except TemplateError:
            return ""

    asked = text([_USER], _TOOLS)
    found = Found(knows_tools=_NAME in asked)
    if not found.knows_tools:
        asked = text([as_system_tools(None, _TOOLS), _USER], None)
        found = replace(found, tools_in_system=_NAME in asked, knows_tools=_NAME in asked)
    called = ""
    if found.knows_tools:
        tools = None if found.tools_in_system else _TOOLS
        found, called = _with_calls(found, lambda messages: text(messages, tools))
    plain = text([_USER], None, opens=True)
    # What follows the tools shows the call itself; their description may mention other ways to write one.
    after_tools = called[_common_chars(asked, called) :]
    family = _family((after_tools, called, asked, plain, tokens), found.knows_tools)
    shown = (
        *(text([_USER], _TOOLS, opens=True, **args) for args in ({}, _THINKING)),
        *(text([_USER], None, opens=True, **args) for args in ({}, _THINKING)),
        text([_USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, _USER], None, **_THINKING),
        called,
    )
    thoughts = _thoughts(shown, family, tokens)
    return replace(
        found,
        calls=family,
        short_ids=found.short_ids or family.short_ids,
        thoughts=thoughts or THINK,  # a model may think though its template does not say so
        thinks=thoughts is not None,
    )


def _with_calls(found: Found, render: Callable[[list[Message]], str]) -> tuple[Found, str]:
    """Find out how the template takes a history with a call. Returns also what it renders."""
    for takes_objects in (True, False):
        for call_id in (_LONG_ID, _SHORT_ID):
            arguments = {"probe_place": _PLACE} if takes_objects else json.dumps({"probe_place": _PLACE})
            text = render(_history(call_id, arguments))
            is_python = "{'probe_place'" in text  # an object where JSON was expected
            if text and not is_python:
                short_ids, shows_calls = call_id == _SHORT_ID, _PLACE in text
                changes = replace(found, takes_objects=takes_objects, short_ids=short_ids, shows_calls=shows_calls)
                return changes, text
    return found, ""


def _history(call_id: str, arguments: object) -> list[Message]:
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "tool_call_id": call_id, "name": _NAME},
    ]


def _family(evidence: tuple[str, ...], knows_tools: bool) -> Family:
    """Return the family of which the strongest evidence shows a sign; the strongest comes first."""
    if not knows_tools:  # it is taught our own calls, unless all of its text is in a form of its own
        harmony = FAMILIES["harmony"]
        return harmony if any(harmony.shows_in(text) for text in evidence[:-1]) else OWN
    for text in evidence:
        for family in FAMILIES.values():
            if family.shows_in(text):
                return family
    return UNKNOWN


def _common_chars(a: str, b: str) -> int:
    """Return the length of the longest common beginning."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _thoughts(shown: Iterable[str], family: Family, tokens: str) -> Thoughts | None:
    """Return the marks of which there is a sign."""
    text = "\n".join(shown)
    by_text = next((each for each in THOUGHTS.values() if each.open in text), None)
    if by_text is not None:
        return by_text
    if family.thoughts:
        return THOUGHTS[family.thoughts]
    return next((each for each in THOUGHTS.values() if each.open in tokens), None)


def as_system_tools(system: Message | None, tools: list[dict[str, Any]]) -> Message:
    """Return a system message with tools, for templates that look for them there."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return {**(system or {"role": "system", "content": ""}), "tools": text}
