"""Tests which rows leave a pool of KV that has no room for all."""

import torch

from benchmarks.texts.pool import MOST_COUNT, Pool


def rows_in(pool: Pool) -> list[list[int]]:
    return [torch.nonzero(head)[:, 0].tolist() for head in pool.is_in]


def test_the_row_leaves_that_the_policy_says() -> None:
    pool = Pool("fifo", kv_heads=1, rows=6, room=3)
    pool.grow(6)
    assert rows_in(pool) == [[3, 4, 5]]
    pool = Pool("lru", kv_heads=2, rows=6, room=3)
    pool.grow(3)
    pool.note(torch.tensor([[0, 2], [1, 2]]))
    pool.grow(4)
    assert rows_in(pool) == [[0, 2, 3], [1, 2, 3]]
    pool = Pool("counter", kv_heads=1, rows=8, room=3)
    pool.grow(3)
    for chosen in ([0, 1], [0, 1], [0, 2]):
        pool.note(torch.tensor([chosen]))
    pool.grow(5)  # no query has chosen row 3
    assert rows_in(pool) == [[0, 1, 4]]
    pool = Pool("counter32", kv_heads=1, rows=40, room=36)
    pool.grow(36)
    pool.note(torch.tensor([[0, 1, 3]]))
    pool.grow(40)
    assert sorted(set(range(40)) - set(rows_in(pool)[0])) == [2, 4, 5, 6]


def test_counts_are_halved_at_the_greatest() -> None:
    pool = Pool("counter", kv_heads=1, rows=4, room=4)
    pool.grow(3)
    for _ in range(MOST_COUNT - 1):
        pool.note(torch.tensor([[0, 1]]))
    pool.note(torch.tensor([[0]]))
    assert pool.counts[0].tolist() == [MOST_COUNT // 2, (MOST_COUNT - 1) // 2, 0, 0]
