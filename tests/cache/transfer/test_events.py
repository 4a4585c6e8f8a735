"""Tests which waiting threads wake up when a transfer has ended."""

import os
import select
import threading
import time
from collections.abc import Callable

import pytest

from reprise.cache.moves import Saved
from reprise.cache.transfer.events import Events


def test_what_is_told_wakes_the_engine_if_it_waits_and_nobody_else(monkeypatch):
    completions = Events()
    woken = []
    notify_all = completions.changed.notify_all
    monkeypatch.setattr(completions.changed, "notify_all", lambda: (woken.append(1), notify_all()))
    completions.tell(Saved(1))
    assert not woken
    assert completions.take() == [Saved(1)]

    engine = threading.Thread(target=completions.wait, args=(60.0,))
    engine.start()
    while not completions._awaited:
        time.sleep(0.001)
    completions.tell(Saved(2), Saved(3))
    engine.join(30.0)
    assert not engine.is_alive()
    assert woken == [1]
    assert completions.take() == [Saved(2), Saved(3)]


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not is_so() and time.monotonic() < until:
        time.sleep(0.001)


def rings(events: Events) -> bool:
    return bool(select.select([events.bell], [], [], 0)[0])


def test_the_bell_rings_while_there_is_news():
    events = Events()
    assert not rings(events)
    for ticket in range(100_000):  # more than a pipe holds, if each rang
        events.tell(Saved(ticket))
    assert rings(events)
    assert len(events.take()) == 100_000
    assert not rings(events)
    events.fail(RuntimeError())
    assert rings(events)


def test_a_bell_that_is_asked_for_late_tells_of_what_came_before():
    events = Events()
    events.tell(Saved(1))
    assert rings(events)
    events.take()
    assert not rings(events)


def test_what_is_told_while_the_bell_is_made_rings_once(monkeypatch):
    events = Events()
    set_blocking = os.set_blocking

    def told_meanwhile(end: int, blocking: bool) -> None:
        events.tell(Saved(1))
        set_blocking(end, blocking)

    monkeypatch.setattr(os, "set_blocking", told_meanwhile)
    assert rings(events)
    assert events.take()
    assert not rings(events)


def test_a_thread_that_breaks_while_events_are_taken_is_told_of(monkeypatch):
    events = Events()
    events.tell(Saved(1))
    check = events.check

    def breaks_behind_it() -> None:
        check()
        breaker = threading.Thread(target=events.fail, args=(RuntimeError(),), daemon=True)
        breaker.start()
        breaker.join(0.05)

    monkeypatch.setattr(events, "check", breaks_behind_it)
    events.take()
    monkeypatch.setattr(events, "check", check)
    wait_until(lambda: events.has_news)
    with pytest.raises(RuntimeError):
        events.take()


def test_no_ring_is_missed_and_none_stays():
    """A thread that waits for the bell alone hears of everything, whenever it comes."""
    events = Events()
    heard: list[int] = []

    def tell(first: int) -> None:
        for ticket in range(first, 20_000, 4):
            events.tell(Saved(ticket))

    tellers = [threading.Thread(target=tell, args=(first,)) for first in range(4)]
    for teller in tellers:
        teller.start()
    while len(heard) < 20_000:
        assert select.select([events.bell], [], [], 10.0)[0]
        heard += [event.ticket for event in events.take() if isinstance(event, Saved)]
    assert sorted(heard) == list(range(20_000))
    assert not rings(events)
