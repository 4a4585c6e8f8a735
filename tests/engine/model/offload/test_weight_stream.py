"""Tests that weights come ahead of their layers, and that whoever computes never sees others."""

import random
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.engine.model.offload.offloaded_weights import streamed_layers
from reprise.engine.model.offload.weight_stream import WeightsLost, WeightStream
from tests.example_counts import examples

WAIT_S = 10.0


class Link:
    """Copies as slowly as it is told, and knows what lies in each buffer."""

    def __init__(self, num_buffers: int = 2) -> None:
        self.buffers: list[int | None] = [None] * num_buffers
        self.copied: list[int] = []
        self.may_copy = threading.Semaphore(0)
        self.is_open = True

    def copy(self, layer: int, buffer: int) -> None:
        if not self.is_open:
            assert self.may_copy.acquire(timeout=WAIT_S)
        self.buffers[buffer] = layer
        self.copied.append(layer)


def stream_of(link: Link, layers: int = 4, num_buffers: int = 2) -> WeightStream:
    return WeightStream(sizes=dict.fromkeys(range(layers), 10), num_buffers=num_buffers, copy=link.copy)


def wait_for(link: Link, copied: list[int]) -> None:
    end = time.monotonic() + WAIT_S
    while link.copied != copied:
        assert time.monotonic() < end, link.copied
        time.sleep(0.001)


def test_the_first_layers_are_there_before_anybody_asks():
    link = Link()
    stream = stream_of(link)
    wait_for(link, [0, 1])
    assert link.buffers[stream.enter(0)] == 0
    stream.leave(0)
    wait_for(link, [0, 1, 2])
    for layer in (1, 2, 3):
        assert link.buffers[stream.enter(layer)] == layer
        stream.leave(layer)
    wait_for(link, [0, 1, 2, 3, 0, 1])
    assert stream.copied_bytes == 60
    stream.close()


def test_a_buffer_is_not_filled_while_its_layer_computes():
    link = Link()
    stream = stream_of(link)
    buffer = stream.enter(0)
    wait_for(link, [0, 1])
    time.sleep(0.05)
    assert (link.copied, link.buffers[buffer]) == ([0, 1], 0)
    stream.close()


def test_who_waits_is_counted():
    link = Link()
    link.is_open = False
    stream = stream_of(link)
    threading.Timer(0.05, link.may_copy.release, (2,)).start()
    stream.enter(0)
    assert 0.03 < stream.waited_s < WAIT_S
    before = stream.waited_s
    stream.leave(0)
    wait_for(link, [0, 1])
    time.sleep(0.01)
    stream.enter(1)
    assert stream.waited_s == before
    link.may_copy.release(9)
    stream.close()


def test_a_step_that_broke_off_leaves_nothing_behind():
    link = Link()
    stream = stream_of(link, layers=6)
    for layer in (0, 1, 2):
        stream.enter(layer)
        stream.leave(layer)
    for layer in range(6):
        assert link.buffers[stream.enter(layer)] == layer
        stream.leave(layer)
    stream.close()


def test_leaving_what_was_not_entered_changes_nothing():
    link = Link()
    stream = stream_of(link)
    wait_for(link, [0, 1])
    stream.leave(1)
    time.sleep(0.02)
    assert link.copied == [0, 1]
    stream.close()


def test_a_copy_that_fails_is_told_to_whoever_computes():
    def copy(layer: int, buffer: int) -> None:
        if layer == 1:
            raise OSError("gone")

    stream = WeightStream(sizes={0: 1, 1: 1, 2: 1}, num_buffers=2, copy=copy)
    stream.enter(0)
    stream.leave(0)
    for _ in range(2):  # the same holds from then on
        with pytest.raises(WeightsLost) as caught:
            stream.enter(1)
        assert isinstance(caught.value.__cause__, OSError)
    stream.close()


def test_a_closed_stream_keeps_nobody_waiting():
    link = Link()
    stream = stream_of(link)
    wait_for(link, [0, 1])
    stream.close()
    with pytest.raises(WeightsLost):
        stream.enter(3)


def test_one_buffer_is_too_few():
    with pytest.raises(ValueError, match="buffer"):
        WeightStream(sizes={0: 1}, num_buffers=1, copy=Link().copy)


@settings(deadline=None, max_examples=examples(60))
@given(
    layers=st.integers(1, 5),
    num_buffers=st.integers(2, 4),
    entries=st.lists(st.integers(0, 4), max_size=25),
    seed=st.integers(0, 99),
)
def test_any_order_of_layers_finds_its_own_weights(layers: int, num_buffers: int, entries: list[int], seed: int):
    rng, link = random.Random(seed), Link(num_buffers)

    def copy(layer: int, buffer: int) -> None:
        time.sleep(rng.choice((0, 0, 0.0005)))
        link.buffers[buffer] = None  # half written
        link.copy(layer, buffer)

    stream = WeightStream(sizes=dict.fromkeys(range(layers), 1), num_buffers=num_buffers, copy=copy)
    for entry in entries:
        layer = entry % layers
        buffer = stream.enter(layer)
        for _ in range(3):
            assert link.buffers[buffer] == layer
            time.sleep(0)
        stream.leave(layer)
    stream.close()
    assert stream.copied_bytes == len(link.copied)


@given(num_layers=st.integers(1, 100), hbm_layers=st.integers(0, 110))
def test_layers_that_stay_lie_between_those_that_do_not(num_layers: int, hbm_layers: int):
    streamed = streamed_layers(num_layers, hbm_layers)
    assert len(streamed) == max(0, num_layers - hbm_layers)
    assert streamed == sorted(set(streamed))
    assert all(0 <= layer < num_layers for layer in streamed)
    gaps = [b - a for a, b in pairwise([*streamed, num_layers])]
    assert not gaps or max(gaps) - min(gaps) <= 1
