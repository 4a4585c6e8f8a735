"""Records what this replica knows of the sessions that it has claimed or answered."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from reprise.fleet.keys import SessionName


@dataclass(slots=True)
class HeldSession:
    """The knowledge that this replica has of a session: its claim, and what the directory has recorded of it."""

    ttl_s: float | None  # after its last use; None: it is pinned
    epoch: int = 0  # epoch of its claim; 0: none
    turn: int = 0  # the last one that it has
    branches: int = 0  # fenced turns, of which it has the answers too
    begun: int = 0  # epoch at which its copy was begun; 0: it has none
    exported: int = 0  # id of the recorded answer up to which the directory has all
    tokens: int = 0
    redis_tokens: int = 0
    running: int = 0  # turns
    head: bytes = b""
    has_new_head: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class HeldSessions:
    """A table of the sessions that this replica has claimed or answered. One per replica, on its event loop."""

    def __init__(self, *, most: int, ttl_s: float) -> None:
        """Begin empty. most: number of sessions that are remembered. ttl_s: time to live of sessions that have no time
        to live of their own."""
        self._most, self._ttl_s = most, ttl_s
        self._by_name: OrderedDict[SessionName, HeldSession] = OrderedDict()  # the one used longest ago first

    def __iter__(self) -> Iterator[SessionName]:
        return iter(self._by_name)

    def items(self) -> list[tuple[SessionName, HeldSession]]:
        return list(self._by_name.items())

    def of(self, name: SessionName) -> HeldSession:
        """Return the entry of a session, making one if needed. If the table then has too many entries, the session used
        longest ago is dropped, unless it runs; its next turn fetches it again from the directory."""
        held = self._by_name.get(name)
        if held is None:
            held = self._by_name[name] = HeldSession(ttl_s=self._ttl_s)
            if len(self._by_name) > self._most:
                oldest = next(iter(self._by_name))
                if oldest != name and not self._by_name[oldest].running:
                    del self._by_name[oldest]
        self._by_name.move_to_end(name)
        return held

    def of_id(self, tenant: str, session_id: str) -> dict[SessionName, HeldSession]:
        """Return the sessions of an id, with any salt."""
        return {
            name: held for name, held in self._by_name.items() if (name.tenant, name.session_id) == (tenant, session_id)
        }

    def are_begun_after(self, name: SessionName, epoch: int) -> bool:
        """Return whether a session of the same id, with any salt, was first claimed here at an epoch (a number that
        grows with every claim and deletion) above this one."""
        return any(held.begun > epoch for held in self.of_id(name.tenant, name.session_id).values())

    def forget(self, name: SessionName) -> None:
        self._by_name.pop(name, None)

    @property
    def num_claimed(self) -> int:
        """Number of sessions of which this replica is the home."""
        return sum(held.epoch > 0 for held in self._by_name.values())
