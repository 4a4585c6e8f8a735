"""Makes this server one replica of a fleet: it sends beats (reports to the directory), claims a session before its
turn, fetches what others have committed of it, and commits the turn before its client learns that it has ended.

Without Redis a turn uses what this server has. Its commit waits in the outbox.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from reprise.app.conversations.text_thread import TextThread
from reprise.app.settings.settings import Settings
from reprise.app.state_disk import StateDisk
from reprise.app.tenancy.keyring import KeyLimits
from reprise.app.turn.ports import ArrivedRequest, EnginePort
from reprise.app.turn.readiness import Readiness
from reprise.app.turn.sessions import REPLY_TIMEOUT_S, SessionCommands
from reprise.engine.messages import Head
from reprise.engine.process.client import EngineClient
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.identify import background_id
from reprise.fleet.keys import SessionName
from reprise.fleet.members import BEAT_S, Members
from reprise.fleet.outbox import Outbox
from reprise.fleet.overview import overview
from reprise.fleet.protocol import fleet_key
from reprise.fleet.replica.arrivals import arrived
from reprise.fleet.replica.background import Background
from reprise.fleet.replica.beats import Beats
from reprise.fleet.replica.claims import Claims
from reprise.fleet.replica.commits import Commits
from reprise.fleet.replica.copies import Copies
from reprise.fleet.replica.delete_everywhere import delete_everywhere
from reprise.fleet.replica.deletions import Deletions
from reprise.fleet.replica.held_sessions import HeldSessions
from reprise.fleet.replica.holdings import Spending
from reprise.fleet.replica.identity import Identity
from reprise.fleet.replica.outbox_thread import OutboxThread
from reprise.fleet.replica.this_server import ThisServer
from reprise.fleet.replica.turn_under_way import TurnUnderWay
from reprise.fleet.routing import FleetView

MAX_TENANT_SESSIONS = 100_000  # most of one key in the directory: those used longest ago leave it
MAX_OUTBOX_BYTES = 64 << 20  # most for turns that wait on disk for the directory to answer: the oldest leave
LAST_WORDS_S = 5.0  # for commits that are under way when the server ends


class Replica:
    """The parts of a replica together, as the app uses them. One per app, on its event loop. None of the methods that a
    turn calls raises because of the fleet. Two of its parts:

        beats        reports that this server lives, and does what the directory's answers ask for
        deletions    deletes here what has been deleted in the fleet
    """

    def __init__(
        self,
        *,
        settings: Settings,
        secret: bytes,
        engine: EnginePort,
        readiness: Readiness,
        transcripts: TextThread,
        commands: SessionCommands,
        limits: Callable[[str], KeyLimits],
        state_disk: StateDisk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up. secret: the tenant secret, the same on every member. state_disk: that of settings.state_dir.
        Raises ValueError for an invalid address, ImportError without redis' client, OSError if the name cannot be
        stored."""
        fleet = settings.fleet
        self.identity = Identity.of(settings)
        self.key = fleet_key(secret)  # the key of gateways, which may resume answers here
        self.ttl_s = settings.cache.ttl_s
        self.directory = Directory(
            url=fleet.redis_url,
            secret=secret,
            deadline_s=fleet.deadline_ms / 1e3,
            replica=self.identity.name,
            boot=self.identity.boot,
            max_sessions=MAX_TENANT_SESSIONS,
        )
        outbox = Outbox(path=settings.state_dir / "outbox.sqlite3", max_bytes=MAX_OUTBOX_BYTES, disk=state_disk)
        self.outbox = OutboxThread(outbox)
        self.held = HeldSessions(most=settings.cache.max_sessions, ttl_s=settings.cache.ttl_s)
        self._copies = Copies(held=self.held, outbox=self.outbox, transcripts=transcripts, commands=commands)
        self.deletions = Deletions(
            path=settings.state_dir / "deletions", directory=self.directory, copies=self._copies, disk=state_disk
        )
        self._background = Background()
        server = ThisServer(self.identity, engine, readiness, transcripts if fleet.transcripts else None)
        self._claims = Claims(
            directory=self.directory,
            server=server,
            held=self.held,
            copies=self._copies,
            ttl_s=self.ttl_s,
            deleted_until=lambda: self.deletions.since,
        )
        self._commits = Commits(
            directory=self.directory,
            server=server,
            held=self.held,
            copies=self._copies,
            outbox=self.outbox,
            background=self._background,
            deadline_s=fleet.deadline_ms / 1e3,
            last_epoch=lambda: self.deletions.since,
        )
        self._spending = Spending(directory=self.directory, limits=limits)
        self._telling: asyncio.Task[None] | None = None
        self.beats = Beats(
            directory=self.directory,
            server=server,
            held=self.held,
            commits=self._commits,
            deletions=self.deletions,
            spending=self._spending,
            background=self._background,
            clock=clock,
        )
        self._clock = clock
        self._members = Members(directory=self.directory, view=FleetView(), clock=clock)
        readiness.joining = True
        if isinstance(engine, EngineClient):
            engine.on_head = self.on_head

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def claims(self) -> Counter[str]:
        """Counts of claims by result. new: the session had no turn yet. home: this replica had all of its turns.
        adopted: turns of another replica were taken over. failed: the directory did not answer."""
        return self._claims.results

    @property
    def commits(self) -> Counter[str]:
        """Counts of commits by result: an `Outcome`, "unsent" (Redis did not answer) or "full"."""
        return self._commits.outcomes

    # --- what requests ask --------------------------------------------------------------------------------------------

    def arrive(self, *, tenant: str, path: str, request_id: str, headers: Mapping[str, str]) -> ArrivedRequest:
        """Return the object that represents a request from its arrival on: relayed by a gateway, or direct. Raises
        ApiError 403 for a request that resumes an answer without a gateway."""
        return arrived(self, self.key, tenant=tenant, path=path, request_id=request_id, headers=headers)

    def background_id(self, response_id: str) -> str:
        """Return the id of a response that runs in the background here, from which gateways read that it runs here.
        response_id: the id that it would have on a server alone."""
        return background_id(response_id, self.name)

    async def claim(self, name: SessionName) -> bool:
        """Make this replica the session's home, and fetch what other replicas have committed of the session. Returns
        whether anything was fetched; False also if the directory does not answer."""
        return await self._claims.claim(name)

    def begin(self, *, tenant: str, session_id: str, salt: str) -> TurnUnderWay:
        """Note that a turn of the session has begun, and return the object that commits the turn when it ends."""
        name = SessionName(tenant, session_id, salt)
        self.held.of(name).running += 1
        return TurnUnderWay(self, name)

    async def commit(self, name: SessionName, *, tokens: int, ttl_s: float | None, chains: tuple[bytes, ...]) -> None:
        """Commit a turn that has ended: record it in the directory, or in the outbox if the directory does not answer.
        Parameters as in `Commits.commit`."""
        await self._commits.commit(name, tokens=tokens, ttl_s=ttl_s, chains=chains)

    def left(self, name: SessionName) -> None:
        """Note that a turn has ended here with nothing to commit: no token was generated, or another replica continues
        the answer. The session stays claimed."""
        held = self.held.of(name)
        held.running = max(0, held.running - 1)

    def spend(self, tenant: str, tokens: int) -> None:
        """Add to the tokens that a tenant (the name of a key) has used. Only queues them: a background task reports
        them to the directory, and what it cannot report is sent with a later beat. Tokens of a tenant without a limit
        of tokens per minute are not counted."""
        if self._spending.add(tenant, tokens) and (self._telling is None or self._telling.done()):
            self._telling = self._background.spawn(self._tell_spending())

    async def keep(self, session_id: str, *, tenant: str, ttl_s: float | None) -> None:
        """Tell the fleet how many seconds a session lives after its last use; None: it is pinned. If the directory does
        not answer, the lifetime of the session's record is not changed."""
        with contextlib.suppress(DirectoryUnavailable):
            await self.directory.keep(tenant, session_id, ttl_s=ttl_s)

    def on_head(self, head: Head) -> None:
        """Store the engine's newest head of a session (the record by which another replica can take it over)."""
        self._commits.on_head(head)

    async def delete(self, session_id: str, *, tenant: str) -> None:
        """Delete the sessions of this id, with any salt, on every replica. Raises ApiError: 404 if no replica has one,
        409 while a request of it runs here, 503 if not all replicas are known to have deleted it."""
        timeout_s = REPLY_TIMEOUT_S
        await delete_everywhere(tenant, session_id, copies=self._copies, directory=self.directory, timeout_s=timeout_s)

    # --- in the background --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send a beat about once a second until cancelled."""
        await self.beats.run()

    async def beat(self) -> None:
        """Send one beat: report that this server lives, carry out deletions, and send the commits that wait. Raises
        DirectoryUnavailable."""
        await self.beats.beat()

    async def leave(self) -> None:
        """Wait a few seconds for background work, send the commits that wait, give up the claims of all sessions, leave
        the fleet, and close the parts. A directory that does not answer is no error."""
        self.beats.stop()
        await self._background.finish(timeout_s=LAST_WORDS_S)
        with contextlib.suppress(DirectoryUnavailable):
            await self._commits.send_waiting()
            await self._commits.release_all()
            await self.directory.leave()
        await self.directory.close()
        await self.deletions.save()
        await self.outbox.close()

    async def overview(self, *, limit: int) -> dict[str, Any]:
        """Return a description of the fleet from the directory; without Redis, from its last answer."""
        if self._clock() - self._members.refreshed_s >= BEAT_S:
            await self._members.refresh()
        return overview(self._members, self.directory, self._clock(), limit=limit)

    async def _tell_spending(self) -> None:
        with contextlib.suppress(DirectoryUnavailable):  # tried again with the next beat
            await self._spending.tell()
