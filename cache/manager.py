"""Composes the cache, and is what callers see of it: they pass it events and the time, and it returns moves. It touches
no bytes.

A context of 140 tokens in pages of two blocks, and which class knows what of it:

    token_ids   |  block 0  |  block 1  |  block 2  |  block 3  | 4 |   the request's own list, which grows
    keys        |    k0     |    k1     |    k2     |    k3     |       `Lineage`: k3 names block 3 after blocks 0 to 2
    pages       |        page 7         |        page 2         |  9    pinned by the request (`PageAllocator`)
    computed    ------------------------------------------------>       rows that hold KV, or will by the time of a read
    published   ------------------------------------>                   what others may find (`CacheTable`)
    row of k0   page 7, row 0 · slot 31 · extent 5, 0                   one address for each tier that has the block
    saved to                                        | slot 12   |  4    slots of what is not sealed (`SlotTier`)
    taken       moves (`Orders`), which end in events: only then does the table tell of what was moved
"""

from collections.abc import Callable, Sequence

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.look_ahead import LookAhead, WaitingLine
from reprise.cache.moves import (
    Deleted,
    DiskGivenUp,
    DiskTaken,
    Encoded,
    Event,
    Fetched,
    HeadersRead,
    Loaded,
    Lost,
    Move,
    NotTransferred,
    RemoteDeleted,
    RemoteUsed,
    Renewed,
    Saved,
    Transferred,
    Uploaded,
    Written,
)
from reprise.cache.options import CacheOptions
from reprise.cache.policies.eviction_policy import PolicyFactory
from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.cache.rates import LoadProgress, Rates
from reprise.cache.requests.keeping import Keeper
from reprise.cache.requests.lifecycle import Lifecycle
from reprise.cache.requests.loading import Loads
from reprise.cache.requests.matching import Matcher
from reprise.cache.requests.opening import ContextOpener, DomainOf
from reprise.cache.requests.parking import Parking
from reprise.cache.requests.placing import Placer
from reprise.cache.requests.publishing import Publisher
from reprise.cache.requests.recalling import Recaller
from reprise.cache.requests.running import Requests
from reprise.cache.requests.saving import Saver
from reprise.cache.requests.siblings import Siblings
from reprise.cache.requests.view import SchedulerView
from reprise.cache.sessions import SessionStore
from reprise.cache.stats import CacheGauges, CacheStats
from reprise.cache.tiers.hierarchy import Hierarchy


