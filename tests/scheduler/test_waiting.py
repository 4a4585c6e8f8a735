"""Tests who goes before the queue, and the line of all who wait."""

import pytest

from reprise.scheduler.queues.waiting_queue import FcfsQueue
from reprise.scheduler.waiting import Waiting
from tests.conftest import make_sequence


@pytest.fixture
def waiting():
    """a, b and c in the queue; r has lost its room."""
    waiting = Waiting(queue=FcfsQueue())
    for name in "abc":
        waiting.add(make_sequence(name, 4))
    waiting.resume(make_sequence("r", 4))
    return waiting


def queued(waiting, name):
    return next(sequence for sequence in waiting.queue.upcoming().members if sequence.request_id == name)


def names(sequences):
    return [sequence.request_id for sequence in sequences]


def test_who_lost_its_room_goes_before_the_queue(waiting):
    assert waiting.count == 4
    assert names(waiting.front(9)) == ["r", "a", "b", "c"]
    assert names(waiting.front(2)) == ["r", "a"]
    resumed = waiting.next(())
    assert resumed.request_id == "r"
    assert waiting.next((resumed,)).request_id == "a"
    assert not waiting.may_be_passed(resumed, 0.0)
    waiting.start(resumed)
    assert (waiting.count, waiting.next(()).request_id) == (3, "a")


def test_who_is_favoured_is_admitted_first_and_only_once(waiting):
    waiting.favoured = queued(waiting, "b")
    favoured = waiting.next(())
    assert favoured.request_id == "b"
    assert waiting.next((favoured,)).request_id == "r"
    waiting.start(favoured)
    assert waiting.favoured is None
    assert names(waiting.front(9)) == ["r", "a", "c"]


def test_who_goes_away_is_favoured_no_more(waiting):
    waiting.favoured = queued(waiting, "b")
    waiting.remove(waiting.favoured)
    assert waiting.favoured is None
    waiting.remove(waiting.resumed[0])
    assert names(waiting.front(9)) == ["a", "c"]


def test_a_line_has_another_version_only_when_the_order_is_another(waiting):
    line = waiting.line(None)
    assert line.members == ("r", "a", "b", "c")
    assert waiting.line(None).version == line.version
    assert waiting.line(queued(waiting, "a")).version == line.version, "a starved one that is next anyway"
    starved = waiting.line(queued(waiting, "c"))
    assert starved.members == ("r", "c", "a", "b")
    assert starved.version > line.version
    newcomer = make_sequence("d", 4)
    waiting.add(newcomer)
    waiting.remove(newcomer)
    assert waiting.line(queued(waiting, "c")).version == starved.version
