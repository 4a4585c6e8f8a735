"""Loads: blocks on their way from DRAM and disk into the pages of a request."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from cache.block import BLOCK_TOKENS, BlockKey
from cache.context import RunningContext
from cache.hierarchy import Hierarchy
from cache.plan import BlockLoad, LoadBlocks, Loaded, ReleaseLoad
from cache.rates import Rates
from cache.siblings import Siblings
from cache.stats import CacheStats


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way. Its pages and slots are pinned until it has ended, whoever still wants it."""

    context: RunningContext
    blocks: tuple[BlockLoad, ...]
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
        bytes_per_token: int,
        stats: CacheStats,
    ) -> None:
        self.under_way: dict[int, Load] = {}
        self._table, self._pages, self._hbm, self._lower = tiers.table, tiers.pages, tiers.hbm, tiers.lower
        self._siblings = siblings
        self._running = running
        self._rates = rates
        self._arrived = arrived  # the share of a load that is in HBM
        self._bytes_per_token = bytes_per_token
        self._stats = stats
        self._failed: dict[str, None] = {}  # requests whose load failed, until `take_failed`

    def start(self, context: RunningContext, loads: Sequence[BlockLoad]) -> None:
        """Order what a request was placed on but is not in HBM."""
        blocks = []
        for load in loads:
            if load.slot is not None:
                self._lower.slots.pin(load.slot)
            elif self._lower.has_room() and load.num_rows == BLOCK_TOKENS:
                load = replace(load, slot=self._lower.take_slot(None))
            self._pages.pin(load.page)
            if load.num_rows == BLOCK_TOKENS:
                self._siblings.claim(load.key, context.request_id)
            blocks.append(load)
        self._lower.extents.hold(load.key for load in blocks if load.extent is not None)
        context.job = self._lower.next_job()
        self.under_way[context.job] = Load(context, tuple(blocks), context.request_id)
        self._lower.moves.append(LoadBlocks(context.job, context.request_id, tuple(blocks)))

    def leave(self, context: RunningContext) -> bool:
        """A request gives its pages back: whether its load is still under way, and goes on for nobody."""
        if context.job is None or context.job not in self.under_way:
            return False
        self._lower.moves.append(ReleaseLoad(context.job))
        return True

    def outlive(self, context: RunningContext) -> None:
        """A request is voided while its load is under way. It will wait for the end of that outside of the batch, as
        others wait for a sibling, and order nothing twice."""
        load = self.under_way.get(context.job) if context.job is not None else None
        if load is None or context.job is None:
            return
        self.under_way[context.job] = load = replace(load, claimant=f"load {context.job}")
        for block in load.blocks:
            if block.num_rows == BLOCK_TOKENS:
                self._siblings.claim(block.key, load.claimant)

    def on_loaded(self, event: Loaded) -> None:
        """What came is believed, what failed is not looked for there again."""
        load = self.under_way.pop(event.job_id)
        context = load.context
        self._lower.extents.release(block.key for block in load.blocks if block.extent is not None)
        for block in load.blocks:
            self._siblings.settle(block.key, load.claimant)
            if block.slot is not None and block.extent is None:
                self._lower.slots.unpin(block.slot)
            elif block.slot is not None:
                if event.failed:
                    self._lower.slots.give_back(block.slot)
                else:
                    self._lower.keep(block.key, block.slot)
            row = self._table.get(block.key)
            if not event.failed and block.num_rows == BLOCK_TOKENS and row is not None and not row.is_open:
                self._hbm.settle(block.key, block.page, block.page_row, block.position, hop=False)
            self._pages.unpin(block.page)
        for key, reason in event.failed.items():
            self._stats.load_failures[reason] += 1
            self._drop_bad_copy(key, next(b for b in load.blocks if b.key == key))
        stands_on_it = context.job == event.job_id
        if event.failed and (stands_on_it or load.claimant != context.request_id):
            context.miss_reason = "load_failed"
        if event.failed and stands_on_it and context.request_id in self._running:
            self._failed[context.request_id] = None
        elif stands_on_it:
            context.job = None

    def _drop_bad_copy(self, key: BlockKey, load: BlockLoad) -> None:
        row = self._table.get(key)
        if row is None:
            return
        if load.extent is not None and row.extent == load.extent:
            self._lower.extents.drop(row)
        elif load.extent is None and row.slot == load.slot:
            self._lower.drop_slot(row)
        if row.is_nowhere:
            self._table.forget(row)

    def stall_s(self, context: RunningContext) -> float:
        """What is left of a request's load, less nothing: how much of it the step hides is not known here."""
        if context.job is None or context.job not in self.under_way:
            return 0.0
        tokens = self._tokens(self.under_way[context.job])
        seconds = sum(self._rates.load_s(f"{tier}_to_hbm", n * self._bytes_per_token) for tier, n in tokens.items())
        return seconds * (1 - self._arrived(context.job))

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
