"""Lets this server be one replica of a fleet: it beats, claims a session before its turn, brings what others have
committed of it, and commits the turn before its client hears that it has ended.

Without Redis a turn goes on with what is here. Its commit waits in the outbox.
"""

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from app.conversations.text_thread import TextThread
from app.errors import ApiError, unavailable
from app.fleet.deletions import Deletions
from app.fleet.holdings import Spending
from app.observe.live import tiers_of
from app.settings.settings import Settings
from app.tenancy.keyring import KeyLimits
from app.turn.ports import EndedChoice, EnginePort, TurnOfFleet
from app.turn.readiness import Readiness, Status
from app.turn.sessions import SessionCommands
from app.version import version
from engine.messages import Adopt, Head, ModelInfo, SessionInfo
from engine.process.client import EngineClient, EngineFailed, EngineLost, EngineTimeout, EngineUnavailable
from fleet.directory import Directory, DirectoryFull, DirectoryUnavailable, Foreign
from fleet.identify import link_answer
from fleet.keys import SessionName
from fleet.load import Before, counted, load_of
from fleet.members import BEAT_S, Members
from fleet.outbox import Outbox, Unsent
from fleet.overview import overview
from fleet.records import MAX_ROWS, Commit, Heard, Heartbeat, Outcome
from fleet.routing import FleetView

