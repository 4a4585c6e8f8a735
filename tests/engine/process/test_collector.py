import gc
import weakref

import pytest

from reprise.engine.process.collector import Collector


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(10, 2, 1)
    yield
    gc.set_threshold(*before)


def test_no_full_collection_begins_by_itself(thresholds):
    gc.freeze()  # the full collections of this test then cost nothing
    gc.collect()  # garbage of earlier tests does not delay a full collection

    def full_collections():
        before = gc.get_stats()[2]["collections"]
        kept = [[] for _ in range(20_000)]
        return gc.get_stats()[2]["collections"] - before, kept

    assert full_collections()[0] > 0
    Collector()
    assert full_collections()[0] == 0
    assert gc.isenabled()


def test_cycles_are_collected_when_nothing_runs_but_not_again_and_again(thresholds):
    gc.disable()
    try:
        collector, first = Collector(), cycle()
        collector.idle(0.0)
        assert first() is None
        second = cycle()
        collector.idle(599.0)
        assert second() is not None
        collector.idle(600.0)
        assert second() is None
    finally:
        gc.enable()
