import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.storage.throttle import CREDIT_S, Throttle


class Clock:
    def __init__(self):
        self.now = 100.0

    def sleep(self, seconds):
        self.now += seconds


def throttle(rate, clock):
    return Throttle(bytes_per_s=rate, clock=lambda: clock.now, sleep=clock.sleep)


@given(
    transfers=st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 3), st.floats(0, 3)), min_size=1),
    rate=st.integers(1, 5000),
)
def test_no_span_of_time_carries_more_than_the_cap_and_its_credit(transfers, rate):
    clock = Clock()
    link = throttle(rate, clock)
    spans = []
    for size, idle, device in transfers:
        clock.now += idle
        started = clock.now
        due = link.book(size)
        clock.now += device
        link.wait(due)
        assert clock.now >= started + device
        spans.append((started, clock.now, size))
    for first, (started, _, _) in enumerate(spans):
        carried = 0
        for _, ended, size in spans[first:]:
            carried += size
            assert carried <= rate * (ended - started + CREDIT_S) * (1 + 1e-6) + 1e-6


def test_a_device_slower_than_the_cap_is_not_slowed_further():
    clock = Clock()
    link = throttle(1000, clock)
    for _ in range(5):
        due = link.book(100)  # 0.1 s by the cap
        clock.now += 0.5
        before = clock.now
        link.wait(due)
        assert clock.now == before


def test_no_cap_never_waits():
    clock = Clock()
    link = throttle(0, clock)
    link.wait(link.book(1 << 40))
    assert clock.now == 100.0


def test_threads_share_the_cap():
    link = Throttle(bytes_per_s=1_000_000, clock=time.monotonic, sleep=time.sleep)
    started = time.monotonic()
    threads = [threading.Thread(target=lambda: link.wait(link.book(50_000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started >= 0.2 - CREDIT_S


def test_a_negative_cap_is_refused():
    with pytest.raises(ValueError, match="cap"):
        Throttle(bytes_per_s=-1, clock=time.monotonic, sleep=time.sleep)
