"""Makes a server one replica of a fleet: it beats, becomes the home of its conversations, and enters ended turns in the
directory.

Nothing here may cost an answer. Without the directory the server serves as if it were alone, and what it cannot enter
is lost to the other members: they do not find the conversation's home until its next turn has ended.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from app.settings.settings import Settings
from app.turn.ports import EndedChoice, TurnOfFleet
from app.turn.readiness import Readiness, Status
from app.version import version
from engine.messages import ModelInfo, Stats
from fleet.directory import Directory, DirectoryUnavailable, Foreign
from fleet.identify import link_answer
from fleet.keys import SessionName
from fleet.load import Before, counted, free_bytes, load_of
from fleet.members import BEAT_S
from fleet.records import Claim, Commit, Heartbeat, Outcome

log = logging.getLogger(__name__)

NAME_BYTES = 8


class Counters(Protocol):
    """What a replica needs of its engine's client."""

    @property
    def stats(self) -> Stats | None: ...


class Replica:
    """One per app, on its event loop. Raises nothing but what its constructor does."""

    def __init__(
        self,
        *,
        settings: Settings,
        secret: bytes,
        engine: Counters,
        readiness: Readiness,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """secret: the tenant secret, the same on every member. Raises ValueError for an address that is none,
        ImportError without redis' client, OSError if the name cannot be kept."""
        fleet = settings.fleet
        self.name = fleet.replica or replica_name(settings.state_dir)
        self._boot = secrets.token_hex(8)
        self._url = fleet.advertise or f"http://{settings.server.host}:{settings.server.port}"
        self._aliases = tuple(settings.model.aliases)
        self._ttl_s = settings.cache.ttl_s
        self._commit_deadline_s = fleet.commit_deadline_ms / 1e3
        self._engine = engine
        self._readiness = readiness
        self._clock = clock
        self._before: Before | None = None
        self._epoch = 0  # the last that the directory has told
        self._is_foreign = False
        self._late: set[asyncio.Task[None]] = set()  # commits that have missed their deadline
        self.directory = Directory(
            url=fleet.redis_url,
            secret=secret,
            deadline_s=fleet.deadline_ms / 1e3,
            replica=self.name,
            boot=self._boot,
            max_sessions=fleet.tenant_sessions,
        )

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            with suppress(DirectoryUnavailable):
                await self.beat()
            await asyncio.sleep(BEAT_S)

    async def leave(self) -> None:
        """Enter what is late, and have gateways know at once that this replica is gone."""
        if self._late:
            await asyncio.wait(self._late, timeout=self._commit_deadline_s)
        for task in self._late:
            task.cancel()
        with suppress(DirectoryUnavailable):
            await self.directory.leave()
        await self.directory.close()

    def begin(self, *, tenant: str, session_id: str, salt: str, model: ModelInfo) -> TurnOfFleet:
        """Claim the session of a turn, while the engine begins with it."""
        return TurnUnderWay(self, SessionName(tenant, session_id, salt), model)

    def keep(self, commit: asyncio.Task[None]) -> None:
        """Let a commit go on that is late."""
        self._late.add(commit)
        commit.add_done_callback(self._late.discard)

    async def claim(self, name: SessionName, model: ModelInfo) -> Claim | None:
        """Become the home of a session; None: the directory could not be asked."""
        try:
            return await self.directory.claim(name, fingerprint=model.fingerprint, ttl_s=self._ttl_s)
        except DirectoryUnavailable:
            return None

    async def commit(self, commit: Commit) -> None:
        """Enter a turn that has ended. Its failure is logged: other members find the session where it was before."""
        try:
            done = await self.directory.commit(commit)
        except DirectoryUnavailable as error:
            log.warning("a turn is not in the directory of the fleet: %s", error)
            return
        if done.outcome is not Outcome.COMMITTED:
            log.info("a turn was not entered in the directory of the fleet: it is %s", done.outcome)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def commit_deadline_s(self) -> float:
        return self._commit_deadline_s

    async def beat(self) -> None:
        """Tell the members how this replica stands. Raises DirectoryUnavailable."""
        try:
            heard = await self.directory.beat(self.heartbeat(), since=self._epoch)
        except Foreign as error:
            if not self._is_foreign:
                log.error("%s", error)
            self._is_foreign = True
            raise
        self._is_foreign, self._epoch = False, heard.epoch

    def heartbeat(self) -> Heartbeat:
        """Return what this replica says of itself now."""
        status, model, stats, now = self._readiness.status, self._readiness.model, self._engine.stats, self._clock()
        load = None
        if stats is not None and model is not None and status in (Status.READY, Status.DRAINING):
            load = load_of(stats, model, self._before, now, draining=status is Status.DRAINING)
            self._before = counted(stats, now)
        return Heartbeat(
            replica=self.name,
            boot=self._boot,
            url=self._url,
            fingerprint=model.fingerprint if model is not None else "",
            model=model.name if model is not None else "",
            aliases=self._aliases,
            state=status.value,
            version=version(),
            running=stats.running if stats is not None else 0,
            waiting=stats.waiting if stats is not None else 0,
            load=load,
            free_bytes=free_bytes(stats) if stats is not None else {},
        )


class TurnUnderWay:
    """A turn of a session that this replica is the home of, or would be if the directory had answered."""

    def __init__(self, replica: Replica, name: SessionName, model: ModelInfo) -> None:
        self._replica = replica
        self._name, self._model = name, model
        self._since = replica.epoch
        self._claim = asyncio.create_task(replica.claim(name, model))
        self._ended = False

    async def end(
        self,
        choices: Sequence[EndedChoice],
        *,
        chain: bytes | None,
        tokens: int,
        ttl_s: float | None,
    ) -> None:
        """Enter the turn. Waits for the directory as long as `fleet.commit_deadline_ms` says; then it goes on behind.
        chain: of the request's messages, see `fleet.identify`; None: clients must name the session. tokens: of its
        context."""
        if self._ended:
            return
        self._ended = True
        chains = [link_answer(chain, choice.text, choice.calls) for choice in choices] if chain is not None else []
        work = asyncio.create_task(self._commit(tuple(chains), tokens=tokens, ttl_s=ttl_s))
        self._replica.keep(work)
        await asyncio.wait({work}, timeout=self._replica.commit_deadline_s)

    async def _commit(self, chains: tuple[bytes, ...], *, tokens: int, ttl_s: float | None) -> None:
        claim = await self._claim
        await self._replica.commit(
            Commit(
                name=self._name,
                fingerprint=self._model.fingerprint,
                epoch=claim.epoch if claim is not None else 0,
                since=self._since,
                base_turn=claim.turn if claim is not None else 0,
                nonce=secrets.token_bytes(8),
                tokens=tokens,
                size_bytes=tokens * self._model.kv_bytes_per_token,
                ttl_s=ttl_s,
                chains=chains,
            )
        )

    def give_up(self) -> None:
        """Nothing came of the turn."""
        self._ended = True


def replica_name(state_dir: Path) -> str:
    """Return the name that this state directory had before, or a new one, which is kept there. Raises OSError."""
    path = state_dir / "replica"
    with suppress(OSError):
        name = path.read_text(encoding="ascii", errors="replace").strip()
        if name and len(name) <= 64 and all(character.isalnum() or character in "._-" for character in name):
            return name
    name = secrets.token_hex(NAME_BYTES)
    path.write_text(name, encoding="ascii")
    return name
