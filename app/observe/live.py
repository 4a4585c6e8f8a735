"""Streams what the page shows while it is open: the engine's state once a second while it changes, and every answer's
first token.

A tenant sees its own conversations and requests. Shared data (tiers, the whole queue, all tenants' answers) is only for
tenants that `reprise.app.tenancy.keyring.Keyring.is_admin` accepts.
"""

import asyncio
import contextlib
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from reprise.app.errors import too_many_watchers
from reprise.app.state_disk import StateDisk
from reprise.app.turn.answer import Answer
from reprise.app.turn.kv_sources import source_fields
from reprise.app.turn.observer import ObservedTurn, TurnObserver
from reprise.app.turn.ports import EnginePort, codec_in_use
from reprise.engine.messages import ModelInfo, SessionInfo, SessionRequest, Stats, WaitingInfo
from reprise.engine.process.client import EngineLost, EngineTimeout, EngineUnavailable

PERIOD_S = 1.0  # as often as the engine reports
IDLE_S = 15.0  # between two states where nothing happens
LINGER_S = 5.0  # after a change: the page shows for some seconds what has moved, and then that nothing does
GATHER_S = 0.1  # answers that begin within it are told together: a busy server has hundreds a second
MAX_WATCHERS = 32  # pages that watch at once
MAX_SESSIONS = 10  # the ones used last; the engine walks over all their blocks to say where they are
KEPT_S = 2 * PERIOD_S  # for which a session whose first turn has ended is known here: the engine is asked meanwhile
MAX_BEGUN = 5  # sessions shown whose first turn goes on
MAX_WAITING = 64  # most requests shown of the front of the queue
MAX_TURNS = 240  # remembered for pages that are opened later, or read slowly
TENANT_SHARE = 4  # a tenant may hold so much of the places: one fourth


