"""Tests that what is left of a lenient schema can always be enforced, and that nothing else is left out."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from reprise.app.text import lenient_schema
from reprise.app.text.lenient_schema import forgiven, has_inexact_number, without_unknown_formats

KEYWORDS = (
    "type", "enum", "const", "format", "pattern", "minLength", "maxLength",
    "minItems", "maxItems", "required", "minProperties", "maxProperties", "minimum", "maximum",
    "multipleOf", "properties", "patternProperties", "$defs", "anyOf", "oneOf", "allOf",
    "prefixItems", "items", "additionalProperties", "$ref", "not", "title", "default",
    "if",
)  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "string", "integer", "object", "array", "null", "str", "(?=a)", "a+", "#", "#/$defs/a"]),
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from([*KEYWORDS, "a", "(?!b)"]), inner, max_size=4)
    ),
    max_leaves=12,
)
schemas = st.dictionaries(st.sampled_from(KEYWORDS), anything, max_size=5)


def compiles(schema: dict[str, Any]) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": {"lenient": True}}))
    return not LLMatcher.validate_grammar(grammar)


@given(schemas)
def test_what_is_left_can_be_enforced(schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    found = forgiven(schema, compiles)
    assert compiles(found)
    assert schema == before
    assert forgiven(found, compiles) == found


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}, "required": ["a"]},
        {"$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}, "$ref": "#/$defs/n"},
        {"type": "array", "items": {"enum": [1, "b", None]}, "minItems": 1},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
        {"prefixItems": [{"const": None}, True], "items": False, "type": "array"},
    ],
)
def test_a_schema_that_can_be_enforced_stays(schema: dict[str, Any]) -> None:
    assert forgiven(schema, compiles) == schema


def test_a_schema_of_many_bad_parts_is_checked_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(lenient_schema, "MOST_CHECKS", 50)

    def look(schema: dict[str, Any]) -> bool:
        checked.append(schema)
        return compiles(schema)

    parts = {f"p{n}": {"type": "string", "pattern": f"(?={n})", "maxLength": n} for n in range(200)}
    found = forgiven({"type": "object", "properties": parts}, look)
    assert len(checked) <= 51
    assert found["properties"].keys() == parts.keys()
    assert compiles(found)


def test_values_that_look_like_schemas_are_left_alone() -> None:
    schema = {"const": {"format": "color", "properties": {"a": {"format": "color"}}}, "enum": [{"format": "color"}]}
    assert without_unknown_formats(schema) == schema
    assert without_unknown_formats({"items": {"format": "color", "type": "string"}}) == {"items": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "is_inexact"),
    [
        ({"default": 1 << 60, "title": str(1 << 60)}, False),
        ({"properties": {"const": {"maximum": 5}, "maximum": {"type": "integer"}}}, False),
        ({"properties": {"a": {"anyOf": [{"maximum": 1 << 60}]}}}, True),
        ({"additionalProperties": {"enum": [{"a": (1 << 53) + 1}]}}, True),
        ({"maximum": 1 << 53, "const": True}, False),
        ({"$defs": {"a": {"exclusiveMinimum": -(1 << 60)}}}, True),
    ],
)
def test_numbers_are_found_where_they_bind(schema: dict[str, Any], is_inexact: bool) -> None:
    assert has_inexact_number(schema) is is_inexact
