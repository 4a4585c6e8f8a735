import json
from collections.abc import Iterator
from typing import Any

import pytest

from reprise.app.text.families.typed_values import ArgumentTypes, TextToJson, json_of

SCHEMA = {
    "$defs": {"Day": {"type": "integer"}, "Name": {"$ref": "#/$defs/Word"}, "Word": {"type": "string"}},
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "day": {"$ref": "#/$defs/Day"},
        "name": {"$ref": "#/$defs/Name"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "number_or_text": {"type": ["number", "string"]},
        "kind": {"enum": ["sun", "rain"]},
        "level": {"enum": [1, 2]},
        "fixed": {"const": "x"},
        "circle": {"$ref": "#/properties/circle"},
        "free": {},
        "partly": {"anyOf": [{"type": "string"}, {}]},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "3", "3"),
        ("text", "null", "null"),
        ("text", ' "a" ', ' "a" '),
        ("count", "3", 3),
        ("count", " 3\n", 3),
        ("count", "three", "three"),
        ("count", "True", True),
        ("count", "NaN", "NaN"),
        ("count", "1e999", "1e999"),
        ("count", "[" * 100_000, "[" * 100_000),
        ("day", "4", 4),
        ("name", "4", "4"),
        ("maybe", "None", None),
        ("maybe", "null", None),
        ("maybe", "4", "4"),
        ("number_or_text", "4", 4),
        ("number_or_text", '"4"', '"4"'),
        ("kind", "sun", "sun"),
        ("level", "2", 2),
        ("fixed", "1", "1"),
        ("circle", "1", 1),
        ("free", '{"a": [1]}', {"a": [1]}),
        ("free", "Rome", "Rome"),
        ("partly", "1", 1),
        ("unknown", "False", False),
    ],
)
def test_the_schema_tells_the_type(key: str, text: str, value: object) -> None:
    kind, types = ArgumentTypes(SCHEMA).kind_of(key)
    assert json.loads(json_of(text, kind, types)) == value
    writer = TextToJson(kind, types)
    pieces = [writer.push(piece) for piece in (text[:1], text[1:])]
    assert json.loads("".join(pieces) + writer.end()) == value
    assert (pieces[0] != "") == (kind == "string")


def test_schemas_that_are_none_tell_nothing() -> None:
    for schema in ({}, {"properties": []}, {"properties": {"a": True}}, {"$ref": "#"}, {"$ref": "http://else"}):
        assert ArgumentTypes(schema).kind_of("a") == ("json", frozenset())
    assert json_of("", "string", frozenset()) == '""'


class _Counted(list[Any]):
    """A list that counts how often its items are asked for."""

    asked = 0

    def __iter__(self) -> Iterator[Any]:
        type(self).asked += 1
        return super().__iter__()


def test_a_schema_that_many_refer_to_is_read_once() -> None:
    """Every choice refers to all choices again: 60^4 ways lead to the deepest of them."""
    ways = _Counted({"$ref": "#/$defs/a"} for _ in range(60))
    listed = {f"p{n}": {"$ref": "#/$defs/a"} for n in range(50)}
    types = ArgumentTypes({"$defs": {"a": {"anyOf": ways}}, "properties": listed})
    assert {types.kind_of(key) for key in listed} == {("json", frozenset())}
    assert _Counted.asked < 10


def test_choices_add_their_types_at_every_depth() -> None:
    word, number = {"type": "string"}, {"type": "integer"}
    schema = {
        "$defs": {"word": word, "either": {"oneOf": [{"$ref": "#/$defs/word"}, number]}},
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/either"}, {"$ref": "#/$defs/either"}, {"type": "null"}]}},
    }
    assert ArgumentTypes(schema).kind_of("a") == ("either", {"string", "integer", "null"})
