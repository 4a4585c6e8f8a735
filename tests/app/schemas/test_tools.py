"""Tests how calls of a history are given to chat templates."""

import json

import pytest

from reprise.app.schemas.tools import MAX_ARGUMENT_LEVELS, rendered_call


def given(arguments: str) -> object:
    return rendered_call("call_1", "f", arguments)["function"]["arguments"]


def test_arguments_are_an_object_if_they_are_json_of_one():
    assert given('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert given("[1]") == "[1]"
    assert given('{"a"') == '{"a"'


@pytest.mark.parametrize("levels", [MAX_ARGUMENT_LEVELS + 1, 950, 100_000])
def test_arguments_nested_too_deeply_stay_text(levels):
    text = '{"a":' * levels + "1" + "}" * levels
    assert given(text) == text


@pytest.mark.parametrize("arguments", [r'{"a": "\ud83d"}', '{"a": 1e999}', '{"a": "\ud83d"}'])
def test_all_that_a_template_gets_can_be_written(arguments):
    json.dumps(given(arguments), ensure_ascii=False, allow_nan=False).encode()
