"""Stores the line of queued sessions that a policy was last told of."""

from collections.abc import Collection, Hashable, Sequence


class QueueLine:
    """The order of the sessions whose turns wait in the queue, next first, each once."""

    def __init__(self) -> None:
        self._sessions: Sequence[Hashable] = ()
        self._members: set[Hashable] = set()
        self._places: dict[Hashable, int] | None = None  # made when it is asked for

    def __len__(self) -> int:
        return len(self._sessions)

    def __getitem__(self, place: int) -> Hashable:
        return self._sessions[place]

    def __contains__(self, session: Hashable) -> bool:
        return session in self._members

    def become(self, sessions: Sequence[Hashable], changed: Collection[Hashable] | None = None) -> Collection[Hashable]:
        """Replace the line by `sessions`, which is kept and must not change afterwards. changed: the sessions that have
        joined or left the line by that; None: they are found by comparison. Returns them."""
        if changed is None:
            changed = self._members.symmetric_difference(sessions)
        self._sessions, self._places = sessions, None
        self._members.symmetric_difference_update(changed)
        return changed

    def place(self, session: Hashable) -> int | None:
        """Return a session's place in line, 0 for the next; None if it is not in line."""
        if session not in self._members:
            return None
        if self._places is None:
            self._places = {name: place for place, name in enumerate(self._sessions)}
        return self._places[session]
