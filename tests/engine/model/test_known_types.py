"""Tests the table of known types: it has those of transformers and no others, and says of each what the load-time probe
says of a tiny model."""

import importlib.util

import pytest

from reprise.engine.model.known_types import KNOWN_TYPES, Service
from tests.engine.model_zoo import TYPES, NoTinyModel, find_out
from tests.engine.wrappers import REFUSED, SERVED

SOME = 25  # one of so many types is tried in `make test`
# Words of the probe or of the configuration's refusal, by words of the table's reason.
WORDS = {
    "keep a state": ("keep a state", "remembers more than KV", "called our attention for []"),
    "choose which tokens": ("choose which tokens",),
    "attends in chunks": ("attends in chunks",),
    "encoder with a decoder": ("encoder-decoder",),
    "in both directions": ("logits differ", "called our attention for []", "cannot be driven"),
    "wants an image": ("cannot run text alone", "is no language model"),
    "after they were rotated": ("logits differ",),
    "something that ours does not": ("logits differ", "called our attention", "cannot be driven", "slide a window"),
    "its positions, its names": ("counts the positions", "under other names", "classifies images"),
    "bypasses": ("called our attention for []", "cannot be driven"),
}


def test_the_table_has_the_types_of_transformers() -> None:
    """Add the types of a new version by what `find_out` of tests/engine/model_zoo.py says of them."""
    assert sorted(set(TYPES) - set(KNOWN_TYPES)) == [], "new in transformers"
    assert sorted(set(KNOWN_TYPES) - set(TYPES)) == [], "gone from transformers"


def test_each_type_is_in_one_group() -> None:
    from reprise.engine.model import known_types as table

    groups = [table._PLAIN_MOVABLE, table._PLAIN_FIXED, table._WRAPPER_MOVABLE, table._WRAPPER_FIXED, table._NOT_TRIED]
    names = [name for types in (*groups, *(types for _, _, types in table._REFUSED)) for name in types.split()]
    assert len(names) == len(set(names)) == len(KNOWN_TYPES)


@pytest.mark.sweep(SOME)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_tiny_model_gets_the_verdict_of_the_table(model_type: str) -> None:
    known = KNOWN_TYPES[model_type]
    try:
        found = find_out(model_type)
    except NoTinyModel:
        assert known.service is Service.NOT_TRIED
        return
    assert (found.is_served, found.movable) == (known.is_served, known.is_movable), found.reason
    if found.is_served and not (model_type == "gemma3n" and importlib.util.find_spec("timm")):
        assert found.is_wrapper == (known.service is Service.WRAPPER)
    if not found.is_served:
        (words,) = (words for reason, words in WORDS.items() if reason in known.reason)
        assert any(word in found.reason for word in words), found.reason
        assert known.instead


def test_instead_names_types_that_are_served() -> None:
    for known in KNOWN_TYPES.values():
        words = {word.strip(".,:") for word in known.instead.split()}
        named = words & KNOWN_TYPES.keys()
        assert bool(named) == (known.service is Service.REFUSED)
        assert all(KNOWN_TYPES[name].is_served for name in named)


def test_the_wrappers_that_are_compared_with_the_whole_are_in_the_table() -> None:
    assert {KNOWN_TYPES[name].service for name in SERVED} == {Service.WRAPPER}
    assert {KNOWN_TYPES[name].service for name in REFUSED} == {Service.REFUSED}
