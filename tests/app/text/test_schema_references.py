"""Tests how far references of a schema are found to lead."""

import pytest

from reprise.app.text.schema_references import longest_chain


def chain(count: int, *, last: object, name: str = "$defs") -> dict:
    definitions: dict = {f"d{n}": {"items": [{"$ref": f"#/{name}/d{n + 1}"}]} for n in range(count - 1)}
    return {"properties": {"a": {"$ref": f"#/{name}/d0"}}, name: {**definitions, f"d{count - 1}": last}}


@pytest.mark.parametrize("name", ["$defs", "definitions"])
@pytest.mark.parametrize("count", [1, 5, 20_000])
def test_a_chain_is_as_long_as_its_definitions(count, name):
    assert longest_chain(chain(count, last={"type": "string"}, name=name)) == count


def test_a_chain_that_comes_back_ends_there():
    assert longest_chain(chain(5, last={"$ref": "#/$defs/d0"})) <= 6
    assert longest_chain({"$defs": {"a": {"anyOf": 60 * [{"$ref": "#/$defs/a"}]}}}) <= 2


def test_what_is_no_definition_counts_for_nothing():
    assert longest_chain({}) == 0
    assert longest_chain({"$defs": {"a": {"$ref": "#/$defs/none"}, "b": 5}}) == 1
