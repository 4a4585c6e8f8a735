"""Reports to the fleet about once a second that this replica lives, and carries out what the answers ask for."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from reprise.app.errors import ApiError
from reprise.app.observe.live import tiers_of
from reprise.app.turn.readiness import Status
from reprise.app.version import version
from reprise.engine.process.client import EngineFailed
from reprise.fleet.directory import Directory, Foreign
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.load import Before, counted, load_of
from reprise.fleet.members import BEAT_S
from reprise.fleet.records import Heard, Heartbeat
from reprise.fleet.replica.background import Background
from reprise.fleet.replica.commits import Commits
from reprise.fleet.replica.deletions import Deletions
from reprise.fleet.replica.held_sessions import HeldSessions
from reprise.fleet.replica.holdings import Spending
from reprise.fleet.replica.this_server import ThisServer

JOIN_S = 10.0  # longest wait for the directory before this server takes requests
JOIN_LOOK_S = 0.1  # between two beats of a server that is about to take them
LOOK_S = 0.1  # between two looks whether there is something new to say

log = logging.getLogger(__name__)


class Beats:
    """A sender of this replica's beats (its reports to the directory). One per replica, on its event loop."""

    def __init__(
        self,
        *,
        directory: Directory,
        server: ThisServer,
        held: HeldSessions,
        commits: Commits,
        deletions: Deletions,
        spending: Spending,
        background: Background,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._server, self._held = directory, server, held
        self._commits, self._deletions, self._spending = commits, deletions, spending
        self._background, self._readiness, self._clock = background, server.readiness, clock
        self._before: Before | None = None
        self._said: Status | None = None  # the status that the last beat told
        self._born = ""
        self._is_foreign = False
        self._deleting: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Send beats (reports to the directory) about once a second until cancelled. If this server has not joined yet
        and the directory belongs to another fleet, fail the server and return.

        The directory's answer to a beat may ask for work, such as deletions. A background task does the work while
        further beats are sent: it may have to wait until a turn ends, and gateways give up a replica whose beats are
        late."""
        started_s = self._clock()
        while True:
            try:
                heard = await self._say_alive()
                if self._following is None or self._following.done():
                    self._following = self._background.spawn(self._follow_up(heard))
            except Foreign as error:
                if self._readiness.joining:  # it would be no part of the fleet, and nobody would see why
                    self._readiness.fail(str(error))
                    return
            except DirectoryUnavailable as error:
                log.debug("no beat: %s", error)
                if self._readiness.joining and self._clock() - started_s > JOIN_S:
                    log.warning("no directory: this server may still have sessions that others have deleted")
                    self._readiness.joining = False
            except Exception:
                log.exception("a beat failed")
            await self._pause()

    async def beat(self) -> None:
        """Report that this server lives, carry out deletions, and send the commits (results of turns) that wait. Raises
        DirectoryUnavailable."""
        await self._follow(await self._say_alive())

    def stop(self) -> None:
        """Cancel the work that the directory's answer to the last beat has asked for."""
        for task in (self._deleting, self._following):
            if task is not None:
                task.cancel()

    def heartbeat(self) -> Heartbeat:
        """Return what this replica reports about itself now."""
        status, model, now = self._readiness.status, self._readiness.model, self._clock()
        self._said = status
        identity, stats, load = self._server.identity, self._server.engine.stats, None
        if stats is not None and model is not None and status in (Status.READY, Status.DRAINING):
            load = load_of(stats, model, self._before, now, draining=status is Status.DRAINING)
            self._before = counted(stats, now)
        return Heartbeat(
            replica=identity.name,
            boot=identity.boot,
            url=identity.url,
            fingerprint=self._readiness.fingerprint,
            model=model.name if model is not None else "",
            aliases=identity.aliases,
            state=status.value,
            version=version(),
            running=stats.running if stats is not None else 0,
            waiting=stats.waiting if stats is not None else 0,
            load=load,
            sessions=self._held.num_claimed,
            tiers=tiers_of(stats, model) if stats is not None and model is not None else {},
        )

    async def _pause(self) -> None:
        """Wait for the time of the next beat: sooner if the model has come, if this server still joins, or if it takes
        turns now and did not before, or the other way round."""
        readiness = self._readiness
        if readiness.failure is not None:  # `wait_loaded` would not wait any more
            await asyncio.sleep(BEAT_S)
        elif readiness.model is None:
            with contextlib.suppress(TimeoutError, EngineFailed):
                await asyncio.wait_for(readiness.wait_loaded(), BEAT_S)
        elif readiness.joining:
            await asyncio.sleep(JOIN_LOOK_S)
        else:
            for _ in range(round(BEAT_S / LOOK_S)):
                if readiness.status is not self._said:
                    break
                await asyncio.sleep(LOOK_S)

    async def _say_alive(self) -> Heard:
        try:
            heard = await self._directory.beat(self.heartbeat(), since=self._deletions.since)
        except Foreign as error:
            if not self._is_foreign:
                log.error("%s", error)
            self._is_foreign = True
            raise
        self._is_foreign = False
        return heard

    async def _follow_up(self, heard: Heard) -> None:
        with contextlib.suppress(DirectoryUnavailable):  # tried again after the next beat
            await self._follow(heard)

    async def _follow(self, heard: Heard) -> None:
        """Carry out what the directory's answer to a beat asks for: the deletions in it, and to tell it everything
        again if it has lost its data. Then send the commits that wait."""
        if self._born and heard.born != self._born:
            # Before anything is awaited: the directory would take a turn that ends under its old epoch for a deleted
            # one's. Then what was deleted is said, and then what this replica was home of.
            owned = self._commits.forget_directory()
            await self._deletions.publish_again()
            await self._commits.send_again(owned)
        self._born = heard.born
        if self._readiness.model is None:
            return  # deletions wait until there is an engine to ask
        if self._deleting is None or self._deleting.done():
            self._deleting = self._background.spawn(self._carry_out(heard))
        await asyncio.wait({self._deleting}, timeout=JOIN_LOOK_S)  # requests of a session may take longer to end
        if self._deletions.is_caught_up:
            self._readiness.joining = False
        await self._commits.send_waiting()
        await self._spending.tell()

    async def _carry_out(self, heard: Heard) -> None:
        try:
            await self._deletions.carry_out(heard, fingerprint=self._readiness.fingerprint)
        except (ApiError, DirectoryUnavailable) as error:
            log.debug("deletions wait for the next beat: %s", error)
