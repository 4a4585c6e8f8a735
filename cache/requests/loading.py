"""Loads: blocks on their way from DRAM and disk into the pages of a request."""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from cache.blocks.context import RunningContext
from cache.blocks.keys import BLOCK_TOKENS, BlockKey
from cache.moves import AbandonLoad, BlockLoad, LoadBlocks, Loaded, ReleaseLoad
from cache.rates import LoadProgress, Rates, deadline_s
from cache.requests.siblings import Siblings
from cache.tiers.hierarchy import Hierarchy

_WAVERS = 2  # what a load is expected to take may double without anything having happened


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way. Its pages and slots are pinned until it has ended, whoever still wants it."""

    context: RunningContext
    blocks: tuple[BlockLoad, ...]
    first: int | None  # the first token that comes off the disk, which may not answer; None: none does
    seemed_fast: bool  # enough to be worth it; else it is a look at what the device is like, or nothing to choose
    claimant: str  # in whose name others wait for its blocks: its request, until that cannot wait any longer itself


class Loads:
    """Single-threaded, part of the CacheManager."""

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
    ) -> None:
        self.under_way: dict[int, Load] = {}
        self._table, self._pages, self._hbm = tiers.table, tiers.pages, tiers.hbm
        self._dram, self._disk, self._fetches, self._orders = tiers.dram, tiers.disk, tiers.fetches, tiers.orders
        self._siblings = siblings
        self._running = running
        self._rates = rates
        self._arrived = arrived  # the share of a load that is in HBM
        self._progress = progress  # of what a load reads off the disk
        self._bytes_per_token = bytes_per_token
        self._stats = tiers.stats
        self._now = -math.inf  # as of `give_up`
        self._given_up: set[int] = set()  # loads that were, and have not ended
        self._failed: dict[str, None] = {}  # requests whose load failed, until `take_failed`

    def start(self, context: RunningContext, loads: Sequence[BlockLoad]) -> None:
        """Order what a request was placed on but is not in HBM."""
        blocks = []
        for load in loads:
            if load.slot is not None:
                self._dram.pin(load.slot)
            elif self._fetches.has_room() and load.num_rows == BLOCK_TOKENS:
                load = replace(load, slot=self._dram.take_slot(None))
            self._pages.pin(load.page)
            if load.num_rows == BLOCK_TOKENS:
                self._siblings.claim(load.key, context.request_id)
            blocks.append(load)
        self._disk.hold(load.key for load in blocks if load.extent is not None)
        context.job = self._orders.next_job()
        noted = self._noted(context, blocks)
        self.under_way[context.job] = replace(
            noted, seemed_fast=self._expected_s(noted) <= self._worth_waiting_s(noted)
        )
        self._orders.add(LoadBlocks(context.job, context.request_id, tuple(blocks)))

    def _noted(self, context: RunningContext, blocks: Sequence[BlockLoad]) -> Load:
        on_disk = [load.position for load in blocks if load.extent is not None]
        # Behind a cut all that is stored is loaded (`Matcher.choose`).
        first = min(on_disk) if on_disk and context.lineage.joint is None else None
        return Load(context, tuple(blocks), first, False, context.request_id)

    def give_up(self, now: float) -> None:
        """Give up what has come to be dearer than to compute it: the disk has become slow, or stands still. All blocks
        of a load come layer by layer, so all that the disk was to bring is computed; what came out of DRAM is kept."""
        self._now = now
        for job_id, load in self.under_way.items():
            progress = self._progress(job_id) if load.first is not None and job_id not in self._given_up else None
            if progress is None:
                continue
            left_s = progress.left_s(self._rates.num_layers)
            if not progress.layers and load.seemed_fast:
                # Others' loads may have told meanwhile what the disk is like; what they tell wavers.
                left_s = max(left_s, self._expected_s(load) / _WAVERS)
            if left_s > self._worth_waiting_s(load):
                self._given_up.add(job_id)
                self._orders.add(AbandonLoad(job_id))

    def patience_s(self, context: RunningContext) -> float:
        """How much longer a step may wait for the next layer of a request's load before that is given up."""
        load = self.under_way.get(context.job) if context.job is not None else None
        progress = self._progress(context.job) if load is not None and context.job is not None else None
        if load is None or load.first is None or progress is None:
            return math.inf
        return self._worth_waiting_s(load) - progress.silent_s

    def is_fetch_late(self, context: RunningContext) -> bool:
        """A request whose turn has come waits for a fetch into DRAM. Whether it has waited for as long as computing
        would take: then it skips what is on disk. Behind a cut it waits on, for what is stored cannot be computed."""
        is_fetching = self._fetches.is_fetching
        if context.awaited is None or not is_fetching(context.awaited) or context.lineage.joint is not None:
            return False
        coming = [block for block, key in enumerate(context.chain()) if is_fetching(key)]
        tokens, first, end = len(context.token_ids), coming[0] * BLOCK_TOKENS, (coming[-1] + 1) * BLOCK_TOKENS
        # No layer of a fetch is of use before its last one.
        allowed_s = deadline_s(self._rates.compute_s(tokens - end), self._rates.compute_s(tokens - first), 1)
        if context.fetch_due_s is None:
            context.fetch_due_s = self._now + allowed_s
        if self._now < context.fetch_due_s:
            return False
        self._rates.late("disk_to_dram", len(coming) * BLOCK_TOKENS * self._bytes_per_token, allowed_s)
        self._stats.load_failures["late"] += 1
        context.skips_disk, context.miss_reason = True, "load_late"
        return True

    def _worth_waiting_s(self, load: Load) -> float:
        """Return how long a load may take before computing what it reads off the disk is faster; inf without any."""
        if load.first is None:
            return math.inf
        end = max(block.position + block.num_rows for block in load.blocks)
        tokens = len(load.context.token_ids)
        new_s, all_s = self._rates.compute_s(tokens - end), self._rates.compute_s(tokens - load.first)
        return deadline_s(new_s, all_s, self._rates.num_layers)

    def _expected_s(self, load: Load) -> float:
        tokens = self._tokens(load)
        return sum(self._rates.load_s(f"{tier}_to_hbm", n * self._bytes_per_token) for tier, n in tokens.items())

    def leave(self, context: RunningContext) -> bool:
        """A request gives its pages back: whether its load is still under way, and goes on for nobody."""
        if context.job is None or context.job not in self.under_way:
            return False
        self._orders.add(ReleaseLoad(context.job))
        return True

    def outlive(self, context: RunningContext) -> None:
        """A request is voided while its load is under way. It will wait for the end of that outside of the batch, as
        others wait for a sibling, and order nothing twice."""
        load = self.under_way.get(context.job) if context.job is not None else None
        if load is None or context.job is None:
            return
        self.under_way[context.job] = load = replace(load, claimant=f"load {context.job}")
        context.outlived = context.job
        for block in load.blocks:
            if block.num_rows == BLOCK_TOKENS:
                self._siblings.claim(block.key, load.claimant)

    def is_outlived(self, context: RunningContext) -> bool:
        """Whether a load that was late for a request is still under way."""
        return context.outlived is not None and context.outlived in self.under_way

    def on_loaded(self, event: Loaded) -> None:
        """What came is believed, what failed is not looked for there again."""
        load = self.under_way.pop(event.job_id)
        self._given_up.discard(event.job_id)
        context = load.context
        self._disk.release(block.key for block in load.blocks if block.extent is not None)
        for block in load.blocks:
            self._siblings.settle(block.key, load.claimant)
            if block.slot is not None and block.extent is None:
                self._dram.unpin(block.slot)
            elif block.slot is not None:
                if event.failed:
                    self._dram.give_back(block.slot)
                else:
                    self._dram.keep(block.key, block.slot)
            row = self._table.get(block.key)
            is_here = not event.failed or block.key in event.whole
            if is_here and block.num_rows == BLOCK_TOKENS and row is not None and not row.is_open:
                self._hbm.settle(block.key, block.page, block.page_row, block.position, hop=False)
                if load.claimant != context.request_id:
                    context.brought[block.key] = "disk" if block.extent is not None else "dram"
            self._pages.unpin(block.page)
        for key, reason in event.failed.items():
            self._stats.load_failures[reason] += 1
            if reason != "late":
                self._drop_bad_copy(key, next(b for b in load.blocks if b.key == key))
        stands_on_it = context.job == event.job_id
        was_late = load.claimant != context.request_id
        is_late = "late" in event.failed.values()
        if was_late or is_late:
            # It has waited for the disk once. What it has not got by that, such as the rows of an open block, would
            # be as late again, and again.
            context.skips_disk = True
        if was_late or (event.failed and stands_on_it):
            context.miss_reason = "load_failed" if event.failed and not is_late else "load_late"
        if event.failed and stands_on_it and context.request_id in self._running:
            self._failed[context.request_id] = None
        elif stands_on_it:
            context.job = None

    def _drop_bad_copy(self, key: BlockKey, load: BlockLoad) -> None:
        row = self._table.get(key)
        if row is None:
            return
        if load.extent is not None and row.extent == load.extent:
            self._disk.drop(row)
        elif load.extent is None and row.slot == load.slot:
            self._dram.drop_slot(row)
        if row.is_nowhere:
            self._table.forget(row)

    def stall_s(self, context: RunningContext) -> float:
        """What is left of a request's load, less nothing: how much of it the step hides is not known here."""
        if context.job is None or context.job not in self.under_way:
            return 0.0
        return self._expected_s(self.under_way[context.job]) * (1 - self._arrived(context.job))

    def to_come(self, context: RunningContext) -> dict[str, int]:
        """tier -> tokens of a request's load, all of them until it has ended: its last layer may yet fail."""
        if context.job is None or context.job not in self.under_way:
            return {}
        return {tier: count for tier, count in self._tokens(self.under_way[context.job]).items() if count}

    @staticmethod
    def _tokens(load: Load) -> dict[str, int]:
        tokens = {"disk": 0, "dram": 0}
        for block in load.blocks:
            tokens["disk" if block.extent is not None else "dram"] += block.num_rows
        return tokens

    def stalls_s(self) -> dict[str, float]:
        """`stall_s` of all who stand on a load under way."""
        contexts = (load.context for job_id, load in self.under_way.items() if load.context.job == job_id)
        return {context.request_id: stall_s for context in contexts if (stall_s := self.stall_s(context))}

    def frees_room(self) -> bool:
        """Whether the end of a load will soon free pages that no request has any more. One that made its request leave
        the batch may take long."""
        return any(
            load.context.job != job_id and load.claimant == load.context.request_id
            for job_id, load in self.under_way.items()
        )

    def take_failed(self) -> list[str]:
        """Requests whose load failed since the last call: what they computed on it is void. They have to be preempted
        by `void`, and find what is left of their history when they are admitted again."""
        failed, self._failed = list(self._failed), {}
        return failed

    def closed(self, request_id: str) -> None:
        """A request has ended; that its load failed is nobody's business any more."""
        self._failed.pop(request_id, None)
