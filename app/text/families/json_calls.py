"""Calls that are JSON objects with a name and arguments, with or without tags around them, one by one or in a list."""

from dataclasses import dataclass
from typing import Any

from reprise.app.text.families.lark import Lark, OfferedTool
from reprise.app.text.families.reading import (
    MAX_HEAD_CHARS,
    Progress,
    Reader,
    Steps,
    json_end,
    json_string,
)
from reprise.app.text.plain_text import json_text, read_json

MAX_BARE_HEAD_CHARS = 512  # longest head of a call without a tag, where no text is shown meanwhile
_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id", "tool_call_id")
_SEPARATORS = ",;"


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """The shape of JSON calls. Keys may come in any order; arguments that come after the name are streamed.

    open, close: the tags; without `open` calls can only begin an answer. newline: what stands between the tags and the
    calls in them. is_list: the model writes all of its calls between one pair of tags, as a list, with `list_edges`
    before, between and after them. name, arguments: the keys that it writes. first: what it writes before the name;
    `{number}` stands for the call's number. is_keyed: an object has one key, which is the function's name. is_alone:
    the model writes one call in an answer. has_ids: it writes ids that its template shows again; those of others are
    not kept.
    """

    open: str = ""
    close: str = ""
    is_list: bool = False
    name: str = "name"
    arguments: str = "arguments"
    first: str = ""
    is_keyed: bool = False
    newline: str = "\n"
    list_edges: tuple[str, str, str] = ("[", ", ", "]")
    is_alone: bool = False
    has_ids: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.open,) if self.open else ()

    @property
    def at_start(self) -> bool:
        return not self.open

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker.strip() for marker in (self.open, self.close) if marker.strip())

    def reader(self) -> Reader:
        return _JsonReader(self)

    def _frame(self) -> tuple[str, str, str]:
        """Return the texts before all calls, between two, and after all."""
        if self.is_list:
            before, between, after = self.list_edges
            return f"{self.open}{self.newline}{before}", between, f"{after}{self.newline}{self.close}"
        return "", "\n" if self.open else "; ", ""

    def _around(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call."""
        key = json_text(name)
        head = f"{{{key}: " if self.is_keyed else f'{{{self.first}"{self.name}": {key}, "{self.arguments}": '
        if self.is_list or not self.open:
            return head, "}"
        return f"{self.open}{self.newline}{head}", f"}}{self.newline}{self.close}"

    def written(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        before, between, after = self._frame()
        texts = []
        for number, (name, arguments) in enumerate(calls):
            head, tail = self._around(name)
            texts.append(head.replace("{number}", str(number)) + json_text(arguments) + tail)
        return before + between.join(texts) + after

    def grammar(self, tools: list[OfferedTool], many: bool, lark: Lark) -> str:
        before, between, after = self._frame()
        rules = []
        for tool in tools:
            head, tail = self._around(tool.name)
            head, number, rest = head.partition("{number}")
            opening = lark.joined(lark.literal(head), "/[0-9]+/" if number else "", lark.literal(rest))
            rules.append(lark.rule("call", lark.joined(opening, lark.json(tool.schema, tool), lark.literal(tail))))
        return lark.repeated(before, between, after, rules, many and not self.is_alone)


class _JsonReader(Steps):
    def __init__(self, shape: JsonCalls) -> None:
        super().__init__()
        self._shape = shape

    def open(self) -> Progress | None:
        shape = self._shape
        if not self.take(shape.open) and shape.open:
            return Progress.MORE if self.may_become(shape.open) else Progress.TEXT
        self.skip_space()
        while self.take("["):
            self.skip_space()
        return self.then(self._object)

    def _object(self) -> Progress | None:
        """Read an object up to its arguments, or all of it if they come before the name."""
        most = MAX_HEAD_CHARS if self._shape.open else MAX_BARE_HEAD_CHARS
        if self.at == len(self.text):
            return self.wait(most)
        if self.text[self.at] != "{":
            return Progress.TEXT
        place = self.at + 1
        name: str | None = None
        call_id = ""
        while True:
            place = self.past_space(place)
            pair = json_string(self.text, place)
            if pair is None:
                return self.wait(most) if self.text[place : place + 1] in ("", '"') else Progress.TEXT
            key, place = pair
            if not self._is_expected(key):
                return Progress.TEXT
            place = self.past_space(place)
            if place == len(self.text):
                return self.wait(most)
            if self.text[place] != ":":
                return Progress.TEXT
            place = self.past_space(place + 1)
            if self._shape.is_keyed:
                name, key = key, self._shape.arguments
            if name is not None and key in _ARGUMENTS and self.text.startswith("{", place):
                self.at = place
                self.begin(name, call_id)
                return self.then(self._arguments)
            end = json_end(self.text, place)
            if end is None:
                return self.wait(most)
            value = self.text[place:end]
            if key in _NAMES and value.startswith('"'):
                name = _string(value)
                if name is None or not self.calls.knows(name):
                    return Progress.TEXT
            elif key == "id" and self._shape.has_ids and value.startswith('"'):
                call_id = _string(value) or ""
            elif key == "type" and not self._shape.open and value != '"function"':
                return Progress.TEXT
            place = self.past_space(end)
            if place == len(self.text):
                return self.wait(most)
            if self.text[place] == "}":
                return self._whole(place + 1)
            if self.text[place] != ",":
                return Progress.TEXT
            place += 1

    def _is_expected(self, key: str) -> bool:
        if self._shape.is_keyed:
            return self.calls.knows(key)
        return bool(self._shape.open) or key in (*_NAMES, *_ARGUMENTS, *_OTHERS)

    def _whole(self, end: int) -> Progress | None:
        """Read an object that is complete."""
        try:
            value = read_json(self.text[self.at : end])
        except (ValueError, RecursionError):
            return Progress.TEXT
        if isinstance(value.get("function"), dict):
            value |= value["function"]
        name = next((value[key] for key in _NAMES if isinstance(value.get(key), str)), None)
        if name is None or not self.calls.knows(name):
            return Progress.TEXT
        given = next((value[key] for key in _ARGUMENTS if key in value), None)
        if isinstance(given, str):  # JSON inside JSON
            given = _decoded(given)
        self.at = end
        self.begin(name)
        self.calls.add(json_text(given if isinstance(given, dict) else {}))
        return self.then(self._after)

    def _arguments(self) -> Progress | None:
        return self.then(self._rest) if self.add_object() else Progress.MORE

    def _rest(self) -> Progress | None:
        """Read the keys after the arguments, and the object's end."""
        place = self.past_space(self.at)
        if place == len(self.text):
            return Progress.MORE
        if self.text[place] == ",":
            key = json_string(self.text, self.past_space(place + 1))
            if key is not None:
                colon = self.past_space(key[1])
                end = json_end(self.text, self.past_space(colon + 1)) if self.text.startswith(":", colon) else None
                if end is not None:
                    self.at = end
                    return None
            if self._may_be_key(place) and len(self.text) - place < MAX_HEAD_CHARS:
                return Progress.MORE
        elif self.text[place] == "}":
            self.at = place + 1
        return self.then(self._after)

    def _may_be_key(self, comma: int) -> bool:
        place = self.past_space(comma + 1)
        return self.text[place : place + 1] in ("", '"')

    def _after(self) -> Progress | None:
        """Read what follows a call: another one, or the end of them."""
        close = self._shape.close
        place = self.at
        self.skip_space()
        if self.take(close):
            return Progress.OVER
        if self.at == len(self.text) or self.may_become(close):
            if not self.final:
                self.at = place
                return Progress.MORE
            return Progress.OVER
        char = self.text[self.at]
        if char == "{":
            return self.then(self._object)
        if char in _SEPARATORS:
            following = self.past_space(self.at + 1)
            if following == len(self.text) and not self.final:
                self.at = place
                return Progress.MORE
            if self.text[following : following + 1] in ("{", ""):
                self.at = following
                return None
        elif char in "}]":  # the end of a list, or one bracket too many
            self.at += 1
            return None
        self.at = place
        return Progress.OVER


def _string(value: str) -> str | None:
    found = json_string(value, 0)
    return None if found is None else found[0]


def _decoded(text: str) -> Any:
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return None
