"""The scheduler of an engine: what is automatic in its settings, resolved, and what it says about itself."""

from collections import Counter

from cache.manager import CacheManager
from cache.rates import Rates
from engine.messages import EngineConfig, SchedulerState, WaitingInfo
from scheduler.budget import StepCost
from scheduler.make_queue import WINDOWED, make_queue
from scheduler.predictor import LengthPredictor, MaxTokensPredictor, QuantilePredictor
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.window import ShuffledWindow

_COST_TERMS = ("fixed", "per_token", "per_kilo_pair", "per_row", "per_kilo_read")
_STALL_BUDGET_S = 0.02  # what those who decode wait for one whose KV is still on its way
_LONE_STEP_FACTOR = 4  # larger products are faster, and with nobody decoding nobody is held up by a long step
_LEAST_WINDOW, _MOST_WINDOW = 4, 32  # below there is nothing to choose from; above the wait may be long
_QUANTILE = 0.5  # of answer lengths: a load that starts at the median is as often early as late
# Before the first steps are measured: a row costs as much as a few tokens of a prompt, a thousand pairs less than one;
# and more where they are read for a single row.
_TOKENS_PER_ROW, _TOKENS_PER_KILO_PAIR, _TOKENS_PER_KILO_READ = 4.0, 0.5, 2.0


def build_scheduler(
    config: EngineConfig,
    cache: CacheManager,
    rates: Rates,
    step_tokens: int,
    least_chunk_tokens: int,
    max_context: int,
) -> Scheduler:
    """least_chunk_tokens: of a prompt, below which products are inefficient on this machine."""
    predictor: LengthPredictor = MaxTokensPredictor()
    if config.length_predictor == "quantile":
        predictor = QuantilePredictor(quantile=_QUANTILE)
    queue = make_queue(
        config.scheduler_policy,
        cache=cache,
        predictor=predictor,
        window=config.window or _window(cache, max_context),
        class_ordered_entry=config.class_ordered_entry,
        hidden_s=_STALL_BUDGET_S,
    )
    per_token = rates.prefill_s_per_token
    return Scheduler(
        cache=cache,
        queue=queue,
        predictor=predictor,
        cost=StepCost(
            fixed_s=rates.compute_s(1) - per_token,
            s_per_token=per_token,
            s_per_row=per_token * _TOKENS_PER_ROW,
            s_per_kilo_pair=per_token * _TOKENS_PER_KILO_PAIR,
            s_per_kilo_read=per_token * _TOKENS_PER_KILO_READ,
        ),
        max_seqs=config.max_seqs,
        max_queued=config.max_queued,
        step_tokens=step_tokens,
        lone_step_tokens=step_tokens * (1 if config.step_tokens else _LONE_STEP_FACTOR),
        itl_target_s=config.itl_target_s,
        least_chunk_tokens=least_chunk_tokens,
        chunked_prefill=config.chunked_prefill,
        stall_budget_s=_STALL_BUDGET_S,
        fair_places=config.scheduler_policy in WINDOWED,
        scores=config.scores,
    )


def _window(cache: CacheManager, max_context: int) -> int:
    """As many turns as HBM holds sessions: those whose KV can be there, or on its way, at the same time."""
    hbm_tokens = cache.pages.num_pages * cache.page_size
    session_tokens = cache.mean_session_tokens or max_context / 4
    return min(_MOST_WINDOW, max(_LEAST_WINDOW, int(hbm_tokens / session_tokens)))


def scheduler_state(scheduler: Scheduler, cache: CacheManager, now: float) -> SchedulerState:
    """Costs a look at where the KV of everybody in front lies: for a heartbeat, not for every step."""
    queue = scheduler.queue
    window = queue if isinstance(queue, ShuffledWindow) else None
    outlook = scheduler.outlook(now)
    front = [_waiting(sequence, wait_s, scheduler, cache, window, now) for sequence, wait_s in outlook]
    classes = Counter("resumed" if info.transfer_class is None else str(info.transfer_class) for info in front)
    if window is None:
        classes = Counter()
    cost = scheduler.cost
    predicted = scheduler.predicted_tokens
    return SchedulerState(
        policy=queue.policy,
        window=window.size if window is not None else 0,
        waiting={**classes, "outside": scheduler.num_waiting - sum(classes.values())},
        front=front,
        overtakes=window.overtakes if window is not None else 0,
        preemptions=scheduler.preemptions,
        fair_preemptions=scheduler.fair_preemptions,
        timer=dict(scheduler.timer_outcomes),
        loads=dict(scheduler.loads),
        prediction_error=predicted["error"] / max(1, predicted["actual"]),
        tpot_s=scheduler.tpot_s,
        step_cost={**dict(zip(_COST_TERMS, cost.current(), strict=True)), "margin": cost.margin},
    )


def _waiting(
    sequence: Sequence,
    wait_s: float | None,
    scheduler: Scheduler,
    cache: CacheManager,
    window: ShuffledWindow | None,
    now: float,
) -> WaitingInfo:
    residency = cache.residency(sequence.request_id)
    member = window.inside.get(sequence) if window is not None else None
    return WaitingInfo(
        request_id=sequence.request_id,
        tenant=sequence.tenant,
        session_id=sequence.session_id,
        transfer_class=int(window.class_of(sequence)) if window is not None and member is not None else None,
        overtaken=member.overtaken if member is not None else 0,
        hbm_tokens=residency.hbm_tokens,
        lower_tokens=residency.lower_tokens,
        bytes_to_load=residency.bytes_to_load,
        missing_tokens=residency.missing_tokens,
        has_pages=scheduler.is_ahead(sequence),
        waiting_s=now - sequence.arrived_s,
        expected_start_s=wait_s,
    )
