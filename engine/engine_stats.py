"""Collects the counts of an engine's parts, for its reports."""

import time
from collections import Counter
from dataclasses import dataclass

from reprise.cache.manager import CacheManager
from reprise.cache.transfer.transfer import Transfer
from reprise.engine.messages import SchedulerState, Stats, WaitingInfo
from reprise.engine.requests import KnownRequests
from reprise.engine.step.batch_step import BatchStep
from reprise.engine.step.compute import StepCompute
from reprise.engine.step.drawing import Drawing
from reprise.engine.step.moves import StepMoves
from reprise.engine.step.ports import DraftMaker
from reprise.engine.step.verify import Verifier
from reprise.scheduler.scheduler import Scheduler
from reprise.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsSources:
    """The parts of an engine that count something. drafter: None if nothing is drafted."""

    scheduler: Scheduler
    cache: CacheManager
    transfer: Transfer
    requests: KnownRequests
    step: BatchStep
    moves: StepMoves
    drawing: Drawing
    compute: StepCompute
    verifier: Verifier | None
    drafter: DraftMaker | None


def collect(parts: StatsSources) -> Stats:
    """Return the counts of all parts of an engine, as the Stats that the engine sends to the app."""
    scheduler, cache, verifier, weights = parts.scheduler, parts.cache, parts.verifier, parts.compute.runner.weights
    gauges, stats = cache.gauges(), cache.stats
    verdict = None if verifier is None else verifier.verdict
    return Stats(
        running=len(scheduler.running),
        waiting=scheduler.num_waiting,
        sessions=gauges.sessions,
        leases=gauges.leases,
        hbm_pages_total=gauges.hbm_pages_total,
        hbm_pages_free=gauges.hbm_pages_free,
        hbm_pages_cached=gauges.hbm_pages_cached,
        steps=parts.step.count,
        step_seconds=parts.step.seconds,
        eager_decode_steps=parts.compute.eager_decode_steps,
        prompt_tokens=dict(stats.prompt_tokens),
        generated_tokens=parts.drawing.generated_tokens,
        drafted_tokens={} if parts.drafter is None else dict(parts.drafter.counts),
        miss_tokens=dict(stats.miss_tokens),
        evicted_blocks=stats.evicted_blocks,
        preemptions=scheduler.preemptions,
        aborted=parts.requests.aborted,
        tier_bytes=gauges.tier_bytes,
        tier_capacity=gauges.tier_capacity,
        tier_problems=gauges.tier_problems,
        moved_bytes=dict(stats.moved_bytes + Counter(hbm_to_dram=parts.transfer.placed_bytes)),
        moved_seconds=dict(stats.moved_seconds),
        load_wait_seconds=parts.transfer.waited_s,
        load_seconds=parts.moves.load_seconds,
        weight_bytes=0 if weights is None else weights.copied_bytes,
        weight_wait_seconds=0.0 if weights is None else weights.waited_s,
        evictions={"hbm": stats.evicted_blocks, **stats.evictions},
        refused=dict(stats.refused),
        load_failures=dict(stats.load_failures),
        write_failures=dict(stats.write_failures),
        truncated_tokens=stats.truncated_tokens,
        recalled_tokens=stats.recalled_tokens,
        in_flight=gauges.in_flight,
        verified_loads=verifier.compared if verifier is not None else 0,
        offloaded_blocks=stats.offloaded_blocks,
        scheduler=scheduler_state(scheduler, cache, time.monotonic()),
        verify_mismatches=verifier.mismatches if verifier is not None else 0,
        codec_checks=None if verdict is None else verdict.report(),
        codec_condemned=cache.tiers.form.is_condemned,
    )


_COST_TERMS = ("fixed", "per_token", "per_kilo_pair", "per_row", "per_kilo_read")


def scheduler_state(scheduler: Scheduler, cache: CacheManager, now: float) -> SchedulerState:
    """Return the state of the queue, with the tiers in which the KV of the next requests lies. Cheap enough for the
    heartbeat that the engine sends once a second, but not for every step."""
    cost = scheduler.cost
    return SchedulerState(
        policy=scheduler.queue.policy,
        front=[_waiting(sequence, wait_s, scheduler, cache, now) for sequence, wait_s in scheduler.outlook()],
        preemptions=scheduler.preemptions,
        fair_preemptions=scheduler.fair_preemptions,
        loads=dict(scheduler.loads),
        step_cost={**dict(zip(_COST_TERMS, cost.current(), strict=True)), "margin": cost.margin},
    )


def _waiting(
    sequence: Sequence,
    wait_s: float | None,
    scheduler: Scheduler,
    cache: CacheManager,
    now: float,
) -> WaitingInfo:
    residency = cache.view.residency(sequence.request_id)
    return WaitingInfo(
        request_id=sequence.request_id,
        tenant=sequence.tenant,
        session_id=sequence.session_id,
        order={} if sequence.scheduled_s is not None else scheduler.queue.explain(sequence, now),
        hbm_tokens=residency.hbm_tokens,
        lower_tokens=residency.lower_tokens,
        bytes_to_load=residency.bytes_to_load,
        missing_tokens=residency.missing_tokens,
        has_pages=scheduler.has_early_load(sequence),
        waiting_s=now - sequence.arrived_s,
        expected_start_s=wait_s,
    )
