"""CacheManager: the cache as its callers see it. Events and `now` in, moves out; touches no bytes. It knows
what happens when; how is the business of its parts, each in a file of its own."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from cache.blocks.context import RunningContext, SessionContext
from cache.blocks.keys import BLOCK_TOKENS
from cache.blocks.scores import Scores
from cache.blocks.stored import ExtentInfo, SessionRecord
from cache.blocks.table import CacheTable, SessionName
from cache.blocks.truncate import CutRules
from cache.look_ahead import LookAhead, WaitingLine
from cache.moves import CapturePiece, Deleted, Event, Fetched, Late, Loaded, Lost, Move, Saved, Transferred, Written
from cache.policies.eviction_policy import PolicyFactory
from cache.rates import LoadProgress, Rates
from cache.requests.loading import Loads
from cache.requests.matching import Matcher
from cache.requests.opening import ClientCut, ContextOpener, DomainOf, Truncation
from cache.requests.placing import Placer
from cache.requests.provenance import report_prompt
from cache.requests.publishing import Publisher
from cache.requests.running import Requests
from cache.requests.saving import Saver
from cache.requests.siblings import Siblings
from cache.returns.return_times import ReturnTimes
from cache.sessions import SessionStore
from cache.stats import CacheStats, ResidencyValue, TokensBySource
from cache.tiers.dram import DramTier
from cache.tiers.hbm import HbmPool
from cache.tiers.hierarchy import Hierarchy
from cache.tiers.pages import PageAllocator


class CacheManager:
    """Implements `scheduler.ports.CacheView` and keeps the promise behind it: a row that is counted as cached holds the
    KV of exactly these tokens behind exactly this prefix by the time it is read, and a pinned page is written by one
    request alone.

    A request is opened on arrival, admitted by the scheduler, committed after every step and closed at its end.
    Everything it finished stays findable in the cache table until its room is needed. Single-threaded.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        bytes_per_token: int,
        prefer_contiguous: bool,
        reuse: bool,
        policy: PolicyFactory,
        domain_of: DomainOf,
        session_ttl_s: float,
        max_sessions: int,
        truncation: Truncation,
        num_slots: int,
        dram_slots: int,
        disk_bytes: int,
        free_buffer: float,
        hbm_high_water: float,
        hbm_low_water: float,
        rates: Rates,
        arrived: Callable[[int], float],
        progress: Callable[[int], LoadProgress | None],
        unix_offset_s: float,
        exact: bool,
    ) -> None:
        if page_size % BLOCK_TOKENS:
            raise ValueError(f"page size {page_size} is not a multiple of the block, {BLOCK_TOKENS}")
        self.page_size = page_size
        self.stats = CacheStats()
        self.table = CacheTable()
        self.pages = PageAllocator(num_pages=num_pages, prefer_contiguous=prefer_contiguous)
        self.rates = rates
        returns = ReturnTimes()
        self._scores = Scores(table=self.table)
        self.hbm = HbmPool(
            table=self.table,
            pages=self.pages,
            page_size=page_size,
            bytes_per_token=bytes_per_token,
            policy=policy(returns),
            naive_positions=truncation.mode == "naive",
            has_lower=num_slots > 0,
            scores=self._scores,
            high_water=hbm_high_water,
            low_water=hbm_low_water,
            stats=self.stats,
            gone=self.table.forget,
        )
        self.lower = DramTier(
            table=self.table,
            num_slots=num_slots,
            dram_slots=dram_slots,
            slot_bytes=bytes_per_token * BLOCK_TOKENS,
            disk_bytes=disk_bytes,
            free_buffer=free_buffer,
            dram_policy=policy(returns),
            disk_policy=policy(returns),
            stats=self.stats,
            gone=self.table.forget,
        )
        self._reuse = reuse
        self._bytes_per_token = bytes_per_token
        self._now = -math.inf  # of the last `plan`
        self._running = Requests()
        tiers = Hierarchy(table=self.table, pages=self.pages, hbm=self.hbm, lower=self.lower, returns=returns)
        self._tiers = tiers
        self._sessions = SessionStore(
            tiers=tiers,
            running=self._running,
            domain_of=domain_of,
            session_ttl_s=session_ttl_s,
            max_sessions=max_sessions,
            bytes_per_token=bytes_per_token,
            unix_offset_s=unix_offset_s,
        )
        self._opener = ContextOpener(
            table=self.table,
            sessions=self._sessions.contexts,
            truncation=truncation,
            domain_of=domain_of,
            stats=self.stats,
        )
        self._matcher = Matcher(
            table=self.table,
            hbm=self.hbm,
            rates=rates,
            reuse=reuse,
            bytes_per_token=bytes_per_token,
            only_slots=exact and num_slots > 0,
        )
        self._siblings = Siblings(tiers=tiers)
        self._loads = Loads(
            tiers=tiers,
            siblings=self._siblings,
            running=self._running,
            rates=rates,
            arrived=arrived,
            progress=progress,
            bytes_per_token=bytes_per_token,
            stats=self.stats,
        )
        self._placer = Placer(
            tiers=tiers, matcher=self._matcher, siblings=self._siblings, loads=self._loads, reuse=reuse
        )
        self._saver = Saver(tiers=tiers, page_size=page_size, exact=exact)
        self._publisher = Publisher(
            tiers=tiers,
            siblings=self._siblings,
            saver=self._saver,
            loads=self._loads,
            page_size=page_size,
            reuse=reuse,
        )
        self._ahead = LookAhead(tiers=tiers, sessions=self._sessions, running=self._running, rates=rates, reuse=reuse)

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(
        self,
        request_id: str,
        tenant: str,
        salt: str,
        session_id: str,
        stream: list[int],
        rules: CutRules,
        reserve: int,
        client_cut: ClientCut | None,
        now: float,
    ) -> list[int]:
        """A request arrived with the conversation `stream`. Returns its context, cut so that it and `reserve` tokens
        fit the window: the sequence's own list from now on. Raises DoesNotFit."""
        name = (tenant, salt, session_id)
        context = self._opener.open(request_id, name, stream, rules, reserve, client_cut)
        self._running.begin(context)
        self._tiers.used(name, now, len(context.token_ids))
        return context.token_ids

    def compute_all(self, request_id: str) -> None:
        """A request that was opened just now wants to see every token of its prompt: nothing of it is reused. What is
        stored of it stays."""
        context = self._running[request_id]
        context.recompute_from, context.miss_reason = 0, "prompt_logprobs"

    def context(self, request_id: str) -> RunningContext:
        return self._running[request_id]

    def resident_tokens(self, request_id: str) -> int:
        """See CacheView."""
        context = self._running[request_id]
        return self._matcher.choose(context, self._matcher.match(context)).num_tokens

    def residency(self, request_id: str) -> ResidencyValue:
        """See CacheView."""
        context = self._running[request_id]
        if context.pages:
            return self._matcher.on_the_way(context, self._loads.to_come(context), self._loads.stall_s(context))
        return self._matcher.residency(context)

    def waits_for_sibling(self, request_id: str, *, is_due: bool) -> bool:
        """See CacheView. One computation, load or fetch, many waiters."""
        context = self._running[request_id]
        if not self._reuse:
            return False
        if self._loads.is_outlived(context):
            return True
        if not self._siblings.waits(context):
            return False
        return not (is_due and self._loads.is_fetch_late(context, self._now)) or self._siblings.waits(context)

    def admit(self, request_id: str, num_tokens: int) -> int | None:
        """See CacheView. What is matched is shared page by page where whole pages match; the rest is copied, loaded, or
        taken over in place if nobody else can see it."""
        return self._placer.admit(self._running[request_id], num_tokens)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """See CacheView."""
        context = self._running[request_id]
        missing = self.hbm.num_pages(context.computed + num_tokens) - len(context.pages)
        if missing <= 0:
            return True
        if not self.hbm.make_room(missing):
            return False
        for done in range(missing):
            context.pages.append(self.pages.take(context.pages[-1] if context.pages else None, missing - done))
        return True

    def without_room(self, request_ids: Iterable[str]) -> list[str]:
        """See CacheView."""
        running, page_size = self._running, self.hbm.page_size
        return [
            request_id
            for request_id in request_ids
            if (context := running[request_id]).computed >= len(context.pages) * page_size
        ]

    def capture(self, request_id: str, num_tokens: int, batch_row: int) -> list[CapturePiece]:
        """Where the KV of the next `num_tokens` rows, which a step has just computed as rows batch_row.. of its batch,
        is to be saved. Call it before `commit`."""
        return self._saver.capture(self._running[request_id], num_tokens, batch_row)

    def commit(self, request_id: str, num_tokens: int) -> None:
        """A step wrote the next `num_tokens` rows; blocks that are full now become findable."""
        self._publisher.commit(self._running[request_id], num_tokens)

    def report(self, request_id: str) -> TokensBySource:
        """Explains the prompt of a request that was just admitted for the first time."""
        context = self._running[request_id]
        name = context.session
        return report_prompt(
            context, self.sessions.get(name), self.table, reuse=self._reuse, expired=self._sessions.expired.get(name)
        )

    def preempt(self, request_id: str) -> None:
        """See CacheView. The open block is kept too, so an early resumption computes nothing again."""
        context = self._running[request_id]
        context.open_hint, context.open_place = self._publisher.release(context), context.computed // BLOCK_TOKENS
        context.reached = max(context.reached, context.computed)
        context.pages, context.computed, context.sealed = [], 0, 0
        self._running.gave_way()

    def room_is_coming(self) -> bool:
        """See CacheView."""
        return self._loads.frees_room()

    def withdraw(self, request_id: str) -> None:
        """See CacheView."""
        context = self._running[request_id]
        before = context.reached, context.open_hint, context.open_place
        self.preempt(request_id)
        context.reached, context.open_hint, context.open_place = before

    def truncate(self, request_id: str) -> int:
        """A running request has filled the window: drop history in the middle of its generation. It has to be admitted
        anew. Returns the tokens dropped. Raises DoesNotFit."""
        self.preempt(request_id)
        return self._opener.shorten(self._running[request_id])

    def distrust(self, request_id: str) -> None:
        """What a request stands on gave a result that cannot be: none of its blocks is found again, whoever computed
        them. Requests that run on them keep their pages, and publish nothing that stands on them."""
        keys = self._running[request_id].chain()
        for key in keys:
            self._tiers.forget(key)
        for context in self._running.values():
            if keys and context.chain()[:1] == keys[:1]:
                context.trusted = False

    def take_failed(self) -> list[str]:
        """Requests whose load failed since the last call: what they computed on it is void. They have to be preempted
        by `void`, and find what is left of their history when they are admitted again."""
        return self._loads.take_failed()

    def void(self, request_id: str) -> None:
        """Give a request's room back and publish nothing of it: its load has failed."""
        self._publisher.void(self._running[request_id])
        self._running.gave_way()

    def stall_s(self, request_id: str) -> float:
        """See CacheView."""
        return self._loads.stall_s(self._running[request_id])

    def patience_s(self, request_id: str) -> float:
        """How much longer a step may wait for the next layer of a request's load before that is given up."""
        return self._loads.patience_s(self._running[request_id])

    def stalls_s(self) -> dict[str, float]:
        """See CacheView."""
        return self._loads.stalls_s()

    def expect(self, request_id: str, score: int) -> None:
        """See CacheView."""
        self._scores.set(self._running[request_id], score)

    def close(self, request_id: str, num_tokens: int, now: float) -> None:
        """A request ended and its context is its first `num_tokens` tokens (a stop string may have cut it). Pages that
        nothing else needs are free; what was finished stays cached; the session stands where the request stopped, or as
        it was if nothing was computed."""
        context = self._running.end(request_id)
        self._scores.clear(request_id)
        self._loads.closed(request_id)
        reached = min(max(context.computed, context.reached), num_tokens)
        open_key = None
        if context.pages:
            context.computed = min(context.computed, num_tokens)
            open_key = self._publisher.release(context)
        elif context.open_place == reached // BLOCK_TOKENS and context.open_hint is not None:
            row = self.table.get(context.open_hint)
            open_key = row.key if row is not None and len(row.token_ids) == reached % BLOCK_TOKENS else None
        if reached:
            self._sessions.remember(context, reached, open_key, now)
        else:
            self._sessions.hand_over(context)

    # --- sessions -----------------------------------------------------------------------------------------------------

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    @property
    def sessions(self) -> Mapping[SessionName, SessionContext]:
        """Oldest use first. Read only."""
        return self._sessions.contexts

    @property
    def mean_session_tokens(self) -> float:
        """Of a session's context, the latest counting most; 0 while there is none."""
        return self._sessions.mean_bytes / self._bytes_per_token

    def is_running(self, name: SessionName) -> bool:
        return self._sessions.is_running(name)

    def is_conversing(self, tenant: str, session_id: str) -> bool:
        """Whether a request of a session by this id runs or waits, whatever its salt, if only its first."""
        return self._sessions.is_conversing(tenant, session_id)

    def blocks_of(self, name: SessionName) -> dict[str, int]:
        """tier -> blocks of a session's context that are there."""
        return self._sessions.per_tier(name, lambda row: 1)

    def bytes_of(self, name: SessionName) -> dict[str, int]:
        return self._sessions.per_tier(name, lambda row: row.size_bytes)

    def configure(self, name: SessionName, *, pinned: bool | None, ttl_s: float | None) -> None:
        """Pinned sessions never expire and their saved blocks are not evicted. None leaves a value as it is."""
        self._sessions.configure(name, pinned=pinned, ttl_s=ttl_s)

    def prefetch(self, name: SessionName, now: float) -> None:
        """A turn of this session is expected: bring it up to DRAM."""
        self._sessions.prefetch(name, now)

    def sweep(self, now: float) -> int:
        """Forget sessions not used for their time to live. Returns how many."""
        return self._sessions.sweep(now)

    def delete(self, name: SessionName, waiter: str) -> str | None:
        """Remove a session and what only it has from every tier; `take_deleted` names `waiter` when the bytes are gone.
        Returns why not: `not_found`, or `busy` while a request of it runs."""
        return self._sessions.delete(name, waiter)

    def take_deleted(self) -> list[str]:
        """Those who waited for a deletion that is done."""
        return self._sessions.take_deleted()

    def undeleted(self, tenant: str, session_id: str) -> list[SessionName]:
        """Deleted sessions of this name, with their salts, of which the disk has not deleted all."""
        return self.lower.extents.undone(tenant, session_id)

    def take_undeleted(self) -> list[str]:
        """Those who waited for one that the disk would not do: bytes may still be there. It is tried again."""
        return self._sessions.take_undeleted()

    def restore(self, extents: Iterable[ExtentInfo], records: Iterable[SessionRecord], now: float) -> None:
        """What a tier that outlives the process has kept: its blocks are found again, and its sessions."""
        self._sessions.restore(extents, records, now)

    # --- events and moves ---------------------------------------------------------------------------------------------

    def on_event(self, event: Event, now: float) -> None:
        """Something that was ordered has ended."""
        match event:
            case Saved():
                for page in self.lower.on_saved(event.ticket):
                    self.pages.unpin(page)
            case Loaded():
                self._loads.on_loaded(event)
            case Fetched():
                self.lower.on_fetched(event.job_id, event.failed)
            case Written():
                self.lower.on_written(event.job_id, event.extent, now)
            case Deleted():
                self.lower.extents.on_deleted(event.job_id, event.problem, now)
            case Lost():
                self.lower.extents.lost(event.extent_ids)
            case Transferred():
                self.stats.count_move(event.direction, event.num_bytes, event.seconds)
                self.rates.moved(event.direction, event.num_bytes, event.seconds)
            case Late():
                self.rates.late(event.direction, event.num_bytes, event.seconds)
        if self._sessions.deleting:
            self._sessions.go_on()

    def plan(self, line: WaitingLine, starting: int, now: float) -> None:
        """Look ahead (AttentionStore §3.3): tell the policies what comes, fetch for it, write what is behind, and give
        up loads that have come to be dearer than computing. The first `starting` in line have a place in the batch:
        they load for themselves, layer by layer."""
        self._now = now
        self._loads.give_up()
        self._saver.catch_up()
        self._ahead.plan(line, starting, now)
        self.hbm.offload()

    def take_moves(self) -> list[Move]:
        """The moves decided since the last call, to be carried out in this order before the next step."""
        moves = [*self._placer.copies, *self.lower.moves]
        self._placer.copies, self.lower.moves = [], []
        return moves

    def borrow(self, num_pages: int) -> list[int] | None:
        """Pages for the engine's own use, until `give_back`. None if there is no room."""
        if not self.hbm.make_room(num_pages):
            return None
        pages: list[int] = []
        for done in range(num_pages):
            pages.append(self.pages.take(pages[-1] if pages else None, num_pages - done))
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.pages.unpin(page)

    @property
    def changes(self) -> int:
        """Another number than before: a request has come or gone, or given its pages back."""
        return self._running.changes

    def is_roomy(self, num_running: int) -> bool:
        """Whether a step or two of so many who decode need nothing to leave any tier."""
        return self.pages.num_free >= 2 * num_running > 0 and not self.lower.is_pressed

    @property
    def num_leases(self) -> int:
        """Pages pinned by requests and transfers; zero when nothing runs."""
        return self.pages.num_pinned

    @property
    def in_flight(self) -> int:
        """Saves, loads, fetches, writes and deletions under way; zero at idle."""
        return self.lower.in_flight + len(self._loads.under_way)
