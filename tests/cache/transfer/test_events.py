"""Tests which waiting threads wake up when a transfer has ended."""

import threading
import time

from cache.moves import Saved
from cache.transfer.events import Events


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
