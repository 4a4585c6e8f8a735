"""Keeps the sessions whose next turn a client has announced, because a person opens or continues a conversation."""

from collections import Counter

from reprise.cache.blocks.table import SessionName

_MOST_SESSIONS = 64  # more at once are a burst, of which the disk could bring little before the turns come
_KEPT_S = 60.0  # without a message by then, the person may have left


class Announced:
    """The announced sessions, each until its turn comes or a minute has passed. The SessionStore adds them, the
    Hierarchy removes those that have come or are gone, and LookAhead asks, on the engine's thread; it is pure.

    If there are too many, the oldest announcement of the tenant that has the most of them is removed.
    """

    def __init__(self) -> None:
        self._until_s: dict[SessionName, float] = {}  # the soonest to expire first
        self._unserved: dict[SessionName, None] = {}
        self.changes = 0
        """Number of times a session has come or left."""

    def __len__(self) -> int:
        return len(self._until_s)

    @property
    def names(self) -> tuple[SessionName, ...]:
        """The announced sessions, the oldest announcement first."""
        return tuple(self._until_s)

    def add(self, name: SessionName, now: float) -> None:
        """Record that a turn of the session will come soon. Announcing a session again restarts its minute, and `next`
        may return it again."""
        self.remove(name)
        self.changes += 1
        self._until_s[name] = now + _KEPT_S
        self._unserved[name] = None
        if len(self._until_s) > _MOST_SESSIONS:
            counts = self._per_tenant()
            self.remove(max(self._until_s, key=lambda one: counts[one[0]]))

    def remove(self, name: SessionName) -> None:
        """Remove a session whose turn has come, or that is gone. Ignores one that is not announced."""
        if self._until_s.pop(name, None) is not None:
            self._unserved.pop(name, None)
            self.changes += 1

    def expire(self, now: float) -> None:
        """Remove the sessions that were announced more than a minute before `now`."""
        for name, until_s in list(self._until_s.items()):
            if until_s > now:
                break
            self.remove(name)

    def next(self) -> SessionName | None:
        """Return the session whose KV is to be fetched next: of those for which `served` was not called, one of the
        tenant that has the fewest sessions announced. None if there is none."""
        counts = self._per_tenant() if self._unserved else {}
        return min(self._unserved, key=lambda one: counts[one[0]], default=None)

    def served(self, name: SessionName) -> None:
        """Stop returning a session from `next`, because its KV was fetched or need not be. It stays announced."""
        self._unserved.pop(name, None)

    def _per_tenant(self) -> Counter[str]:
        return Counter(name[0] for name in self._until_s)
