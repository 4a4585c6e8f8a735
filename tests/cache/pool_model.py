"""A model of the KV pool in which every row shows what it holds, and a check of every promise of the cache manager.

The KV of a row depends on its token and on all rows before it. Here a row holds a number that stands for exactly that:
two rows are equal only if their tokens and everything they were computed on are. A row in HBM also holds the position
for which its key is rotated. Three queues, which a test runs when it likes, write and copy these numbers where the
engine and the transfer threads would write and copy KV. So a row that the cache trusts but that holds anything else is
detected.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey, KeyDomain, token_bytes
from reprise.cache.blocks.rows import PARKED
from reprise.cache.blocks.stored import ExtentInfo, SessionRecord, is_coded
from reprise.cache.blocks.table import BlockRow
from reprise.cache.blocks.truncate import CutRules
from reprise.cache.manager import CacheManager
from reprise.cache.moves import (
    CapturePiece,
    CopyRows,
    Deleted,
    DeleteExtents,
    EncodeBlocks,
    Encoded,
    Event,
    FetchBlocks,
    Fetched,
    FillFromPage,
    FillFromSlot,
    FinishLoad,
    LoadBlocks,
    Loaded,
    PutSession,
    Saved,
    SealSlot,
    Transferred,
    WriteExtent,
    Written,
)
from reprise.cache.options import CacheOptions, Truncation
from reprise.cache.policies import POLICIES
from reprise.cache.rates import Rates
from reprise.cache.requests.context import LoadState, RequestContext
from reprise.cache.requests.opening import ClientCut
from reprise.scheduler.line import Line

EMPTY = -1
GARBAGE = -2
BYTES_PER_TOKEN = 4
CODED_BYTES = 28  # size of a block
NO_CUTS = CutRules(allowed=False, keep_first=0, message_starts=(), important=())


class Decoded(int):
    """A row's value that came out of a codec: equal to what was computed, and known by its class."""


def decoded(rows: Iterable[int]) -> list[int]:
    return [value if value < 0 else Decoded(value) for value in rows]


def were_decoded(rows: Iterable[int]) -> bool:
    return any(isinstance(value, Decoded) for value in rows)


def domain_of(tenant: str, salt: str) -> KeyDomain:
    return KeyDomain(secret=b"a secret", fingerprint=b"a model", tenant=tenant, salt=salt)


def make_manager(
    *,
    num_pages: int = 16,
    page_size: int = 32,
    contiguous: bool = True,
    reuse: bool = True,
    policy: str = "lru",
    ttl_s: float = 1000.0,
    max_sessions: int = 100,
    window: int = 1 << 30,
    truncation_mode: str = "decoupled",
    ratio: float = 0.5,
    block_scorer: str = "oldest",
    recall: bool = False,
    dram_slots: int = 0,
    staging_slots: int = 0,
    disk_bytes: int = 0,
    free_buffer: float = 0.1,
    high_water: float = 1.0,
    low_water: float = 1.0,
    bytes_per_s: float = 1e12,
    exact: bool = False,
    most_pages: int = 0,
    head_key: bytes = b"",
    coded_slots: int | None = None,
) -> CacheManager:
    """head_key: with one, there is a Redis. `PoolModel` does not play its part. coded_slots: None without a codec."""
    directions = (
        *("dram_to_hbm", "coded_to_hbm", "disk_to_hbm", "disk_to_dram", "hbm_to_dram", "dram_to_disk"),
        *(("redis_to_hbm", "redis_to_dram", "disk_to_redis") if head_key else ()),
    )
    return CacheManager(
        options=CacheOptions(
            num_pages=num_pages,
            page_size=page_size,
            bytes_per_token=BYTES_PER_TOKEN,
            hbm_bytes_per_token=None,
            prefer_contiguous=contiguous,
            most_pages=most_pages,
            num_slots=dram_slots + staging_slots,
            dram_slots=dram_slots,
            disk_bytes=disk_bytes,
            redis_bytes=0,
            head_key=head_key,
            coded_block_bytes=0 if coded_slots is None else CODED_BYTES,
            coded_slots=coded_slots or 0,
            hbm_high_water=high_water,
            hbm_low_water=low_water,
            dram_free_buffer=free_buffer,
            reuse=reuse,
            only_as_computed=exact,
            truncation=Truncation(window, ratio, truncation_mode, block_scorer, recall),
            session_ttl_s=ttl_s,
            max_sessions=max_sessions,
            unix_offset_s=1000.0,
        ),
        policy=POLICIES[policy],
        domain_of=domain_of,
        rates=Rates(
            num_layers=2,
            step_fixed_s=1e-3,
            prefill_s_per_token=1e-4,
            transfer_fixed_s=0.0,
            bytes_per_s=dict.fromkeys(directions, bytes_per_s),
        ),
        arrived=lambda job_id: 0.0,
        progress=lambda job_id: None,
    )


