"""Writes tools into a prompt, and makes the parser of an answer. Calls have the form that the model was taught, or else
one of our own."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from pydantic_core import from_json

from reprise.app.schemas.fields import is_deeper, is_finite
from reprise.app.schemas.tools import MAX_ARGUMENT_LEVELS, rendered_call
from reprise.app.text.answer_parser import AnswerParser
from reprise.app.text.answer_parts import SHORT_ID_CHARS, AnswerWriter, Call, Wanted
from reprise.app.text.families.detect import (
    NONE,
    Found,
    as_system_tools,
    as_users_result,
    find,
)
from reprise.app.text.families.harmony import HarmonyParser
from reprise.app.text.families.table import OWN
from reprise.app.text.families.thoughts import THOUGHTS
from reprise.app.text.message_order import Ordered, ordered
from reprise.app.text.plain_text import json_text
from reprise.app.text.probe import Message, Render

_THOUGHT = "reasoning_content"  # the field of an answer's thought in a request
_SYSTEM = """# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call write a JSON object with the function's name and its arguments within <tool_call></tool_call>:
<tool_call>
{{"name": NAME, "arguments": {{...}}}}
</tool_call>"""
_SYSTEM_BY_EXAMPLE = """# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

Write a call as in this example:
{example}"""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form in which a model takes tools, and writes tool calls and thoughts (its reasoning).

    found: what its template shows. special_ids: the ids of those special tokens that mark calls and thoughts.
    """

    found: Found
    special_ids: Mapping[str, int]

    @classmethod
    def of(
        cls, render: Render | None, tokens: Mapping[str, int], special: Iterable[int], *, calls: str, thoughts: str
    ) -> "AnswerForm":
        """Find out the form of a model. render: its chat template, if it has one. tokens: the ids of its added tokens.
        special: those of them that are special tokens. calls, thoughts: names of families to use whatever the template
        shows, or "auto"."""
        found = find(render, tokens, calls=calls, thoughts=thoughts)
        markers = found.calls.markers | set(found.thoughts.markers if found.thoughts is not None else ())
        ids = frozenset(special)
        # A marker may consist of several tokens, or of a token and text.
        special_ids = {
            token: token_id
            for token, token_id in tokens.items()
            if token_id in ids and len(token) > 1 and any(token in marker for marker in markers)
        }
        return cls(found=found, special_ids=special_ids)

    @property
    def marks(self) -> dict[int, str]:
        """The special tokens around calls and thoughts that a parser needs, by their ids."""
        return {token_id: token for token, token_id in self.special_ids.items()}

    @property
    def described(self) -> dict[str, str]:
        """Return the form for people: the names of the families of calls and thoughts, and what writes tools into the
        prompt ("template", "system message" or "server")."""
        found = self.found
        names = [name for name, thoughts in THOUGHTS.items() if thoughts is found.thoughts]
        place = "system message" if found.tools_in_system else "template" if found.knows_tools else "server"
        return {"calls": found.calls.name, "thoughts": names[0] if names else NONE, "tools_in": place}

    @property
    def takes_parts(self) -> bool:
        """Whether the template takes content only as a list of parts."""
        return self.found.traits.takes_parts_alone

    def template_args(self, *, thinks: bool | None, effort: str | None) -> dict[str, Any]:
        """Return the arguments of the template that say whether and how much to think (`ThinkingSwitch.args`)."""
        return self.found.switch.args(thinks=thinks, effort=effort)

    def ordered(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> Ordered:
        """Return the messages in an order that the template takes when it gets these tools."""
        return ordered(messages, self.found.traits_with_tools if tools else self.found.traits)

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> tuple[list[Message], Any]:
        """Return (messages, tools) in the form that the template takes. If the template does not render tools itself,
        they are written into the system message, which is added if there is none, and the returned tools are None."""
        messages = self._as_taken(messages)
        if self.found.knows_tools and not self.found.tools_in_system:
            return messages, tools
        if tools:
            has_system = messages[0]["role"] == "system"
            system, rest = (messages[0], messages[1:]) if has_system else (None, messages)
            messages = [self._with_tools(system, tools), *rest]
        return messages, None

    def _with_tools(self, system: Message | None, tools: list[dict[str, Any]]) -> Message:
        """Return a system message with tools."""
        if self.found.tools_in_system:
            return as_system_tools(system, tools)
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        if self.found.calls is OWN:
            text = _SYSTEM.format(tools=lines)
        else:
            example = self.found.calls.taught.written([("NAME", {"ARGUMENT": "VALUE"})])
            text = _SYSTEM_BY_EXAMPLE.format(tools=lines, example=example)
        if system is None:
            return {"role": "system", "content": text}
        return {**system, "content": f"{system['content']}\n\n{text}"}

    def _as_taken(self, messages: list[Message]) -> list[Message]:
        """Return the messages in the form in which the template takes calls, their results and thoughts."""
        found = self.found
        takes_arguments = found.takes_objects and found.takes_texts
        takes_calls = found.shows_calls and found.shows_results and takes_arguments and not found.short_ids
        takes_thoughts = found.thought_field in ("", _THOUGHT) and found.thinks_beside_text

        def is_taken(message: Message) -> bool:
            is_of_call = "tool_calls" in message or message["role"] == "tool"
            return (takes_calls or not is_of_call) and (takes_thoughts or _THOUGHT not in message)

        return messages if all(map(is_taken, messages)) else [self._taken(message) for message in messages]

    def _taken(self, message: Message) -> Message:
        found = self.found
        calls = message.get("tool_calls")
        if message["role"] == "tool" and not found.shows_results:
            return as_users_result(message)
        if calls and not found.shows_calls:
            message, calls = self._as_text(message), None
        changed = dict(message)
        if found.short_ids and "tool_call_id" in message:
            changed["tool_call_id"] = _short_id(message["tool_call_id"])
        if calls:
            changed["tool_calls"] = [self._call_taken(call) for call in calls]
        thought = changed.pop(_THOUGHT, None)
        if thought and (found.thinks_beside_text or not (calls and message["content"])):
            changed[found.thought_field or _THOUGHT] = thought
        return changed

    def _call_taken(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str) and not self.found.takes_texts:
            function = {**function, "arguments": _as_object(arguments)}
        elif not isinstance(arguments, str) and not self.found.takes_objects:
            function = {**function, "arguments": json_text(arguments)}
        return {**call, "id": _short_id(call["id"]) if self.found.short_ids else call["id"], "function": function}

    def _as_text(self, message: Message) -> Message:
        """Write a message's calls as text, for a template that does not render them."""
        functions = [call["function"] for call in message["tool_calls"]]
        calls = [(function["name"], _as_object(function["arguments"])) for function in functions]
        texts = [message["content"]] if message["content"] else []
        texts.append((self.found.calls if self.found.knows_tools else OWN).taught.written(calls))
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**rest, "content": "\n".join(texts)}

    def in_thought(self, prompt: str) -> bool:
        """Return whether a prompt ends with an opened thought, so that the answer begins inside of it."""
        return self.found.thoughts is not None and self.found.thoughts.opens(prompt)

    def closing(self, prompt: str) -> str:
        """Return the text to append to a prompt that ends with an opened thought, so that the thought is empty; "" for
        another prompt."""
        if self.found.thoughts is None or not self.in_thought(prompt):
            return ""
        newline = "\n" if prompt.endswith("\n") else ""
        return f"{newline}{self.found.thoughts.close}\n\n"

    def ends_thought(self, grammar: str) -> bool:
        """Return whether a grammar mentions the mark that ends a thought. Such a grammar is one of the whole answer,
        with its thought."""
        if self.found.thoughts is None:
            return False
        plain, close = grammar.replace("\\", ""), self.found.thoughts.close
        token_id = self.special_ids.get(close)
        return close in plain or (token_id is not None and f"<[{token_id}]>" in plain)

    def parser(self, wanted: Wanted, *, in_thought: bool) -> AnswerWriter:
        """Return a parser of one answer. in_thought: whether the prompt ends with an opened thought."""
        if self.found.calls.name == "harmony":
            return HarmonyParser(wanted, in_thought=in_thought, tokens=frozenset(self.special_ids))
        return AnswerParser(
            wanted,
            calls=self.found.calls,
            thoughts=self.found.thoughts,
            in_thought=in_thought,
            short_ids=self.found.short_ids,
        )

    def answer(self, content: str, reasoning: str, calls: Iterable[Call]) -> Message:
        """Return an answer as the message that the next prompt contains when the client sends the answer back."""
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message[_THOUGHT] = reasoning
        if rendered := [rendered_call(call.id, call.name, call.arguments) for call in calls]:
            message["tool_calls"] = rendered
        return self._as_taken([message])[0]


NO_FORM = AnswerForm(found=Found(), special_ids={})
"""The form of a model without a chat template."""


def _as_object(arguments: object) -> dict[str, Any]:
    """Return a call's arguments as an object. Of a text whose end was cut off it has what came before; another text
    stands in one."""
    if isinstance(arguments, dict):
        return arguments
    text = str(arguments)
    try:
        begun = from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        begun = text
    if begun is None:
        return {}
    is_taken = isinstance(begun, dict) and is_finite(begun) and not is_deeper(begun, MAX_ARGUMENT_LEVELS)
    return begun if is_taken else {"arguments": text}


def _short_id(call_id: str) -> str:
    """Return an id that templates of Mistral's models accept: always the same for the same id."""
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode(), digest_size=16).hexdigest()[:SHORT_ID_CHARS]
