"""Leaves out of a JSON schema what cannot be enforced, for schemas that need not be followed to the letter: those of
tools that are not strict, and of a response format with strict false. Pydantic, MCP servers and generators write
regexes with look-ahead, bounds of 64 bits, null keywords and references to nothing into them."""

import json
from collections.abc import Callable
from typing import Any

LARGEST_EXACT = 1 << 53  # integers up to here are exact in the doubles of llguidance
_LARGEST_INTEGER = float(1 << 63)  # larger ones come as floats (`reprise.app.schemas.fields.plain_numbers`)
MOST_CHECKS = 2000  # checks of one schema's parts; what is left after that loses all but its types
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by name
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_OWN = frozenset((
    "type", "enum", "const", "format", "pattern", "minLength", "maxLength", "minItems", "maxItems", "required",
    "minProperties", "maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
))  # fmt: skip
"""The keywords without schemas in them that llguidance enforces."""
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
KNOWN_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
"""The formats that llguidance enforces."""

Compiles = Callable[[dict[str, Any]], bool]
"""Returns whether a schema can be enforced."""


def forgiven(schema: dict[str, Any], compiles: Compiles) -> dict[str, Any]:
    """Return a copy of a schema without the keywords that cannot be enforced, at any depth; {} if what is left cannot
    be compiled either. compiles: tells whether a schema can be enforced. The schema must be nested no more deeply than
    a body may be."""
    found = _Forgiver(schema, compiles).forgiven(schema)
    return found if isinstance(found, dict) and compiles(found) else {}


def without_unknown_formats(schema: Any) -> Any:
    """Return a copy of a schema without the `format` keywords that cannot be enforced. To JSON Schema they are
    annotations."""
    return _map_schemas(schema, _without_unknown_format)


def has_inexact_number(schema: Any) -> bool:
    """Return whether a schema compares answers with an integer that a double cannot hold exactly."""
    found = False

    def look(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal found
        found = found or any(_is_inexact(part[name]) for name in _NUMBERS if name in part)
        return part

    _map_schemas(schema, look)
    return found


class _Forgiver:
    def __init__(self, root: dict[str, Any], compiles: Compiles) -> None:
        self._root, self._compiles = root, compiles
        self._known: dict[str, bool] = {}

    def forgiven(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema if isinstance(schema, bool) else {}
        found = self._own_keywords({name: value for name, value in schema.items() if name in _OWN})
        if isinstance(place := schema.get("$ref"), str) and _leads_somewhere(place, self._root):
            found["$ref"] = place
        for name in _MAPS:
            if isinstance(inner := schema.get(name), dict):
                found[name] = {key: self.forgiven(value) for key, value in inner.items()}
        for name in _LISTS:
            if isinstance(inner := schema.get(name), list) and inner:
                found[name] = [self.forgiven(value) for value in inner]
        for name in _SINGLE:
            if isinstance(inner := schema.get(name), dict | bool):
                found[name] = self.forgiven(inner)
        return self._without_bad_patterns(found)

    def _own_keywords(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return those of a schema's own keywords that can be enforced, together."""
        kept = {name: value for name, value in given.items() if not (name in _NUMBERS and _is_inexact(value))}
        if self._can_be(kept):
            return kept
        for name in kept:
            left = {other: value for other, value in kept.items() if other != name}
            if self._can_be(left):
                return left
        found: dict[str, Any] = {}
        for name, value in kept.items():
            if self._can_be({**found, name: value}):
                found[name] = value
        return found

    def _without_bad_patterns(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Leave out names of properties whose regex cannot be compiled. Then any property may be there."""
        patterns = schema.get("patternProperties", {})
        good = {name: value for name, value in patterns.items() if self._can_be({"type": "string", "pattern": name})}
        if len(good) == len(patterns):
            return schema
        return {name: value for name, value in schema.items() if name != "additionalProperties"} | {
            "patternProperties": good
        }

    def _can_be(self, keywords: dict[str, Any]) -> bool:
        if not keywords:
            return True
        written = json.dumps(keywords, sort_keys=True)
        if written not in self._known:
            if len(self._known) >= MOST_CHECKS:
                return False
            self._known[written] = self._compiles(keywords)
        return self._known[written]


def _leads_somewhere(place: str, root: dict[str, Any]) -> bool:
    """Return whether a reference leads to a schema within `root`."""
    if place == "#":
        return True
    if not place.startswith("#/"):
        return False
    found: Any = root
    for step in place[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return False
    return isinstance(found, dict | bool)


def _is_inexact(value: Any) -> bool:
    """Return whether a value is an integer, or has one in it, that a double need not hold exactly."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict(fields):
                waiting += fields.values()
            case list(items):
                waiting += items
            case bool():
                pass
            case int(number) if abs(number) > LARGEST_EXACT:
                return True
            case float(number) if abs(number) >= _LARGEST_INTEGER:
                return True
    return False


def _without_unknown_format(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("format")
    if not isinstance(name, str) or name in KNOWN_FORMATS:
        return schema
    return {key: value for key, value in schema.items() if key != "format"}


def _map_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema in which it and all schemas within it are changed. Values that are no schemas, such as those of
    `const`, stay."""
    if not isinstance(schema, dict):
        return schema
    found = dict(change(schema))
    for name in _MAPS:
        if isinstance(inner := found.get(name), dict):
            found[name] = {key: _map_schemas(value, change) for key, value in inner.items()}
    for name in _LISTS:
        if isinstance(inner := found.get(name), list):
            found[name] = [_map_schemas(value, change) for value in inner]
    for name in _SINGLE:
        if name in found:
            found[name] = _map_schemas(found[name], change)
    return found
