import json

import pytest

from reprise.app.text.families.typed_values import TextToJson, json_of, kind_of

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
    kind, types = kind_of(SCHEMA, key)
    assert json.loads(json_of(text, kind, types)) == value
    writer = TextToJson(kind, types)
    pieces = [writer.push(piece) for piece in (text[:1], text[1:])]
    assert json.loads("".join(pieces) + writer.end()) == value
    assert (pieces[0] != "") == (kind == "string")


def test_schemas_that_are_none_tell_nothing() -> None:
    for schema in ({}, {"properties": []}, {"properties": {"a": True}}, {"$ref": "#"}, {"$ref": "http://else"}):
        assert kind_of(schema, "a") == ("json", frozenset())
    assert json_of("", "string", frozenset()) == '""'
