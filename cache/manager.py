"""CacheManager: sessions, running contexts, and what moves between the tiers for them. Events and `now` in, moves out;
touches no bytes."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cache.allocator import PageAllocator
from cache.block import BLOCK_TOKENS, BlockKey, KeyDomain
from cache.context import Lineage, RunningContext, SessionContext, digest_of
from cache.extent import ExtentInfo, SessionRecord
from cache.hbm import MAX_HOPS, HbmPool, Match, keys_of
from cache.lower import LowerTiers
from cache.plan import (
    BlockLoad,
    CapturePiece,
    Deleted,
    Event,
    Fetched,
    FillFromPage,
    FillFromSlot,
    LoadBlocks,
    Loaded,
    Move,
    ReleaseLoad,
    Saved,
    Transferred,
    Written,
)
from cache.policies.base import EvictionPolicy
from cache.rates import LoadOption, Rates, choose_load
from cache.stats import CacheStats, PromptReport, Residency
from cache.table import BlockRow, CacheTable, SessionName, common_prefix
from cache.truncate import CutRules, DoesNotFit, Range, apply_cuts, map_offset, merge_cuts, plan_cut
from cache.windows import eviction_window, prefetch_window

DomainOf = Callable[[str, str], KeyDomain]
"""(tenant, cache salt) -> the domain of its keys."""

_MIN_SHIFTED_BLOCKS = 4  # below that a client's own truncation is not worth the echo of what it dropped


@dataclass(frozen=True, slots=True)
class Truncation:
    """The server's side of truncation (AttentionStore §3.4)."""

    window: int  # tokens a context may have
    ratio: float  # of the window, dropped at an overflow
    mode: str  # decoupled | recompute | naive


@dataclass(frozen=True, slots=True)
class ClientCut:
    """What a client has dropped itself (DESIGN "Client-side truncation"): of `stream`, the conversation with nothing
    dropped, it sent the first `keep` tokens and those from `resume` on."""

    stream: list[int]
    keep: int
    resume: int


