"""Calls that are a function's name, a separator, and its arguments as a JSON object."""

import re
from dataclasses import dataclass
from typing import Any

from reprise.app.text.families.lark import Lark, OfferedTool
from reprise.app.text.families.reading import MAX_NAME_CHARS, Progress, Reader, Steps
from reprise.app.text.plain_text import json_text


@dataclass(frozen=True, slots=True)
class NamedJson:
    """The shape of calls that are a name and then arguments as JSON.

    open, close: tags around all calls. begin, end: tags around each. head: matches from `begin` up to the arguments,
    with groups `name` and, where the model writes ids, `id`. before, after: what the model writes around a call's
    arguments; `{name}` stands for the name and `{number}` for the call's number. between: what it writes between two
    calls. skipped: what may stand after the arguments beside `end`.
    """

    head: re.Pattern[str]
    before: str
    after: str
    begin: str
    end: str = ""
    open: str = ""
    close: str = ""
    between: str = ""
    skipped: tuple[str, ...] = ()
    more_markers: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for text in (self.open, self.begin) if text))

    @property
    def at_start(self) -> bool:
        return False

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.open, self.close, self.begin, self.end, *self.more_markers) if text)

    def reader(self) -> Reader:
        return _NamedReader(self)

    def written(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        texts = [
            self.before.replace("{name}", name).replace("{number}", str(number)) + json_text(arguments) + self.after
            for number, (name, arguments) in enumerate(calls)
        ]
        return self.open + self.between.join(texts) + self.close

    def grammar(self, tools: list[OfferedTool], many: bool, lark: Lark) -> str:
        rules = []
        for tool in tools:
            before, number, after = self.before.replace("{name}", tool.name).partition("{number}")
            head = lark.joined(lark.literal(before), "/[0-9]+/" if number else "", lark.literal(after))
            rules.append(lark.rule("call", lark.joined(head, lark.json(tool.schema, tool), lark.literal(self.after))))
        return lark.repeated(self.open, self.between, self.close, rules, many)


class _NamedReader(Steps):
    def __init__(self, shape: NamedJson) -> None:
        super().__init__()
        self._shape = shape

    def open(self) -> Progress | None:
        self.take(self._shape.open)
        self.skip_space()
        return self.then(self._head)

    def _head(self) -> Progress | None:
        found = self._shape.head.match(self.text, self.at)
        if found is not None:
            if not self.calls.knows(found["name"]):
                return Progress.TEXT
            self.at = found.end()
            self.begin(found["name"], (found.groupdict().get("id") or "").strip())
            return self.then(self._arguments)
        if self.may_become(self._shape.begin) or self.text.startswith(self._shape.begin, self.at):
            return self.wait(MAX_NAME_CHARS)
        return Progress.TEXT

    def _arguments(self) -> Progress | None:
        return self.then(self._after) if self.add_object() else Progress.MORE

    def _after(self) -> Progress | None:
        shape = self._shape
        return self.after_call(self._head, shape.begin, close=(shape.close,), skipped=(shape.end, *shape.skipped))
