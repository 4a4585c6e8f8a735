"""Writes tools into a prompt and reads calls in an answer. Calls have the syntax of the model's template, or else one
of our own."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reprise.app.schemas.tools import rendered_call
from reprise.app.text.answer_parser import CALL, END_CALL, AnswerParser, Call

Message = dict[str, Any]

_SYSTEM = """# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call write a JSON object with the function's name and its arguments within {call}{end_call}:
{call}
{{"name": NAME, "arguments": {{...}}}}
{end_call}"""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form in which a model writes calls and thoughts, as far as its chat template shows it."""

    knows_tools: bool = False  # the template renders tools, calls and their results
    style: str = "tags"  # how the model writes calls: see `AnswerParser`
    thinks: bool = False

    @classmethod
    def of(cls, template: str) -> "AnswerForm":
        """Return the form for a model. template: the text of all of its templates."""
        knows_tools = "tools" in template
        return cls(
            knows_tools=knows_tools,
            style="tags" if CALL in template or not knows_tools else "bare",
            thinks="<think>" in template,
        )

    def prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> tuple[list[Message], Any]:
        """Return (messages, tools) for the template. For a template that does not support tools the system prompt
        describes them, and the returned tools are None. A system message is put first if there is none."""
        if self.knows_tools:
            return messages, tools
        if any("tool_calls" in message or message["role"] == "tool" for message in messages):
            messages = [_as_text(message) for message in messages]
        if tools:
            lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            system = _SYSTEM.format(tools=lines, call=CALL, end_call=END_CALL)
            if messages[0]["role"] == "system":
                messages = [{**messages[0], "content": f"{messages[0]['content']}\n\n{system}"}, *messages[1:]]
            else:
                messages = [{"role": "system", "content": system}, *messages]
        return messages, None

    def parser(self, names: Sequence[str], *, parallel: bool, in_thought: bool) -> AnswerParser:
        """Return a parser of one answer. names: the functions that may be called. parallel: whether several calls are
        allowed. in_thought: whether the prompt has opened a thought."""
        return AnswerParser(
            style=self.style if names else None,
            names=frozenset(names),
            parallel=parallel,
            thinks=self.thinks,
            in_thought=in_thought,
        )

    def answer(self, content: str, reasoning: str, calls: Sequence[Call]) -> Message:
        """Return the answer as a message, in the form in which the next prompt will contain it when the client has sent
        it back."""
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [rendered_call(call.id, call.name, call.arguments) for call in calls]
        return message if self.knows_tools else _as_text(message)


def _as_text(message: Message) -> Message:
    """Write calls and results as plain text, for a template that does not support them."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        texts.append(call_text("tags", call["function"]["name"], text))
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def call_text(style: str, name: str, arguments: str) -> str:
    """Write a call as a model of this style does."""
    if style == "bare":
        return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'
    return f'{CALL}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{END_CALL}'
