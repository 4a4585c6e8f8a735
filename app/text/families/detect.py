"""Finds out how a model writes calls and thoughts, by rendering a probe with its chat template.

What a template renders for tools, a call and a result shows the markers that the model was taught. The words of its
source show less: a template may mention tools without rendering them, and markers that it never writes.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from reprise.app.text.families.table import FAMILIES, OWN, UNKNOWN, Family
from reprise.app.text.families.thoughts import THINK, THOUGHTS, Thoughts
from reprise.app.text.probe import Message, Outcome, Probe, Render, Tools
from reprise.app.text.template_traits import TAKES_ALL, TemplateTraits, content_traits, with_orders
from reprise.app.text.thinking_switch import NO_SWITCH, ThinkingSwitch, switch_of

AUTO, NONE = "auto", "none"
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
_NAME, _PLACE, _RESULT, _THOUGHT = "probe_forecast", "Probeville", "probe result", "probe thought"
_KEY = "probe_place"  # an argument of the probe's call
_SHORT_ID, _LONG_ID = "probe0001", "call_0123456789abcdef01234567"
_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Probe.",
            "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": []},
        },
    }
]
_USER: Message = {"role": "user", "content": "Probe?"}
_THINKING: dict[str, Any] = {"enable_thinking": True, "thinking": True}
_NO_ARGS: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Found:
    """The form in which a model takes tools and writes calls and thoughts, as far as its template shows it."""

    calls: Family = OWN
    thoughts: Thoughts | None = THINK
    thinks: bool = False  # there was a sign of thoughts; without one a leading <think> is read as a thought too
    knows_tools: bool = False  # it renders tools
    tools_in_system: bool = False  # it renders those that a system message brings, in a field `tools`, as JSON
    calls_in_history: Outcome = Outcome.KEPT  # what becomes of earlier calls
    results_in_history: Outcome = Outcome.KEPT  # what becomes of their results
    takes_objects: bool = True  # it renders arguments that are objects; otherwise only their JSON
    takes_texts: bool = True  # it renders arguments that are a text, such as the JSON of a call that was cut
    short_ids: bool = False  # it refuses ids of calls that are not of 9 letters and digits
    thought_field: str = ""  # the field in which it looks for the thought of an earlier answer; empty: it shows none
    thinks_beside_text: bool = True  # it shows a thought beside a call and a text
    switch: ThinkingSwitch = NO_SWITCH
    traits: TemplateTraits = TAKES_ALL  # for requests without tools
    traits_with_tools: TemplateTraits = TAKES_ALL

    @property
    def shows_calls(self) -> bool:
        return self.knows_tools and self.calls_in_history.is_shown

    @property
    def shows_results(self) -> bool:
        return self.knows_tools and self.results_in_history.is_shown

    @property
    def described(self) -> dict[str, str]:
        """Return for each kind of message what the template does with it, as words for people."""
        lost, kept = Outcome.LOST, Outcome.KEPT
        return {
            **self.traits.described(self.traits_with_tools),
            "tools": kept if self.knows_tools else lost,
            "calls": self.calls_in_history if self.knows_tools else lost,
            "results": self.results_in_history if self.knows_tools else lost,
            "thoughts": kept if self.thought_field else lost,
        }


def find(render: Render | None, tokens: Iterable[str], *, calls: str = AUTO, thoughts: str = AUTO) -> Found:
    """Find out the form of a model by rendering probes. render: its chat template, if it has one. tokens: the texts of
    its added tokens. calls, thoughts: names of families to use whatever the template shows, or AUTO."""
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
    traits = content_traits(render)
    probe = Probe(render, in_parts=traits.takes_parts_alone)
    asked = probe.text([_USER], _TOOLS)
    found = Found(knows_tools=_NAME in asked)
    if not found.knows_tools:
        asked = probe.text([as_system_tools(None, _TOOLS), _USER])
        found = replace(found, tools_in_system=_NAME in asked, knows_tools=_NAME in asked)
    tools = _TOOLS if found.knows_tools and not found.tools_in_system else None
    history: list[Message] = []
    if found.knows_tools:
        found, history = _with_calls(found, probe, tools)
    called = probe.text(history, tools) if history else ""
    plain = probe.text([_USER], opens=True)
    # What follows the tools shows the call itself; their description may mention other ways to write one.
    after_tools = called[_common_chars(asked, called) :]
    family = _family((after_tools, called, asked, plain, tokens), found.knows_tools)
    shown = (
        *(probe.text([_USER], each, opens=True, **args) for each in (_TOOLS, None) for args in (_NO_ARGS, _THINKING)),
        probe.text([_USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, _USER], **_THINKING),
        called,
    )
    thoughts = _thoughts(shown, family, tokens)
    found = _with_thoughts(found, probe, tools, history)
    resulted = None
    if found.shows_results:
        resulted = [history[0], {**history[1], found.thought_field or THOUGHT_FIELDS[0]: _THOUGHT}, *history[2:]]
    return replace(
        found,
        calls=family,
        short_ids=found.short_ids or family.short_ids,
        thoughts=thoughts or THINK,  # a model may think though its template does not say so
        thinks=thoughts is not None,
        switch=switch_of(probe, tools),
        traits=with_orders(traits, probe, tools=None, called=resulted, thought=_THOUGHT),
        traits_with_tools=with_orders(traits, probe, tools=tools, called=resulted, thought=_THOUGHT),
    )


def _with_calls(found: Found, probe: Probe, tools: Tools | None) -> tuple[Found, list[Message]]:
    """Find out how the template takes a history with a call. Returns also the history that it takes; empty if it takes
    none."""
    for as_given in (True, False):
        for takes_objects in (True, False):
            for call_id in (_LONG_ID, _SHORT_ID):
                arguments = {_KEY: _PLACE} if takes_objects else json.dumps({_KEY: _PLACE})
                history = _history(call_id, arguments)
                if not as_given:
                    history[-1] = as_users_result(history[-1])
                text = probe.text(history, tools)
                is_python = f"{{'{_KEY}'" in text  # an object where JSON was expected
                if text and not is_python:
                    cut = _history(call_id, json.dumps({_KEY: _PLACE})[:-2])
                    changes = replace(
                        found,
                        takes_objects=takes_objects,
                        takes_texts=not takes_objects or _PLACE in probe.text(cut[:2], tools),
                        short_ids=call_id == _SHORT_ID,
                        calls_in_history=Outcome.KEPT if _PLACE in text else Outcome.LOST,
                        results_in_history=_outcome_of_result(text) if as_given else Outcome.REFUSED,
                    )
                    return changes, history
    return replace(found, calls_in_history=Outcome.REFUSED, results_in_history=Outcome.REFUSED), []


def _outcome_of_result(text: str) -> Outcome:
    return Outcome.KEPT if _RESULT in text else Outcome.LOST


def _history(call_id: str, arguments: object) -> list[Message]:
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "tool_call_id": call_id, "name": _NAME},
    ]


def _with_thoughts(found: Found, probe: Probe, tools: Tools | None, history: list[Message]) -> Found:
    """Find out in which field the template looks for the thought of an earlier answer. history: one with a call, as it
    takes it."""

    def shows(answer: Message, *after: Message) -> bool:
        return _THOUGHT in probe.text([_USER, answer, *after], tools if after else None, **_THINKING)

    for field in THOUGHT_FIELDS:
        calls = bool(history) and shows({**history[1], field: _THOUGHT}, *history[2:])
        if calls or shows({"role": "assistant", "content": "Yes.", field: _THOUGHT}):
            # Some templates take a text beside a call for its thought, and refuse both.
            beside_text = not calls or shows({**history[1], field: _THOUGHT, "content": "Yes."}, *history[2:])
            return replace(found, thought_field=field, thinks_beside_text=beside_text)
    return found


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


def as_system_tools(system: Message | None, tools: Tools) -> Message:
    """Return a system message with tools, for templates that look for them there."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return {**(system or {"role": "system", "content": ""}), "tools": text}


def as_users_result(message: Message) -> Message:
    """Return the result of a call as a user's message, for templates that take no results."""
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
