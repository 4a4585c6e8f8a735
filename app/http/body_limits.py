"""Limits what a body may hold beyond the types and ranges of its schema. Checked before anything is built from it."""

from collections.abc import Iterator
from typing import Any

import msgspec

from app.errors import ApiError, invalid
from app.settings.settings import LimitSettings

# field -> the setting that limits its number, or the number of its items
_NUMBERS = {"n": "choices", "logprobs": "logprobs", "top_logprobs": "logprobs"}
_COUNTS = {
    "messages": "messages",
    "input": "messages",
    "items": "messages",
    "stop": "stop",
    "stop_sequences": "stop",
    "tools": "tools",
}


def check_body(body: dict[str, Any], limits: LimitSettings) -> None:
    """Raises ApiError 400. Wrong types are left to the schema."""
    if _is_deeper(body, limits.json_depth):
        raise invalid(f"The body has more than {limits.json_depth} levels.", code="invalid_json")
    for name, limit in _NUMBERS.items():
        value = body.get(name)
        if type(value) is int and value > getattr(limits, limit):
            raise _too_much(name, f"at most {getattr(limits, limit)}", limit)
    for name, limit in _COUNTS.items():
        value = body.get(name)
        if isinstance(value, list) and len(value) > getattr(limits, limit):
            raise _too_much(name, f"at most {getattr(limits, limit)} items", limit)
    for name, schema in _schemas(body):
        if _is_deeper(schema, limits.schema_depth):
            raise _too_much(name, f"schemas of at most {limits.schema_depth} levels", "schema_depth")
        if len(msgspec.json.encode(schema)) > limits.schema_bytes:
            raise _too_much(name, f"schemas of at most {limits.schema_bytes} bytes", "schema_bytes")


def _too_much(param: str, allowed: str, limit: str) -> ApiError:
    return invalid(f"Invalid '{param}': this server takes {allowed} (limits.{limit}).", param)


def _schemas(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON schemas in a body, each with the name of the field that holds it."""
    found: list[tuple[str, object]] = [
        ("response_format", _at(body, "response_format", "json_schema", "schema")),
        ("structured_outputs", _at(body, "structured_outputs", "json")),
        ("guided_json", body.get("guided_json")),
        ("text", _at(body, "text", "format", "schema")),
    ]
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        found += [
            ("tools", _at(tool, *path)) for path in (("function", "parameters"), ("parameters",), ("input_schema",))
        ]
    yield from ((name, schema) for name, schema in found if isinstance(schema, dict))


def _at(value: object, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _is_deeper(value: object, levels: int) -> bool:
    """Whether objects and lists are nested more than `levels` deep. Works level by level, without recursion."""
    layer = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        if not layer:
            return False
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if type(inner) is dict or type(inner) is list
        ]
    return bool(layer)
