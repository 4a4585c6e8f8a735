"""Tests CaR's three classes: what makes a request one of the first, the second or the third."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.scheduler.car.classes import TransferClass, standing, standing_once_loaded

IN_HBM, NOTHING, LOADS = TransferClass


class Found(NamedTuple):
    """The part of `reprise.scheduler.ports.Residency` that the classes may ask for."""

    bytes_to_load: int = 0
    own_tokens: int = 0
    exposed_s: float = 0.0
    is_loading: bool = False
    missing_tokens: int = 10


@pytest.mark.parametrize(
    ("what", "found", "expected"),
    [
        ("its whole history is in HBM", Found(own_tokens=4000), (IN_HBM, 0)),
        ("the first block of it is, the rest is lost", Found(own_tokens=32, missing_tokens=3968), (IN_HBM, 0)),
        ("it has no history", Found(missing_tokens=1000), (NOTHING, 0)),
        ("all of it is lost, or cheaper to compute", Found(missing_tokens=4000), (NOTHING, 0)),
        ("it shares a system prompt in HBM, and no more", Found(own_tokens=0, missing_tokens=50), (NOTHING, 0)),
        ("500 MB on disk, hidden by what it has to compute", Found(500_000_000, 4000), (LOADS, 500_000_000)),
        ("a block below, all else in HBM", Found(4096, 4000), (LOADS, 4096)),
        ("a system prompt on disk", Found(4096, 0), (LOADS, 4096)),
        ("its load is under way and nearly done", Found(4096, 4000, is_loading=True), (LOADS, 4096)),
    ],
)
def test_the_three_classes(what, found, expected):
    assert standing(found) == expected, what


@given(
    size=st.integers(1, 2**40), own=st.integers(0, 2**20), exposed_s=st.floats(0, 100), is_loading=st.booleans(),
    missing=st.integers(1, 2**20),
)  # fmt: skip
def test_a_request_with_kv_to_load_never_stands_ahead_of_a_new_conversation(size, own, exposed_s, is_loading, missing):
    new, loads = standing(Found(missing_tokens=missing)), Found(size, own, exposed_s, is_loading)
    assert standing(loads) > new
    assert standing_once_loaded(loads) == standing(Found(own_tokens=own)) <= new, "loaded, it stands ahead, or beside"
