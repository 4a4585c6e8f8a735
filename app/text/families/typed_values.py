"""Arguments that models write as plain text: what type they have by their tool's JSON schema, and their JSON."""

import json
import math
from typing import Any, Literal

from reprise.app.text.families.lark import resolved
from reprise.app.text.plain_text import json_text, plain_text

Kind = Literal["string", "json", "either"]
_MAX_NESTED_CHOICES = 4  # levels of anyOf and oneOf that are looked into
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class ArgumentTypes:
    """The types of one tool's arguments, read from its JSON schema. A part of the schema that many others refer to is
    read once, so the time for all arguments together grows only with the size of the schema, however its references
    lead."""

    def __init__(self, schema: dict[str, Any]) -> None:
        root = resolved(schema, schema)
        self._root = {**schema, **root}
        listed = root.get("properties")
        self._listed = listed if isinstance(listed, dict) else {}
        self._known: dict[tuple[int, int], frozenset[str]] = {}  # by a schema's id and the depth left

    def kind_of(self, key: str) -> tuple[Kind, frozenset[str]]:
        """Return (how to read the text of the argument `key`, types that its schema allows; none: any). "string": the
        text as it is. "json": the JSON in the text, or the text if it is no JSON. "either": the same, but only JSON of
        an allowed type."""
        types = self._types(self._listed.get(key), _MAX_NESTED_CHOICES)
        if types == {"string"}:
            return "string", types
        return "either" if "string" in types else "json", types

    def _types(self, schema: object, depth: int) -> frozenset[str]:
        found = resolved(schema, self._root)
        if not found:
            return frozenset()
        place = id(found), depth
        if place not in self._known:
            types = _own_types(found)
            self._known[place] = self._types_of_choices(found, depth) if types is None else types
        return self._known[place]

    def _types_of_choices(self, schema: dict[str, Any], depth: int) -> frozenset[str]:
        types: frozenset[str] = frozenset()
        for name in ("anyOf", "oneOf"):
            if isinstance(ways := schema.get(name), list) and depth:
                for way in ways:
                    if not (allowed := self._types(way, depth - 1)):
                        return frozenset()
                    types |= allowed
        return types


def _own_types(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema names or lists values of; None if it does neither."""
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset("string" if isinstance(value, str) else _type_of(value) for value in values)
    return None


def _type_of(value: object) -> str:
    return "null" if value is None else _TYPES.get(type(value), "string")


def json_of(text: str, kind: Kind, types: frozenset[str]) -> str:
    """Return an argument's text as JSON. kind, types: as `ArgumentTypes.kind_of` returns them."""
    if kind != "string":
        bare = text.strip()
        bare = _PYTHON.get(bare, bare)
        try:
            value = json.loads(bare)
            if kind == "json" or _fits(value, types):
                return plain_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (ValueError, RecursionError):
            pass
    return json_text(text)


def _fits(value: object, types: frozenset[str]) -> bool:
    name = _type_of(value)
    if isinstance(value, str):
        return False  # text in quotes, where text without them is a string too
    return name in types or (name == "integer" and "number" in types)


def json_of_value(value: object) -> str:
    """Return the JSON of a value that a model wrote as Python. Raises ValueError if there is none."""
    return plain_text(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False))


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("JSON has no such number")
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def escaped(text: str) -> str:
    """Return text with escapes as inside of a JSON string, without the quotes around it."""
    return json_text(text)[1:-1]


class TextToJson:
    """A converter to JSON of one argument whose text comes in pieces. A string is passed on at once; any other value
    when it is complete."""

    def __init__(self, kind: Kind, types: frozenset[str]) -> None:
        self._kind, self._types = kind, types
        self._is_open = False  # a string has begun
        self._pieces: list[str] = []

    def push(self, text: str) -> str:
        """Add a piece of the text. Returns the JSON that is certain now."""
        if self._kind != "string":
            self._pieces.append(text)
            return ""
        opening = "" if self._is_open else '"'
        self._is_open = True
        return opening + escaped(text)

    def end(self) -> str:
        if self._kind == "string":
            return '"' if self._is_open else '""'
        return json_of("".join(self._pieces), self._kind, self._types)

    def cut(self) -> str:
        """Return the text so far of an argument that is no string and was cut off; empty for a string."""
        return "".join(self._pieces)
