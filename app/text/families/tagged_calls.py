"""Calls whose arguments stand one by one between tags, as plain text."""

import re
from dataclasses import dataclass
from typing import Any

from reprise.app.text.answer_parts import possible
from reprise.app.text.families.lark import (
    Lark,
    OfferedTool,
    Property,
    properties,
    quoted,
    with_definitions,
)
from reprise.app.text.families.reading import MAX_NAME_CHARS, Progress, Reader, Steps
from reprise.app.text.families.typed_values import ArgumentTypes, TextToJson
from reprise.app.text.plain_text import json_text


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """The shape of tagged calls.

    open, close: tags around calls, which may be missing; the first of each is what the model is taught. is_shared: one
    pair of them is around all calls. head_open: how a call begins; head: all of that, with the group `name`.
    argument_open, argument: the same of an argument, with the groups `key` and, where the text tells the type,
    `is_string`. argument_close, call_close: the ends. written_head, written_argument: what the model writes, with
    `{name}`, `{key}` and `{is_string}`. has_lines: an argument's text stands on lines of its own. line: what follows
    each tag.
    """

    head_open: str
    head: re.Pattern[str]
    argument_open: str
    argument: re.Pattern[str]
    argument_close: str
    call_close: str
    written_head: str
    written_argument: str
    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    has_lines: bool = False
    line: str = "\n"
    is_shared: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        return (*self.open, self.head_open)

    @property
    def at_start(self) -> bool:
        return False

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.open, *self.close, self.head_open, self.argument_open, self.argument_close, self.call_close)

    def reader(self) -> Reader:
        return _TaggedReader(self)

    def _around(self, key: str, *, is_string: bool) -> tuple[str, str]:
        """Return the texts before and after an argument's text."""
        before = self.written_argument.replace("{key}", key).replace("{is_string}", str(is_string).lower())
        edge = "\n" if self.has_lines else ""
        return before + edge, edge + self.argument_close + self.line

    def _outer(self) -> tuple[str, str]:
        return (self.open[0] + self.line, self.line + self.close[0]) if self.open else ("", "")

    def written(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        before, after = self._outer()
        texts = []
        for name, arguments in calls:
            text = self.written_head.replace("{name}", name) + self.line
            for key, value in arguments.items():
                head, tail = self._around(key, is_string=isinstance(value, str))
                text += head + (value if isinstance(value, str) else json_text(value)) + tail
            texts.append(text + self.call_close)
        return before + (self.line if self.is_shared else f"{after}\n{before}").join(texts) + after

    def grammar(self, tools: list[OfferedTool], many: bool, lark: Lark) -> str:
        before, after = self._outer()
        if self.is_shared:
            # A line end belongs to the call before it: a grammar's lexer is greedy, and would take the one before the
            # closing tag for a beginning of that tag.
            close, between, after = self.call_close + self.line, "", self.close[0]
        else:
            close, between = self.call_close, f"{after}\n{before}"
        rules = []
        for tool in tools:
            head = lark.literal(self.written_head.replace("{name}", tool.name) + self.line)
            rules.append(lark.rule("call", lark.joined(head, self._arguments(tool, lark), lark.literal(close))))
        return lark.repeated(before, between, after, rules, many)

    def _arguments(self, tool: OfferedTool, lark: Lark) -> str:
        listed = properties(tool.schema)
        if listed is None:
            key = lark.rule("key", r"/[^<>\"\n]+/")
            before, after = (text.split("\0") for text in self._around("\0", is_string=True))
            opening = lark.joined(lark.literal(before[0]), key, lark.literal(before[1]))
            return f"({lark.joined(opening, lark.text_up_to(after[0]))})*"
        parts, types = [], ArgumentTypes(tool.schema)
        for item in listed:
            part = lark.rule("argument", self._argument(item, tool, types, lark))
            parts.append(part if item.is_required else f"({part})?")
        return lark.joined(*parts)

    def _argument(self, item: Property, tool: OfferedTool, types: ArgumentTypes, lark: Lark) -> str:
        kind, _ = types.kind_of(item.name)
        before, after = self._around(item.name, is_string=kind != "json")
        values = item.schema.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            value = f"({' | '.join(map(quoted, values))}) {lark.literal(after)}"
        elif kind == "json":
            value = f"{lark.json(with_definitions(item.schema, tool.schema), tool)} {lark.literal(after)}"
        else:
            value = lark.text_up_to(after)
        return lark.joined(lark.literal(before), value)


class _TaggedReader(Steps):
    def __init__(self, shape: TaggedCalls) -> None:
        super().__init__()
        self._shape = shape
        self._num_arguments = 0
        self._value = TextToJson("string", frozenset())
        self._value_has_begun = False
        self._types = ArgumentTypes({})

    def open(self) -> Progress | None:
        if self.take(*self._shape.open):
            self.skip_space()
        return self.then(self._head)

    def _head(self) -> Progress | None:
        shape = self._shape
        found = shape.head.match(self.text, self.at)
        if found is not None:
            if not self.calls.knows(found["name"]):
                return Progress.TEXT
            self.at, self._num_arguments = found.end(), 0
            self._types = ArgumentTypes(self.calls.schema(found["name"]))
            self.begin(found["name"])
            return self.then(self._next)
        if self.may_become(shape.head_open) or self.text.startswith(shape.head_open, self.at):
            return self.wait(MAX_NAME_CHARS)
        return Progress.TEXT

    def _next(self) -> Progress | None:
        """Read the beginning of the next argument, or the end of the call."""
        shape = self._shape
        self.skip_space()
        if self.take(shape.call_close):
            return self._ended(Progress.MORE)
        if self.take(*shape.close):
            return self._ended(Progress.OVER)
        found = shape.argument.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            return self._argument(found)
        if self.text.startswith("{", self.at) and not self._num_arguments:
            return self.then(self._json)
        if self.at == len(self.text):
            return Progress.MORE
        is_argument = self.text.startswith(shape.argument_open, self.at)
        if self.may_become(shape.call_close, shape.argument_open, *shape.close) or is_argument:
            waits = self.wait(MAX_NAME_CHARS)
            if waits is Progress.MORE or self.final:
                return Progress.MORE
        return self._ended(Progress.OVER)

    def _ended(self, progress: Progress) -> Progress | None:
        """Complete the current call. progress: OVER if no other call can follow."""
        self.calls.add("}" if self._num_arguments else "{}")
        return progress if progress is Progress.OVER else self.then(self._after)

    def _argument(self, found: re.Match[str]) -> Progress | None:
        key = found["key"].strip()
        kind, types = self._types.kind_of(key)
        told = found.groupdict().get("is_string")
        if told is not None:
            kind = "string" if told == "true" else "json"
        self._value, self._value_has_begun = TextToJson(kind, types), False
        self.calls.add(("{" if not self._num_arguments else ", ") + json_text(key) + ": ")
        self._num_arguments += 1
        return self.then(self._text)

    def _text(self) -> Progress | None:
        shape = self._shape
        if not self._value_has_begun:
            if self.at == len(self.text):
                return self._cut() if self.final else Progress.MORE
            self._value_has_begun = True
            if shape.has_lines and self.text[self.at] == "\n":
                self.at += 1
        end = self.text.find(shape.argument_close, self.at)
        ends = (f"\n{shape.argument_close}",) if shape.has_lines else ()
        stop = end if end >= 0 else len(self.text) - possible(self.text[self.at :], shape.argument_close, *ends)
        if end >= 0 and shape.has_lines and self.text.startswith("\n", end - 1) and end > self.at:
            stop = end - 1
        if end < 0 and self.final:
            stop = len(self.text)
        if stop > self.at:
            self.calls.add(self._value.push(self.text[self.at : stop]))
        if end < 0:
            self.at = stop
            return self._cut() if self.final else Progress.MORE
        self.at = end + len(shape.argument_close)
        self.calls.add(self._value.end())
        return self.then(self._next)

    def _cut(self) -> Progress:
        self.calls.add(self._value.cut())
        return Progress.OVER

    def _json(self) -> Progress | None:
        """Read arguments that are a JSON object in place of tags."""
        return self.then(self._after) if self.add_object() else Progress.MORE

    def _after(self) -> Progress | None:
        shape = self._shape
        # The end of the call stands there after arguments in JSON.
        return self.after_call(self._head, shape.head_open, close=shape.close, skipped=(shape.call_close,))
