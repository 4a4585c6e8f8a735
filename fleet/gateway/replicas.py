"""Keeps the connections to all replicas that the table of members lists."""

import asyncio
import logging

from reprise.fleet.gateway.http_client import SWEEP_S, Replica, ReplicaFailed
from reprise.fleet.members import BEAT_S, Members
from reprise.fleet.routing import STALE_S

LOOK_S = 0.2  # between two looks while no replica takes turns: people and load balancers wait for the first one

log = logging.getLogger(__name__)


class Replicas:
    """The connections to all replicas. One per gateway, on its event loop."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._replicas: dict[str, Replica] = {}

    def of(self, name: str) -> Replica:
        """Return the connections to a replica. Raises ReplicaFailed if it has left the table, or advertises no
        address."""
        url = self._members.url(name)
        known = self._replicas.get(name)
        if known is not None and known.url == url:
            return known
        try:
            replica = Replica(url or "")
        except ValueError as error:
            raise ReplicaFailed(str(error), was_asked=False) from None
        if known is not None:  # it has another address after a restart; nobody answers at the old one
            known.abort_all("the replica has another address now")
        self._replicas[name] = replica
        return replica

    def lost(self, name: str) -> None:
        """Exclude a replica until its next beat (its report to the directory), because a connection to it has
        failed."""
        self._members.lost(name)

    def under_way(self, name: str) -> int:
        """Return the number of requests that this gateway has sent to the replica and whose answers have not ended."""
        replica = self._replicas.get(name)
        return 0 if replica is None else replica.under_way

    async def follow(self) -> None:
        """Refresh the table of members until cancelled, and abort the answers of stopped replicas: a stopped process
        keeps its connections open."""
        while True:
            try:
                await self._members.refresh()
                self._leave_the_stopped()
            except Exception:
                log.exception("the table of the replicas was not refreshed")
            await asyncio.sleep(BEAT_S if self._members.has_open() else LOOK_S)

    def _leave_the_stopped(self) -> None:
        """Abort the answers of replicas whose beats have stopped and whose connections bring no bytes either. A replica
        whose beats are late, as on a busy machine, still sends tokens."""
        since_s = asyncio.get_running_loop().time() - STALE_S
        for name in self._members.silent():
            if (replica := self._replicas.get(name)) is not None:
                replica.abort_unheard(since_s, "its beats have stopped")
        for name in [name for name in self._replicas if name not in self._members.beats]:
            if not self._replicas[name].under_way:
                self._replicas.pop(name).abort_all("it has left the fleet")

    async def sweep(self) -> None:
        """Abort answers of which nothing comes any more, and close unused connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            for replica in list(self._replicas.values()):
                replica.sweep(loop.time())

    def close(self) -> None:
        """Close all connections."""
        for replica in self._replicas.values():
            replica.abort_all("the gateway ends")
        self._replicas.clear()
