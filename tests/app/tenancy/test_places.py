import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.errors import ApiError
from reprise.app.tenancy.keyring import KeyLimits
from reprise.app.tenancy.places import MAX_RETRY_S, Places, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_places(*, places: int = 4, tenant_places: int = 3, running: int = 2) -> tuple[Places, Clock]:
    clock = Clock()
    return Places(places=places, tenant_places=tenant_places, running=running, clock=clock), clock


def refused(gate: Places, tenant: str, count: int = 1) -> ApiError:
    with pytest.raises(ApiError) as error:
        gate.enter(tenant, count)
    return error.value


def test_a_greedy_tenant_is_told_so_and_another_is_not():
    gate, _ = make_places()
    tickets = [gate.enter("a", 1) for _ in range(3)]
    error = refused(gate, "a")
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    tickets.append(gate.enter("b", 1))
    error = refused(gate, "b")
    assert (error.status, error.code, error.type) == (503, "overloaded", "server_error")
    for ticket in tickets:
        ticket.leave()
        ticket.leave()
    assert gate.taken == 0
    gate.enter("a", 3)


def test_retry_after_follows_the_rate_of_endings():
    gate, clock = make_places(places=11, tenant_places=10, running=2)
    tickets = [gate.enter("a", 1) for _ in range(10)]
    for ticket in tickets[:4]:
        clock.now += 3.0
        ticket.leave()
        gate.enter("a", 1)
    assert gate.retry_after_s == pytest.approx(8 * 3.0)  # eight wait, one is done every three seconds
    assert refused(gate, "a").headers["retry-after"] == "3"  # the tenant has all of them: its next one ends in 3 s
    clock.now += 1000.0
    assert gate.retry_after_s == MAX_RETRY_S


def test_before_the_first_ending_those_who_run_are_taken_to_be_half_way():
    gate, clock = make_places(places=320, tenant_places=320, running=64)
    tickets = [gate.enter("a", 1) for _ in range(320)]
    clock.now += 2.0
    assert gate.retry_after_s == pytest.approx(256 * 2.0 / 32)  # not one every two seconds: none is done, but 64 run
    for ticket in tickets[:50]:
        ticket.leave()
    assert gate.retry_after_s == pytest.approx(206 * 2.0 / 50)


def test_idle_time_does_not_slow_the_rate():
    gate, clock = make_places(places=4, tenant_places=4, running=1)
    gate.enter("a", 1).leave()
    clock.now += 3600.0
    tickets = [gate.enter("a", 1) for _ in range(4)]
    clock.now += 2.0
    tickets[0].leave()
    gate.enter("a", 1)
    assert gate.retry_after_s == pytest.approx(3 * 2.0)


def test_a_tenant_waits_for_its_own_share_of_the_endings():
    gate, clock = make_places(places=9, tenant_places=2, running=2)
    first = gate.enter("a", 1)
    gate.enter("a", 1)
    for tenant in "bcd":
        gate.enter(tenant, 2)
    clock.now += 2.0
    first.leave()
    gate.enter("a", 1)
    assert refused(gate, "a").headers["retry-after"] == "8"  # 8 under way, one ends in 2 s; a quarter of them its own


@given(
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 9), st.floats(0, 100))),
    places=st.integers(1, 12),
    tenant_places=st.integers(1, 12),
)
def test_places_are_never_overrun_and_all_come_back(steps, places, tenant_places):
    gate, clock = make_places(places=places, tenant_places=tenant_places)
    tickets: list[tuple[str, int, object]] = []
    for tenant, count, leaving, seconds in steps:
        clock.now += seconds
        held = sum(n for name, n, _ in tickets if name == tenant)
        fits = held + count <= tenant_places and gate.taken + count <= places
        headers = gate.headers(tenant)
        assert (int(headers["x-ratelimit-remaining-requests"]) >= count) == fits
        assert re.fullmatch(r"(\d+h)?(\d+m)?\d+s|\d+ms", headers["x-ratelimit-reset-requests"])
        if fits:
            tickets.append((tenant, count, gate.enter(tenant, count)))
        else:
            error = refused(gate, tenant, count)
            assert error.status == (429 if held + count > tenant_places < places else 503)
            assert 1 <= int(error.headers["retry-after"]) <= MAX_RETRY_S
        if leaving < len(tickets):
            tickets.pop(leaving)[2].leave()  # type: ignore[attr-defined]
        assert gate.taken == sum(n for _, n, _ in tickets) <= places
    for _, _, ticket in tickets:
        ticket.leave()  # type: ignore[attr-defined]
    assert gate.taken == 0
    assert gate.headers("a")["x-ratelimit-reset-requests"] == "0s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.0204, "21ms"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3723, "1h2m3s")]
)
def test_durations_are_written_as_openai_does(seconds, text):
    assert duration(seconds) == text


def limited(**limits: int) -> tuple[Places, Clock]:
    clock = Clock()
    known = {"a": KeyLimits(**limits)}
    gate = Places(
        places=9, tenant_places=4, running=2, limits=lambda tenant: known.get(tenant, KeyLimits()), clock=clock
    )
    return gate, clock


def test_a_keys_own_places_replace_everybodys():
    gate, _ = limited(requests=1)
    gate.enter("a", 1)
    assert refused(gate, "a").status == 429
    gate.enter("b", 4)
    assert (gate.places_of("a"), gate.places_of("b"), gate.headers("b")["x-ratelimit-limit-requests"]) == (1, 4, "4")
    more, _ = limited(requests=100)
    more.enter("a", 9)  # no more than there are


def test_requests_a_minute():
    gate, clock = limited(requests_per_minute=2)
    gate.request("a")
    gate.request("a")
    with pytest.raises(ApiError) as error:
        gate.request("a")
    headers = error.value.headers
    assert (error.value.status, error.value.code, headers["retry-after"]) == (429, "rate_limit_exceeded", "30")
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] == "1m0s"
    for _ in range(100):
        gate.request("b")
    clock.now += 30.0
    gate.request("a")
    with pytest.raises(ApiError):
        gate.request("a")


def test_tokens_a_minute_are_counted_behind_the_answer():
    gate, clock = limited(tokens_per_minute=600)
    ticket = gate.enter("a", 1)
    gate.spend("a", 500)
    assert ticket.headers["x-ratelimit-remaining-tokens"] == "100"
    gate.enter("a", 1)  # some are left
    gate.spend("a", 400)
    gate.spend("b", 10_000)
    error = refused(gate, "a")
    assert (error.status, error.code, error.headers["retry-after"]) == (429, "rate_limit_exceeded", "30")
    assert error.headers["x-ratelimit-limit-tokens"] == "600"
    assert error.headers["x-ratelimit-remaining-tokens"] == "0"
    assert error.headers["x-ratelimit-reset-tokens"] == "1m30s"
    assert gate.taken == 2
    clock.now += 30.2
    gate.enter("a", 1)
    gate.enter("b", 1)