NAME_BYTES = 8
ADOPT_S = 2.0  # longest wait for the engine to take over a session; after that it computes what it does not have
LAST_WORDS_S = 5.0  # for commits that are under way when the server ends
POLL_S = 0.1  # between two looks whether the others have deleted a session
UNSENT_AT_ONCE = 64  # sessions of the outbox that one beat sends
JOIN_S = 10.0  # longest wait for the directory before this server takes requests
JOIN_LOOK_S = 0.1  # between two beats of a server that is about to take them
LISTED = 200  # sessions in one answer of the engine

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class _Held:
    """What this replica knows of a session."""

    ttl_s: float | None  # after its last use; None: it is pinned
    epoch: int = 0  # of its claim; 0: none
    turn: int = 0  # the last one that it has
    branches: int = 0  # fenced turns, of which it has the answers too
    begun: int = 0  # epoch at which its copy was begun
    exported: int = 0  # id of the last recorded answer that the directory has
    tokens: int = 0
    redis_tokens: int = 0
    running: int = 0  # turns
    head: bytes = b""
    has_new_head: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Replica:
    """One per app, on its event loop. None of the methods that a turn calls raises because of the fleet."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """secret: the tenant secret, the same on every member. Raises ValueError for an address that is none,
        ImportError without redis' client, OSError if the name cannot be kept."""
        fleet = settings.fleet
        self.name = fleet.replica or replica_name(settings.state_dir)
        self._boot = secrets.token_hex(8)
        self._url = fleet.advertise or own_address(settings)
        self._aliases = tuple(settings.model.aliases)
        self._clock = clock
        self._before: Before | None = None
        self._is_foreign = False
        self.directory = Directory(
            url=fleet.redis_url,
            secret=secret,
            deadline_s=fleet.deadline_ms / 1e3,
            replica=self.name,
            boot=self._boot,
            max_sessions=fleet.tenant_sessions,
            max_said_bytes=fleet.tenant_mib << 20,
        )
        self._spending = Spending(directory=self.directory, limits=limits)
        self._telling: asyncio.Task[None] | None = None
        self.outbox = Outbox(path=settings.state_dir / "outbox.sqlite3", max_bytes=fleet.outbox_mib << 20)
        self._outbox_thread = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._settings = settings
        self._engine = engine
        if isinstance(engine, EngineClient):
            engine.on_head = self.on_head
        self._readiness = readiness
        self._transcripts = transcripts
        self._commands = commands
        self._held: OrderedDict[SessionName, _Held] = OrderedDict()
        self._born = ""
        self._deletions = Deletions(path=settings.state_dir / "deletions", directory=self.directory, copies=self)
        self._deleting: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        readiness.joining = True
        self.claims: Counter[str] = Counter()  # by result: new, home, adopted, failed
        self.commits: Counter[str] = Counter()  # by what became of them: an Outcome, "unsent" or "full"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._members = Members(directory=self.directory, view=FleetView(), clock=clock)

    # --- what a turn asks ---------------------------------------------------------------------------------------------

    async def claim(self, name: SessionName) -> bool:
        """Make this replica the session's home, and bring what others have committed of it. Returns whether something
        was brought, so that its prompt may be known better than before."""
        held = self._of(name)
        async with held.lock:
            try:
                claim = await self.directory.claim(
                    name, fingerprint=self._fingerprint, ttl_s=self._settings.cache.ttl_s, begun=held.begun
                )
                if claim.forgotten > held.begun:  # what is here is older than its deletion
                    await self._delete_copy(name)
                    held.turn = held.exported = held.begun = 0
                held.epoch = claim.epoch
                held.begun = held.begun or claim.epoch
                if claim.turn <= held.turn and claim.branches == held.branches:
                    self.claims["home" if claim.turn else "new"] += 1
                    return False
                self.claims["adopted"] += 1
                await self._adopt(name, held, claim.head if claim.turn > held.turn else b"")
                if claim.turn > held.turn:
                    held.turn, held.tokens = claim.turn, claim.tokens
                held.branches = claim.branches
                return True
            except DirectoryUnavailable:
                self.claims["failed"] += 1
                held.epoch = 0
                return False

    def begin(self, *, tenant: str, session_id: str, salt: str, model: ModelInfo) -> TurnOfFleet:
        """Note that a turn runs."""
        name = SessionName(tenant, session_id, salt)
        self._of(name).running += 1
        return TurnUnderWay(self, name)

    async def commit(self, name: SessionName, *, tokens: int, ttl_s: float | None, chains: tuple[bytes, ...]) -> None:
        """Commit a turn that has ended. Waits `fleet.commit_deadline_ms` at most; then it is committed later."""
        task = self._spawn(self._commit(name, tokens=tokens, ttl_s=ttl_s, chains=chains))
        await asyncio.wait({task}, timeout=self._settings.fleet.commit_deadline_ms / 1e3)

    def spend(self, tenant: str, tokens: int) -> None:
        """Tell the fleet which tokens a key has used, soon."""
        if self._spending.add(tenant, tokens) and (self._telling is None or self._telling.done()):
            self._telling = self._spawn(self._tell_spending())

    async def keep(self, session_id: str, *, tenant: str, ttl_s: float | None) -> None:
        """Tell the fleet how long a session lives after its last use; None: it is pinned. Without the directory, its
        record lives as before."""
        with contextlib.suppress(DirectoryUnavailable):
            await self.directory.keep(tenant, session_id, ttl_s=ttl_s)

    def left(self, name: SessionName) -> None:
        """Note that a turn has ended without a token."""
        held = self._of(name)
        held.running = max(0, held.running - 1)

    def on_head(self, head: Head) -> None:
        """Keep the engine's newest head of a session; one that comes after its turn is committed with the next beat."""
        held = self._of(SessionName(head.tenant, head.session_id, head.salt))
        held.head, held.redis_tokens, held.has_new_head = head.head, head.redis_tokens, True

    async def delete(self, session_id: str, *, tenant: str) -> None:
        """Delete a session on every replica. Raises ApiError: 404 if nobody has it, 409 while a request of it runs
        here, 503 if it cannot be said that all have deleted it."""
        missing: ApiError | None = None
        try:
            await self._commands.delete_here(session_id, tenant=tenant)
        except ApiError as error:
            if error.status != 404:
                raise
            missing = error
        try:
            names = {name for name in self._held if (name.tenant, name.session_id) == (tenant, session_id)}
            forgetting = await self.directory.forget(tenant, session_id)
            for name in names:
                self._held.pop(name, None)
            await self._in_outbox(self.outbox.forget, tenant, session_id)
            async with asyncio.timeout(self._settings.limits.sessions_timeout_s):
                waiting = forgetting.waiting
                while waiting:
                    await asyncio.sleep(POLL_S)
                    waiting = await self.directory.unacknowledged(forgetting.epoch)
        except (DirectoryUnavailable, TimeoutError):
            message = "The session is deleted here; other servers have not said so yet. Ask again."
            raise unavailable(message, code="not_deleted", retry_after_s=1.0) from None
        if missing is not None and not forgetting.found:
            raise missing

    # --- in the background --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Beat until cancelled. What a beat brings to do is done beside the next ones: it may have to wait for a turn,
        and a gateway gives up a replica whose beats are late."""
        started_s = self._clock()
        while True:
            try:
                heard = await self._say_alive()
                if self._following is None or self._following.done():
                    self._following = self._spawn(self._follow_up(heard))
            except DirectoryUnavailable as error:
                log.debug("no beat: %s", error)
                if self._readiness.joining and self._clock() - started_s > JOIN_S:
                    log.warning("no directory: this server may still have sessions that others have deleted")
                    self._readiness.joining = False
            except Exception:
                log.exception("a beat failed")
            if self._readiness.model is None:
                with contextlib.suppress(TimeoutError, EngineFailed):
                    await asyncio.wait_for(self._readiness.wait_loaded(), BEAT_S)
            else:
                await asyncio.sleep(JOIN_LOOK_S if self._readiness.joining else BEAT_S)

    async def beat(self) -> None:
        """Say that this server lives, carry out deletions, and send what waits. Raises DirectoryUnavailable."""
        await self._follow(await self._say_alive())

    async def _say_alive(self) -> Heard:
        try:
            heard = await self.directory.beat(self.heartbeat(), since=self._deletions.since)
        except Foreign as error:
            if not self._is_foreign:
                log.error("%s", error)
            self._is_foreign = True
            raise
        self._is_foreign = False
        return heard

    async def _follow_up(self, heard: Heard) -> None:
        with contextlib.suppress(DirectoryUnavailable):  # then after the next beat
            await self._follow(heard)

    async def _follow(self, heard: Heard) -> None:
        """Do what the answer to a beat asks for."""
        if self._born and heard.born != self._born:
            await self._publish_again()
        self._born = heard.born
        if self._readiness.model is None:
            return  # deletions wait until there is an engine to ask
        if self._deleting is None or self._deleting.done():
            self._deleting = self._spawn(self._carry_out(heard))
        await asyncio.wait({self._deleting}, timeout=JOIN_LOOK_S)  # requests of a session may take longer to end
        if self._deletions.is_caught_up:
            self._readiness.joining = False
        await self._send_waiting()
        await self._spending.tell()

    async def leave(self) -> None:
        """Let go of all sessions and leave the fleet."""
        for task in (self._deleting, self._following):
            if task is not None:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WORDS_S)
        with contextlib.suppress(DirectoryUnavailable):
            await self._send_waiting()
            for name, held in self._held.items():
                if held.epoch:
                    await self.directory.release(name, fingerprint=self._fingerprint, epoch=held.epoch)
            await self.directory.leave()
        await self.directory.close()
        await self._deletions.save()
        await self._in_outbox(self.outbox.close)
        self._outbox_thread.shutdown(wait=False)

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
            sessions=sum(held.epoch > 0 for held in self._held.values()),
            tiers=tiers_of(stats, model) if stats is not None and model is not None else {},
        )

    async def overview(self, *, limit: int) -> dict[str, Any]:
        """Return what the directory knows of the fleet: without Redis, what it last knew."""
        if self._clock() - self._members.refreshed_s >= BEAT_S:
            await self._members.refresh()
        return overview(self._members, self.directory, self._clock(), limit=limit)

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _fingerprint(self) -> str:
        model = self._readiness.model
        return "" if model is None else model.fingerprint

    def _of(self, name: SessionName) -> _Held:
        """Return what is known of a session. Those used longest ago are forgotten: their next turn adopts them."""
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = _Held(ttl_s=self._settings.cache.ttl_s)
            if len(self._held) > self._settings.cache.max_sessions:
                oldest = next(iter(self._held))
                if oldest != name and not self._held[oldest].running:
                    del self._held[oldest]
        self._held.move_to_end(name)
        return held

    async def _in_outbox(self, work: Callable[..., T], *values: Any) -> T:
        """Run a method of the outbox on its own thread: two at once would share one transaction."""
        return await asyncio.get_running_loop().run_in_executor(self._outbox_thread, work, *values)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work for the fleet failed", exc_info=error)

    async def _adopt(self, name: SessionName, held: _Held, head: bytes) -> None:
        if self._settings.fleet.transcripts:
            rows = await self.directory.transcript(name, fingerprint=self._fingerprint)
            held.exported = await self._transcripts.adopt(
                name.session_id, rows, tenant=_scope(name), now=time.time(), after=held.exported
            )
        if head:
            held.head = head
            await self._tell_engine(name, head)

    async def _tell_engine(self, name: SessionName, head: bytes) -> None:
        """Have the engine take over a session's KV. What it cannot take over, it computes."""
        request = Adopt(
            request_id=f"adopt-{secrets.token_hex(12)}", tenant=name.tenant, salt=name.salt,
            session_id=name.session_id, head=head,
        )  # fmt: skip
        with contextlib.suppress(EngineUnavailable, EngineTimeout, EngineLost):
            await self._engine.sessions(request, timeout_s=ADOPT_S)

    async def _commit(self, name: SessionName, *, tokens: int, ttl_s: float | None, chains: tuple[bytes, ...]) -> None:
        held = self._of(name)
        try:
            async with held.lock:
                held.tokens, held.ttl_s = tokens, ttl_s
                held.begun = held.begun or held.epoch or self._deletions.since
                await self._send(name, held, ends_turn=True, chains=chains)
        finally:
            held.running = max(0, held.running - 1)

    async def _send(self, name: SessionName, held: _Held, *, ends_turn: bool, chains: tuple[bytes, ...] = ()) -> None:
        """Commit what is new of a session; without Redis, keep it in the outbox. Its lock is held."""
        model = self._readiness.require_loaded()
        rows: dict[bytes, bytes] = {}
        exported = held.exported
        if self._settings.fleet.transcripts:
            found = await self._transcripts.export(
                name.session_id, tenant=_scope(name), after=held.exported, most=MAX_ROWS
            )
            rows, exported = found.rows, found.newest
        commit = Commit(
            name=name, fingerprint=model.fingerprint, epoch=held.epoch, since=held.begun, base_turn=held.turn,
            nonce=secrets.token_bytes(8), ends_turn=ends_turn, tokens=held.tokens,
            size_bytes=held.tokens * model.kv_bytes_per_token, redis_tokens=held.redis_tokens,
            ttl_s=held.ttl_s, head=held.head, rows=rows, chains=chains,
        )  # fmt: skip
        had_new_head, held.has_new_head = held.has_new_head, False
        try:
            done = await self.directory.commit(commit)
            if done.outcome is Outcome.FENCED and not commit.epoch and (epoch := await self._epoch_at_home(name)):
                done = await self.directory.commit(replace(commit, epoch=epoch))
            self.commits[done.outcome.value] += 1
        except DirectoryUnavailable as error:
            self.commits["full" if isinstance(error, DirectoryFull) else "unsent"] += 1
            done = None
        if done is None or done.outcome is Outcome.FLUSHED:
            held.has_new_head = had_new_head
            held.epoch = 0 if done is not None else held.epoch
            await self._in_outbox(self.outbox.put, self._unsent(name, held, model.fingerprint))
            return
        if self.outbox.waiting:
            await self._in_outbox(self.outbox.remove, name.tenant, name.session_id, name.salt)
        if done.outcome is Outcome.COMMITTED:
            held.epoch, held.turn, held.exported = done.epoch, done.turn, exported
        elif done.outcome is Outcome.FENCED:
            held.epoch, held.exported = 0, exported
        else:
            self._held.pop(name, None)
            self._spawn(self._delete_copy(name))

    async def _epoch_at_home(self, name: SessionName) -> int:
        """Return the epoch under which this process is a session's home, 0 if it is not: Redis may have done what it
        was too late to say. Raises DirectoryUnavailable."""
        record = await self.directory.look(name, fingerprint=self._fingerprint)
        is_home = record is not None and (record.home, record.boot) == (self.name, self._boot)
        return record.epoch if record is not None and is_home else 0

    def _unsent(self, name: SessionName, held: _Held, fingerprint: str) -> Unsent:
        return Unsent(
            tenant=name.tenant, session_id=name.session_id, salt=name.salt, fingerprint=fingerprint, since=held.begun,
            base_turn=held.turn, exported=held.exported, tokens=held.tokens, ttl_s=held.ttl_s,
            head=held.head,
        )  # fmt: skip

    async def _send_waiting(self) -> None:
        """Send some of the outbox, and heads that came after their turn."""
        for unsent in await self._in_outbox(self.outbox.first, UNSENT_AT_ONCE):
            name = SessionName(unsent.tenant, unsent.session_id, unsent.salt)
            if unsent.fingerprint != self._fingerprint or self.directory.state != "closed":
                continue
            held = self._of(name)
            async with held.lock:
                if not held.begun:  # this process has not seen it: another one has written the entry
                    held.begun, held.turn, held.exported = unsent.since, unsent.base_turn, unsent.exported
                    held.tokens, held.ttl_s, held.head = unsent.tokens, unsent.ttl_s, unsent.head
                await self._send(name, held, ends_turn=True)
        for name, held in [(name, held) for name, held in self._held.items() if held.has_new_head and not held.running]:
            async with held.lock:
                if held.epoch and held.has_new_head:
                    await self._send(name, held, ends_turn=False)

    async def _publish_again(self) -> None:
        """After a flush: say what was deleted, then what this replica was home of."""
        owned = [(name, held) for name, held in self._held.items() if held.epoch]
        # Before anything is awaited: the directory would take a turn that ends under its old epoch for a deleted one's.
        for held in self._held.values():
            held.epoch = held.turn = held.exported = 0
        await self._deletions.publish_again()
        for name, held in owned:
            await self._in_outbox(self.outbox.put, self._unsent(name, held, self._fingerprint))

    async def _tell_spending(self) -> None:
        with contextlib.suppress(DirectoryUnavailable):  # then with the next beat
            await self._spending.tell()

    async def _carry_out(self, heard: Heard) -> None:
        try:
            await self._deletions.carry_out(heard, fingerprint=self._fingerprint)
        except (ApiError, DirectoryUnavailable) as error:
            log.debug("deletions wait for the next beat: %s", error)

    async def names(self) -> set[SessionName]:
        """Return the sessions of which there is anything here. Raises ApiError."""
        found = set(self._held)
        for scope, session_id in await self._transcripts.names():
            tenant, _, salt = scope.partition("/")
            found.add(SessionName(tenant, session_id, salt))
        async for info in self._kept():
            found.add(SessionName(info.tenant, info.session_id, info.cache_salt))
        return found

    async def delete_older(self, tenant: str, session_id: str, epoch: int) -> None:
        """Delete the copies of a session, with any salt, unless they were begun after the epoch. Raises ApiError."""
        held = [name for name in self._held if (name.tenant, name.session_id) == (tenant, session_id)]
        if any(self._held[name].begun > epoch for name in held):
            return
        for name in held:
            del self._held[name]
        await self._in_outbox(self.outbox.forget, tenant, session_id)
        await self._delete_copy(SessionName(tenant, session_id))

    async def _kept(self) -> AsyncIterator[SessionInfo]:
        """Yield what the engine keeps of all sessions. Raises ApiError."""
        after, more = "", True
        while more:
            reply = await self._commands.ask("list_all", after=after, limit=LISTED)
            for info in reply.sessions:
                yield info
                after = f"{info.tenant}/{info.session_id}"
            more = reply.more and bool(reply.sessions)

    async def _delete_copy(self, name: SessionName) -> None:
        """Delete a session here, when no request of it runs any more."""
        while True:
            try:
                await self._commands.delete_here(name.session_id, tenant=name.tenant)
                return
            except ApiError as error:
                if error.status == 404:
                    return
            await asyncio.sleep(POLL_S)


