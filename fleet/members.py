"""Keeps a gateway's table of the replicas, read from the directory once a second."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.records import Heartbeat, Roll
from reprise.fleet.routing import STALE_S, Beat, FleetView

BEAT_S = 1.0  # between two beats of a replica, and between two looks at them

log = logging.getLogger(__name__)


class Members:
    """A table that keeps a `FleetView` up to date, with the replicas' addresses. One per gateway, on its event loop.

    While Redis cannot be reached, the table stays as it was; replicas that a gateway itself finds dead are reported
    with `lost`. Replicas that were alive get `STALE_S` to beat again in three cases: Redis is back, Redis has lost its
    data, or no replica's beat has reached Redis lately.
    """

    def __init__(self, *, directory: Directory, view: FleetView, clock: Callable[[], float] = time.monotonic) -> None:
        self.view = view
        self.born = ""  # the directory's data set; another one after a flush
        self.refreshed_s = -1e9  # monotonic clock; when the directory was read last
        self._directory = directory
        self._clock = clock
        self._beats: dict[str, Heartbeat] = {}
        self._made_s: dict[str, float] = {}  # when the beats were made
        self.drained: frozenset[str] = frozenset()  # by an operator
        self._lost_s: dict[str, float] = {}  # found dead here; a beat that was made later says otherwise
        self._is_away = False
        self._flushed_s = -1e9  # when the directory was found without what it had
        self._takes_beats_s = -1e9  # since when it has taken beats without a gap; old ones tell nothing of before

    @property
    def beats(self) -> Mapping[str, Heartbeat]:
        """The last beats (reports to the directory), by name, of all replicas that the directory lists, including
        loading, draining and silent ones. Not to be changed."""
        return self._beats

    def url(self, replica: str) -> str | None:
        """Return the address at which a replica can be reached, without a slash at its end; None if it is not in the
        table."""
        beat = self._beats.get(replica)
        return None if beat is None else beat.url

    def made_s(self, replica: str) -> float:
        """Return the time of a replica's last beat, by this table's clock."""
        return self._made_s[replica]

    def silent(self) -> list[str]:
        """Return the replicas whose last beat was old when the directory was read: stopped, or cut off from it."""
        return [name for name, made_s in self._made_s.items() if self.refreshed_s - made_s > STALE_S]

    def has_open(self) -> bool:
        """Return whether a replica takes turns."""
        now = self._clock()
        return any(self.view.is_open(name, now) for name in self.view.names)

    def lost(self, replica: str) -> None:
        """Exclude a replica until its next beat, because it refused or broke a connection."""
        self._lost_s[replica] = self._clock()
        self.view.lost(replica)

    async def run(self, *, every_s: float = BEAT_S) -> None:
        """Refresh the table until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(every_s)

    async def refresh(self) -> bool:
        """Read the table from the directory. Returns whether Redis answered."""
        try:
            roll = await self._directory.members()
        except DirectoryUnavailable:
            self._is_away = True
            self._hold()
            return False
        self.take(roll)
        return True

    def take(self, roll: Roll) -> None:
        """Replace the table by one that was read just now."""
        now, alive = self._clock(), self._alive()
        beats = {member.beat.replica: member.beat for member in roll.members}
        read_s = {member.beat.replica: now - member.age_s for member in roll.members}
        if self.born and roll.born != self.born:
            self._flushed_s = self._takes_beats_s = now
        nobody_beats = max(read_s.values(), default=now) < now - (STALE_S - BEAT_S)
        if self._is_away or nobody_beats:
            self._takes_beats_s = now
        made_s = dict(read_s)
        for name in alive:
            if name in beats:
                made_s[name] = max(read_s[name], self._takes_beats_s)
            elif now - self._flushed_s <= STALE_S:
                beats[name], made_s[name] = self._beats[name], self._flushed_s
        self.born, self.refreshed_s, self.drained, self._is_away = roll.born, now, roll.drained, False
        self._beats, self._made_s = beats, made_s
        self._lost_s = {
            name: at_s for name, at_s in self._lost_s.items() if name in beats and read_s.get(name, at_s) <= at_s
        }
        for name in self._beats:
            self._tell(name, self._made_s[name])
        for name in [name for name in self.view.names if name not in self._beats]:
            self.view.lost(name)
        self.view.expire(now)

    def _alive(self) -> set[str]:
        """Return the replicas that were not silent when Redis was last read, and were not found dead since."""
        return self._made_s.keys() - self._lost_s.keys() - set(self.silent())

    def _hold(self) -> None:
        """Treat the replicas that were alive when Redis was last read as if they had just beaten, because Redis cannot
        be read."""
        now = self._clock()
        for name in self._alive():
            self._tell(name, now)

    def _tell(self, name: str, made_s: float) -> None:
        load = _load(self._beats[name])
        if load is None or name in self._lost_s:
            self.view.lost(name)
        else:
            self.view.heard(name, replace(load, draining=True) if name in self.drained else load, made_s)


def _load(beat: Heartbeat) -> Beat | None:
    """Return the part of a replica's beat that routing uses; None for a replica that has never been ready or is
    gone."""
    return beat.load if beat.state in ("ready", "draining") else None
