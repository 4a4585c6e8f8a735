"""Writes grammars of calls in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# JSON on one line, as models are taught to write it; with free white space, small models lose track.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_REFERENCES = 8  # one schema after the other
_MAX_REFERENCE_CHARS = 1024
_DEFINITIONS = ("$defs", "definitions")


class TooLarge(Exception):
    """The grammar would have more characters than allowed."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that a grammar lets the model call. schema: of its arguments, an object. is_lenient: keywords of the
    schema that cannot be enforced are ignored, not refused."""

    name: str
    schema: dict[str, Any]
    is_lenient: bool


class Lark:
    """A grammar under construction. special_ids: the ids of special tokens by their texts. A special token in a grammar
    has to be named by its id, because its text would stand for the plain tokens that spell it. max_chars: the most
    characters that all rules may have together; a method that would exceed it raises TooLarge."""

    def __init__(self, special_ids: Mapping[str, int], *, max_chars: int) -> None:
        self.rules: list[str] = []
        self._chars_left = max_chars
        self._json_rules: dict[str, str] = {}  # names by bodies
        self._special_ids = special_ids
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def rule(self, name: str, body: str, attribute: str = "") -> str:
        """Add a rule and return its name, which is `name` with a number. body: its expression. attribute: in brackets
        after the name, such as `suffix="..."`."""
        name = f"{name}{len(self.rules)}"
        self.add(f"{name}{f'[{attribute}]' if attribute else ''}: {body}")
        return name

    def add(self, *rules: str) -> None:
        """Add complete rules."""
        self._chars_left -= sum(map(len, rules))
        if self._chars_left < 0:
            raise TooLarge
        self.rules += rules

    def joined(self, *parts: str) -> str:
        return " ".join(part for part in parts if part)

    def literal(self, text: str) -> str:
        """Return an expression for a text; empty for an empty text."""
        parts, start = [], 0
        for found in self._special.finditer(text):
            if found.start() > start:
                parts.append(quoted(text[start : found.start()]))
            parts.append(f"<[{self._special_ids[found[0]]}]>")
            start = found.end()
        if start < len(text):
            parts.append(quoted(text[start:]))
        return " ".join(parts)

    def json(self, schema: dict[str, Any], tool: OfferedTool) -> str:
        """Return an expression for JSON that follows one of a tool's schemas. Equal schemas share one rule."""
        body = json_rule(schema, is_lenient=tool.is_lenient)
        if body not in self._json_rules:
            self._json_rules[body] = self.rule("json", body)
        return self._json_rules[body]

    def text_up_to(self, end: str) -> str:
        """Return an expression for any text that ends with `end`."""
        if self._special.match(end):
            return self.joined(r"/(?s:.*)/", self.literal(end))
        return self.rule("text", r"/(?s:.*)/", f"suffix={quoted(end)}")

    def repeated(self, before: str, between: str, after: str, calls: Sequence[str], many: bool) -> str:
        """Return an expression for one of the calls between `before` and `after`; if `many`, for one or more of them
        with `between` in between."""
        one = self.rule("one", " | ".join(calls)) if len(calls) > 1 else calls[0]
        more = f"({self.joined(self.literal(between), one)})*" if many else ""
        return self.joined(self.literal(before), one, more, self.literal(after))

    def members(self, required: Sequence[str], optional: Sequence[str], between: str) -> str:
        """Return an expression for all `required` parts and any of the `optional` ones, in this order, with `between`
        in between; empty if there are no parts."""
        separator = self.literal(between)
        if required:
            first = f" {separator} ".join(required)
            return self.joined(first, *(f"({self.joined(separator, part)})?" for part in optional))
        return f"({self._some(optional, separator)})?" if optional else ""

    def _some(self, parts: Sequence[str], separator: str) -> str:
        """Return an expression for one or more of the parts, in order. Halves of halves keep the rules few and their
        nesting shallow: llguidance recurses over nested rules, and its stack ends at some thousands."""
        if len(parts) == 1:
            return parts[0]
        middle = len(parts) // 2
        first, last = self._some(parts[:middle], separator), self._some(parts[middle:], separator)
        return self.rule("some", f"{first} ({self.joined(separator, last)})? | {last}")


@dataclass(frozen=True, slots=True)
class Property:
    """A property of a tool's arguments."""

    name: str
    schema: dict[str, Any]
    is_required: bool


def num_optional(schema: object) -> int:
    """Return how many properties of an object are optional by its schema; 0 if the schema lists no properties."""
    given = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not isinstance(given, dict):
        return 0
    required = schema.get("required")
    wanted = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return sum(name not in wanted for name in given)


def most_optional(schema: object) -> int:
    """Return the largest `num_optional` of all objects within a schema."""
    most, waiting = 0, [schema]
    while waiting:
        value = waiting.pop()
        most = max(most, num_optional(value))
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
    return most


def loosened(schema: Any, max_optional: int) -> Any:
    """Return a copy of a schema in which objects with more than `max_optional` optional properties may have any
    properties. The schema must be nested no more deeply than a body may be."""
    if isinstance(schema, list):
        return [loosened(inner, max_optional) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if num_optional(schema) > max_optional:
        left_out = {"properties", "required", "additionalProperties", "patternProperties"}
        schema = {name: value for name, value in schema.items() if name not in left_out}
    return {name: loosened(value, max_optional) for name, value in schema.items()}


def properties(schema: dict[str, Any]) -> list[Property] | None:
    """Return the properties of an object's schema, those that are required first; None if the schema does not list
    them."""
    schema = resolved(schema, schema)
    given = schema.get("properties")
    if not isinstance(given, dict):
        return [] if schema.get("additionalProperties") is False else None
    required = schema.get("required")
    wanted = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    found = [
        Property(str(name), value if isinstance(value, dict) else {}, name in wanted)
        for name, value in given.items()
        if value is not False
    ]
    return sorted(found, key=lambda found: not found.is_required)


def resolved(schema: object, root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema; if it is a reference, the schema that this names in `root`; {} if that does not exist."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        if len(reference) > _MAX_REFERENCE_CHARS:
            return {}
        found: Any = root if reference.startswith("#") else None
        for step in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if step and isinstance(found, dict) else found
        schema = found
    return {}


def with_definitions(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Return a property's schema with the definitions that it refers to, directly and through others. root: the schema
    that it is a property of, which may itself be a reference."""
    root = {**root, **resolved(root, root)}
    listed = {name: root[name] for name in _DEFINITIONS if isinstance(root.get(name), dict)}
    needed: dict[str, dict[str, Any]] = {}
    waiting = [schema]
    while waiting:
        for reference in _references(waiting.pop()):
            kind, _, path = reference.removeprefix("#/").partition("/")
            name = path.partition("/")[0].replace("~1", "/").replace("~0", "~")
            if name not in listed.get(kind, {}):
                return {**listed, **schema}  # a form of reference that is not known here
            if name not in needed.setdefault(kind, {}):
                needed[kind][name] = listed[kind][name]
                waiting.append(listed[kind][name])
    return {**needed, **schema}


def _references(schema: object) -> Iterator[str]:
    """Yield all references in a schema."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str):
                yield reference
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def json_rule(schema: dict[str, Any], *, is_lenient: bool) -> str:
    """Return an expression for JSON that follows a schema. is_lenient: whether to ignore keywords that cannot be
    enforced, instead of refusing them."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_LAYOUT, "lenient": is_lenient}})


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
