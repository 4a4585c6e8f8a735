"""Tests that one server adopts what another exports: the same ids, whatever order and damage the rows come in."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.conversations.transcript_rows import TranscriptRow, encode_row, readable
from tests.app.conversations.test_transcript_store import (
    add_conversation,
    answer_of,
    found,
    full_ids,
    open_store,
    prompt_of,
)

TENANT = "tenant"


def exported(store, session="s", after=0, most=100):
    return store.export(session, tenant=TENANT, after=after, most=most)


def test_a_session_goes_on_elsewhere_with_the_same_ids():
    here, there = open_store(), open_store()
    ids = add_conversation(here, "s", 5, now=1.0)
    add_conversation(here, "other", 2, now=1.0)
    rows = exported(here)
    assert len(rows.rows) == 5
    newest = there.adopt("s", rows.rows, tenant=TENANT, now=2.0, after=0)
    assert newest == there.export("s", tenant=TENANT, after=0, most=100).newest
    assert [full_ids(there, f"s {n}") for n in range(5)] == [full_ids(here, f"s {n}") for n in range(5)]
    assert full_ids(there, "s 4") == ids
    assert exported(there).rows == rows.rows
    assert there.adopt("s", rows.rows, tenant=TENANT, now=2.0, after=0) == newest, "twice is once"
    assert there.names() == [(TENANT, "s")]


def test_what_was_not_sent_yet_is_exported_after_an_adoption():
    here, there = open_store(), open_store()
    add_conversation(here, "s", 2, now=1.0)
    sent = exported(here)
    there.adopt("s", sent.rows, tenant=TENANT, now=2.0, after=0)
    here.add(prompt_of("mine", [1, 2]), answer_of("my answer", [3]), now=3.0)
    there.add(prompt_of("theirs", [4, 5]), answer_of("their answer", [6]), now=3.0)
    unsent = exported(here, after=sent.newest).rows
    theirs = exported(there).rows
    after = here.adopt("s", theirs, tenant=TENANT, now=4.0, after=sent.newest)
    assert exported(here, after=after).rows.keys() >= unsent.keys()
    assert exported(here).rows == {**theirs, **unsent}
    assert after >= sent.newest, "the rest is there"
    assert exported(here, after=here.adopt("s", {**theirs, **unsent}, tenant=TENANT, now=4.0, after=0)).rows == {}


def test_only_what_is_new_is_exported():
    store = open_store()
    add_conversation(store, "s", 3, now=1.0)
    before = exported(store)
    store.add(prompt_of("later", [1, 2]), answer_of("later answer", [3]), now=2.0)
    later = exported(store, after=before.newest)
    assert len(later.rows) == 1
    assert later.newest > before.newest
    assert exported(store, after=later.newest) == type(later)({}, later.newest)
    assert exported(store, session="unknown").rows == {}
    assert len(exported(store, most=2).rows) == 2


@given(seed=st.integers(0, 1000), turns=st.integers(1, 6), lost=st.sets(st.integers(0, 5)))
def test_a_lost_row_costs_only_what_builds_on_it(seed, turns, lost):
    here, there = open_store(), open_store()
    add_conversation(here, "s", turns, now=1.0)
    rows = list(exported(here).rows.items())
    random.Random(seed).shuffle(rows)
    gone = {found(here, f"s {n}").digest for n in lost if n < turns}
    there.adopt("s", {mark: row for mark, row in rows if mark not in gone}, tenant=TENANT, now=2.0, after=0)
    first = min((n for n in lost if n < turns), default=turns)
    for n in range(turns):
        assert full_ids(there, f"s {n}") == (full_ids(here, f"s {n}") if n < first else None)


@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_damaged_row_is_left_out(place, flip):
    here, there = open_store(), open_store()
    add_conversation(here, "s", 1, now=1.0)
    ((mark, row),) = exported(here).rows.items()
    broken = bytearray(row)
    broken[place % len(row)] ^= flip
    there.adopt("s", {mark: bytes(broken)}, tenant=TENANT, now=2.0, after=0)
    assert full_ids(there, "s 0") is None


@pytest.mark.parametrize(
    "changes", [{"ids": b"123"}, {"base_tokens": -1}, {"base_tokens": 3}, {"chars": 1 << 63}, {"starts": b"1"}]
)
def test_a_row_that_makes_no_sense_is_left_out_although_its_digest_is_right(changes):
    fields = dict.fromkeys(TranscriptRow.__struct_fields__, b"") | {"base_tokens": 0, "chars": 0}
    assert len(readable({(row := TranscriptRow(**fields)).digest: encode_row(row)})) == 1
    try:
        row = TranscriptRow(**{**fields, **changes})
        mark = row.digest
    except OverflowError:
        mark = b"?"
    assert readable({mark: encode_row(row)}) == []
