"""Tests that what a replica remembers of its sessions is bounded."""

from reprise.fleet.keys import SessionName
from reprise.fleet.replica.held_sessions import HeldSessions


def test_those_used_longest_ago_are_forgotten_unless_a_turn_of_them_runs():
    held = HeldSessions(most=2, ttl_s=60.0)
    names = [SessionName("alice", f"chat {n}") for n in range(4)]
    first = held.of(names[0])
    first.epoch = first.running = 1
    held.of(names[1])
    held.of(names[2])
    assert list(held) == names[:3], "its turn runs"
    first.running = 0
    assert held.of(names[1]).ttl_s == 60.0
    held.of(names[3])
    assert list(held) == [names[2], names[1], names[3]]
    assert held.num_claimed == 0


def test_sessions_of_an_id_differ_in_their_salts():
    held = HeldSessions(most=9, ttl_s=60.0)
    names = [SessionName("alice", "chat"), SessionName("alice", "chat", "salt"), SessionName("bob", "chat")]
    for name in names:
        held.of(name)
    assert list(held.of_id("alice", "chat")) == names[:2]
    held.forget(names[0])
    held.forget(names[0])
    assert list(held) == names[1:]
