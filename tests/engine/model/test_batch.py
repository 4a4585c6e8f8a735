"""Tests the flat tensors of a step against a slow loop, with sequences that come, grow and go."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from tests.engine.models import CPU

MAX_SEQS, MAX_PAGES = 4, 6


@dataclass
class Running:
    """A sequence as the engine knows it."""

    name: str
    pages: list[int] = field(default_factory=list)
    done: int = 0

    def item(self, rng: random.Random, page_size: int) -> BatchItem:
        """Its share of the next step; takes the pages it needs for that, and at times one more."""
        count = rng.randint(1, min(2 * page_size, MAX_PAGES * page_size - self.done))
        needed = -(-(self.done + count) // page_size)
        for _ in range(needed - len(self.pages) + rng.randint(0, MAX_PAGES - needed)):
            self.pages.append(rng.randrange(1000))
        token_ids = [rng.randrange(50_000) for _ in range(count)]
        item = BatchItem(self.name, token_ids, self.done, self.pages, rng.random() < 0.5)
        self.done += count
        return item


def assert_says_what_the_items_say(items: list[BatchItem], tables: BlockTables, page_size: int) -> None:
    batch = build_batch(items, tables, page_size, CPU)
    token_ids, positions, slots, logit_rows = [], [], [], []
    for item in items:
        for offset, token_id in enumerate(item.token_ids):
            row = item.first_row + offset
            token_ids.append(token_id)
            positions.append(row)
            slots.append(item.pages[row // page_size] * page_size + row % page_size)
        if item.wants_logits:
            logit_rows.append(len(token_ids) - 1)
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.logit_rows.tolist() == logit_rows
    meta = batch.meta
    assert meta.slots.tolist() == slots
    assert meta.query_lens == [len(item.token_ids) for item in items]
    assert meta.context_lens == meta.context_len.tolist() == [i.first_row + len(i.token_ids) for i in items]
    assert meta.query_start.tolist() == [sum(meta.query_lens[:i]) for i in range(len(items) + 1)]
    for item, row, length in zip(items, meta.block_table.tolist(), meta.context_lens, strict=True):
        used = -(-length // page_size)
        assert row[:used] == item.pages[:used]
        assert all(0 <= page < 1000 for page in row[used:])  # a backend may read, not use, what stands after them
    assert {t.dtype for t in (batch.token_ids, batch.positions, batch.logit_rows, meta.slots)} == {torch.int64}
    assert {t.dtype for t in (meta.query_start, meta.context_len, meta.block_table)} == {torch.int32}


@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([4, 32, 256]))
def test_every_step_says_what_its_items_say(seed: int, page_size: int) -> None:
    """Sequences join, run or rest, are preempted and come back with other pages."""
    rng = random.Random(seed)
    tables = BlockTables(max_seqs=MAX_SEQS, max_pages=MAX_PAGES)
    running: list[Running] = []
    for step in range(rng.randint(1, 12)):
        while len(running) < MAX_SEQS and (not running or rng.random() < 0.5):
            running.append(Running(f"{step}.{len(running)}"))
        chosen = rng.sample(running, rng.randint(1, len(running)))
        items = [sequence.item(rng, page_size) for sequence in chosen]
        assert_says_what_the_items_say(items, tables, page_size)
        for sequence in list(running):
            if sequence.done == MAX_PAGES * page_size or rng.random() < 0.2:
                tables.drop(sequence.name)
                if rng.random() < 0.5:  # preempted: under its old name, from its start
                    sequence.pages, sequence.done = [], 0
                else:
                    running.remove(sequence)


def test_known_pages_are_not_copied_again() -> None:
    tables = BlockTables(max_seqs=1, max_pages=3)
    tables.row("a", [7, 8])
    row = tables.row("a", [None, None, 9])  # type: ignore[list-item]
    assert tables.select([row], 3).tolist() == [[7, 8, 9]]


def test_rows_are_given_back() -> None:
    tables = BlockTables(max_seqs=2, max_pages=1)
    for name in "abcdef":
        tables.row(name, [1])
        tables.row("stays", [2])
        tables.drop(name)
        tables.drop(name)
        tables.drop("never seen")
    tables.row("one more", [3])
    with pytest.raises(IndexError):
        tables.row("too many", [4])


def test_a_selection_is_not_changed_by_later_steps() -> None:
    tables = BlockTables(max_seqs=1, max_pages=2)
    selected = tables.select([tables.row("a", [5])], 1)
    tables.drop("a")
    tables.row("b", [6])
    assert selected.tolist() == [[5]]


def test_a_sequence_that_comes_back_has_another_number() -> None:
    tables = BlockTables(max_seqs=3, max_pages=1)
    numbers = []
    for name in ("a", "b", "a", "c", "b"):
        tables.row(name, [1])
        numbers.append(tables.owner(name))
    tables.drop("a")
    tables.row("a", [1])
    first = numbers[0]
    assert numbers == [first, first + 1, first, first + 2, first + 1]
    assert tables.owner("a") == first + 3
    another = BlockTables(max_seqs=1, max_pages=1)
    another.row("a", [1])
    assert another.owner("a") == first + 4


def test_a_batch_says_who_may_read_a_part() -> None:
    tables = BlockTables(max_seqs=3, max_pages=2)
    items = [BatchItem(name, [5], 3, [7], True, partial=name != "b") for name in "abc"]
    partial = build_batch(items, tables, 4, torch.device("cpu")).meta.partial
    assert partial == {0: tables.owner("a"), 2: tables.owner("c")}
    assert partial[0] != partial[2]
