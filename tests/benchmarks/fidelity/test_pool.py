"""Who leaves a pool of KV that has no room for all."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fidelity.pool import MOST_COUNT, POLICIES, RECENT, Pool


def rows_in(pool: Pool) -> list[list[int]]:
    return [torch.nonzero(head)[:, 0].tolist() for head in pool.is_in]


def test_the_oldest_leaves_first():
    pool = Pool("fifo", kv_heads=1, rows=6, room=3)
    pool.grow(6)
    assert rows_in(pool) == [[3, 4, 5]]


def test_who_was_chosen_last_stays():
    pool = Pool("lru", kv_heads=2, rows=6, room=3)
    pool.grow(3)
    pool.note(torch.tensor([[0, 2], [1, 2]]))
    pool.grow(4)
    assert rows_in(pool) == [[0, 2, 3], [1, 2, 3]]


def test_who_was_chosen_most_often_stays():
    pool = Pool("counter", kv_heads=1, rows=8, room=3)
    pool.grow(3)
    for chosen in ([0, 1], [0, 1], [0, 2]):
        pool.note(torch.tensor([chosen]))
    pool.grow(4)
    assert rows_in(pool) == [[0, 1, 3]]
    pool.grow(5)  # nobody has chosen row 3
    assert rows_in(pool) == [[0, 1, 4]]


def test_the_newest_stay_until_they_could_be_chosen():
    pool = Pool("counter32", kv_heads=1, rows=40, room=36)
    pool.grow(36)
    pool.note(torch.tensor([[0, 1, 3]]))
    pool.grow(40)
    assert 0 <= RECENT < 36
    gone = sorted(set(range(40)) - set(rows_in(pool)[0]))
    assert gone == [2, 4, 5, 6]


def test_counts_are_halved_at_the_greatest():
    pool = Pool("counter", kv_heads=1, rows=4, room=4)
    pool.grow(3)
    for _ in range(MOST_COUNT - 1):
        pool.note(torch.tensor([[0, 1]]))
    pool.note(torch.tensor([[0]]))
    assert pool.counts[0].tolist() == [MOST_COUNT // 2, (MOST_COUNT - 1) // 2, 0, 0]


@given(
    policy=st.sampled_from(POLICIES),
    room=st.integers(RECENT + 2, RECENT + 12),
    heads=st.integers(1, 3),
    draws=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=RECENT + 24),
)
def test_a_pool_is_full_and_has_the_newest_row(policy, room, heads, draws):
    pool = Pool(policy, kv_heads=heads, rows=len(draws), room=room)
    for newest, draw in enumerate(draws):
        before = pool.is_in.clone()
        pool.grow(newest + 1)
        assert pool.is_in.sum(1).tolist() == [min(room, newest + 1)] * heads
        assert bool(pool.is_in[:, newest].all())
        gone = ~before[:, :newest] & pool.is_in[:, :newest]
        assert not bool(gone.any())  # nobody comes back
        pool.note(torch.tensor([[there[draw % len(there)]] for there in rows_in(pool)]))
