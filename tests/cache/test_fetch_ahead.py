"""Tests that DRAM keeps what the prefetch window fetches for a queue; staging slots do not count as room."""

import random
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.moves import FetchBlocks
from tests.cache.pool_model import PoolModel, make_manager
from tests.example_counts import examples

PAGES = 8
ANSWER = 1 << 20  # a token that no prompt has


class Queue:
    """Sessions of so many blocks each, all of them on disk, that wait for their next turn."""

    def __init__(self, *, dram, staging, sessions, blocks, pages=PAGES):
        self.manager = make_manager(
            num_pages=pages, policy="lookahead", dram_slots=dram, staging_slots=staging, disk_bytes=1 << 30
        )
        self.model = PoolModel(self.manager)
        self.model.check = lambda: None  # checking every step takes most of the time; a test checks at its end
        self.blocks, self.now = blocks, 0.0
        self.fetched = []
        for session in range(sessions):
            self.model.run(f"first-{session}", self.prompt(session), answer=[ANSWER], session=str(session))
            self.model.settle(now=float(session))

    def prompt(self, session):
        start = session * 10_000
        return range(start, start + self.blocks * BLOCK_TOKENS)

    def wait(self, session, turn=0):
        request_id = f"{session}/{turn}"
        self.model.open(request_id, [*self.prompt(session), ANSWER, ANSWER + 1], session=str(session), now=100.0)
        return request_id

    def plan(self, waiting):
        """Returns how many blocks were ordered."""
        self.now += 0.1
        self.model.hear(self.now)
        self.model.plan(waiting, self.now)
        before = len(self.model.io)
        self.model.move()
        orders = islice(self.model.io, before, None)
        keys = [key for order in orders if isinstance(order, FetchBlocks) for key, _, _ in order.blocks]
        self.fetched += keys
        return len(keys)

    def transfer(self, count=1 << 30):
        while self.model.io and count:
            self.model.run_io()
            count -= 1


@pytest.mark.parametrize(("dram", "staging"), [(60, 20), (10, 20), (10, 50), (20, 40), (0, 50)])
def test_a_queue_that_does_not_change_is_fetched_for_once(dram, staging):
    queue = Queue(dram=dram, staging=staging, sessions=12, blocks=5)
    waiting = [queue.wait(session) for session in range(12)]
    for _ in range(30):
        queue.plan(waiting)
        queue.transfer()
    PoolModel.check(queue.model)
    assert len(queue.fetched) == len(set(queue.fetched)) <= 0.9 * dram
    # Those in front have all of theirs above the disk, as far as DRAM may keep it beside what is in HBM.
    held = [
        sum(queue.manager.sessions.blocks_of(("", "", str(n)))[tier] > 0 for tier in ("hbm", "dram")) for n in range(12)
    ]
    assert all(held[: int(0.9 * dram) // 5])


def test_a_session_longer_than_dram_has_its_head_fetched():
    queue = Queue(dram=10, staging=60, sessions=3, blocks=30, pages=31)
    assert queue.manager.sessions.blocks_of(("", "", "0")) == {"hbm": 0, "dram": 0, "disk": 30}
    waiting = [queue.wait(0)]
    for _ in range(5):
        queue.plan(waiting)
        queue.transfer()
    assert (
        queue.manager.sessions.blocks_of(("", "", "0"))["dram"] == len(queue.fetched) == 9
    )  # what `trim` leaves there


def test_sizes_of_an_8b_model_on_a_small_host():
    """A quarter of HBM 16,384, DRAM 8,192 and staging 32,768 tokens, random queues."""
    for seed in range(3):
        queue = Queue(dram=64, staging=256, sessions=24, blocks=31, pages=128)
        waiting = [queue.wait(session) for session in random.Random(seed).sample(range(24), 14)]
        orders = []
        for _ in range(120):
            orders.append(queue.plan(waiting))
            queue.transfer()
        assert len(queue.fetched) == len(set(queue.fetched)) <= 57
        assert not any(orders[10:])


@settings(max_examples=examples(50))
@given(
    dram=st.integers(1, 20),
    staging=st.integers(0, 40),
    blocks=st.integers(1, 4),
    events=st.lists(
        st.tuples(st.sampled_from(["plan", "transfer", "reorder", "turn", "leave"]), st.integers(0, 1 << 16)),
        min_size=5,
        max_size=40,
    ),
)
def test_no_block_is_fetched_twice_for_one_waiting_request(dram, staging, blocks, events):
    """However the queue changes, and whatever turns save meanwhile."""
    queue = Queue(dram=dram, staging=staging, sessions=4, blocks=blocks)
    waiting = [queue.wait(session) for session in range(4)]
    fetched_for = {request_id: [] for request_id in waiting}
    turns = 0
    for what, number in events:
        match what:
            case "plan":
                before = len(queue.fetched)
                if queue.plan(waiting):
                    assert queue.manager.tiers.fetches._room(coded=False) >= 0
                for key in queue.fetched[before:]:
                    (request_id,) = (r for r in waiting if key in queue.model.contexts[r].chain())
                    fetched_for[request_id].append(key)
                queue.transfer(number % 3)
            case "transfer":
                queue.transfer()
            case "reorder":
                random.Random(number).shuffle(waiting)
            case "turn":  # another session's turn
                turns += 1
                start = 100_000 * turns
                queue.model.run(f"other-{turns}", range(start, start + 32 * (1 + number % 4)), session=f"other-{turns}")
                for _ in range(len(queue.model.saves)):
                    queue.model.run_save()
            case "leave" if len(waiting) > 2:
                gone = waiting.pop(number % len(waiting))
                queue.model.close(gone, 0)
    PoolModel.check(queue.model)
    for keys in fetched_for.values():
        assert len(keys) == len(set(keys))