@dataclass(frozen=True, slots=True)
class _Load:
    """A load under way. Its pages and slots are pinned until it has ended, whoever still wants it."""

    context: RunningContext
    blocks: tuple[BlockLoad, ...]


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
        policy: Callable[[], EvictionPolicy],
        domain_of: DomainOf,
        session_ttl_s: float,
        max_sessions: int,
        truncation: Truncation,
        num_slots: int,
        dram_slots: int,
        disk_bytes: int,
        free_buffer: float,
        rates: Rates,
        arrived: Callable[[int], float],
        unix_offset_s: float,
    ) -> None:
        if page_size % BLOCK_TOKENS:
            raise ValueError(f"page size {page_size} is not a multiple of the block, {BLOCK_TOKENS}")
        self.page_size = page_size
        self.stats = CacheStats()
        self.table = CacheTable()
        self.pages = PageAllocator(num_pages=num_pages, prefer_contiguous=prefer_contiguous)
        self.rates = rates
        self._arrived = arrived  # the share of a load that is in HBM
        self.hbm = HbmPool(
            table=self.table,
            pages=self.pages,
            page_size=page_size,
            bytes_per_token=bytes_per_token,
            policy=policy(),
            naive_positions=truncation.mode == "naive",
            has_lower=num_slots > 0,
            stats=self.stats,
            gone=self._gone,
        )
        self.lower = LowerTiers(
            table=self.table,
            num_slots=num_slots,
            dram_slots=dram_slots,
            slot_bytes=bytes_per_token * BLOCK_TOKENS,
            disk_bytes=disk_bytes,
            free_buffer=free_buffer,
            dram_policy=policy(),
            disk_policy=policy(),
            stats=self.stats,
            gone=self._gone,
        )
        self._policies = (self.hbm.policy, self.lower.dram_policy, self.lower.disk_policy)
        self._truncation = truncation
        self._bytes_per_token = bytes_per_token
        self._reuse = reuse
        self._domain_of = domain_of
        self._session_ttl_s = session_ttl_s
        self._max_sessions = max_sessions
        self._unix_offset_s = unix_offset_s
        self._sessions: OrderedDict[SessionName, SessionContext] = OrderedDict()  # oldest use first
        self._running: dict[str, RunningContext] = {}
        self._in_flight: dict[BlockKey, str] = {}  # blocks being computed or loaded -> the request that does it
        self._loads: dict[int, _Load] = {}
        self._failed: dict[str, None] = {}  # requests whose load failed, until `take_failed`
        self._copies: list[Move] = []
        self._mean_session_bytes = 0.0
        self._upcoming: list[SessionName] = []
        self._deleting: dict[SessionName, str] = {}  # session -> who waits; a save or a write of it has to end first

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
        context = None
        if client_cut is not None and self._truncation.mode != "recompute":
            context = self._shifted(request_id, name, client_cut, rules)
        if context is None:
            context = self._begin(request_id, name, stream, rules, rules.allowed)
        rules = context.rules
        if rules.allowed:
            starts = rules.message_starts
            self._cut(context, reserve, newest=starts[-1] if starts else len(context.stream) - 1)
        elif len(context.token_ids) >= self._truncation.window:
            raise DoesNotFit(f"{len(context.token_ids)} tokens, the window holds {self._truncation.window}")
        self._running[request_id] = context
        for policy in self._policies:
            policy.used(name, now)
        return context.token_ids

    def _begin(
        self, request_id: str, name: SessionName, stream: list[int], rules: CutRules, apply_known_cuts: bool
    ) -> RunningContext:
        """The context of a conversation: what its session had cut before stays cut."""
        session = self._sessions.get(name) if self._reuse else None
        cuts: list[Range] = []
        if session is not None and session.cuts and apply_known_cuts:
            end = session.cuts[-1][1]
            if len(stream) > end and digest_of(stream[:end]) == session.cut_digest:
                cuts = session.cuts
        tokens = apply_cuts(stream, cuts)
        lineage, known, open_hint = Lineage(self._domain_of(name[0], name[1])), 0, None
        if session is not None and (cuts or not session.cuts) and self._truncation.mode != "recompute":
            known = self._still_known(session, tokens)
            lineage = session.lineage.first(known)
            if known == len(session.keys):
                open_hint = session.open_key
        return RunningContext(
            request_id=request_id,
            session=name,
            token_ids=tokens,
            prompt_tokens=len(tokens),
            lineage=lineage,
            rules=rules,
            stream=stream,
            cuts=list(cuts),
            open_hint=open_hint,
            open_place=known,
            preset=known if cuts else 0,
            lost_lineage=bool(session and cuts and known < (session.lineage.joint or 0)),
        )

    def _shifted(self, request_id: str, name: SessionName, cut: ClientCut, rules: CutRules) -> RunningContext | None:
        """The client dropped messages itself: stand the request on the blocks it kept, a block's worth more than it
        sent where messages end inside of blocks. None if that spares too little."""
        moved = cut.resume - cut.keep

        def in_stream(offset: int) -> int:
            return offset if offset < cut.keep else offset + moved

        rules = CutRules(
            allowed=rules.allowed,
            keep_first=rules.keep_first,
            message_starts=tuple(in_stream(start) for start in rules.message_starts),
            important=tuple((in_stream(a), in_stream(b - 1) + 1) for a, b in rules.important),
        )
        context = self._begin(request_id, name, cut.stream, rules, apply_known_cuts=True)
        first = -(-map_offset(cut.keep, context.cuts) // BLOCK_TOKENS) * BLOCK_TOKENS
        last = map_offset(cut.resume, context.cuts) // BLOCK_TOKENS * BLOCK_TOKENS
        spared = len(context.keys) * BLOCK_TOKENS - last
        inside = any(a < cut.resume < b for a, b in context.cuts)  # it kept what is not there any more
        if inside or spared < _MIN_SHIFTED_BLOCKS * BLOCK_TOKENS:
            return None
        if first < last:
            self._drop(context, [(first, last)])
        context.shifted_tokens = len(context.keys) * BLOCK_TOKENS - min(first, last)
        return context

    def _still_known(self, session: SessionContext, tokens: list[int]) -> int:
        """How many leading blocks of a session's last context these tokens still begin with, as far as the blocks are
        stored: their tokens are known only then."""
        count = 0
        for count, key in enumerate(session.keys):
            start = count * BLOCK_TOKENS
            row = self.table.get(key)
            if row is None or row.token_ids.tolist() != tokens[start : start + BLOCK_TOKENS]:
                return count
        return len(session.keys)

    def _cut(self, context: RunningContext, reserve: int, newest: int) -> bool:
        """Drop what does not fit, in place. `newest` counts in the stream, as all of the rules do."""
        rules, tokens = context.rules, context.token_ids
        outside = [start for start in rules.message_starts if not any(a <= start < b for a, b in context.cuts)]
        more = plan_cut(
            len(tokens),
            window=self._truncation.window,
            ratio=self._truncation.ratio,
            reserve=reserve,
            keep_first=map_offset(rules.keep_first, context.cuts),
            newest=map_offset(newest, context.cuts),
            starts=[map_offset(start, context.cuts) for start in outside],
            marked=[(map_offset(a, context.cuts), map_offset(b, context.cuts)) for a, b in rules.important],
        )
        if not more:
            return False
        self.stats.truncated_tokens += sum(b - a for a, b in more)
        self._drop(context, more)
        return True

    def _drop(self, context: RunningContext, cuts: list[Range]) -> None:
        """Take ranges of whole blocks out of a context that stands on no pages."""
        context.cuts = merge_cuts(context.cuts, cuts)
        if self._truncation.mode == "recompute":
            context.lineage, context.open_hint = Lineage(context.domain), None
        else:
            self._cut_lineage(context, cuts)
        context.token_ids[:] = apply_cuts(context.token_ids, cuts)
        context.preset = len(context.keys)
        context.prompt_tokens = len(context.token_ids)

    def _cut_lineage(self, context: RunningContext, cuts: Sequence[Range]) -> None:
        # Keys behind that are of tokens whose KV nobody has computed; they would be taken for blocks that were kept.
        before = context.lineage.first(context.open_place)
        end = context.open_place * BLOCK_TOKENS
        if any(a <= end < b for a, b in cuts):
            context.open_hint = None
        context.open_place = map_offset(end, cuts) // BLOCK_TOKENS
        moved = context.open_hint is not None and cuts[0][0] < end
        context.lineage = before.without(cuts, context.open_hint if moved else None)

    def context(self, request_id: str) -> RunningContext:
        return self._running[request_id]

    def resident_tokens(self, request_id: str) -> int:
        """See CacheView."""
        context = self._running[request_id]
        return self._choose(context, self._match(context)).num_tokens

    def residency(self, request_id: str) -> Residency:
        """See CacheView."""
        context = self._running[request_id]
        if context.pages:
            return Residency(context.computed, {}, 0, len(context.token_ids) - context.computed)
        match = self._choose(context, self._match(context))
        tokens = self._tokens_by_tier(match)
        hbm = tokens.pop("hbm", 0)
        return Residency(
            hbm_tokens=hbm,
            lower_tokens=tokens,
            bytes_to_load=sum(tokens.values()) * self._bytes_per_token,
            missing_tokens=len(context.token_ids) - match.num_tokens,
        )

    def waits_for_sibling(self, request_id: str) -> bool:
        """Whether the next block this request needs is on its way: one computation or load, many waiters."""
        context = self._running[request_id]
        if context.awaited is not None and self._is_coming(context.awaited, request_id):
            return True  # a prompt may have many waiters, asked in every step: none walks it again for nothing
        context.awaited = None
        if not self._reuse:
            return False
        keys = context.chain()
        for block, key in enumerate(keys):
            row = self.table.get(key)
            if self._is_coming(key, request_id) and (row is None or not self.hbm.is_ready(row, block)):
                context.awaited = key
                return True
            if row is None:
                return False
        return False

    def _is_coming(self, key: BlockKey, request_id: str) -> bool:
        if self._in_flight.get(key, request_id) != request_id or self.lower.is_fetching(key):
            return True
        row = self.table.get(key)
        # Moving keys that are being saved would cost them a rounding, or a computation; the save ends in milliseconds.
        return row is not None and not row.is_saved and self.lower.is_saving(key) and row.page is None

    def admit(self, request_id: str, num_tokens: int) -> int | None:
        """See CacheView. What is matched is shared page by page where whole pages match; the rest is copied, loaded, or
        taken over in place if nobody else can see it."""
        context = self._running[request_id]
        assert not context.pages, "admitted twice"
        full = self._match(context)
        match = self._choose(context, full)
        pages_needed = self.hbm.num_pages(match.num_tokens + num_tokens)
        placement = self.hbm.place(context, match, pages_needed)
        if placement is None and self.pages.num_pinned == 0:
            # What is copied needs its room twice until the copy is made, and nobody's end will bring more: compute it.
            match = self.hbm.usable_in_place(match)
            placement = self.hbm.place(context, match, pages_needed)
        if placement is None:
            return None
        context.sources = self._tokens_by_tier(match)
        context.published = placement.moved
        self._copies += placement.copies
        if placement.taken_over is not None:
            taken = self.table.get(placement.taken_over)
            assert taken is not None
            self.hbm.leave(taken)
            if taken.is_nowhere:
                self.table.drop(taken.key)
        rows = [row for row, _ in match.used]
        for key in keys_of(rows, self.table):
            self._touch(key)
        if not context.lineage.is_held_by(len(match.rows), match.partial is not None):
            context.lineage = context.lineage.anew(len(match.rows))
            context.lost_lineage = True
        context.trusted = True
        context.computed = match.num_tokens
        context.sealed = len(match.rows)
        context.open_hint = match.partial.key if match.partial is not None else None
        context.open_place = len(match.rows)
        if self._reuse:
            prompt_blocks = context.prompt_tokens // BLOCK_TOKENS
            for key in context.chain()[len(match.rows) : prompt_blocks]:
                self._in_flight.setdefault(key, request_id)
        if placement.loads:
            self._start_load(context, placement.loads)
        return match.num_tokens

    def _touch(self, key: BlockKey) -> None:
        row = self.table.get(key)
        assert row is not None
        for policy, address in zip(self._policies, (row.page, row.slot, row.extent), strict=True):
            if address is not None:
                policy.touch(key)

    def _start_load(self, context: RunningContext, loads: Sequence[BlockLoad]) -> None:
        blocks = []
        for load in loads:
            if load.slot is not None:
                self.lower.pin(load.slot)
            elif self.lower.has_room() and load.num_rows == BLOCK_TOKENS:
                load = replace(load, slot=self.lower.take_slot(None))
            self.pages.pin(load.page)
            if load.num_rows == BLOCK_TOKENS:
                self._in_flight.setdefault(load.key, context.request_id)
            blocks.append(load)
        self.lower.hold_copies(load.key for load in blocks if load.extent is not None)
        context.job = self.lower.next_job()
        self._loads[context.job] = _Load(context, tuple(blocks))
        self.lower.moves.append(LoadBlocks(context.job, context.request_id, tuple(blocks)))

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """See CacheView."""
        context = self._running[request_id]
        missing = self.hbm.num_pages(context.computed + num_tokens) - len(context.pages)
        if not self.hbm.make_room(missing):
            return False
        for _ in range(missing):
            context.pages.append(self.pages.take(context.pages[-1] if context.pages else None))
        return True

    def capture(self, request_id: str, num_tokens: int, batch_row: int) -> list[CapturePiece]:
        """Where the KV of the next `num_tokens` rows, which a step has just computed as rows batch_row.. of its batch,
        is to be saved. Call it before `commit`."""
        context = self._running[request_id]
        if not self.lower.is_on:
            return []
        pieces = []
        end = context.computed + num_tokens
        for block in range(context.computed // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            first = block * BLOCK_TOKENS
            start, stop = max(context.computed, first), min(end, first + BLOCK_TOKENS)
            slot = context.slots.get(block)
            if slot is None and block not in context.unsaved:
                slot = self._begin_save(context, block, start - first)
            if slot is not None:
                pieces.append(CapturePiece(batch_row + start - context.computed, slot, start - first, stop - start))
        return pieces

    def _begin_save(self, context: RunningContext, block: int, rows_before: int) -> int | None:
        """A slot for a block that is being computed, with the rows it has already."""
        slot = self.lower.take_slot(None)
        if slot is None:
            context.unsaved.add(block)
            return None
        context.slots[block] = slot
        if rows_before:
            older = self.table.get(context.open_hint) if context.open_hint is not None else None
            if older is not None and older.slot is not None:
                self.lower.hold_slot(slot, older.slot)
                self.lower.moves.append(FillFromSlot(older.slot, slot, rows_before))
            else:
                self._fill_from_page(context, block, slot, 0, rows_before)
        return slot

    def _fill_from_page(self, context: RunningContext, block: int, slot: int, first: int, num_rows: int) -> None:
        row = block * BLOCK_TOKENS + first
        page = context.pages[row // self.page_size]
        self.pages.pin(page)
        self.lower.hold_page(slot, page)
        self.lower.moves.append(FillFromPage(page, row % self.page_size, slot, first, num_rows, row))

    def commit(self, request_id: str, num_tokens: int) -> None:
        """A step wrote the next `num_tokens` rows; blocks that are full now become findable."""
        context = self._running[request_id]
        context.computed += num_tokens
        if not self._reuse:
            return
        for block, (key, page) in context.published.items():
            self.hbm.settle(key, page, block * BLOCK_TOKENS % self.page_size, block * BLOCK_TOKENS, hop=True)
        context.published = {}
        full = context.computed // BLOCK_TOKENS
        if full == context.sealed:
            return
        keys = context.chain()
        for block in range(context.sealed, full):
            key = keys[block]
            if self._in_flight.get(key) == request_id:
                del self._in_flight[key]
            self._publish_full(context, block)
        context.sealed = full

    def _publish_full(self, context: RunningContext, block: int) -> None:
        """Make a full block findable, and seal the slot it was saved to."""
        first = block * BLOCK_TOKENS
        key = context.keys[block]
        row = self.hbm.row(context, block, key, context.token_ids[first : first + BLOCK_TOKENS], session_id=None)
        if context.trusted:
            self._publish(context, row)
        self._seal(context, block, row if context.trusted else None, BLOCK_TOKENS)

    def _publish(self, context: RunningContext, row: BlockRow) -> None:
        context.owned[row.key] = None
        self.hbm.publish(row)

    def _seal(self, context: RunningContext, block: int, row: BlockRow | None, num_rows: int) -> None:
        context.unsaved.discard(block)
        slot = context.slots.pop(block, None)
        if slot is None:
            return
        known = self.table.get(row.key) if row is not None else None
        wanted = row is not None and not self.lower.is_saving(row.key) and (known is None or known.slot is None)
        self.lower.seal(slot, replace(row) if row is not None and wanted else None, num_rows)

    def report(self, request_id: str) -> PromptReport:
        """Explains the prompt of a request that was just admitted for the first time."""
        context = self._running[request_id]
        prompt = context.prompt_tokens
        tiers = {tier: min(count, prompt) for tier, count in context.sources.items()} if self._reuse else {}
        cached = sum(tiers.values())
        session = self._sessions.get(context.session)
        shared, seen = self._shared_history(context, session)
        history = max(shared, cached)
        reasons: dict[str, int] = {}
        lost = history - cached
        if self._reuse and lost and cached == prompt - 1:
            reasons["last_token"] = 1
            lost -= 1
        if lost:
            reasons[self._why_lost(context)] = lost
        diverged = max(0, min(seen, prompt) - history) if session is not None and not context.cuts else 0
        if diverged:
            reasons["diverged"] = diverged
        if new := prompt - history - diverged:
            reasons["new"] = new
        return PromptReport(
            prompt_tokens=prompt,
            history_tokens=history,
            hbm_tokens=tiers.get("hbm", 0),
            dram_tokens=tiers.get("dram", 0),
            disk_tokens=tiers.get("disk", 0),
            miss_reasons=reasons,
            truncated_tokens=sum(b - a for a, b in context.cuts),
            shifted_tokens=min(context.shifted_tokens, cached),
        )

    def _why_lost(self, context: RunningContext) -> str:
        if not self._reuse:
            return "disabled"
        if context.miss_reason is not None:
            return context.miss_reason
        return "lineage_reset" if context.lost_lineage else "evicted"

    def _tokens_by_tier(self, match: Match) -> dict[str, int]:
        tokens: dict[str, int] = {}
        for block, (row, used) in enumerate(match.used):
            if self.hbm.is_ready(row, block) or self.hbm.can_move(row):
                tier = "hbm"
            else:
                tier = "dram" if row.slot is not None else "disk"
            tokens[tier] = tokens.get(tier, 0) + used
        return tokens

    def preempt(self, request_id: str) -> None:
        """See CacheView. The open block is kept too, so an early resumption computes nothing again."""
        context = self._running[request_id]
        context.open_hint, context.open_place = self._release(context), context.computed // BLOCK_TOKENS
        context.reached = max(context.reached, context.computed)
        context.pages, context.computed, context.sealed = [], 0, 0

    def room_is_coming(self) -> bool:
        """See CacheView."""
        return any(load.context.job != job_id for job_id, load in self._loads.items())

    def withdraw(self, request_id: str) -> None:
        """See CacheView."""
        context = self._running[request_id]
        before = context.reached, context.open_hint, context.open_place
        self.preempt(request_id)
        context.reached, context.open_hint, context.open_place = before

    def truncate(self, request_id: str) -> int:
        """A running request has filled the window: drop history in the middle of its generation. It has to be admitted
        anew. Returns the tokens dropped. Raises DoesNotFit."""
        context = self._running[request_id]
        before = len(context.token_ids)
        self.preempt(request_id)
        length = before + sum(b - a for a, b in context.cuts)
        context.stream = context.stream + context.token_ids[before - (length - len(context.stream)) :]
        # An answer longer than the window loses its own beginning, but never its last quarter window.
        newest = max(context.rules.message_starts[-1] if context.rules.message_starts else 0,
                     length - self._truncation.window // 4)  # fmt: skip
        self._cut(context, max(1, self._truncation.window // 8), newest)
        context.reached = len(context.token_ids) - 1
        return before - len(context.token_ids)

    def distrust(self, request_id: str) -> None:
        """What a request stands on gave a result that cannot be: none of its blocks is found again, whoever computed
        them. Requests that run on them keep their pages, and publish nothing that stands on them."""
        keys = self._running[request_id].chain()
        for key in keys:
            self._forget_block(key)
        for context in self._running.values():
            if keys and context.chain()[:1] == keys[:1]:
                context.trusted = False

    def close(self, request_id: str, num_tokens: int, now: float) -> None:
        """A request ended and its context is its first `num_tokens` tokens (a stop string may have cut it). Pages that
        nothing else needs are free; what was finished stays cached; the session stands where the request stopped, or as
        it was if nothing was computed."""
        context = self._running.pop(request_id)
        self._failed.pop(request_id, None)
        reached = min(max(context.computed, context.reached), num_tokens)
        open_key = None
        if context.pages:
            context.computed = min(context.computed, num_tokens)
            open_key = self._release(context)
        elif context.open_place == reached // BLOCK_TOKENS and context.open_hint is not None:
            row = self.table.get(context.open_hint)
            open_key = row.key if row is not None and len(row.token_ids) == reached % BLOCK_TOKENS else None
        if reached:
            self._remember(context, reached, open_key, now)
        else:
            self._hand_over(context)

    def _hand_over(self, context: RunningContext) -> None:
        """A request leaves no session behind: what it has put into the table belongs to who else goes by its name."""
        name = context.session
        running = (other for other in self._running.values() if other.session == name)
        heir = self._sessions.get(name) or next(running, None)
        if heir is not None:
            heir.owned.update(context.owned)
            return
        self._disown(name, context.owned)
        for key in context.owned:
            row = self.table.get(key)
            if row is None or not row.owners:
                self._forget_block(key)  # no session's time to live would ever end it
        for policy in self._policies:
            policy.forget(name)

    def _release(self, context: RunningContext) -> BlockKey | None:
        """Unpin a context's pages, keep its blocks findable, the open one too, and touch them from tail to head.
        Returns the open block's key."""
        open_key = None
        loading = context.job is not None and context.job in self._loads
        if loading and context.job is not None:
            self.lower.moves.append(ReleaseLoad(context.job))
        if self._reuse:
            for key in context.chain():
                if self._in_flight.get(key) == context.request_id:
                    del self._in_flight[key]
        if self._reuse and not loading:
            full, rows = divmod(context.computed, BLOCK_TOKENS)
            tokens = context.token_ids[full * BLOCK_TOKENS : context.computed]
            if rows and full == context.sealed:
                open_key = context.domain.open_block(context.lineage.parent(full), tokens, context.session_id)
                row = self.hbm.row(context, full, open_key, tokens, context.session_id)
                if context.trusted:
                    self._publish(context, row)
                self._seal(context, full, row if context.trusted else None, rows)
            for block in reversed(range(full)):
                known = self.table.get(context.keys[block])
                here = known is not None and block * BLOCK_TOKENS == self.hbm.position_of(known, block)
                if known is None or (known.page is None and here):
                    # The page that had the name has left meanwhile. Without a link the chain behind it is lost.
                    self._publish_full(context, block)
                if context.keys[block] in self.table:
                    self._touch(context.keys[block])
                    self._save_late(context, block)
        for slot in context.slots.values():
            self.lower.seal(slot, None, 0)
        context.slots, context.unsaved, context.published, context.job = {}, set(), {}, None
        for page in context.pages:
            self.pages.unpin(page)
        return open_key

    def _save_late(self, context: RunningContext, block: int) -> None:
        """A block that found no slot while it was computed: save it out of its page while that is ours."""
        key = context.keys[block]
        row = self.table.get(key)
        if row is None or row.is_saved or self.lower.is_saving(key) or row.hops >= MAX_HOPS or not context.trusted:
            return
        slot = self.lower.take_slot(context.session) if self.lower.is_on else None
        if slot is not None and self.hbm.is_ready(row, block) and row.position == block * BLOCK_TOKENS:
            self._fill_from_page(context, block, slot, 0, BLOCK_TOKENS)
            self.lower.seal(slot, replace(row, hops=row.hops + 1), BLOCK_TOKENS)
        elif slot is not None:
            self.lower.give_back(slot)

    # --- matching -----------------------------------------------------------------------------------------------------

    def _match(self, context: RunningContext) -> Match:
        """The longest stored prefix; the last token is always left to compute, for its logits."""
        limit = len(context.token_ids) - 1
        if context.recompute_from is not None:
            limit = min(limit, context.recompute_from)
        if not self._reuse or limit <= 0:
            return Match([], None, 0)
        keys = context.chain()
        rows = self.table.matched(keys[: limit // BLOCK_TOKENS])
        rows = rows[: next((b for b, row in enumerate(rows) if not self._is_usable(row, b)), len(rows))]
        done = len(rows) * BLOCK_TOKENS
        tail = context.token_ids[done : done + BLOCK_TOKENS]
        most = min(BLOCK_TOKENS, limit - done)
        found = self._open_hint(context, tail, most) if len(rows) == context.open_place else None
        joint = context.lineage.joint
        # Between kept blocks there is nothing to begin with: what follows one in another context stands on more.
        if joint is None or not context.lineage.plain < len(rows) < joint:
            other = self.table.closest_child(context.lineage.parent(len(rows)), tail, context.session_id, most)
            if other is not None and self._is_usable(other[0], len(rows)) and other[1] > (found[1] if found else 0):
                found = other
        return Match(rows, *(found or (None, 0)))

    def _open_hint(self, context: RunningContext, tail: list[int], most: int) -> tuple[BlockRow, int] | None:
        row = self.table.get(context.open_hint) if context.open_hint is not None else None
        if row is None or not self._is_usable(row, context.open_place):
            return None
        shared = common_prefix(row.token_ids, tail, most)
        return (row, shared) if shared else None

    def _is_usable(self, row: BlockRow, block: int) -> bool:
        return self.hbm.is_ready(row, block) or row.is_saved or self.hbm.can_move(row)

    def _choose(self, context: RunningContext, match: Match) -> Match:
        """As much of a match as is worth loading (DESIGN "Load, recompute or mix")."""
        used = match.used
        ready = next((b for b, (row, _) in enumerate(used) if not self.hbm.is_ready(row, b)), len(used))
        if ready == len(used):
            return match
        options = [
            LoadOption(
                size_bytes=0 if self.hbm.is_ready(row, ready + i) or self.hbm.can_move(row) else row.size_bytes,
                source="dram_to_hbm" if row.slot is not None or row.extent is None else "disk_to_hbm",
                num_tokens=tokens,
            )
            for i, (row, tokens) in enumerate(used[ready:])
        ]
        count = choose_load(options, self.rates, len(context.token_ids) - match.num_tokens)
        if count < len(options):
            context.miss_reason = "cheaper_to_recompute"
        return match.first(ready + count)

    def _shared_history(self, context: RunningContext, session: SessionContext | None) -> tuple[int, int]:
        """(tokens of the prompt that the session's last context begins with, tokens of that context). Where they part
        in the middle of a full block, its tokens count only while it is stored: the session knows its key alone."""
        if session is None:
            return 0, 0
        if context.cuts:  # its blocks stand elsewhere than they stood
            return min(context.preset * BLOCK_TOKENS, context.prompt_tokens), session.num_tokens
        shared = 0
        keys = context.chain()
        prompt_blocks = context.prompt_tokens // BLOCK_TOKENS
        for before, key in zip(session.keys, keys[:prompt_blocks], strict=False):
            if before != key:
                break
            shared += BLOCK_TOKENS
        rest = context.token_ids[shared : min(shared + BLOCK_TOKENS, context.prompt_tokens)]
        if shared == len(session.keys) * BLOCK_TOKENS:
            shared += common_prefix(session.open_tokens, rest, BLOCK_TOKENS)
        elif (row := self.table.get(session.keys[shared // BLOCK_TOKENS])) is not None:
            shared += common_prefix(row.token_ids, rest, BLOCK_TOKENS)
        return shared, session.num_tokens

    # --- sessions -----------------------------------------------------------------------------------------------------

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def sessions(self) -> Mapping[SessionName, SessionContext]:
        """Oldest use first. Read only."""
        return self._sessions

    def is_running(self, name: SessionName) -> bool:
        return any(context.session == name for context in self._running.values())

    def blocks_of(self, name: SessionName) -> dict[str, int]:
        """tier -> blocks of a session's context that are there."""
        return self._per_tier(name, lambda row: 1)

    def bytes_of(self, name: SessionName) -> dict[str, int]:
        return self._per_tier(name, lambda row: row.size_bytes)

    def _per_tier(self, name: SessionName, weight: Callable[[BlockRow], int]) -> dict[str, int]:
        counts = {"hbm": 0, "dram": 0, "disk": 0}
        session = self._sessions[name]
        for key in (*session.keys, *((session.open_key,) if session.open_key else ())):
            row = self.table.get(key)
            if row is not None:
                for tier, address in zip(counts, (row.page, row.slot, row.extent), strict=True):
                    counts[tier] += weight(row) if address is not None else 0
        return counts

    def configure(self, name: SessionName, *, pinned: bool | None, ttl_s: float | None) -> None:
        """Pinned sessions never expire and their saved blocks are not evicted. None leaves a value as it is."""
        session = self._sessions[name]
        if pinned is not None:
            session.pinned = pinned
            (self.lower.pinned_sessions.add if pinned else self.lower.pinned_sessions.discard)(name)
        if ttl_s is not None:
            session.ttl_s = ttl_s
        self.lower.put_session(self.record(name, session))

    def prefetch(self, name: SessionName, now: float) -> None:
        """A turn of this session is expected: bring it up to DRAM."""
        session = self._sessions[name]
        for policy in self._policies:
            policy.used(name, now)
        rows = self.table.matched([*session.keys, *((session.open_key,) if session.open_key else ())])
        self.lower.fetch((row for row in rows if row.page is None), name)

    def sweep(self, now: float) -> int:
        """Forget sessions not used for their time to live. Returns how many."""
        expired = 0
        for name, session in list(self._sessions.items()):
            over = len(self._sessions) > self._max_sessions
            ttl_s = self._session_ttl_s if session.ttl_s is None else session.ttl_s
            if name in self._deleting:
                continue
            if session.pinned or (now - session.last_used_s < ttl_s and not over):
                if session.ttl_s is None and not session.pinned and not over:
                    break  # oldest use first; those behind it have time left as well, but for ones with their own
                continue
            self._forget_session(name)
            expired += 1
        return expired

    def _remember(self, context: RunningContext, num_tokens: int, open_key: BlockKey | None, now: float) -> None:
        full = num_tokens // BLOCK_TOKENS
        name = context.session
        context.chain()
        before = self._sessions.pop(name, None)
        if before is not None and before.open_key not in (None, open_key):
            # A branch of the same session ended elsewhere, or the block is full now: nobody can use it any more.
            self._forget_block(before.open_key)
        session = SessionContext(
            lineage=context.lineage.first(full) if full < len(context.keys) else context.lineage,
            open_key=open_key,
            open_tokens=tuple(context.token_ids[full * BLOCK_TOKENS : num_tokens]),
            last_used_s=now,
            cuts=context.cuts,
            cut_digest=self._cut_digest(context),
            pinned=before.pinned if before else False,
            ttl_s=before.ttl_s if before else None,
            owned={
                key: None
                for key in (*(before.owned if before else ()), *context.owned)
                if key in self.table or self.lower.is_saving(key)
            },
        )
        self._sessions[name] = session
        for place, key in enumerate([*session.keys, *((open_key,) if open_key else ())]):
            row = self.table.get(key)
            if row is None:
                continue
            session.owned[key] = None
            if name not in row.owners:
                row.owners = (*row.owners, name)
            row.place = place
            for policy in self._policies:
                policy.own(key, name, place)
        size = float(num_tokens * self._bytes_per_token)
        self._mean_session_bytes += (size - self._mean_session_bytes) * (0.1 if self._mean_session_bytes else 1.0)
        self.lower.put_session(self.record(name, session))
        if len(self._sessions) > self._max_sessions:
            self.sweep(now)

    def _cut_digest(self, context: RunningContext) -> bytes:
        """Of the conversation up to its last cut; what was generated before it is part of the stream by then."""
        if not context.cuts:
            return b""
        return digest_of(context.stream[: context.cuts[-1][1]])

    def record(self, name: SessionName, session: SessionContext | None) -> SessionRecord:
        """What outlives the process of a session."""
        if session is None:
            return SessionRecord(*name, context=b"", last_used_s=0.0, pinned=False, ttl_s=None)
        return SessionRecord(
            *name,
            context=session.pack(),
            last_used_s=session.last_used_s + self._unix_offset_s,
            pinned=session.pinned,
            ttl_s=session.ttl_s,
        )

    def _forget_session(self, name: SessionName) -> None:
        """Its blocks leave as space is needed, unless it was the only one to find them."""
        session = self._sessions.pop(name)
        self.lower.pinned_sessions.discard(name)
        if session.open_key is not None:
            self._forget_block(session.open_key)
        for policy in self._policies:
            policy.forget(name)
        private = self._disown(name, session.owned)
        self.lower.delete_session(name, [row for row in private if row.extent is not None], None)

    def _disown(self, name: SessionName, keys: Iterable[BlockKey]) -> list[BlockRow]:
        """Take a session's name off its blocks; those that nobody else has."""
        private = []
        self.lower.disown_saves(name)
        for key in keys:
            row = self.table.get(key)
            if row is None:
                continue
            row.owners = tuple(owner for owner in row.owners if owner != name)
            if not row.owners:
                private.append(row)
        return private

    def delete(self, name: SessionName, waiter: str) -> str | None:
        """Remove a session and what only it has from every tier; `take_deleted` names `waiter` when the bytes are gone.
        Returns why not: `not_found`, or `busy` while a request of it runs."""
        session = self._sessions.get(name)
        if session is None or name in self._deleting:
            return "not_found"
        if self.is_running(name):
            return "busy"
        # What others have in the same extents is read first, to be written anew.
        self.lower.fetch(self._sharers_of(name), name)
        if self._has_to_wait(name):
            self._deleting[name] = waiter
        else:
            self._delete_now(name, waiter)
        return None

    def _sharers_of(self, name: SessionName) -> list[BlockRow]:
        rows = (self.table.get(key) for key in self._sessions[name].owned)
        return self.lower.sharers_of([row for row in rows if row is not None and row.owners == (name,)])

    def _has_to_wait(self, name: SessionName) -> bool:
        """Whether a deletion would come between a copy and its end."""
        return self.lower.is_busy(name) or any(self.lower.is_fetching(row.key) for row in self._sharers_of(name))

    def _delete_now(self, name: SessionName, waiter: str) -> None:
        session = self._sessions.pop(name)
        self.lower.pinned_sessions.discard(name)
        for policy in self._policies:
            policy.forget(name)
        private = self._disown(name, session.owned)
        self.lower.delete_session(name, private, waiter)
        for row in private:
            self._forget_block(row.key)

    def take_deleted(self) -> list[str]:
        """Those who waited for a deletion that is done."""
        done, self.lower.done = self.lower.done, []
        return done

    def _forget_block(self, key: BlockKey) -> None:
        """Nobody may find it again, in any tier."""
        self.lower.cancel_save(key)
        row = self.table.get(key)
        if row is None:
            return
        self.hbm.leave(row)
        self.lower.drop_slot(row)
        self.lower.drop_extent_copy(row)
        if row.key in self.table:
            self.table.drop(row.key)

    def _gone(self, row: BlockRow) -> None:
        """A block has left its last tier."""
        if row.key in self.table:
            self.table.drop(row.key)

    # --- events and moves ---------------------------------------------------------------------------------------------

    def on_event(self, event: Event, now: float) -> None:
        """Something that was ordered has ended."""
        match event:
            case Saved():
                for page in self.lower.on_saved(event.ticket):
                    self.pages.unpin(page)
                self.lower.trim()
            case Loaded():
                self._on_loaded(event)
            case Fetched():
                self.lower.on_fetched(event.job_id, event.failed)
            case Written():
                self.lower.on_written(event.job_id, event.extent, now)
            case Deleted():
                self.lower.on_deleted(event.job_id)
            case Transferred():
                self.stats.count_move(event.direction, event.num_bytes, event.seconds)
                self.rates.moved(event.direction, event.num_bytes, event.seconds)
        for name in [name for name in self._deleting if not self._has_to_wait(name)]:
            self._delete_now(name, self._deleting.pop(name))

    def _on_loaded(self, event: Loaded) -> None:
        load = self._loads.pop(event.job_id)
        context = load.context
        self.lower.release_copies(block.key for block in load.blocks if block.extent is not None)
        for block in load.blocks:
            if self._in_flight.get(block.key) == context.request_id:
                del self._in_flight[block.key]
            if block.slot is not None and block.extent is None:
                self.lower.unpin(block.slot)
            elif block.slot is not None:
                if event.failed:
                    self.lower.give_back(block.slot)
                else:
                    self.lower.keep(block.key, block.slot)
            row = self.table.get(block.key)
            if not event.failed and block.num_rows == BLOCK_TOKENS and row is not None and not row.is_open:
                self.hbm.settle(block.key, block.page, block.page_row, block.position, hop=False)
            self.pages.unpin(block.page)
        for key, reason in event.failed.items():
            self.stats.load_failures[reason] += 1
            self._drop_bad_copy(key, next(b for b in load.blocks if b.key == key))
        if event.failed and context.job == event.job_id and context.request_id in self._running:
            context.miss_reason = "load_failed"
            self._failed[context.request_id] = None
        elif context.job == event.job_id:
            context.job = None

    def _drop_bad_copy(self, key: BlockKey, load: BlockLoad) -> None:
        row = self.table.get(key)
        if row is None:
            return
        if load.extent is not None and row.extent == load.extent:
            self.lower.drop_extent_copy(row)
        elif load.extent is None and row.slot == load.slot:
            self.lower.drop_slot(row)
        if row.is_nowhere:
            self._gone(row)

    def stall_s(self, request_id: str) -> float:
        """See CacheView. What is left of the load, less nothing: how much of it the step hides is not known here."""
        context = self._running[request_id]
        if context.job is None or context.job not in self._loads:
            return 0.0
        seconds = sum(
            self.rates.load_s(
                "disk_to_hbm" if block.extent is not None else "dram_to_hbm", block.num_rows * self._bytes_per_token
            )
            for block in self._loads[context.job].blocks
        )
        return seconds * (1 - self._arrived(context.job))

    def take_failed(self) -> list[str]:
        """Requests whose load failed since the last call: what they computed on it is void. They have to be preempted
        by `void`, and find what is left of their history when they are admitted again."""
        failed, self._failed = list(self._failed), {}
        return failed

    def void(self, request_id: str) -> None:
        """Give a request's room back and publish nothing of it: its load has failed."""
        context = self._running[request_id]
        context.computed = context.sealed * BLOCK_TOKENS
        for key in context.chain():
            if self._in_flight.get(key) == request_id:
                del self._in_flight[key]
        for slot in context.slots.values():
            self.lower.seal(slot, None, 0)
        for page in context.pages:
            self.pages.unpin(page)
        context.slots, context.unsaved, context.published = {}, set(), {}
        context.pages, context.computed, context.sealed, context.job = [], 0, 0, None

    def plan(self, waiting: Sequence[str], starting: int, now: float) -> None:
        """Look ahead (AttentionStore §3.3): tell the policies what comes, fetch for it, write what is behind. The first
        `starting` of those who wait have a place in the batch: they load for themselves, layer by layer."""
        names = [self._running[request_id].session for request_id in waiting]
        if names != self._upcoming:
            self._upcoming = names
            if self._mean_session_bytes:
                window = eviction_window(
                    self.lower.dram_slots * self.lower.slot_bytes, self.lower.disk_bytes, self._mean_session_bytes
                )
                for policy in self._policies:
                    policy.look_ahead(names[:window], now)
            self._fetch_ahead(waiting[starting:])
        if self.lower.is_on:
            running = {context.session for context in self._running.values() if context.pages}
            self.lower.plan_writes(self._sessions, running, self.record, now)
            self.lower.trim()

    def _fetch_ahead(self, waiting: Sequence[str]) -> None:
        if not (waiting and self.lower.disk_bytes and self._reuse and self._mean_session_bytes):
            return
        room = (self.lower.num_slots - self.lower.resident) * self.lower.slot_bytes
        for request_id in waiting[: prefetch_window(room, self._mean_session_bytes)]:
            context = self._running[request_id]
            if context.pages:
                continue  # admitted ahead of its turn: what it needs is on its way to HBM
            rows = self.table.matched(context.chain())
            self.lower.fetch((row for row in rows if row.page is None), context.session)

    def take_moves(self) -> list[Move]:
        """The moves decided since the last call, to be carried out in this order before the next step."""
        moves = [*self._copies, *self.lower.moves]
        self._copies, self.lower.moves = [], []
        return moves

    def restore(self, extents: Iterable[ExtentInfo], records: Iterable[SessionRecord], now: float) -> None:
        """What a tier that outlives the process has kept: its blocks are found again, and its sessions."""
        for extent in extents:
            name = (extent.session.tenant, extent.session.salt, extent.session.session_id)
            rows = [
                BlockRow(
                    key=block.key,
                    parent=block.parent,
                    token_ids=(tokens := self.lower.tokens_of(block.token_ids)),
                    size_bytes=len(tokens) * self._bytes_per_token,
                    session_id=name[2] if block.is_open else None,
                    owners=(name,),
                )
                for block in extent.blocks
            ]
            self.lower.adopt(extent, rows)
        for record in sorted(records, key=lambda r: r.last_used_s):
            self._restore_session(record)
        for row in self.table:
            row.owners = tuple(owner for owner in row.owners if owner in self._sessions)
            for owner in row.owners:
                self._sessions[owner].owned[row.key] = None
        self.sweep(now)

    def _restore_session(self, record: SessionRecord) -> None:
        name = (record.tenant, record.salt, record.session_id)
        if not record.context:
            return
        for policy in self._policies:
            policy.used(name, record.last_used_s - self._unix_offset_s)
        domain = self._domain_of(record.tenant, record.salt)
        session = SessionContext.unpack(record.context, domain, record.last_used_s - self._unix_offset_s)
        session.pinned, session.ttl_s = record.pinned, record.ttl_s
        for place, key in enumerate([*session.keys, *((session.open_key,) if session.open_key else ())]):
            row = self.table.get(key)
            if row is None:
                continue
            session.owned[key] = None
            if name not in row.owners:
                row.owners = (*row.owners, name)
            row.place = place
            for policy in self._policies:
                policy.own(key, name, place)
        self._sessions[name] = session
        if session.pinned:
            self.lower.pinned_sessions.add(name)

    def borrow(self, num_pages: int) -> list[int] | None:
        """Pages for the engine's own use, until `give_back`. None if there is no room."""
        if not self.hbm.make_room(num_pages):
            return None
        pages: list[int] = []
        for _ in range(num_pages):
            pages.append(self.pages.take(pages[-1] if pages else None))
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.pages.unpin(page)

    @property
    def num_leases(self) -> int:
        """Pages pinned by requests and transfers; zero when nothing runs."""
        return self.pages.num_pinned

    @property
    def in_flight(self) -> int:
        """Saves, loads, fetches, writes and deletions under way; zero at idle."""
        return self.lower.in_flight + len(self._loads)