class TurnUnderWay:
    """A turn of a session that this replica is the home of, or would be if the directory had answered."""

    def __init__(self, replica: Replica, name: SessionName) -> None:
        self._replica, self._name = replica, name
        self._ended = False

    async def end(
        self,
        choices: Sequence[EndedChoice],
        *,
        chain: bytes | None,
        names: Sequence[bytes],
        tokens: int,
        ttl_s: float | None,
    ) -> None:
        """Enter the turn. Waits for the directory as long as `fleet.commit_deadline_ms` says; then it goes on behind.
        chain: of the request's messages, see `fleet.identify`; None: their next request does not find the session.
        names: other digests that do. tokens: of its context."""
        if self._ended:
            return
        self._ended = True
        chains = [link_answer(chain, choice.text, choice.calls) for choice in choices] if chain is not None else []
        await self._replica.commit(self._name, tokens=tokens, ttl_s=ttl_s, chains=(*chains, *names))

    def give_up(self) -> None:
        """Nothing came of the turn."""
        if not self._ended:
            self._ended = True
            self._replica.left(self._name)


def _scope(name: SessionName) -> str:
    """Return the tenant as transcripts know it."""
    return f"{name.tenant}/{name.salt}" if name.salt else name.tenant


def own_address(settings: Settings) -> str:
    """Return where this server is reached. One that listens on every address is reached by its machine's name, which
    in a container is the container's."""
    host = settings.server.host
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def replica_name(state_dir: Path) -> str:
    """Return the name that this state directory had before, or a new one, which is kept there. Raises OSError."""
    path = state_dir / "replica"
    with contextlib.suppress(OSError):
        name = path.read_text(encoding="ascii", errors="replace").strip()
        if name and len(name) <= 64 and all(character.isalnum() or character in "._-" for character in name):
            return name
    name = secrets.token_hex(NAME_BYTES)
    path.write_text(name, encoding="ascii")
    return name
