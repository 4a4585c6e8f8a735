"""Tests that generated workloads resemble their source: sessions return with the model's probabilities and continue
from what they left."""

import random
from itertools import pairwise

import pytest

from benchmarks.paper.eviction_limit import Recorded, accounts, hindsight, kinds, world
from reprise.cache.returns.survival import ReturnModel, bin_end_s
from reprise.loadgen.blocks.replay import BLOCK_TOKENS
from reprise.loadgen.workloads.traces import TraceRequest

SPAN_S = 3000.0


def model_of(age_bin: int) -> ReturnModel:
    """Half of all come back in one bin, nobody in another."""
    model = ReturnModel()
    model._bins = [-30.0] * len(model._bins)
    model._bins[age_bin] = 0.0
    return model


def recorded(age_bin: int) -> Recorded:
    first = [TraceRequest(float(at_s), 2000, 50, "", (0, 1)) for at_s in range(300)]
    return Recorded(model_of(age_bin), first, {turn: [(100, 600)] for turn in (1, 2, 3)}, SPAN_S)


def test_sessions_come_back_when_the_model_says_and_go_on_from_what_was_there():
    requests = world(recorded(8), seed=1)
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    assert all(len(request.block_names) == -(-request.prompt_tokens // BLOCK_TOKENS) for request in requests)
    sessions: dict[int, list[TraceRequest]] = {}
    for request in requests:
        assert request.block_names[0] == 0
        sessions.setdefault(request.block_names[1], []).append(request)
    assert len(sessions) == 600
    returned = 0
    for turns in sessions.values():
        for before, after in pairwise(turns):
            returned += 1
            assert bin_end_s(7) <= after.at_s - before.at_s <= bin_end_s(8)
            assert after.prompt_tokens == before.prompt_tokens + before.answer_tokens + 100
            full = before.prompt_tokens // BLOCK_TOKENS
            assert after.block_names[:full] == before.block_names[:full]
            assert after.block_names[full] not in before.block_names
    assert returned / len(requests) == pytest.approx(0.5, abs=0.05)


def test_requests_are_told_apart_by_what_they_go_on_from():
    def ask(at_s: float, *names: int) -> TraceRequest:
        return TraceRequest(at_s, len(names) * BLOCK_TOKENS, 10, "", (0, *names[1:]))

    requests = [
        ask(0.0, 0),  # too short to be known again
        ask(1.0, 0, 1, 2),
        ask(2.0, 0, 1, 2, 3),
        ask(3.0, 0, 1, 2, 3, 4),
        ask(4.0, 0, 1, 5),  # the session ended elsewhere
        ask(5.0, 0, 6),
    ]
    assert kinds(requests) == ["short", "new", "first return", "later return", "fork", "new"]


@pytest.mark.bench
def test_hits_are_accounted_for_and_hindsight_is_no_worse_than_nothing():
    rng, requests = random.Random(3), []
    for number in range(300):
        at_s, names = 10.0 * number, (0, *range(10 * number + 1, 10 * number + 4))
        requests.append(TraceRequest(at_s, 2048, 40, "", names))
        if rng.random() < 0.5:
            requests.append(TraceRequest(at_s + 70.0, 2560, 30, "", (*names, 10 * number + 4)))
    requests.sort(key=lambda request: request.at_s)
    capacity = 20 * BLOCK_TOKENS
    found = accounts(requests, capacity)
    assert sum(row["requests"] for row in found.values()) == len(requests) - len(requests) // 2
    assert found["first return"]["belady"] > found["first return"]["lru"] >= 0
    assert found["new"]["belady"] == 0  # their first block is not counted
    shares = hindsight(requests, capacity)
    assert set(shares) == {"on the way", "the half scored", "all"}
    assert shares["the half scored"] > 0
