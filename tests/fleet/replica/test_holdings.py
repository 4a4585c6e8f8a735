"""Tests what a replica tells the fleet of its keys' tokens."""

import pytest

from reprise.app.tenancy.keyring import NO_LIMITS, KeyLimits
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.replica.holdings import Spending


class FakeDirectory:
    def __init__(self) -> None:
        self.is_away = False
        self.taken: list[tuple[str, str, int, int]] = []

    async def take(self, tenant: str, kind: str, *, per_minute: int, amount: int, need: int) -> None:
        if self.is_away:
            raise DirectoryUnavailable
        self.taken.append((tenant, kind, amount, need))


async def test_tokens_are_told_once_and_what_was_not_told_waits():
    directory = FakeDirectory()
    spending = Spending(
        directory=directory,
        limits=lambda tenant: KeyLimits(tokens_per_minute=100) if tenant == "alice" else NO_LIMITS,
    )
    assert not spending.add("bob", 5), "he has no allowance"
    assert not spending.add("alice", 0)
    assert spending.add("alice", 7)
    assert spending.add("alice", 5)
    await spending.tell()
    await spending.tell()
    assert directory.taken == [("alice", "k", 12, 0)]
    directory.is_away = True
    for _ in range(50):
        spending.add("alice", 10)
        with pytest.raises(DirectoryUnavailable):
            await spending.tell()
    directory.is_away = False
    await spending.tell()
    assert directory.taken[1:] == [("alice", "k", 200, 0)], "her minute was refilled meanwhile"
