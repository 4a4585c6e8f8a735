"""CacheManager: sessions, running contexts and HBM pages. Events and `now` in, Moves out; touches no bytes."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cache.allocator import PageAllocator
from cache.block import BLOCK_TOKENS, BlockKey, KeyDomain
from cache.context import RunningContext, SessionContext, Span
from cache.plan import CopyRows, Move
from cache.policies.base import EvictionPolicy
from cache.stats import CacheStats, PromptReport, Residency
from cache.table import BlockRow, CacheTable, common_prefix

DomainOf = Callable[[str, str], KeyDomain]
"""(tenant, cache salt) -> the domain of its keys."""


@dataclass(frozen=True, slots=True)
class _Match:
    """The leading rows of a context that are in HBM: whole blocks, then `partial_rows` rows of one more."""

    rows: list[BlockRow]
    partial: BlockRow | None
    partial_rows: int

    @property
    def num_tokens(self) -> int:
        return len(self.rows) * BLOCK_TOKENS + self.partial_rows


class _PinnedBlocks:
    """The blocks that must not leave: those in a pinned page."""

    def __init__(self, table: CacheTable, pages: PageAllocator) -> None:
        self._table, self._pages = table, pages

    def __contains__(self, key: object) -> bool:
        row = self._table.get(key)  # type: ignore[arg-type]
        return row is not None and self._pages.pins(row.page) > 0


class CacheManager:
    """Implements `scheduler.ports.CacheView` and keeps the promise behind it: a row that is counted as cached holds the
    KV of exactly these tokens behind exactly this prefix, and a pinned page is written by one request alone.

    A request is opened on arrival, admitted by the scheduler, committed after every step and closed at its end.
    Everything it finished stays findable in the cache table until its page is needed. Single-threaded.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        bytes_per_token: int,
        prefer_contiguous: bool,
        reuse: bool,
        policy: EvictionPolicy,
        domain_of: DomainOf,
        session_ttl_s: float,
        max_sessions: int,
    ) -> None:
        if page_size % BLOCK_TOKENS:
            raise ValueError(f"page size {page_size} is not a multiple of the block, {BLOCK_TOKENS}")
        self.page_size = page_size
        self.table = CacheTable()
        self.pages = PageAllocator(num_pages=num_pages, prefer_contiguous=prefer_contiguous)
        self.stats = CacheStats()
        self._bytes_per_token = bytes_per_token
        self._reuse = reuse
        self._policy = policy
        self._domain_of = domain_of
        self._session_ttl_s = session_ttl_s
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[tuple[str, str, str], SessionContext] = OrderedDict()  # oldest use first
        self._running: dict[str, RunningContext] = {}
        self._in_flight: dict[BlockKey, str] = {}  # prompt blocks being computed -> the request that computes them
        self._moves: list[Move] = []
        self._pinned = _PinnedBlocks(self.table, self.pages)

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(self, request_id: str, tenant: str, salt: str, session_id: str, token_ids: list[int]) -> None:
        """A request arrived. `token_ids` is the sequence's own list and may only grow."""
        self._running[request_id] = RunningContext(
            request_id=request_id,
            tenant=tenant,
            salt=salt,
            session_id=session_id,
            domain=self._domain_of(tenant, salt),
            token_ids=token_ids,
            prompt_tokens=len(token_ids),
        )

    def context(self, request_id: str) -> RunningContext:
        return self._running[request_id]

    def resident_tokens(self, request_id: str) -> int:
        """See CacheView."""
        return self._match(self._running[request_id]).num_tokens

    def residency(self, request_id: str) -> Residency:
        """See CacheView. HBM is the only tier so far: nothing to load."""
        context = self._running[request_id]
        resident = context.computed if context.pages else self._match(context).num_tokens
        missing = len(context.token_ids) - resident
        return Residency(hbm_tokens=resident, lower_tokens={}, bytes_to_load=0, missing_tokens=missing)

    def waits_for_sibling(self, request_id: str) -> bool:
        """Whether a running request is computing the next block this one needs: one computation, many waiters."""
        context = self._running[request_id]
        if context.awaited is not None and context.awaited in self._in_flight:
            return True  # a prompt may have many waiters, asked in every step: none walks it again for nothing
        keys = context.chain()
        matched = len(self.table.matched(keys)) if self._reuse else 0
        waits = matched < len(keys) and self._in_flight.get(keys[matched], request_id) != request_id
        context.awaited = keys[matched] if waits else None
        return waits

    def admit(self, request_id: str, num_tokens: int) -> int | None:
        """See CacheView. What is matched is shared page by page where whole pages match; the rest is copied, or taken
        over in place if nobody else can see it."""
        context = self._running[request_id]
        assert not context.pages, "admitted twice"
        match = self._match(context)
        pages_needed = self._num_pages(match.num_tokens + num_tokens)
        placed = self._place(context, match, pages_needed)
        if not placed and self.pages.num_pinned == 0:
            # What is copied needs its room twice until the copy is made, and nobody's end will bring more: compute it.
            match = self._uncopied(match)
            placed = self._place(context, match, pages_needed)
        if not placed:
            return None
        for row in reversed(list(self._rows_of(match))):  # from tail to head, so that what stays is a prefix
            if row.key in self.table:  # not the open block that was just taken over
                self._policy.touch(row.key)
        context.trusted = True
        context.computed = match.num_tokens
        context.sealed = len(match.rows)
        if self._reuse:
            prompt_blocks = context.prompt_tokens // BLOCK_TOKENS
            for key in context.chain()[len(match.rows) : prompt_blocks]:
                self._in_flight.setdefault(key, request_id)
        return match.num_tokens

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """See CacheView."""
        context = self._running[request_id]
        missing = self._num_pages(context.computed + num_tokens) - len(context.pages)
        if not self._make_room(missing):
            return False
        for _ in range(missing):
            context.pages.append(self.pages.take(self._last_page(context)))
        return True

    def commit(self, request_id: str, num_tokens: int) -> None:
        """A step wrote the next `num_tokens` rows; blocks that are full now become findable."""
        context = self._running[request_id]
        context.computed += num_tokens
        if not self._reuse:
            return
        full = context.computed // BLOCK_TOKENS
        if full == context.sealed:
            return
        keys = context.chain()
        for block in range(context.sealed, full):
            key = keys[block]
            if self._in_flight.get(key) == request_id:
                del self._in_flight[key]
            if key not in self.table:
                self._publish_full(context, block)
        context.sealed = full

    def report(self, request_id: str) -> PromptReport:
        """Explains the prompt of a request that was just admitted for the first time."""
        context = self._running[request_id]
        prompt = context.prompt_tokens
        cached = min(context.computed, prompt)
        session = self._sessions.get((context.tenant, context.salt, context.session_id))
        shared, seen = self._shared_history(context, session)
        if not self._reuse:
            cached = 0
        history = max(shared, cached)
        reasons: dict[str, int] = {}
        lost = history - cached
        if self._reuse and lost and cached == prompt - 1:
            reasons["last_token"] = 1
            lost -= 1
        if lost:
            reasons["evicted" if self._reuse else "disabled"] = lost
        diverged = max(0, min(seen, prompt) - history) if session is not None else 0
        if diverged:
            reasons["diverged"] = diverged
        if new := prompt - history - diverged:
            reasons["new"] = new
        report = PromptReport(prompt, history, cached, reasons)
        self.stats.count_prompt(report)
        return report

    def preempt(self, request_id: str) -> None:
        """See CacheView. The open block is kept too, so an early resumption computes nothing again."""
        context = self._running[request_id]
        self._release(context)
        context.reached = max(context.reached, context.computed)
        context.pages, context.computed, context.sealed = [], 0, 0

    def distrust(self, request_id: str) -> None:
        """What a request stands on gave a result that cannot be: none of its blocks is found again, whoever computed
        them. Requests that run on them keep their pages, and publish nothing that stands on them."""
        keys = self._running[request_id].chain()
        for key in keys:
            if key in self.table:
                self._drop(key)
        for context in self._running.values():
            if keys and context.chain()[:1] == keys[:1]:
                context.trusted = False

    def close(self, request_id: str, num_tokens: int, now: float) -> None:
        """A request ended and its context is its first `num_tokens` tokens (a stop string may have cut it). Pages that
        nothing else needs are free; what was finished stays cached; the session stands where the request stopped, or as
        it was if nothing was computed."""
        context = self._running.pop(request_id)
        reached = min(max(context.computed, context.reached), num_tokens)
        open_key = None
        if context.pages:
            context.computed = min(context.computed, num_tokens)
            open_key = self._release(context)
        if reached:
            self._remember(context, reached, open_key, now)

    # --- sessions -----------------------------------------------------------------------------------------------------

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def sweep(self, now: float) -> int:
        """Forget sessions not used for the TTL; their blocks leave as space is needed. Returns how many."""
        expired = 0
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if now - session.last_used_s < self._session_ttl_s and len(self._sessions) <= self._max_sessions:
                break
            del self._sessions[key]
            if session.open_key is not None and session.open_key in self.table:
                self._evict(session.open_key)
            expired += 1
        return expired

    def _remember(self, context: RunningContext, num_tokens: int, open_key: BlockKey | None, now: float) -> None:
        full = num_tokens // BLOCK_TOKENS
        name = (context.tenant, context.salt, context.session_id)
        before = self._sessions.pop(name, None)
        if before is not None and before.open_key not in (None, open_key) and before.open_key in self.table:
            # A branch of the same session ended elsewhere. Its open block has no owner any more.
            self._evict(before.open_key)
        self._sessions[name] = SessionContext(
            spans=[Span(key, 0, BLOCK_TOKENS) for key in context.chain()[:full]],
            open_key=open_key,
            open_tokens=tuple(context.token_ids[full * BLOCK_TOKENS : num_tokens]),
            last_used_s=now,
        )
        if len(self._sessions) > self._max_sessions:
            self.sweep(now)

    def _shared_history(self, context: RunningContext, session: SessionContext | None) -> tuple[int, int]:
        """(tokens of the prompt that the session's last context begins with, tokens of that context). Where they part
        in the middle of a full block, its tokens count only while it is in HBM: the session knows its key alone."""
        if session is None:
            return 0, 0
        shared = 0
        keys = context.chain()
        prompt_blocks = context.prompt_tokens // BLOCK_TOKENS
        for span, key in zip(session.spans, keys[:prompt_blocks], strict=False):
            if span.key != key:
                break
            shared += BLOCK_TOKENS
        rest = context.token_ids[shared : min(shared + BLOCK_TOKENS, context.prompt_tokens)]
        if shared == len(session.spans) * BLOCK_TOKENS:
            shared += common_prefix(session.open_tokens, rest, BLOCK_TOKENS)
        elif (row := self.table.get(session.spans[shared // BLOCK_TOKENS].key)) is not None:
            shared += common_prefix(row.token_ids, rest, BLOCK_TOKENS)
        return shared, session.num_tokens

    # --- matching -----------------------------------------------------------------------------------------------------

    def _match(self, context: RunningContext) -> _Match:
        """The longest resident prefix; the last token is always left to compute, for its logits."""
        limit = len(context.token_ids) - 1
        if not self._reuse or limit <= 0:
            return _Match([], None, 0)
        rows = self.table.matched(context.chain()[: limit // BLOCK_TOKENS])
        done = len(rows) * BLOCK_TOKENS
        parent = rows[-1].key if rows else context.domain.root
        tail = context.token_ids[done : done + BLOCK_TOKENS]
        found = self.table.closest_child(parent, tail, context.session_id, min(BLOCK_TOKENS, limit - done))
        return _Match(rows, *(found or (None, 0)))

    @staticmethod
    def _rows_of(match: _Match) -> Iterator[BlockRow]:
        yield from match.rows
        if match.partial is not None:
            yield match.partial

    def _group_by_page(self, match: _Match) -> list[list[tuple[BlockRow, int]]]:
        """The matched rows, page by page of the new context: (row, how many of its rows are used)."""
        used = [(row, BLOCK_TOKENS) for row in match.rows]
        if match.partial is not None:
            used.append((match.partial, match.partial_rows))
        per_page = self.page_size // BLOCK_TOKENS
        return [used[start : start + per_page] for start in range(0, len(used), per_page)]

    def _claim(self, group: list[tuple[BlockRow, int]]) -> int | None:
        """The page a group can be used in where it lies, or None if it has to be copied."""
        page = group[0][0].page
        if any(row.page != page or row.offset != place * BLOCK_TOKENS for place, (row, _) in enumerate(group)):
            return None
        last, used = group[-1]
        whole = len(group) * BLOCK_TOKENS == self.page_size and used == BLOCK_TOKENS and not last.is_open
        if whole:
            return page
        # We shall write behind the last row, so nobody else may run on the page or have a block there.
        grows = (last.is_open and used == len(last.token_ids)) or (not last.is_open and used == BLOCK_TOKENS)
        alone = self.pages.pins(page) == 0 and self.pages.residents(page) == len(group)
        return page if grows and alone else None

    def _uncopied(self, match: _Match) -> _Match:
        """As much of a match as can be used where it lies."""
        claims = [self._claim(group) for group in self._group_by_page(match)]
        if None not in claims:
            return match
        return _Match(match.rows[: claims.index(None) * self.page_size // BLOCK_TOKENS], None, 0)

    def _place(self, context: RunningContext, match: _Match, pages_needed: int) -> bool:
        """Give a context its pages: those of the match, shared or copied, then free ones. False changes nothing."""
        groups = self._group_by_page(match)
        claimed = [self._claim(group) for group in groups]
        # Pages that are only copied from need not stay once the copy is ordered, but must not leave before it is.
        held = [page for page in claimed if page is not None]
        sources = [row.page for row in self._rows_of(match)]
        for page in (*held, *sources):
            self.pages.pin(page)
        has_room = self._make_room(pages_needed - len(held))
        if has_room:
            for group, claim in zip(groups, claimed, strict=True):
                context.pages.append(claim if claim is not None else self._copy_group(group, self._last_page(context)))
            while len(context.pages) < pages_needed:
                context.pages.append(self.pages.take(self._last_page(context)))
        for page in sources if has_room else (*sources, *held):
            self.pages.unpin(page)
        if has_room and match.partial is not None and match.partial.is_open and claimed[-1] is not None:
            self._drop(match.partial.key)  # taken over: its rows are ours now and will grow
        return has_room

    def _copy_group(self, group: list[tuple[BlockRow, int]], after: int | None) -> int:
        target = self.pages.take(after)
        for place, (row, used) in enumerate(group):
            self._moves.append(CopyRows(row.page, row.offset, target, place * BLOCK_TOKENS, used))
            self.stats.copied_rows += used
        return target

    # --- room ---------------------------------------------------------------------------------------------------------

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @staticmethod
    def _last_page(context: RunningContext) -> int | None:
        return context.pages[-1] if context.pages else None

    def _make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free; False, and nothing evicted, if that many cannot be had."""
        if num_pages > self.pages.num_free + self.pages.num_cached:
            return False
        while (missing := num_pages - self.pages.num_free) > 0:
            victims = self._policy.victims(missing, self._pinned)
            assert victims, "cached pages without an evictable block"
            for key in victims:
                self._evict(key)
        return True

    def _evict(self, key: BlockKey) -> None:
        self._drop(key)
        self.stats.evicted_blocks += 1

    def _drop(self, key: BlockKey) -> None:
        row = self.table.drop(key)
        self._policy.remove(key)
        self.pages.drop_resident(row.page)

    def _publish(
        self, context: RunningContext, block: int, key: BlockKey, tokens: list[int], session_id: str | None
    ) -> None:
        if not context.trusted:
            return
        first = block * BLOCK_TOKENS
        page = context.pages[first // self.page_size]
        self.table.publish(
            BlockRow(
                key=key,
                parent=context.parent_of(block),
                token_ids=array("I", tokens),
                page=page,
                offset=first % self.page_size,
                size_bytes=len(tokens) * self._bytes_per_token,
                session_id=session_id,
            )
        )
        self.pages.add_resident(page)
        self._policy.touch(key)

    def _publish_full(self, context: RunningContext, block: int) -> None:
        first = block * BLOCK_TOKENS
        tokens = context.token_ids[first : first + BLOCK_TOKENS]
        self._publish(context, block, context.keys[block], tokens, session_id=None)

    def _release(self, context: RunningContext) -> BlockKey | None:
        """Unpin a context's pages, keep its blocks findable, the open one too, and touch them from tail to head.
        Returns the open block's key."""
        open_key = None
        if self._reuse:
            for key in context.chain():
                if self._in_flight.get(key) == context.request_id:
                    del self._in_flight[key]
            full, rows = divmod(context.computed, BLOCK_TOKENS)
            tokens = context.token_ids[full * BLOCK_TOKENS : context.computed]
            if rows and full == context.sealed:
                open_key = context.domain.open_block(context.parent_of(full), tokens, context.session_id)
                if open_key not in self.table:
                    self._publish(context, full, open_key, tokens, context.session_id)
            for block in reversed(range(full)):
                if context.keys[block] in self.table:
                    self._policy.touch(context.keys[block])
                else:  # The page that had the name has left meanwhile. Without a link the chain behind it is lost.
                    self._publish_full(context, block)
        for page in context.pages:
            self.pages.unpin(page)
        return open_key

    # --- what the engine carries out ----------------------------------------------------------------------------------

    def take_moves(self) -> list[Move]:
        """The moves decided since the last call, to be carried out in this order before the next step."""
        moves, self._moves = self._moves, []
        return moves

    @property
    def num_leases(self) -> int:
        """Pages pinned by requests; zero when nothing runs."""
        return self.pages.num_pinned
