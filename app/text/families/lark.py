"""Writes grammars of calls in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# JSON on one line, as models are taught to write it; with free white space, small models lose track.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_REFERENCES = 8  # that are followed from one schema to the next


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that a grammar lets the model call. schema: of its arguments, an object. is_lenient: keywords of the
    schema that cannot be enforced are ignored, not refused."""

    name: str
    schema: dict[str, Any]
    is_lenient: bool


class Lark:
    """A grammar under construction. special_ids: the ids of special tokens by their texts. A special token in a grammar
    has to be named by its id, because its text would stand for the plain tokens that spell it."""

    def __init__(self, special_ids: Mapping[str, int] | None = None) -> None:
        self.rules: list[str] = []
        self._special_ids = special_ids or {}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def rule(self, name: str, body: str, attribute: str = "") -> str:
        """Add a rule under a name of its own, which is returned. attribute: such as `suffix="..."`."""
        name = f"{name}{len(self.rules)}"
        self.rules.append(f"{name}{f'[{attribute}]' if attribute else ''}: {body}")
        return name

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

    def is_special(self, text: str) -> bool:
        return text in self._special_ids

    def json(self, schema: dict[str, Any], tool: OfferedTool) -> str:
        return json_rule(schema, is_lenient=tool.is_lenient)

    def text_up_to(self, end: str) -> str:
        """Return an expression for any text up to `end`, and `end` itself."""
        if self._special.match(end):
            return self.joined(r"/(?s:.*)/", self.literal(end))
        return self.rule("text", r"/(?s:.*)/", f"suffix={quoted(end)}")

    def repeated(self, before: str, between: str, after: str, calls: Sequence[str], many: bool) -> str:
        """Return an expression for one of the calls, or for several with `between` between them."""
        one = self.rule("one", " | ".join(calls)) if len(calls) > 1 else calls[0]
        more = f"({self.joined(self.literal(between), one)})*" if many else ""
        return self.joined(self.literal(before), one, more, self.literal(after))

    def members(self, required: Sequence[str], optional: Sequence[str], between: str) -> str:
        """Return an expression for all that is required and any that is optional, in order, with `between` between two
        of them; empty if there is nothing."""
        separator = self.literal(between)
        if required:
            first = f" {separator} ".join(required)
            return self.joined(first, *(f"({self.joined(separator, part)})?" for part in optional))
        ways = [
            self.joined(part, *(f"({self.joined(separator, later)})?" for later in optional[place + 1 :]))
            for place, part in enumerate(optional)
        ]
        return f"({' | '.join(ways)})?" if ways else ""


@dataclass(frozen=True, slots=True)
class Property:
    """A property of a tool's arguments."""

    name: str
    schema: dict[str, Any]
    is_required: bool


def properties(schema: dict[str, Any]) -> list[Property] | None:
    """Return the properties of an object's schema, those that are required first; None if the schema does not list
    them."""
    schema = resolved(schema, schema)
    given = schema.get("properties")
    if not isinstance(given, dict):
        return [] if schema.get("additionalProperties") is False else None
    required = schema.get("required")
    wanted = set(required) if isinstance(required, list) else set()
    found = [
        Property(str(name), _with_definitions(value, schema), name in wanted)
        for name, value in given.items()
        if value is not False
    ]
    return sorted(found, key=lambda found: not found.is_required)


def resolved(schema: object, root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema, or the one that it refers to in the schema `root`; an empty one if there is none."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found: Any = root if reference.startswith("#") else None
        for step in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if step and isinstance(found, dict) else found
        schema = found
    return {}


def _with_definitions(value: object, root: dict[str, Any]) -> dict[str, Any]:
    """Return a property's schema with the definitions that it may refer to."""
    schema = value if isinstance(value, dict) else {}
    return {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}


def json_rule(schema: dict[str, Any], *, is_lenient: bool) -> str:
    """Return an expression for JSON that follows a schema. is_lenient: whether to ignore keywords that cannot be
    enforced, instead of refusing them."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_LAYOUT, "lenient": is_lenient}})


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
