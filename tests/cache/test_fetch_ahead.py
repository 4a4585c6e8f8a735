"""Tests that DRAM keeps what the prefetch window fetches for a queue; staging slots do not count as room."""

import random
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache import look_ahead
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


# --- turns that clients have announced --------------------------------------------------------------------------------


def announce(queue, *sessions):
    for session in sessions:
        queue.manager.sessions.prefetch(("", "", str(session)), queue.now)


def above_disk(queue, session):
    """Return how many blocks of a session are in DRAM or HBM."""
    rows = (row for row in queue.manager.tiers.table if ("", "", str(session)) in row.owners)
    return sum(row.in_dram or row.page is not None for row in rows)


def leave_memory(queue):
    for row in queue.manager.tiers.table:
        queue.manager.tiers.dram.drop(row)
        if row.page is not None:
            queue.manager.tiers.hbm.evict(row.key)


def test_an_announcement_is_no_turn():
    """Sessions whose clients announce every turn would seem to return twice as often."""
    queue = Queue(dram=20, staging=20, sessions=1, blocks=5)
    returns = queue.manager.tiers.returns
    for at_s in (100.0, 200.0, 300.0):
        returns.used(("", "", "0"), at_s)
    before = returns.gap_s(("", "", "0"))
    for queue.now in (305.0, 310.0, 315.0, 320.0):
        announce(queue, 0)
        queue.plan([])
        queue.transfer()
    assert above_disk(queue, 0) == 5
    assert returns.gap_s(("", "", "0")) == before
    assert queue.manager.tiers.regulars.due(320.0) is None


def test_a_burst_of_announcements_keeps_no_turn_waiting(monkeypatch):
    """Fetches run one after the other: those of ten sessions would come before that of the turn that waits."""
    queue = Queue(dram=100, staging=20, sessions=11, blocks=5)
    monkeypatch.setattr(look_ahead, "_PIECE_S", 3.5 * 128 / 1e12, raising=False)  # 3 blocks by this manager's rates
    leave_memory(queue)
    announce(queue, *range(10))
    queue.plan([])
    assert len(queue.fetched) == 3
    waiting = [queue.wait(10)]
    queue.plan(waiting)
    assert len(queue.model.io) == 2
    queue.transfer(2)
    queue.model.hear(queue.now)
    assert above_disk(queue, 10) == 5
    for _ in range(40):
        queue.plan(waiting)
        queue.transfer()
    assert len(queue.fetched) == len(set(queue.fetched)) == 55


def test_the_pieces_of_an_announced_session_grow_with_what_is_known_of_the_disk():
    queue = Queue(dram=100, staging=20, sessions=1, blocks=30, pages=31)
    leave_memory(queue)
    announce(queue, 0)
    pieces = []
    for _ in range(4):
        pieces.append(queue.plan([]))
        queue.transfer()
    assert pieces == [8, 16, 6, 0]


def test_announced_sessions_stay_in_dram_for_a_minute_but_never_instead_of_one_that_waits():
    queue = Queue(dram=12, staging=40, sessions=4, blocks=5)  # DRAM keeps two of them
    leave_memory(queue)
    queue.now = 10.0
    announce(queue, 0)
    for _ in range(5):
        queue.plan([])
        queue.transfer()
    waiting = [queue.wait(1), queue.wait(2)]
    for _ in range(5):
        queue.plan(waiting)
        queue.transfer()
        announce(queue, 3)
    assert (above_disk(queue, 1), above_disk(queue, 2)) == (5, 5)
    assert above_disk(queue, 0) == 0
    PoolModel.check(queue.model)
    assert len(queue.manager.tiers.announced) == 2
    queue.now = 80.0
    queue.plan(waiting)
    assert not queue.manager.tiers.announced
