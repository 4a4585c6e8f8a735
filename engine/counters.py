"""What an engine has done so far, and what it tells of it."""

import time
from collections import Counter
from dataclasses import dataclass

from cache.manager import CacheManager
from cache.transfer.transfer import Transfer
from engine.build.scheduler import scheduler_state
from engine.messages import Stats
from engine.step.verify import Verifier
from scheduler.scheduler import Scheduler


@dataclass(slots=True)
class Counters:
    """Since the start."""

    steps: int = 0
    step_seconds: float = 0.0
    generated_tokens: int = 0
    aborted: int = 0  # choices
    load_seconds: float = 0.0  # of transfers into HBM, however many at once


def collect(
    counters: Counters, *, scheduler: Scheduler, cache: CacheManager, transfer: Transfer, verifier: Verifier | None
) -> Stats:
    """All that the parts of an engine know, as of now."""
    pages, stats, lower = cache.pages, cache.stats, cache.lower
    return Stats(
        running=len(scheduler.running),
        waiting=scheduler.num_waiting,
        sessions=cache.num_sessions,
        leases=cache.num_leases,
        hbm_pages_total=pages.num_pages,
        hbm_pages_free=pages.num_free,
        hbm_pages_cached=pages.num_cached,
        steps=counters.steps,
        step_seconds=counters.step_seconds,
        prompt_tokens=dict(stats.prompt_tokens),
        generated_tokens=counters.generated_tokens,
        miss_tokens=dict(stats.miss_tokens),
        evicted_blocks=stats.evicted_blocks,
        preemptions=scheduler.preemptions,
        aborted=counters.aborted,
        tier_bytes={"dram": lower.resident * lower.slot_bytes, "disk": lower.extents.used_bytes},
        tier_capacity={"dram": lower.dram_slots * lower.slot_bytes, "disk": lower.disk_bytes},
        moved_bytes=dict(stats.moved_bytes + Counter(hbm_to_dram=transfer.placed_bytes)),
        moved_seconds=dict(stats.moved_seconds),
        load_wait_seconds=transfer.waited_s,
        load_seconds=counters.load_seconds,
        evictions={"hbm": stats.evicted_blocks, **stats.evictions},
        refused=dict(stats.refused),
        load_failures=dict(stats.load_failures),
        write_failures=dict(stats.write_failures),
        truncated_tokens=stats.truncated_tokens,
        in_flight=cache.in_flight,
        verified_loads=verifier.compared if verifier is not None else 0,
        offloaded_blocks=stats.offloaded_blocks,
        scheduler=scheduler_state(scheduler, cache, time.monotonic()),
        verify_mismatches=verifier.mismatches if verifier is not None else 0,
    )
