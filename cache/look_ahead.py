"""Tells the eviction policies which turns come next, by the queue and by the clock, and has their KV fetched into DRAM
early."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.blocks.table import BlockRow, SessionName
from reprise.cache.rates import Rates
from reprise.cache.requests.running import Requests
from reprise.cache.sessions import SessionStore
from reprise.cache.tiers.hierarchy import Hierarchy

_RETRY_AFTER_S = 0.05  # time after which a session that found no room is tried again
_PIECE_S = 0.25  # most time of a fetch for an announced turn, which other fetches may have to wait for
_FIRST_PIECE_BLOCKS = 8  # before a disk was read it may be a hundred times slower than it is taken for
_LOOKED_UP_TOKENS = 4096  # most tokens of contexts looked up per step: well below a tenth of a millisecond


class LineChange(Protocol):
    """A difference between a line of waiting requests and an earlier one."""

    @property
    def joined(self) -> Sequence[str]:
        """The ids of requests that wait now and were not in the earlier line."""
        ...

    @property
    def left(self) -> Sequence[str]:
        """The request ids that are not in the line any more."""
        ...

    def apply(self, values: list[Any], value_of: Callable[[str], Any]) -> None:
        """Update in place a list that has one value per request. value_of: returns the value of a request that
        joined."""
        ...


class WaitingLine(Protocol):
    """The line of waiting requests that the scheduler passes: an immutable value that can tell what has changed since
    an earlier one. `reprise.scheduler.line.Line` implements it."""

    @property
    def version(self) -> int:
        """The number of this line. The first, empty line has 0; each later one has a higher number."""
        ...

    @property
    def members(self) -> Sequence[str]:
        """The waiting request ids, next first."""
        ...

    def since(self, before: Self | None) -> LineChange:
        """Return what has changed since an earlier line; None: since the empty line."""
        ...


def prefetch_window(available_bytes: int, session_bytes: float) -> int:
    """Return how many of the next turns may have their KV fetched from disk into DRAM: L_pw = C_mem / S_kv in the
    paper.

    available_bytes: DRAM available for prefetching. session_bytes: mean KV of a session over all tiers. While nothing
    is stored (session_bytes 0) there is nothing to fetch, and the result is 0.
    """
    if available_bytes <= 0 or session_bytes <= 0:
        return 0
    return int(available_bytes / session_bytes)


@dataclass(slots=True)
class _Errand:
    """A session that is expected, and the blocks that were fetched for it so far."""

    name: SessionName | None = None
    brought: set[BlockKey] = field(default_factory=set)


class LookAhead:
    """A planner for the CacheManager, which calls `plan` before a step, on the engine's thread, unless requests run,
    none waits and `has_news` is False. It finds which waiting or expected session comes next, and which of its KV has
    to be fetched into DRAM. The time of a call depends on what has changed in the queue, not on the queue's length."""

    def __init__(
        self,
        *,
        tiers: Hierarchy,
        sessions: SessionStore,
        running: Requests,
        rates: Rates,
        is_reading: Callable[[], bool],
        reuse: bool,
    ) -> None:
        """Set up. is_reading: returns whether a request waits for bytes from disk or Redis. reuse: whether stored KV is
        used at all; if not, nothing is fetched."""
        self._tiers, self._table, self._dram, self._fetches = tiers, tiers.table, tiers.dram, tiers.fetches
        self._sessions = sessions
        self._running = running
        self._rates = rates
        self._is_reading = is_reading
        self._reuse = reuse
        self._line: WaitingLine | None = None  # the line seen last; None: no request has waited yet
        self._version = 0  # version of the line that `plan` saw last
        self._announced: frozenset[SessionName] = frozenset()  # announced sessions that the policies know of
        self._announcements = 0  # `Announced.changes` at that time
        self._names: list[SessionName] = []  # the session of each waiting request, in line
        self._session_of: dict[str, SessionName] = {}  # waiting request -> its session
        self._brought: dict[str, set[BlockKey]] = {}  # request -> blocks that were fetched for it while it waits
        self._turns: Counter[SessionName] = Counter()  # session -> number of its waiting requests
        self._told = False  # whether the policies know all waiting sessions
        self._unseen: set[str] = set()  # waiting requests not yet looked at for what to fetch
        self._seen = 0, 0, 0  # (version, first, stop): all of this part of this line has been looked at
        self._next = 0  # place in line that was looked at again last
        self._try_regulars_s = self._try_successor_s = self._try_announced_s = -math.inf
        self._regular, self._successor, self._visitor = _Errand(), _Errand(), _Errand()
        self._most_in_piece = _FIRST_PIECE_BLOCKS  # blocks, whatever the rates say
        self._look: BlockKey | None = None  # the last block that was fetched to see what a slow disk is like by now

    def has_news(self, line: WaitingLine) -> bool:
        """Return whether `plan` has anything to do in a step in which requests run and none waits."""
        tiers = self._tiers
        if line.version != self._version or tiers.succession.is_foretold:
            return True
        return len(tiers.announced) > 0 or tiers.announced.changes != self._announcements

    def plan(self, line: WaitingLine, starting: int, now: float) -> None:
        """Look ahead (AttentionStore §3.3): tell the policies which sessions come, and fetch for them. Nothing is
        fetched for the first `starting` requests in line: they get a place in the batch and load for themselves, layer
        by layer."""
        announced = self._tiers.announced
        announced.expire(now)
        if line.version != self._version or announced.changes != self._announcements:
            self._tell_policies(self._follow(line), now)
        has_below = self._tiers.disk.capacity_bytes or self._tiers.redis.is_on
        if has_below and self._reuse and self._sessions.mean_bytes:
            if line.members:
                self._fetch_ahead(line, starting)
            else:
                if not self._running:
                    self._fetch_for_regulars(now)
                if self._tiers.succession.is_foretold:
                    self._fetch_for_successor(now)
            if announced:
                self._fetch_for_announced(now)

    def _tell_policies(self, changed: set[SessionName], now: float) -> None:
        """Tell the policies of all waiting sessions, not only of as many as the tiers can hold. Even the last session
        in the queue will certainly come, so it should stay rather than sessions that may never come. Announced sessions
        come after the queue. changed: sessions that joined or left the queue. now: in seconds."""
        announced = self._tiers.announced
        before, self._announced = self._announced, frozenset(announced.names)
        self._announcements = announced.changes
        changed = {name for name in changed | (before ^ self._announced) if self._is_news(name, changed, before)}
        told, self._told = self._told, bool(self._sessions.mean_bytes)
        if not self._told:
            return
        repeats = len(self._turns) < len(self._names) or self._announced
        upcoming = list(dict.fromkeys([*self._names, *announced.names])) if repeats else self._names[:]
        for policy in self._tiers.policies:
            policy.look_ahead(upcoming, changed if told else None)
        self._tiers.returns.advance(now)

    def _is_news(self, name: SessionName, moved: set[SessionName], before: frozenset[SessionName]) -> bool:
        """Return whether a session is expected now and was not before, or the other way round. moved: sessions that
        joined or left the queue. before: the sessions that were announced before."""
        waits = name in self._turns
        waited = waits != (name in moved)
        return (waited or name in before) != (waits or name in self._announced)

    def _follow(self, line: WaitingLine) -> set[SessionName]:
        """Update the record of the waiting requests. Returns the sessions that have joined or left the queue."""
        if line.version == self._version:
            return set()
        change, self._line, self._version = line.since(self._line), line, line.version
        joined, left, known = change.joined, change.left, self._session_of
        known.update((request_id, self._running[request_id].session) for request_id in joined)
        change.apply(self._names, known.__getitem__)
        self._unseen.update(joined)
        self._unseen.difference_update(left)
        touched = {known[request_id] for request_id in (*joined, *left)}
        were = {session for session in touched if session in self._turns}
        self._turns.update(known[request_id] for request_id in joined)
        self._turns.subtract(known.pop(request_id) for request_id in left)
        for request_id in left:
            self._brought.pop(request_id, None)
        for session in touched:
            if not self._turns[session]:
                del self._turns[session]
        return {session for session in touched if (session in self._turns) != (session in were)}

    def _fetch_ahead(self, line: WaitingLine, starting: int) -> None:
        """Fetch from disk and Redis into DRAM for the next turns, except for the first `starting` in line. Turns that
        are new in the prefetch window (as many next turns as DRAM has room for) come first, then the others in turn,
        because there may have been no room for all of their KV."""
        window = prefetch_window(self._dram.room_bytes, self._sessions.mean_bytes)
        waiting = line.members
        end = min(len(waiting), starting + window + 1)  # the last gets what there is room for, from its head on
        left = _LOOKED_UP_TOKENS
        version, first, last = self._seen
        if self._unseen and not (version == line.version and first <= starting and end <= last):
            for request_id in waiting[starting:end]:
                if request_id in self._unseen:
                    left -= len(self._running[request_id].token_ids)
                    if not self._fetch_for(request_id):
                        return  # nor is there room for later ones
                    self._unseen.discard(request_id)
                    if left <= 0:
                        return
            self._seen = line.version, starting, end
        for _ in range(starting, end):
            if left <= 0:
                return
            self._next = self._next + 1 if starting <= self._next < end - 1 else starting
            request_id = waiting[self._next]
            left -= len(self._running[request_id].token_ids)
            if not self._fetch_for(request_id):
                return

    def _fetch_for_regulars(self, now: float) -> None:
        """Fetch into DRAM for a session that comes at regular intervals and is due. Fetches only while no request runs:
        during a step, a fetch costs that step as much as it saves a later one. Fetches for one session at a time, and
        evicts only sessions that are expected later. A session that finds no room is tried again, because the turn of
        an earlier one may make room."""
        if now < self._try_regulars_s or not self._dram.most_rows:
            return
        regulars = self._tiers.regulars
        name = regulars.due(now)
        if name is None:
            return
        if self._run_errand(self._regular, name):
            regulars.served()
        else:
            self._try_regulars_s = now + _RETRY_AFTER_S

    def _fetch_for_successor(self, now: float) -> None:
        """Fetch into DRAM for the session that comes next where sessions take turns. Fetches during decoding too: that
        slows a few tokens of one answer, and shortens the wait for the next turn's first token. Does not fetch while a
        prompt is computed, because its first token is waited for now."""
        succession = self._tiers.succession
        name = succession.next()
        if name is None or now < self._try_successor_s or not self._dram.most_rows:
            return
        if any(len(context.token_ids) > context.rows.computed + 1 for context in self._running.values()):
            return
        if self._running.of(name) or self._run_errand(self._successor, name):
            succession.served()
        else:
            self._try_successor_s = now + _RETRY_AFTER_S

    def _fetch_for_announced(self, now: float) -> None:
        """Fetch into DRAM for a session whose next turn was announced. Fetches beside running turns, but in pieces, and
        one only while nothing else is fetched and no request waits for bytes: what a turn waits for comes after one
        piece at most."""
        name = self._tiers.announced.next()
        if name is None or now < self._try_announced_s or not self._dram.most_rows:
            return
        if self._fetches.in_flight or self._is_reading():
            return
        slowest = min(self._rates.bytes_per_s(f"{tier}_to_dram") for tier in self._tiers_below())
        most = max(1, min(self._most_in_piece, int(_PIECE_S * slowest) // self._dram.rows.slot_bytes))
        if self._running.of(name) or self._run_errand(self._visitor, name, most):
            self._tiers.announced.served(name)
        elif self._fetches.in_flight > 0:
            self._most_in_piece = 2 * most  # the next piece is ordered after this one was measured
        else:
            self._try_announced_s = now + _RETRY_AFTER_S

    def _tiers_below(self) -> list[str]:
        return [*(["disk"] if self._tiers.disk.capacity_bytes else []), *(["redis"] if self._tiers.redis.is_on else [])]

    def _run_errand(self, errand: _Errand, name: SessionName, most: int | None = None) -> bool:
        """Fetch what the expected session `name` has on disk or in Redis, as far as there is room, and at most `most`
        blocks. Returns False if some of it was left."""
        if errand.name != name:
            errand.name, errand.brought = name, set()
        session = self._sessions.contexts.get(name)
        done = self._bring([] if session is None else session.all_keys, name, errand.brought, most)
        if done:
            errand.name = None
        return done

    def _fetch_for(self, request_id: str) -> bool:
        """Fetch what a waiting request has on disk or in Redis. Returns False if there was no room for all of it."""
        context = self._running[request_id]
        if context.rows.pages:
            return True  # admitted ahead of its turn: what it needs is on its way to HBM
        return self._bring(context.chain(), context.session, self._brought.setdefault(request_id, set()))

    def _bring(
        self, keys: Sequence[BlockKey], name: SessionName, brought: set[BlockKey], most: int | None = None
    ) -> bool:
        """Fetch the blocks of `keys` that are only on disk or in Redis, as far as there is room and at most `most`, and
        note them in `brought`. Returns False if some were left.

        Fetches nothing once a block in `brought` has been evicted again: DRAM is then needed for others, and the disk
        would be read for as long as the turn waits.
        """
        fetches = self._fetches
        missing = [
            row
            for row in self._table.matched(keys)
            if row.page is None and not row.in_dram and not fetches.is_fetching(row.key)
        ]
        if not missing or any(row.key in brought for row in missing):
            return True
        worth = [tier for tier in ("disk", "redis") if self._is_worth(tier, missing, name, brought)]
        wanted = [row for row in missing if row.medium in worth]
        has_room = fetches.fetch(wanted[:most], name)
        brought.update(row.key for row in wanted if fetches.is_fetching(row.key))
        return has_room and (most is None or len(wanted) <= most)

    def _is_worth(self, tier: str, missing: Sequence[BlockRow], name: SessionName, brought: set[BlockKey]) -> bool:
        """Return whether to fetch the missing blocks of a tier. Blocks that are not worth it are noted in `brought`.
        Now and then the first of them is fetched all the same, to measure the tier again."""
        rows = [row for row in missing if row.medium == tier]
        if not rows:
            return False
        direction = f"{tier}_to_dram"
        if self._rates.is_worth_fetching(direction, len(rows) * self._dram.rows.slot_bytes, len(rows) * BLOCK_TOKENS):
            return True
        brought.update(row.key for row in rows)
        if not self._rates.is_look_due(direction):
            self._rates.passed_over(direction)
        elif self._look is None or not self._fetches.is_fetching(self._look):
            self._look = rows[0].key
            self._fetches.fetch(rows[:1], name)
        return False