class PoolModel:
    """Plays the engine's part and the threads' around a CacheManager: moves, forward passes, commits, events."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.line: Line[str] = Line()  # as the manager was told last who waits
        self.exact: bool = manager._saver._only_as_computed
        self.rows: list[tuple[int, int]] = [(EMPTY, 0)] * (manager.tiers.pages.num_pages * manager.page_size)
        self.slots = [[EMPTY] * BLOCK_TOKENS for _ in range(manager.tiers.dram.rows.num_slots)]
        self.coded = [[EMPTY] * BLOCK_TOKENS for _ in range(manager.tiers.dram.coded.num_slots)]
        self.codes = manager._loads._codes
        self.disk: dict[int, dict[BlockKey, list[int]]] = {}  # extent id -> what is in it
        self.extents: dict[int, ExtentInfo] = {}
        self.records: dict[tuple[str, str, str], SessionRecord] = {}
        self.saves: deque[object] = deque()
        self.loads: deque[LoadBlocks] = deque()
        self.io: deque[object] = deque()
        self.encodes: deque[EncodeBlocks] = deque()
        self.encoded: set[BlockKey] = set()
        self.events: deque[Event] = deque()
        self.contexts: dict[str, RequestContext] = {}  # the open requests
        self.fails: Callable[[object], str | None] = lambda order: None  # an order -> why it fails
        self.deleted: list[str] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._token_of: dict[int, int] = {}  # a row's number -> its token
        self._root_of: dict[int, int] = {}  # a row's number -> the root of its tenant
        self._pure: dict[BlockKey, list[int]] = {}  # full blocks that are a chain from the root -> their rows
        self._held: dict[BlockKey, set[tuple[int, ...]]] = {}  # any block -> what was computed under its name
        self._states: dict[BlockKey, int] = {}  # pure blocks and roots -> the state after their last row

    # --- the engine's part --------------------------------------------------------------------------------------------

    def open(
        self,
        request_id: str,
        tokens: Iterable[int],
        *,
        session: str = "s",
        tenant: str = "",
        salt: str = "",
        rules: CutRules = NO_CUTS,
        reserve: int = 1,
        client_cut: ClientCut | None = None,
        now: float = 0.0,
    ) -> list[int]:
        """Returns the sequence's own list, to which is appended what is sampled."""
        stream = list(tokens)
        self._learn(domain_of(tenant, salt), stream if client_cut is None else client_cut.stream)
        context = self.manager.requests.open(request_id, tenant, salt, session, stream, rules, reserve, client_cut, now)
        self.contexts[request_id] = self.manager.requests.context(request_id)
        return context

    def close(self, request_id: str, num_tokens: int | None = None, now: float = 0.0) -> None:
        context = self.contexts.pop(request_id)
        self.manager.requests.close(request_id, len(context.token_ids) if num_tokens is None else num_tokens, now)

    def move(self) -> None:
        """Carry out what the manager ordered inside HBM, hand the rest to its queue."""
        size = self.manager.page_size
        for move in self.manager.take_moves():
            match move:
                case CopyRows():
                    assert move.source_row + move.num_rows <= size
                    assert move.target_row + move.num_rows <= size
                    source, target = (
                        move.source_page * size + move.source_row,
                        move.target_page * size + move.target_row,
                    )
                    turn = move.target_position - move.source_position
                    copied = self.rows[source : source + move.num_rows]
                    assert [position for _, position in copied] == list(
                        range(move.source_position, move.source_position + move.num_rows)
                    )
                    self.rows[target : target + move.num_rows] = [(value, p + turn) for value, p in copied]
                case LoadBlocks():
                    self.loads.append(move)
                case FinishLoad():
                    pass  # loads come whole here, sooner or later
                case FillFromPage() | FillFromSlot() | SealSlot():
                    self.saves.append(move)
                case EncodeBlocks():
                    self.encodes.append(move)
                case _:
                    self.io.append(move)

    def step(self, request_id: str, num_tokens: int) -> bool:
        """A forward pass over the next `num_tokens` tokens of one request, and its commit. False: its load had failed
        and it lost its room."""
        self.forward(request_id, num_tokens)
        self.hear()
        if request_id in self.void_failed():
            return False
        self.save_and_commit(request_id, num_tokens)
        return True

    def save_and_commit(self, request_id: str, num_tokens: int) -> None:
        """Save and commit what a forward pass on sound rows has computed."""
        context = self.contexts[request_id]
        size = self.manager.page_size
        pieces = self.manager.requests.capture(request_id, num_tokens, 0)
        first = context.rows.computed
        step = [self.rows[context.rows.pages[p // size] * size + p % size][0] for p in range(first, first + num_tokens)]
        self.move()
        if pieces:
            self.saves.append((step, pieces))
        self.manager.requests.commit(request_id, num_tokens)

    def forward(self, request_id: str, num_tokens: int) -> None:
        self.move()
        context = self.contexts[request_id]
        while context.load is not None and any(load.job_id == context.load.job for load in self.loads):
            self.run_load()  # the layers wait for what is on its way
        tokens, size = context.token_ids, self.manager.page_size
        self._learn(context.domain, tokens)
        assert context.rows.computed + num_tokens <= len(tokens)
        values = [value for value, _ in self._computed(context)]
        state = self._root(context.domain)
        for value in values:
            state = self._next(state, value)
        for place in range(context.rows.computed, context.rows.computed + num_tokens):
            value = self._value(state, tokens[place], self._root(context.domain))
            self.rows[context.rows.pages[place // size] * size + place % size] = (value, place)
            values.append(value)
            state = self._next(state, value)
        if GARBAGE not in values and EMPTY not in values:  # else its load has failed, and nothing will be published
            self._name(context, values)

    def _computed(self, context: RequestContext) -> list[tuple[int, int]]:
        """The rows that a context has computed, in pages or parked: (number, position)."""
        size, found = self.manager.page_size, []
        for place in range(context.rows.computed):
            page, (block, offset) = context.rows.pages[place // size], divmod(place, BLOCK_TOKENS)
            if page == PARKED:
                where = context.saving.parked[block]
                found.append((self.slots[where.slot][offset], where.position + offset))
            else:
                found.append(self.rows[page * size + place % size])
        return found

    def void_failed(self) -> list[str]:
        failed = self.manager.requests.take_failed()
        for request_id in failed:
            self.manager.requests.void(request_id)
        return failed

    def run(self, request_id: str, tokens: Iterable[int], *, answer: Iterable[int] = (), session: str = "s") -> int:
        """One whole turn: open, admit, prefill, decode `answer` but for its last token, close. Returns how many tokens
        were found."""
        self.open(request_id, tokens, session=session)
        context = self.contexts[request_id]
        pending = len(context.token_ids) - self.manager.view.resident_tokens(request_id)
        cached = self.manager.view.admit(request_id, pending)
        assert cached is not None
        assert self.step(request_id, pending)
        for place, token in enumerate(answer):
            if place:
                assert self.manager.view.grow(request_id, 1)
                assert self.step(request_id, 1)
            context.token_ids.append(token)
        self.check()
        self.close(request_id)
        self.check()
        return cached

    def plan(self, waiting: Sequence[str], now: float) -> None:
        """Look ahead by a queue in which these requests wait, next first."""
        if tuple(waiting) != self.line.members:
            self.line = self.line.followed_by(waiting)
        self.manager.plan(self.line, 0, now)

    def settle(self, now: float = 0.0) -> None:
        """Let everything that is under way end, and what follows from it."""
        for _ in range(1000):
            self.hear(now)
            self.plan([], now)
            self.move()
            if not (self.saves or self.loads or self.io or self.encodes or self.events):
                return
            while self.saves:
                self.run_save()
            while self.loads:
                self.run_load()
            while self.encodes:
                self.run_encode()
            while self.io:
                self.run_io()
            self.hear(now)
            self.void_failed()
            self.check()
        raise AssertionError("the transfers do not come to an end")

    def hear(self, now: float = 0.0) -> None:
        while self.events:
            self.manager.on_event(self.events.popleft(), now)
        ended = self.manager.sessions.deletions.take_ended()
        self.deleted += [waiter for waiter, problem in ended if problem is None]

    # --- the threads' part --------------------------------------------------------------------------------------------

    def run_save(self) -> None:
        order = self.saves.popleft()
        size = self.manager.page_size
        match order:
            case FillFromSlot():
                rows = self.slots[order.source_slot][: order.num_rows]
                assert EMPTY not in rows, "filled from a slot that has no such rows"
                self.slots[order.slot][: order.num_rows] = rows
            case FillFromPage():
                assert not self.exact, "a key was rounded twice"
                assert self.manager.tiers.pages.pins(order.page)
                start = order.page * size + order.page_row
                rows = self.rows[start : start + order.num_rows]
                assert [p for _, p in rows] == list(range(order.position, order.position + order.num_rows))
                self.slots[order.slot][order.slot_row : order.slot_row + order.num_rows] = [value for value, _ in rows]
            case SealSlot():
                if order.num_rows:
                    assert EMPTY not in self.slots[order.slot][: order.num_rows]
                    self.slots[order.slot][order.num_rows :] = [EMPTY] * (BLOCK_TOKENS - order.num_rows)
                self.events.append(Saved(order.ticket))
            case (step, pieces):
                for piece in pieces:
                    assert isinstance(piece, CapturePiece)
                    rows = step[piece.batch_row : piece.batch_row + piece.num_rows]
                    assert len(rows) == piece.num_rows
                    self.slots[piece.slot][piece.slot_row : piece.slot_row + piece.num_rows] = rows
                self.events.append(Transferred("hbm_to_dram", BYTES_PER_TOKEN * len(step), 1e-9))

    def run_load(self) -> None:
        order = self.loads.popleft()
        size = self.manager.page_size
        failed: dict[BlockKey, str] = {}
        reason = self.fails(order)
        if reason is not None:
            failed[order.blocks[0].key] = reason
        for block in order.blocks:
            assert self.manager.tiers.pages.pins(block.page), "loaded into a page that is not held"
            if block.extent is not None:
                stored = self.disk.get(block.extent[0])
                if stored is None:
                    failed[block.key] = "missing"  # deleted while the load waited
                    continue
                assert block.is_coded == (self.codes and is_coded(block.extent[0]))
                content = stored[block.key]
                if block.slot is not None:
                    (self.coded if block.is_coded else self.slots)[block.slot] = list(content)
            else:
                content = (self.coded if block.is_coded else self.slots)[block.slot or 0]
            rows = content[: block.num_rows]
            if block.is_coded:
                rows = decoded(rows)
            assert self._may_be(block.key, rows), "a slot or an extent has something else than its block"
            start = block.page * size + block.page_row
            self.rows[start : start + block.num_rows] = [(v, block.position + i) for i, v in enumerate(rows)]
        if failed:
            for block in order.blocks:
                start = block.page * size + block.page_row
                self.rows[start : start + block.num_rows] = [(GARBAGE, 0)] * block.num_rows
        self.events.append(Loaded(order.job_id, failed))

    def run_encode(self) -> None:
        order = self.encodes.popleft()
        for key, slot, target in order.blocks:
            self._encode(key, self.slots[slot])
            self.coded[target] = list(self.slots[slot])
        taken = [True] * len(order.blocks)
        if self.fails(order) is not None:
            taken[0] = False
            self.coded[order.blocks[0][2]] = [GARBAGE] * BLOCK_TOKENS
        self.events.append(Encoded(order.job_id, tuple(taken)))

    def _encode(self, key: BlockKey, rows: Sequence[int]) -> None:
        assert self._may_be(key, rows), "a slot that is encoded has something else than its block"
        assert len(rows) == BLOCK_TOKENS
        assert EMPTY not in rows, "an open block is encoded"
        assert not were_decoded(rows), "coded twice"
        self.encoded.add(key)

    def run_io(self) -> None:
        order = self.io.popleft()
        match order:
            case WriteExtent():
                contents = {}
                for block, slot in zip(order.blocks, order.slots, strict=True):
                    count = len(block.token_ids) // 4
                    if order.from_coded:
                        assert order.is_coded
                        contents[block.key] = list(self.coded[slot])
                        assert self._may_be(block.key, self.coded[slot])
                        continue
                    if order.is_coded:
                        self._encode(block.key, self.slots[slot])
                    rows = self.slots[slot][:count]
                    assert self._may_be(block.key, rows), "a slot that is written has something else than its block"
                    assert token_bytes([self._token_of[v] for v in rows]) == block.token_ids
                    contents[block.key] = list(self.slots[slot])
                reason = self.fails(order)
                if reason is not None:
                    self.events.append(Written(order.job_id, None, reason))
                    return
                extent_id = 2 * order.job_id + (max(self.disk, default=0) // 2 + 1) * 1000 + order.is_coded
                self.disk[extent_id] = contents
                slot_bytes = CODED_BYTES if order.is_coded else BLOCK_TOKENS * BYTES_PER_TOKEN
                info = ExtentInfo(extent_id, order.session, order.blocks, len(contents) * slot_bytes + 4096)
                self.extents[extent_id] = info
                self.records[order.session.names] = order.session
                self.events.append(Written(order.job_id, info, None))
            case FetchBlocks():
                reason = self.fails(order)
                failed = {} if reason is None else {order.blocks[0][0]: reason}
                for key, (extent_id, _), slot in order.blocks:
                    if extent_id in self.disk:
                        (self.coded if self.codes and is_coded(extent_id) else self.slots)[slot] = list(
                            self.disk[extent_id][key]
                        )
                    else:
                        failed[key] = "missing"
                self.events.append(Fetched(order.job_id, failed))
            case DeleteExtents():
                for extent_id in order.extent_ids:
                    del self.disk[extent_id], self.extents[extent_id]
                if order.session is not None:
                    self.records.pop(order.session, None)
                self.events.append(Deleted(order.job_id))
            case PutSession():
                self.records[order.record.names] = order.record

    # --- what rows are called -----------------------------------------------------------------------------------------

    def _number(self, *what: object) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _root(self, domain: KeyDomain) -> int:
        root = self._number("root", domain.root)
        self._states[domain.root] = root
        return root

    def _value(self, state: int, token: int, root: int) -> int:
        value = self._number("row", state, token)
        self._token_of[value], self._root_of[value] = token, root
        return value

    def _next(self, state: int, value: int) -> int:
        return self._number("behind", state, value)

    def _learn(self, domain: KeyDomain, tokens: Sequence[int]) -> None:
        """Note what the rows of a context hold that was never cut, by the names of its blocks."""
        root = state = self._root(domain)
        for block, key in enumerate(domain.chain(tokens)):
            if key not in self._pure:
                rows = []
                for token in tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]:
                    rows.append(self._value(state, token, root))
                    state = self._next(state, rows[-1])
                self._pure[key], self._states[key] = rows, state
            state = self._states[key]

    def pure(self, domain: KeyDomain, tokens: Sequence[int]) -> list[int]:
        """Return what the rows of a context hold that was never cut."""
        self._learn(domain, tokens)
        keys = domain.chain(tokens)
        rows = [value for key in keys for value in self._pure[key]]
        root, state = self._root(domain), self._states[keys[-1] if keys else domain.root]
        for token in tokens[len(rows) :]:
            rows.append(self._value(state, token, root))
            state = self._next(state, rows[-1])
        return rows

    def _name(self, context: RequestContext, values: list[int]) -> None:
        """Note what was computed under the names of a context's blocks. A name that is a chain from the root says all
        that a row depends on; after a cut it may depend on whether an open block was still there."""
        keys = context.chain()
        for block in range(len(values) // BLOCK_TOKENS):
            rows = values[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            key = keys[block]
            assert key not in self._pure or self._pure[key] == rows, "a block was computed on something else"
            self._held.setdefault(key, set()).add(tuple(rows))
        full = len(values) // BLOCK_TOKENS
        for count in range(1, len(values) - full * BLOCK_TOKENS + 1):
            tokens = context.token_ids[full * BLOCK_TOKENS : full * BLOCK_TOKENS + count]
            key = context.domain.open_block(context.lineage.parent(full), tokens, context.session_id)
            self._held.setdefault(key, set()).add(tuple(values[full * BLOCK_TOKENS :][:count]))

    def _may_be(self, key: BlockKey, rows: Sequence[int]) -> bool:
        """Whether these can be the first rows of a block."""
        if key in self._pure:
            return self._pure[key][: len(rows)] == list(rows)
        return any(list(held[: len(rows)]) == list(rows) for held in self._held[key])

    # --- what must be true --------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.move()
        for context in self.contexts.values():
            self._check_context(context)
        self._check_blocks()
        self._check_pages()
        self._check_slots()
        self._check_coded()
        self._check_disk()
        self._check_in_flight()

    def _check_context(self, context: RequestContext) -> None:
        """Every computed row holds its own token after its own prefix, and what comes next can be written safely."""
        size = self.manager.page_size
        if not context.rows.pages:
            assert context.rows.computed == 0
            self.check_match(context)
            return
        assert context.rows.computed <= len(context.rows.pages) * size
        if context.load is None or context.load.state is LoadState.OUTLIVED:
            held = self._computed(context)
            values = [value for value, _ in held]
            assert [position for _, position in held] == list(range(context.rows.computed))
            assert [self._token_of[value] for value in values] == context.token_ids[: context.rows.computed], context
            assert {self._root_of[value] for value in values} <= {self._root(context.domain)}
            if not context.cuts.ranges:
                assert values == self.pure(context.domain, context.token_ids)[: context.rows.computed], context
            self._name(context, values)
        pages = [page for page in context.rows.pages if page != PARKED]
        assert len(set(pages)) == len(pages)
        published = {(row.page, row.offset // BLOCK_TOKENS) for row in self.manager.tiers.table if row.page is not None}
        saved_from = [page for pages, _ in self.manager.tiers.dram.saves._sources.values() for page in pages]
        for place in range(context.rows.computed // BLOCK_TOKENS, len(context.rows.pages) * size // BLOCK_TOKENS):
            page = context.rows.pages[place * BLOCK_TOKENS // size]
            block = place * BLOCK_TOKENS % size // BLOCK_TOKENS
            loading = sum(load.page == page for job in self.manager._loads.under_way.values() for load in job.blocks)
            saving = saved_from.count(page)
            assert self.manager.tiers.pages.pins(page) == 1 + loading + saving, (
                "somebody else runs on a page to be written"
            )
            assert (page, block) not in published, "a block is findable where rows will be written"

    def check_match(self, context: RequestContext) -> None:
        """Fail if what is remembered of a waiting context, and still counts, is not what is found anew."""
        matcher, reason = self.manager.view._matcher, context.reuse.miss_reason
        assert matcher.match(context) == matcher._match_anew(context, matcher._basis(context))
        context.reuse.miss_reason = reason

    def _check_blocks(self) -> None:
        """Every block that can be found holds what its name says, in every tier that it is said to be in."""
        size = self.manager.page_size
        places, slots, coded = set(), set(), set()
        for row in self.manager.tiers.table:
            count = len(row.token_ids)
            assert not row.is_nowhere, row
            assert row.is_open == (count < BLOCK_TOKENS)
            assert row.size_bytes == BYTES_PER_TOKEN * count
            contents = []
            if row.page is not None:
                assert row.offset % BLOCK_TOKENS == 0
                assert row.offset + count <= size
                held = self.rows[row.page * size + row.offset :][:count]
                assert [p for _, p in held] == list(range(row.position, row.position + count)), row
                contents.append([value for value, _ in held])
                assert (row.page, row.offset) not in places, "two blocks at one place"
                places.add((row.page, row.offset))
            if "dram" in row.copies:
                contents.append(self.slots[row.copies["dram"]][:count])
                assert row.copies["dram"] not in slots, "two blocks in one slot"
                slots.add(row.copies["dram"])
            for content in contents:
                if were_decoded(content):
                    assert row.decoded or row.kept_raw or row.is_open, "it may be coded once more"
            if row.page is not None and not row.is_open:
                assert row.decoded == all(isinstance(value, Decoded) for value in contents[0])
            if "dram" in row.copies and not row.is_open:
                content = self.slots[row.copies["dram"]]
                assert not all(isinstance(value, Decoded) for value in content), "decoded rows are saved"
            if "coded" in row.copies:
                assert not row.is_open
                contents.append(self.coded[row.copies["coded"]])
                assert row.copies["coded"] not in coded, "two blocks in one coded slot"
                coded.add(row.copies["coded"])
            if "disk" in row.copies:
                info, stored = self.extents[row.copies["disk"][0]], self.disk[row.copies["disk"][0]]
                assert info.blocks[row.copies["disk"][1]].key == row.key
                contents.append(stored[row.key][:count])
            for content in contents:
                assert [self._token_of[value] for value in content] == list(row.token_ids), row
                assert self._may_be(row.key, content), row

    def _check_pages(self) -> None:
        """A page is free, cached or pinned, and for a reason; a free one is wiped, so that no luck hides a mistake."""
        manager, pages = self.manager, self.manager.tiers.pages
        pins, residents = [0] * pages.num_pages, [0] * pages.num_pages
        for context in self.contexts.values():
            for page in context.rows.pages:
                pins[page] += page != PARKED
        for load in manager._loads.under_way.values():
            for block in load.blocks:
                pins[block.page] += 1
        for held, _ in manager.tiers.dram.saves._sources.values():
            for page in held:
                pins[page] += 1
        resident = [row for row in manager.tiers.table if row.page is not None]
        for row in resident:
            residents[row.page] += 1
        for page in range(pages.num_pages):
            assert (pages.pins(page), pages.residents(page)) == (pins[page], residents[page])
            assert pages.is_free(page) == (pins[page] == residents[page] == 0)
            if pages.is_free(page):
                size = manager.page_size
                self.rows[page * size : (page + 1) * size] = [(EMPTY, 0)] * size
        assert pages.num_free == sum(pages.is_free(page) for page in range(pages.num_pages))
        assert pages.num_pinned == manager.num_leases == sum(count > 0 for count in pins)
        assert pages.num_free + pages.num_cached + pages.num_pinned == pages.num_pages
        ranked = manager.tiers.hbm.policy.victims(len(manager.tiers.table) + 1, ())
        assert sorted(ranked) == sorted(row.key for row in resident)

    def _check_slots(self) -> None:
        """A slot is free or has one use; whoever copies out of it keeps it. Free ones are wiped."""
        manager, dram = self.manager, self.manager.tiers.dram.rows
        coding, saves = manager.tiers.dram.coded, manager.tiers.dram.saves
        resident = [row.copies["dram"] for row in manager.tiers.table if "dram" in row.copies]
        filling = [slot for context in self.contexts.values() for slot in context.saving.slots.values()]
        filling += [ticket.slot for ticket in saves._tickets.values()]
        filling += [slot for slot, is_coded in self._fetched_to() if not is_coded]
        loading = [block for load in manager._loads.under_way.values() for block in load.blocks if not block.is_coded]
        passing = [block for block in loading if block.extent and block.slot is not None]
        filling += [block.slot for block in passing]
        uses = [*resident, *filling, *dram._slots._free, *dram._slots._doomed]
        assert sorted(uses) == list(range(dram.num_slots)), "a slot is lost, or used twice"
        assert dram.resident == len(resident)
        pins = [0] * dram.num_slots
        for block in loading:
            if block.extent is None:
                pins[block.slot] += 1
        for context in self.contexts.values():
            for pinned in context.saving.parked.values():
                pins[pinned.slot] += 1
        for order in manager.tiers.dram.encoder._under_way.values():
            for _, slot, _ in order.blocks:
                pins[slot] += 1
        for _, sources in saves._sources.values():
            for slot in sources:
                pins[slot] += 1
        for write in manager.tiers.writes._writes.values():
            for slot in write.slots if write.tier is dram else ():
                pins[slot] += 1
        assert dram._slots._pins == pins
        used = dram.resident * dram.slot_bytes + coding.resident * coding.slot_bytes
        assert manager.gauges().tier_bytes["dram"] == used
        assert all(pins[slot] for slot in dram._slots._doomed)
        for slot in dram._slots._free:
            assert not pins[slot]
            self.slots[slot] = [EMPTY] * BLOCK_TOKENS
        ranked = dram.policy.victims(len(manager.tiers.table) + 1, ())
        assert sorted(ranked) == sorted(row.key for row in manager.tiers.table if "dram" in row.copies)
        if not dram.num_slots:
            assert not manager.tiers.in_flight

    def _fetched_to(self) -> list[tuple[int, bool]]:
        """(slot, whether it is a coded one) of every block that is being fetched."""
        orders = [fetch.order for fetch in self.manager.tiers.fetches._under_way.values()]
        return [(slot, self.codes and is_coded(copy[0])) for order in orders for _, copy, slot in order.blocks]

    def _check_coded(self) -> None:
        """The same of coded slots."""
        tiers = self.manager.tiers
        coded, slots = tiers.dram.coded, tiers.dram.coded._slots
        resident = [row.copies["coded"] for row in tiers.table if "coded" in row.copies]
        filling = [target for order in tiers.dram.encoder._under_way.values() for _, _, target in order.blocks]
        filling += [slot for slot, is_coded in self._fetched_to() if is_coded]
        loading = [b for load in self.manager._loads.under_way.values() for b in load.blocks if b.is_coded]
        filling += [block.slot for block in loading if block.extent and block.slot is not None]
        uses = [*resident, *filling, *slots._free, *slots._doomed]
        assert sorted(uses) == list(range(coded.num_slots)), "a coded slot is lost, or used twice"
        assert coded.resident == len(resident)
        pins = [0] * coded.num_slots
        for block in loading:
            if block.extent is None:
                pins[block.slot] += 1
        for write in tiers.writes._writes.values():
            for slot in write.slots if write.tier is coded else ():
                pins[slot] += 1
        assert slots._pins == pins
        assert all(pins[slot] for slot in slots._doomed)
        for slot in slots._free:
            self.coded[slot] = [EMPTY] * BLOCK_TOKENS
        ranked = coded.policy.victims(len(tiers.table) + 1, ())
        assert sorted(ranked) == sorted(row.key for row in tiers.table if "coded" in row.copies)
        under_way = {key for order in tiers.dram.encoder._under_way.values() for key, _, _ in order.blocks}
        assert under_way == tiers.dram.encoder._encoding

    def _check_disk(self) -> None:
        disk, writes = self.manager.tiers.disk, self.manager.tiers.writes
        live = {extent_id: extent.size_bytes for extent_id, extent in disk._extents.items()}
        assert disk.used_bytes == sum(live.values()) + sum(write.size_bytes for write in writes._writes.values())
        assert disk.used_bytes <= disk.capacity_bytes
        going = {i for order in self.io if isinstance(order, DeleteExtents) for i in order.extent_ids}
        unheard = {e.extent.extent_id for e in self.events if isinstance(e, Written) and e.extent is not None}
        assert set(self.disk) == set(live) | going | unheard, "an extent is lost"
        on_disk = {row.key: row.copies["disk"][0] for row in self.manager.tiers.table if "disk" in row.copies}
        for extent_id, extent in disk._extents.items():
            assert set(extent.keys) == {key for key, place in on_disk.items() if place == extent_id}
            assert extent.keys, "an extent that nobody needs"
        ranked = disk.policy.victims(len(self.manager.tiers.table) + 1, ())
        assert sorted(ranked) == sorted(on_disk)

    def _check_in_flight(self) -> None:
        """Check that a request that others wait for runs and will compute or load that block; a load may outlive it."""
        loading = {b.key for load in self.manager._loads.under_way.values() for b in load.blocks}
        for key, owner in self.manager._siblings.coming.items():
            if key in loading:
                continue
            context = self.contexts[owner]
            assert context.rows.pages
            assert key in context.chain()[context.rows.computed // BLOCK_TOKENS :]

    def rows_of(self, key: BlockKey) -> BlockRow | None:
        return self.manager.tiers.table.get(key)
