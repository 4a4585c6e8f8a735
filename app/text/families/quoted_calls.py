"""Calls whose arguments look like JSON with bare keys, and with a token of their own in place of quotes."""

import json
import re
from dataclasses import dataclass
from typing import Any

from reprise.app.text.answer_parts import possible
from reprise.app.text.families.lark import Lark, OfferedTool, Property, properties
from reprise.app.text.families.reading import MAX_NAME_CHARS, Progress, Reader, Steps
from reprise.app.text.families.typed_values import escaped, json_of
from reprise.app.text.plain_text import json_text

_BARE_END = re.compile(r"[,}\]]")
_MAX_BARE_CHARS = 4096  # longest number or word
_KEY_END = re.compile(r"[:,{}\[\]]")
_CLOSES = {"{": "}", "[": "]"}
_BY_TYPE = {
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
    "integer": "/-?(0|[1-9][0-9]*)/",
    "boolean": '("true" | "false")',
    "null": '"null"',
    "array": "quotedlist",
    "object": "quotedobject",
}


@dataclass(frozen=True, slots=True)
class QuotedCalls:
    """The shape of quoted calls: `open call:N{key:QUOTE text QUOTE,other:[1,true]} close`."""

    open: str
    close: str
    quote: str

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def at_start(self) -> bool:
        return False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.open, self.close, self.quote

    def reader(self) -> Reader:
        return _QuotedReader(self)

    def written(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        return "".join(f"{self.open}call:{name}{self._text(arguments)}{self.close}" for name, arguments in calls)

    def _text(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._text(item)}' for key, item in value.items())}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._text, value))}]"
        return json.dumps(value)

    def grammar(self, tools: list[OfferedTool], many: bool, lark: Lark) -> str:
        quote = lark.literal(self.quote)
        text = lark.joined(quote, lark.text_up_to(self.quote))
        bare = " | ".join((*(_BY_TYPE[name] for name in ("number", "boolean", "null")), "quotedlist", "quotedobject"))
        lark.add(
            f"quotedvalue: {text} | {bare}",
            'quotedlist: "[" (quotedvalue ("," quotedvalue)*)? "]"',
            'quotedobject: "{" (quotedpair ("," quotedpair)*)? "}"',
            r'quotedpair: /[A-Za-z0-9_.\-]+/ ":" quotedvalue',
        )
        rules = []
        for tool in tools:
            listed = properties(tool.schema)
            if listed is None:
                arguments = "quotedobject"
            else:
                required = [self._argument(item, lark) for item in listed if item.is_required]
                optional = [self._argument(item, lark) for item in listed if not item.is_required]
                arguments = lark.joined('"{"', lark.members(required, optional, ","), '"}"')
            head = lark.literal(f"{self.open}call:{tool.name}")
            rules.append(lark.rule("call", lark.joined(head, arguments, lark.literal(self.close))))
        return lark.repeated("", "", "", rules, many)

    def _argument(self, item: Property, lark: Lark) -> str:
        values, kind = item.schema.get("enum"), item.schema.get("type")
        if isinstance(values, list) and values:
            value = f"({' | '.join(lark.literal(self._text(each)) for each in values)})"
        elif kind == "string":
            value = lark.joined(lark.literal(self.quote), lark.text_up_to(self.quote))
        else:
            value = _BY_TYPE.get(kind, "quotedvalue") if isinstance(kind, str) else "quotedvalue"
        return lark.rule("argument", lark.joined(lark.literal(f"{item.name}:"), value))


class _QuotedReader(Steps):
    """Turns arguments into JSON while they come. After an error in them the call ends, and its JSON is closed."""

    def __init__(self, shape: QuotedCalls) -> None:
        super().__init__()
        self._shape = shape
        self._head_of = re.compile(re.escape(shape.open) + r"\s*call:(?P<name>[^\s{]+)\s*(?=\{)")
        self._open_brackets: list[str] = []
        self._needs_comma = False
        self._quote = ""  # the quote of the string that goes on

    def open(self) -> Progress | None:
        found = self._head_of.match(self.text)
        if found is None:
            return self.wait(MAX_NAME_CHARS)
        if not self.calls.knows(found["name"]):
            return Progress.TEXT
        self.at = found.end()
        self.begin(found["name"])
        return self.then(self._value)

    def _comma(self) -> str:
        comma = ", " if self._needs_comma else ""
        self._needs_comma = False
        return comma

    def _value(self) -> Progress | None:
        """Read a value, or the end of an empty list."""
        self.skip_space()
        if self.at == len(self.text) or self.may_become(self._shape.quote):
            return Progress.MORE
        char = self.text[self.at]
        if char in _CLOSES:
            self.at += 1
            self.calls.add(self._comma() + char)
            self._open_brackets.append(char)
            return self.then(self._key if char == "{" else self._value)
        if char == "]" and self._open_brackets[-1] == "[":
            return self._closed()
        if self.take(self._shape.quote, '"'):
            self._quote = self._shape.quote if self.text.endswith(self._shape.quote, 0, self.at) else '"'
            self.calls.add(self._comma() + '"')
            return self.then(self._string)
        end = _BARE_END.search(self.text, self.at, self.at + _MAX_BARE_CHARS)
        if end is None:
            return self._unended(_MAX_BARE_CHARS)
        bare = self.text[self.at : end.start()]
        self.at = end.start()
        self.calls.add(self._comma() + json_of(bare.strip(), "json", frozenset()))
        return self.then(self._next)

    def _key(self) -> Progress | None:
        """Read a key, or the end of an empty object."""
        self.skip_space()
        if self.take("}"):
            self.at -= 1
            return self._closed()
        start = self.at
        if self.text.startswith(self._shape.quote, start) or self.may_become(self._shape.quote):
            end = self.text.find(self._shape.quote, start + len(self._shape.quote), start + MAX_NAME_CHARS)
            if end < 0:
                return self._unended(MAX_NAME_CHARS)
            key, place = self.text[start + len(self._shape.quote) : end], end + len(self._shape.quote)
        else:
            found = _KEY_END.search(self.text, start, start + MAX_NAME_CHARS)
            if found is None:
                return self._unended(MAX_NAME_CHARS)
            key, place = self.text[start : found.start()].strip().strip('"'), found.start()
        place = self.past_space(place)
        if place == len(self.text):
            return Progress.MORE
        if self.text[place] != ":":
            return self._abandoned()
        self.at = place + 1
        self.calls.add(f"{self._comma()}{json_text(key)}: ")
        return self.then(self._value)

    def _unended(self, most: int) -> Progress:
        """Wait for the end of a value or key, unless it has become longer than `most` characters."""
        return Progress.MORE if len(self.text) - self.at < most else self._abandoned()

    def _string(self) -> Progress | None:
        end = self.text.find(self._quote, self.at)
        stop = end if end >= 0 else len(self.text) - (0 if self.final else possible(self.text[self.at :], self._quote))
        self.calls.add(escaped(self.text[self.at : stop]))
        self.at = stop
        if end < 0:
            return Progress.MORE
        self.at += len(self._quote)
        self.calls.add('"')
        return self.then(self._next)

    def _next(self) -> Progress | None:
        """Read what follows a value: a comma, or the end of what it is in."""
        self.skip_space()
        if self.at == len(self.text):
            return Progress.MORE
        if self.take(","):
            self._needs_comma = True
            return self.then(self._key if self._open_brackets[-1] == "{" else self._value)
        if self.text[self.at] == _CLOSES[self._open_brackets[-1]]:
            return self._closed()
        return self._abandoned()

    def _closed(self) -> Progress | None:
        self._needs_comma = False
        self.at += 1
        self.calls.add(_CLOSES[self._open_brackets.pop()])
        return self.then(self._next if self._open_brackets else self._after)

    def _abandoned(self) -> Progress:
        """End a call whose arguments make no sense."""
        self.calls.add("".join(_CLOSES[char] for char in reversed(self._open_brackets)))
        return Progress.OVER

    def _after(self) -> Progress | None:
        place = self.at
        self.skip_space()
        if self.take(self._shape.close):
            return Progress.OVER
        if self.may_become(self._shape.close):
            self.at = place
            return Progress.MORE
        self.at = len(self.text) if self.final and self.at == len(self.text) else place
        return Progress.OVER