class Live(TurnObserver):
    """A source of live views for the chat page. One per app, on its event loop. places: how many pages may watch at
    once. state_disk: the disk with the transcripts."""

    def __init__(self, *, engine: EnginePort, places: int, state_disk: StateDisk) -> None:
        self.replica = ""  # the name of this server in its fleet
        self._engine = engine
        self._places = places
        self._state_disk = state_disk
        self._watchers: set[Watcher] = set()
        self._turns: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_TURNS)
        self._turns_now: dict[ObservedTurn, _TurnNow] = {}  # the open ones, and those that have just ended
        self._latest_sessions: dict[str, _LatestSessions] = {}  # tenant -> its sessions

    def watch(self, tenant: str, *, sees_all: bool) -> "Watcher":
        """Return a new watcher, which the caller has to close. sees_all: whether it may see the data of all tenants.
        Raises ApiError 429 if too many pages watch."""
        held = Counter(watcher.tenant for watcher in self._watchers)
        if len(self._watchers) >= self._places or held[tenant] >= max(1, self._places // TENANT_SHARE):
            raise too_many_watchers(retry_after_s=10)
        watcher = Watcher(tenant, sees_all=sees_all, on_close=self._watchers.discard)
        watcher.turns.extend(turn for owner, turn in self._turns if sees_all or owner == tenant)
        self._watchers.add(watcher)
        return watcher

    def opened(self, turn: ObservedTurn) -> None:
        self._turns_now[turn] = _TurnNow(begun_s=time.time())

    def closed(self, turn: ObservedTurn) -> None:
        self._forget_ended()
        if (now := self._turns_now.get(turn)) is not None:
            now.ended_s = time.monotonic()

    def _forget_ended(self) -> None:
        """Forget the turns after whose end the engine has been asked again, if anybody watches."""
        now = time.monotonic()
        for turn in [turn for turn, known in self._turns_now.items() if now - known.ended_s > KEPT_S]:
            del self._turns_now[turn]

    def first_token(self, turn: ObservedTurn, answer: Answer) -> None:
        if answer.report is None or answer.first_token_s is None:
            return
        if sum(other.first_token_s is not None for other in turn.choices) > 1:
            return  # the first one paid for the prompt
        report = answer.report
        shown = {
            "request_id": turn.request_id,
            "session_id": turn.session_id,
            "at": round(time.time(), 3),
            "ttft_ms": round((answer.first_token_s - turn.arrived_s) * 1e3, 3),
            "load_ms": None if answer.timings is None else round(answer.timings.load_ms, 3),
            "saved_ms": None if answer.timings is None else round(answer.timings.saved_ms, 3),
            **source_fields(report),
            "truncated_tokens": report.truncated_tokens,
            "history_tokens": report.history_tokens,
        }
        self._turns.append((turn.tenant, shown))
        for watcher in self._watchers:
            if watcher.sees_all or watcher.tenant == turn.tenant:
                watcher.hear(shown)

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    async def state(self, watcher: "Watcher") -> dict[str, Any]:
        """Return the data that a watcher may see, by the engine's last heartbeat."""
        latest = await self._sessions(watcher.tenant)
        shown = snapshot(self._engine, tenant=watcher.tenant, sees_all=watcher.sees_all)
        return shown | {
            "at": round(time.time(), 3),
            "replica": self.replica,
            "sessions": self._with_begun(latest, watcher.tenant),
            "disk_problem": self._state_disk.problem,  # why no new transcripts are kept
        }

    def _with_begun(self, latest: "_LatestSessions", tenant: str) -> list[dict[str, Any]]:
        """Return the sessions that the engine knows, with those marked that run, and those in their first turn: the
        engine knows them when that has ended. What has just ended stays until the engine has been asked again."""
        self._forget_ended()
        sessions = [_session(info) for info in latest.sessions]
        mine = {
            turn: known
            for turn, known in self._turns_now.items()
            if turn.tenant == tenant and known.ended_s >= latest.as_of_s
        }
        running = {turn.session_id for turn, known in mine.items() if known.ended_s == math.inf}
        known_ids = {session["id"] for session in sessions}
        for session in sessions:
            session["running"] |= session["id"] in running
        begun = {
            turn.session_id: _begun(turn, known, is_running=turn.session_id in running)
            for turn, known in mine.items()
            if turn.session_id not in known_ids
        }
        return [*list(begun.values())[-MAX_BEGUN:][::-1], *sessions][:MAX_SESSIONS]

    async def _sessions(self, tenant: str) -> "_LatestSessions":
        """Return the sessions that a tenant used last. Asks the engine at most once a period, however many pages of the
        tenant are open, and hardly ever while nothing happens. While the engine takes no requests, returns the last
        answer."""
        latest = self._latest_sessions.setdefault(tenant, _LatestSessions())
        now, activity = time.monotonic(), _activity(self._engine.stats)
        age_s = now - latest.asked_s
        if age_s >= PERIOD_S * 0.9 and (activity != latest.activity or age_s >= IDLE_S * 0.9):
            latest.asked_s = now  # nobody else asks meanwhile
            question = SessionRequest(
                request_id=f"live-{secrets.token_hex(12)}", tenant=tenant, action="recent", limit=MAX_SESSIONS
            )
            with contextlib.suppress(EngineUnavailable, EngineLost, EngineTimeout):
                latest.sessions = (await self._engine.sessions(question, timeout_s=PERIOD_S)).sessions
                latest.as_of_s = now
                latest.activity = activity
            for other in [name for name, old in self._latest_sessions.items() if now - old.asked_s > 4 * IDLE_S]:
                del self._latest_sessions[other]
        return latest


@dataclass(slots=True)
class _TurnNow:
    begun_s: float  # wall clock
    ended_s: float = math.inf  # monotonic


@dataclass(slots=True)
class _LatestSessions:
    """The sessions that a tenant used last. They need not be asked for again while `_activity(stats)` equals
    `activity`."""

    sessions: list[SessionInfo] = field(default_factory=list)
    asked_s: float = -math.inf  # monotonic
    as_of_s: float = -math.inf  # when the question was asked whose answer `sessions` is
    activity: tuple[object, ...] | None = None


def _activity(stats: Stats | None) -> tuple[object, ...] | None:
    """Return a value that changes when blocks have moved, or sessions were added or deleted."""
    if stats is None:
        return None
    counts = (stats.steps, stats.sessions, stats.in_flight, stats.hbm_pages_free, stats.hbm_pages_cached)
    return (*counts, stats.tier_bytes, stats.moved_bytes, stats.evictions)


class Watcher:
    """One open page that watches. The events that wait to be sent to it are bounded: the oldest are dropped."""

    def __init__(self, tenant: str, *, sees_all: bool, on_close: "Callable[[Watcher], None]") -> None:
        self.tenant = tenant
        self.sees_all = sees_all
        self.turns: deque[dict[str, Any]] = deque(maxlen=MAX_TURNS)
        self._news = asyncio.Event()
        self._on_close = on_close

    def hear(self, turn: dict[str, Any]) -> None:
        self.turns.append(turn)
        self._news.set()

    def take(self) -> list[dict[str, Any]]:
        self._news.clear()
        turns = list(self.turns)
        self.turns.clear()
        return turns

    async def wait(self, timeout_s: float) -> None:
        """Wait until an answer has begun that the page has not been told of, at most `timeout_s`."""
        # Not wait_for: that of Python 3.11 forgets a cancellation that comes together with the news, and who left would
        # be told for ever.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
            await asyncio.sleep(GATHER_S)

    def close(self) -> None:
        self._on_close(self)


async def events(
    live: Live, watcher: Watcher, *, is_open: Callable[[], bool]
) -> AsyncGenerator[tuple[str, object], None]:
    """Yield (name of the event, its data): `turns` with the answers that have begun since the previous `turns` event,
    and `state` with the server's state: every PERIOD_S until LINGER_S after its last change, then every IDLE_S. Ends
    when `is_open()` is false."""
    due_s = time.monotonic()
    sent: dict[str, Any] = {}
    sent_s = changed_s = -math.inf
    while is_open():
        if turns := watcher.take():
            yield "turns", turns
        now = time.monotonic()
        if now >= due_s:
            due_s = now + PERIOD_S
            state = await live.state(watcher)
            if state | {"at": 0} != sent:
                sent, changed_s = state | {"at": 0}, now
            if now - changed_s < LINGER_S or now - sent_s >= IDLE_S:
                sent_s = now
                yield "state", state
        await watcher.wait(max(0.01, due_s - time.monotonic()))


def snapshot(engine: EnginePort, *, tenant: str, sees_all: bool) -> dict[str, Any]:
    """Return the part of the engine's last heartbeat that a tenant may see. sees_all: whether it may see all tenants'
    data."""
    stats, model = engine.stats, engine.model
    shown: dict[str, Any] = {
        "engine": str(engine.state),
        "scope": "all" if sees_all else "own",
        "model": None if model is None else model.name,
        "tiers": None,
        "moved_bytes": None,
        "running": None,
        "queue": None,
        "codec": None,
    }
    if stats is None or model is None:
        return shown
    if sees_all:
        shown["tiers"] = tiers_of(stats, model)
        shown["moved_bytes"] = stats.moved_bytes
        shown["running"] = stats.running
        shown["codec"] = _codec(stats, model)
    shown["queue"] = _queue(stats, tenant, sees_all=sees_all)
    return shown


def _codec(stats: Stats, model: ModelInfo) -> dict[str, Any] | None:
    """Return the state of the KV codec in use; None if KV is stored without loss."""
    if not model.lossy_codec and not stats.codec_condemned:
        return None
    checks = stats.codec_checks
    return {
        "name": model.codec,
        "is_on": codec_in_use(model, stats) != "raw",
        "checks": 0 if checks is None else sum(checks.counts),
        "recent_divergence": None if checks is None else checks.recent,
    }


def tiers_of(stats: Stats, model: ModelInfo) -> dict[str, dict[str, int]]:
    """Return tier -> its bytes in use and its capacity in bytes."""
    page_bytes = model.page_size * model.hbm_bytes_per_token
    hbm = {
        "used_bytes": (stats.hbm_pages_total - stats.hbm_pages_free) * page_bytes,
        "capacity_bytes": stats.hbm_pages_total * page_bytes,
    }
    return {"hbm": hbm} | {
        tier: {"used_bytes": stats.tier_bytes.get(tier, 0), "capacity_bytes": capacity}
        for tier, capacity in stats.tier_capacity.items()
    }


def _queue(stats: Stats, tenant: str, *, sees_all: bool) -> dict[str, Any] | None:
    state = stats.scheduler
    if state is None:
        return None
    front = [info for info in state.front if sees_all or info.tenant == tenant][:MAX_WAITING]
    return {
        "policy": state.policy,
        "waiting": stats.waiting if sees_all else len(front),
        "front": [_waiting(info) for info in front],
    }


def _waiting(info: WaitingInfo) -> dict[str, Any]:
    fields = msgspec.structs.asdict(info)
    del fields["tenant"]
    return fields | {"waiting_s": round(info.waiting_s, 3)}


def _session(info: SessionInfo) -> dict[str, Any]:
    return {
        "id": info.session_id,
        "tokens": info.tokens,
        "truncated_tokens": info.truncated_tokens,
        "blocks": info.blocks,
        "bytes": info.bytes,
        "last_used_at": round(info.last_used_s, 3),
        "pinned": info.pinned,
        "running": info.running,
    }


def _begun(turn: ObservedTurn, known: _TurnNow, *, is_running: bool) -> dict[str, Any]:
    """Return what is shown of a session that the engine does not list. Its tokens are the prompt's, before anything is
    truncated; that it has no tier tells the page that no more is known."""
    return {
        "id": turn.session_id,
        "tokens": len(turn.token_ids),
        "truncated_tokens": 0,
        "blocks": {},
        "bytes": {},
        "last_used_at": round(known.begun_s, 3),
        "pinned": False,
        "running": is_running,
    }