class CacheManager:
    """The cache as the engine uses it: decides what is cached in which tier and what moves between the tiers. It
    guarantees that a row counted as cached, by the time it is read, holds the KV of exactly these tokens after exactly
    this prefix, and that a pinned page is written by one request alone. Used by the engine's thread alone.

    view        for the scheduler: what is stored of a request, and room for it
    parking     for the engine: contexts that HBM cannot hold
    requests    for the engine: a request from its arrival to its end
    sessions    for the session directory: contexts of sessions between their turns

    The methods here are for the engine's loop: what has ended, what comes, and what is to be moved for it.
    """

    def __init__(
        self,
        *,
        options: CacheOptions,
        policy: PolicyFactory,
        domain_of: DomainOf,
        rates: Rates,
        arrived: Callable[[int], float],
        progress: Callable[[int], LoadProgress | None],
    ) -> None:
        """Set up. domain_of: returns the key domain of (tenant, salt). arrived: takes a load's job number and returns
        the share of the load that is in HBM. progress: takes the same number and returns how much the disk or Redis has
        read, or None."""
        if options.page_size % BLOCK_TOKENS:
            raise ValueError(f"page size {options.page_size} is not a multiple of the block, {BLOCK_TOKENS}")
        self.rates, self.stats = rates, CacheStats()
        self.tiers = tiers = Hierarchy(options=options, policy=policy, stats=self.stats)
        self._running = running = Requests()
        self.sessions = SessionStore(options=options, tiers=tiers, running=running, domain_of=domain_of)
        truncation = options.truncation
        keeper = Keeper(scorer=BLOCK_SCORERS[truncation.block_scorer]())
        recalls = truncation.recall and truncation.mode == "decoupled" and options.reuse
        recaller = Recaller(table=tiers.table, keeper=keeper, window=truncation.window) if recalls else None
        opener = ContextOpener(
            tiers=tiers,
            sessions=self.sessions.contexts,
            truncation=truncation,
            domain_of=domain_of,
            keeper=keeper,
            recaller=recaller,
        )
        self.parking = parking = Parking(tiers=tiers, most_pages=options.most_pages)
        matcher = Matcher(tiers=tiers, rates=rates, parking=parking, options=options)
        self._siblings = siblings = Siblings(tiers=tiers)
        self._loads = loads = Loads(
            tiers=tiers,
            siblings=siblings,
            running=running,
            rates=rates,
            arrived=arrived,
            progress=progress,
            bytes_per_token=options.bytes_per_token,
            codes=bool(options.coded_block_bytes),
        )
        self._saver = saver = Saver(tiers=tiers, only_as_computed=options.only_as_computed)
        placer = Placer(
            tiers=tiers, matcher=matcher, siblings=siblings, loads=loads, parking=parking, reuse=options.reuse
        )
        publisher = Publisher(
            tiers=tiers,
            running=running,
            siblings=siblings,
            saver=saver,
            loads=loads,
            parking=parking,
            reuse=options.reuse,
        )
        self.view = SchedulerView(
            tiers=tiers,
            running=running,
            matcher=matcher,
            siblings=siblings,
            loads=loads,
            placer=placer,
            publisher=publisher,
            reuse=options.reuse,
        )
        self.requests = Lifecycle(
            tiers=tiers,
            running=running,
            sessions=self.sessions,
            opener=opener,
            loads=loads,
            saver=saver,
            publisher=publisher,
            reuse=options.reuse,
        )
        self._ahead = LookAhead(
            tiers=tiers,
            sessions=self.sessions,
            running=running,
            rates=rates,
            is_reading=loads.is_reading,
            reuse=options.reuse,
        )

    def on_event(self, event: Event, now: float) -> None:
        """Record an event of the transfer threads: a move has ended, or bytes were moved or lost. now: seconds on the
        engine's monotonic clock."""
        tiers = self.tiers
        match event:
            case Saved():
                tiers.dram.saves.on_saved(event.ticket)
            case Loaded():
                self._loads.on_loaded(event)
            case Fetched():
                tiers.fetches.on_fetched(event.job_id, event.failed, now)
            case Encoded():
                tiers.dram.on_encoded(event.job_id, event.taken)
            case Written():
                tiers.writes.on_written(event.job_id, event.extent, event.refused, now)
                if event.extent is not None:
                    tiers.redis.want(event.extent)
            case Uploaded():
                tiers.redis.on_uploaded(event.job_id, event.extent, event.reason, now)
            case Renewed():
                tiers.redis.on_renewed(event.job_id, event.missing)
            case HeadersRead():
                self.sessions.on_headers(event.job_id, event.extents, event.reason, now)
            case RemoteDeleted():
                tiers.redis.on_deleted(event.job_id, event.problem, now)
            case RemoteUsed():
                tiers.redis.used_bytes = event.num_bytes
            case Deleted():
                tiers.disk.on_deleted(event.job_id, event.problem, now)
            case Lost():
                tiers.disk.lost(event.extent_ids)
            case DiskGivenUp():
                self.disk_given_up(event.problem)
            case DiskTaken():
                self._disk_taken(event, now)
            case Transferred():
                self.stats.count_move(event.direction, event.num_bytes, event.seconds)
                self.rates.moved(event.direction, event.num_bytes, event.seconds)
            case NotTransferred():
                self.rates.late(event.direction, event.num_bytes, event.seconds)
        self.sessions.deletions.go_on()

    def plan(self, line: WaitingLine, starting: int, now: float) -> None:
        """Decide what is done while the next step runs: give up loads that would take longer than computing, save
        blocks that found no slot before, fetch for waiting turns (AttentionStore §3.3), write to disk and Redis what
        turns have computed, and make room. line: the waiting requests. The first `starting` of them get a place in the
        batch: they load for themselves, layer by layer. now: seconds on the engine's monotonic clock."""
        # Each part is skipped when there is nothing to do, as in most steps.
        tiers = self.tiers
        self._loads.now = self.parking.now = now
        if self._loads.under_way:
            self._loads.give_up()
        if self._saver.put_off:
            self._saver.catch_up()
        # While turns run, no other waits and none is expected, there is nothing to look ahead to.
        if line.members or not self._running or self._ahead.has_news(line):
            self._ahead.plan(line, starting, now)
        # While a turn runs, what is dirty is mostly its own, and was looked at when it changed.
        is_new = tiers.dirty.sessions and tiers.writes.seen != (tiers.dirty.changes, self._running.changes)
        if is_new or tiers.writes.unrecorded or tiers.disk.refused:
            self.sessions.write_behind(now)
        if tiers.redis.is_on and tiers.redis.has_work:
            tiers.redis.plan(now)
        if tiers.dram.rows.resident > tiers.dram.rows.most_resident:
            tiers.dram.shrink()
        if tiers.pages.num_free < tiers.hbm.least_free:
            tiers.hbm.offload()

    def lost(self, request_id: str, keys: Sequence[BlockKey]) -> None:
        """Forget the copies in DRAM of these blocks, because a step of the request found their bytes altered. keys: of
        the blocks. `Lifecycle.take_failed` will return the request."""
        self.parking.lost(self._running[request_id], keys)
        self._loads.failed[request_id] = None

    def take_moves(self) -> list[Move]:
        """Return the moves that were decided and that no earlier call has returned. They are to be carried out in this
        order, before the next step."""
        orders = self.tiers.orders
        return orders.take() if orders.moves else []

    def quarantine(self, tier: str) -> None:
        """Stop using `dram` or `disk` in this process, and everything in it, because it gave wrong results although the
        checksums were right."""
        self.tiers.quarantine(tier)

    def disk_given_up(self, problem: str) -> None:
        """Stop using the disk, and what lies on it, until it answers again. problem: the reason, as a text for
        people."""
        self.tiers.disk_given_up(problem)

    def disk_is_unseen(self, problem: str) -> None:
        """Start without the disk, which has not answered yet. What lies on it is unknown until it answers. problem: the
        reason, as a text for people."""
        self.tiers.disk_given_up(problem)
        self.sessions.deletions.disk_is_unseen()

    def _disk_taken(self, event: DiskTaken, now: float) -> None:
        self.tiers.disk_taken(event.capacity_bytes)
        if event.extents is not None:
            self.sessions.restore(event.extents, event.records, now)

    def condemn_codec(self) -> None:
        """Stop using the codec and the KV that it has changed: no request finds a block that it has compressed, or one
        that was computed on such a block. Running requests finish with the KV they have. Later ones are served as if
        they had asked for exact KV, that is KV that no codec has changed."""
        self.tiers.condemn_codec()
        self.sessions.codec_condemned()

    # --- pages --------------------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """The number of tokens in a page."""
        return self.tiers.hbm.page_size

    @property
    def hbm_tokens(self) -> int:
        """The number of tokens for which all pages together have room."""
        return self.tiers.pages.num_pages * self.page_size

    def borrow(self, num_pages: int) -> list[int] | None:
        """Return pages that belong to no context, for the engine's own use until `give_back`; None if HBM has no room
        for them."""
        return self.tiers.hbm.borrow(num_pages)

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.tiers.pages.unpin(page)

    @property
    def reached(self) -> tuple[int, int]:
        """(number of DRAM slots, number of HBM pages), each counted from the first to the last that was ever taken. The
        memory after these has never been used."""
        return self.tiers.dram.rows.reached, self.tiers.pages.reached

    def pages_are_ready(self, num_pages: int) -> None:
        """Note that the memory of the first `num_pages` pages has been touched. The others are slower when first used,
        so they are taken last."""
        self.tiers.pages.ready = min(num_pages, self.tiers.pages.num_pages)  # the ring lies after these

    # --- gauges -------------------------------------------------------------------------------------------------------

    @property
    def changes(self) -> int:
        """A counter that changes when a request begins, ends or gives its pages back."""
        return self._running.changes

    def is_roomy(self, num_running: int) -> bool:
        """Return whether `num_running` sequences can decode for a step or two without anything being evicted from a
        tier."""
        has_room = self.tiers.pages.num_free >= 2 * num_running > 0 and not self.tiers.dram.is_pressed
        return has_room and self.parking.owner is None

    @property
    def num_leases(self) -> int:
        """The number of pages pinned by requests and transfers; 0 when nothing runs."""
        return self.tiers.pages.num_pinned

    @property
    def in_flight(self) -> int:
        """The number of saves, encodings, loads, fetches, writes, uploads and deletions under way and of sessions to be
        recorded; 0 when idle."""
        return self.tiers.in_flight + len(self._loads.under_way)

    def gauges(self) -> CacheGauges:
        """Return how full each tier is now."""
        pages, dram, disk, redis = self.tiers.pages, self.tiers.dram, self.tiers.disk, self.tiers.redis
        used = {"dram": dram.used_bytes, "disk": disk.used_bytes}
        capacity = {"dram": dram.capacity_bytes, "disk": disk.capacity_bytes}
        return CacheGauges(
            sessions=len(self.sessions.contexts),
            leases=self.num_leases,
            in_flight=self.in_flight,
            hbm_pages_total=pages.num_pages,
            hbm_pages_free=pages.num_free,
            hbm_pages_cached=pages.num_cached,
            tier_bytes=used | ({"redis": redis.used_bytes} if redis.is_on else {}),
            tier_capacity=capacity | ({"redis": redis.capacity_bytes} if redis.is_on else {}),
            tier_problems={} if disk.problem is None else {"disk": disk.problem},
        )
