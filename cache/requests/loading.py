"""Starts loads from DRAM, disk and Redis into the pages of requests, gives up late ones, and records what was
loaded."""

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.stored import is_coded
from reprise.cache.moves import NOT_ITS_COPY, AbandonLoad, BlockLoad, FinishLoad, LoadBlocks, Loaded
from reprise.cache.rates import LoadProgress, Rates, worth_waiting_s
from reprise.cache.requests.context import Load, LoadState, RequestContext
from reprise.cache.requests.siblings import Siblings
from reprise.cache.tiers.hierarchy import Hierarchy
from reprise.cache.tiers.slot_tier import SlotTier

_WAVER_FACTOR = 2  # the expected time of a load may be off by this factor although the device is as fast as before


class Loads:
    """The loads under way. The Placer starts loads, and the engine's loop reports their progress and end, all on the
    engine's thread. The states of a load:

    state      its request                                                        set by     next
    WANTED     holds its pages                                                    start      any other
    RELEASED   has given its pages back; the load goes on for no request          release    ENDED
    OUTLIVED   was voided because the load is late, and waits for its end         outlive    ENDED
    FAILED     has rows that did not come, until `Restarts` voids it              on_loaded  -
    ENDED      has what came                                                      on_loaded  -

    The pages and slots of a load are pinned until the threads have ended it, even if no request wants it any more.
    Until then it may be given up in any state, even if a part of it has failed. Then no more is read for it, and it
    ends with what came out of DRAM.
    """

    def __init__(
        self,
        *,
        tiers: Hierarchy,
        siblings: Siblings,
        running: Container[str],
        rates: Rates,
        arrived: Callable[[int], float],
        progress: Callable[[int], LoadProgress | None],
        bytes_per_token: int,
        codes: bool,
    ) -> None:
        """Set up. arrived(job): share of a load that is in HBM. progress(job): what the disk has read of it. codes:
        whether copies below DRAM may be compressed by a codec, which their extent's id says."""
        self.under_way: dict[int, Load] = {}
        self._table, self._pages, self._hbm = tiers.table, tiers.pages, tiers.hbm
        self._tiers, self._dram, self._disk, self._redis = tiers, tiers.dram, tiers.disk, tiers.redis
        self._fetches, self._orders = tiers.fetches, tiers.orders
        self._siblings = siblings
        self._running = running
        self._rates = rates
        self._arrived = arrived  # job -> the share of its load that is in HBM
        self._progress = progress  # job -> how far the disk has come with its load
        self._bytes_per_token, self._codes = bytes_per_token, codes
        self._stats = tiers.stats
        self.now = -math.inf
        """Time of the last plan, in seconds. The CacheManager sets it."""
        self.failed: dict[str, None] = {}  # requests whose load failed, until `take_failed`

    def start(self, context: RequestContext, loads: Sequence[BlockLoad]) -> None:
        """Order a load of the blocks of a request's context that HBM lacks."""
        blocks = tuple(self._taken(context, block) for block in loads)
        self._disk.hold(block.key for block in blocks if block.extent is not None)
        far = [block.position for block in blocks if block.is_far]
        # After a cut everything that is stored is loaded: it cannot be computed again.
        first = min(far) if far and context.lineage.joint is None else None
        load = Load(self._orders.next_job(), context, blocks, first)
        load.seemed_fast = self._expected_s(load) <= self._worth_waiting_s(load)
        context.load = self.under_way[load.job] = load
        self._orders.add(LoadBlocks(load.job, context.request_id, blocks))

    def _taken(self, context: RequestContext, block: BlockLoad) -> BlockLoad:
        """Prepare to load a block: pin its source and its page, let other requests know that it is coming, and take a
        DRAM slot for it if it comes from disk or Redis."""
        if self._codes and (address := block.extent or block.redis) is not None:
            block = replace(block, is_coded=is_coded(address[0]))
        if block.slot is not None:
            self._slots_of(block).pin(block.slot)
        elif block.num_rows == BLOCK_TOKENS and self._fetches.has_room(coded=block.is_coded):
            block = replace(block, slot=self._slots_of(block).take_slot(None))
        self._pages.pin(block.page)
        if block.num_rows == BLOCK_TOKENS:
            self._siblings.claim(block.key, context.request_id)
        return block

    def _slots_of(self, load: BlockLoad) -> SlotTier:
        return self._dram.slots_for(is_coded=load.is_coded)

    def give_up(self) -> None:
        """Give up loads that would take longer than computing, because the disk is slow or does not answer. All blocks
        of a load arrive layer by layer, so everything that the disk was to bring is computed; what came out of DRAM is
        used."""
        for job_id, load in self.under_way.items():
            progress = self._progress(job_id) if load.first is not None and not load.is_given_up else None
            if progress is None:
                continue
            left_s = progress.left_s(self._rates.num_layers)
            if not progress.layers and load.seemed_fast:
                # Other loads may have shown meanwhile that the disk is slow, but their times waver.
                left_s = max(left_s, self._expected_s(load) / _WAVER_FACTOR)
            if left_s > self._worth_waiting_s(load):
                load.is_given_up = True
                self._orders.add(AbandonLoad(job_id))

    def patience_s(self, context: RequestContext) -> float:
        """Return how many more seconds a step may wait for the next layer of a request's load before the load is given
        up; inf if it is not to be given up."""
        load = _wanted(context)
        progress = self._progress(load.job) if load is not None else None
        if load is None or load.first is None or progress is None:
            return math.inf
        return self._worth_waiting_s(load) - progress.silent_s

    def is_fetch_late(self, context: RequestContext) -> bool:
        """Return whether a request whose turn has come has waited for a fetch into DRAM for as long as computing would
        take. It then skips the blocks on disk and in Redis. After a truncation it keeps waiting, because stored blocks
        cannot be computed again."""
        is_fetching = self._fetches.is_fetching
        if context.waiting.block is None or not is_fetching(context.waiting.block) or context.lineage.joint is not None:
            return False
        coming = [block for block, key in enumerate(context.chain()) if is_fetching(key)]
        tokens, first, end = len(context.token_ids), coming[0] * BLOCK_TOKENS, (coming[-1] + 1) * BLOCK_TOKENS
        # A fetch is of no use before its last layer has come, so it counts as a load of a single layer.
        allowed_s = worth_waiting_s(self._rates.compute_s(tokens - end), self._rates.compute_s(tokens - first), 1)
        if context.waiting.fetch_due_s is None:
            context.waiting.fetch_due_s = self.now + allowed_s
        if self.now < context.waiting.fetch_due_s:
            return False
        chain = context.chain()
        for tier, count in Counter(self._fetches.tier_of(chain[block]) for block in coming).items():
            self._rates.late(f"{tier}_to_dram", count * BLOCK_TOKENS * self._bytes_per_token, allowed_s)
        self._stats.load_failures["late"] += len(coming)
        context.reuse.skips_disk, context.reuse.miss_reason = True, "load_late"
        return True

    def _worth_waiting_s(self, load: Load) -> float:
        """Return how many seconds a load may take before computing the blocks that it reads off the disk is faster; inf
        if it reads none."""
        if load.first is None:
            return math.inf
        end = max(block.position + block.num_rows for block in load.blocks)
        tokens = len(load.context.token_ids)
        new_s, all_s = self._rates.compute_s(tokens - end), self._rates.compute_s(tokens - load.first)
        return worth_waiting_s(new_s, all_s, self._rates.num_layers)

    def _expected_s(self, load: Load) -> float:
        """Return how many seconds a whole load should take by the rates measured so far."""
        tokens = Counter[str]()
        for block in load.blocks:
            tokens[block.source] += block.num_rows
        return sum(self._rates.load_s(f"{source}_to_hbm", n * self._bytes_per_token) for source, n in tokens.items())

    def release(self, context: RequestContext) -> bool:
        """Detach a load from its request, because the request gives its pages back. Returns whether its rows must not
        be used, because the load has failed or is still under way. A load under way goes on, although no request waits
        for it."""
        load, context.load = context.load, None
        if load is not None and load.state is LoadState.WANTED:
            load.state = LoadState.RELEASED
            self._orders.add(FinishLoad(load.job))
            return True
        return load is not None and load.state is LoadState.FAILED

    def outlive(self, context: RequestContext) -> None:
        """Let a request whose load was late, and whose pages are taken back, wait outside of the batch for the end of
        that load, so that nothing is loaded twice."""
        context.load = load = _wanted(context)
        if load is None:
            return
        load.state = LoadState.OUTLIVED
        for block in load.blocks:
            if block.num_rows == BLOCK_TOKENS:
                self._siblings.claim(block.key, load.claimant)

    @staticmethod
    def is_outlived(context: RequestContext) -> bool:
        """Return whether a load that was late for a request is still under way."""
        return context.load is not None and context.load.state is LoadState.OUTLIVED

    def on_loaded(self, event: Loaded) -> None:
        """Record the end of a load: blocks that arrived are used. A bad copy is forgotten. A copy that could not be
        read is not tried again for this request."""
        load = self.under_way.pop(event.job_id)
        context = load.context
        self._disk.release(block.key for block in load.blocks if block.extent is not None)
        for block in load.blocks:
            self._siblings.settle(block.key, load.claimant)
            if block.slot is not None and not block.is_far:
                self._slots_of(block).unpin(block.slot)
            elif block.slot is not None:
                if event.failed:
                    self._slots_of(block).give_back(block.slot)
                else:
                    self._slots_of(block).keep(block.key, block.slot)
            row = self._table.get(block.key)
            is_here = not event.failed or block.key in event.whole
            if is_here and block.num_rows == BLOCK_TOKENS and row is not None and not row.is_open:
                self._hbm.settle(block.key, block.page, block.page_row, block.position, hop=False)
                if (row.page, row.offset) == (block.page, block.page_row):
                    row.decoded = block.is_coded
                if load.state is LoadState.OUTLIVED:
                    context.sources.brought[block.key] = block.tier
            self._pages.unpin(block.page)
        for key, reason in event.failed.items():
            self._stats.load_failures[reason] += 1
            if reason not in NOT_ITS_COPY:
                self._drop_bad_copy(next(b for b in load.blocks if b.key == key))
            elif reason != "late":
                context.reuse.unread[key] = reason
        if copies := {block.key: block.redis for block in load.blocks if block.redis is not None}:
            self._redis.settle(copies, event.failed, context.session, self.now)
        self._tell_request(load, event)

    def _tell_request(self, load: Load, event: Loaded) -> None:
        """Record in the request's context how its load has ended: complete, failed, or too late for the request."""
        context, is_late = load.context, "late" in event.failed.values()
        was_wanted, was_outlived = load.state is LoadState.WANTED, load.state is LoadState.OUTLIVED
        if was_outlived or is_late:
            # It has waited for the disk once. What it still lacks, such as the rows of an open block, would be late
            # again and again.
            context.reuse.skips_disk = True
        if was_outlived or (event.failed and was_wanted):
            context.reuse.miss_reason = "load_failed" if event.failed and not is_late else "load_late"
        if event.failed and was_wanted and context.request_id in self._running:
            load.state = LoadState.FAILED
            self.failed[context.request_id] = None
            return
        load.state = LoadState.ENDED
        if context.load is load:
            context.load = None

    def _drop_bad_copy(self, load: BlockLoad) -> None:
        """Forget the copy of a block in DRAM or on disk that a load could not use, unless the table has another address
        by now. `RedisLedger.settle` does the same for copies in Redis."""
        row = self._table.get(load.key)
        if row is None:
            return
        if load.source != "redis" and row.copies.get(load.source) == load.address:
            self._tiers.drop_copy(row, load.source)

    def stall_s(self, context: RequestContext) -> float:
        """Return how many seconds a request's load still takes; 0 without one. A step may overlap part of them with its
        computation, which is not subtracted here."""
        load = _wanted(context)
        return 0.0 if load is None else self._expected_s(load) * (1 - self._arrived(load.job))

    def to_come(self, context: RequestContext) -> dict[str, int]:
        """Return tier -> tokens that a request's load brings from it. All of them count until the load has ended,
        because its last layer may fail."""
        load = _wanted(context)
        return {} if load is None else {tier: count for tier, count in self._tokens(load).items() if count}

    @staticmethod
    def _tokens(load: Load) -> dict[str, int]:
        tokens = {"disk": 0, "dram": 0, "redis": 0}
        for block in load.blocks:
            tokens[block.tier] += block.num_rows
        return tokens

    def stalls_s(self) -> dict[str, float]:
        """Return, by request id, the `stall_s` of every request that waits for a load under way."""
        contexts = (load.context for load in self.under_way.values() if load.state is LoadState.WANTED)
        return {context.request_id: stall_s for context in contexts if (stall_s := self.stall_s(context))}

    def is_reading(self) -> bool:
        """Return whether a request waits for a load that reads the disk or Redis."""
        return any(load.first is not None and load.state is LoadState.WANTED for load in self.under_way.values())

    def frees_room(self) -> bool:
        """Return whether the end of a load will soon free pages that no request has any more. A load that was too late
        for its request does not count: it may take long."""
        return any(load.state is LoadState.RELEASED for load in self.under_way.values())

    def take_failed(self) -> list[str]:
        """Return the ids of the requests whose load has failed, each once. What they have computed with the loaded KV
        is invalid (`Lifecycle.take_failed`)."""
        failed, self.failed = list(self.failed), {}
        return failed

    def closed(self, request_id: str) -> None:
        """Forget that a request's load failed, because the request has ended."""
        self.failed.pop(request_id, None)


def _wanted(context: RequestContext) -> Load | None:
    """Return the load that is filling a request's pages; None if there is none."""
    load = context.load
    return load if load is not None and load.state is LoadState.WANTED else None
