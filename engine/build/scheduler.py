"""Makes the scheduler of an engine: resolves the automatic settings, and logs the results."""

from reprise.cache.manager import CacheManager
from reprise.cache.rates import Rates
from reprise.engine.config import EngineConfig
from reprise.scheduler.budgets.budget import StepCost
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.make_policy import make_policy
from reprise.scheduler.predictor import QuantilePredictor
from reprise.scheduler.scheduler import Scheduler

_LONE_STEP_FACTOR = 4  # larger products are faster, and without decoding sequences a long step delays none
_LEAST_WINDOW, _MOST_WINDOW = 4, 32  # below there is nothing to choose from; above the wait may be long
_QUANTILE = 0.5  # quantile of answer lengths: at the median, a load is as often early as late
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
    most_tokens: int | None = None,
) -> Scheduler:
    """Make the scheduler from the settings and the measured rates. step_tokens: token budget of a step.
    least_chunk_tokens: size of a prompt's chunk below which matrix products are inefficient on this machine.
    most_tokens: largest step; None: no limit."""
    lone_tokens = lone_step_tokens(config, step_tokens)
    if most_tokens is not None:
        step_tokens, lone_tokens = min(step_tokens, most_tokens), min(lone_tokens, most_tokens)
        least_chunk_tokens = min(least_chunk_tokens, most_tokens)
    predictor = QuantilePredictor(quantile=_QUANTILE)
    policy = make_policy(
        config.scheduler.policy,
        cache=cache.view,
        predictor=predictor,
        window=config.experiment.window or _window(cache, max_context),
        patience=config.scheduler.patience,
        scores=config.experiment.scores,
    )
    per_token = rates.prefill_s_per_token
    return Scheduler(
        cache=cache.view,
        policy=policy,
        predictor=predictor,
        cost=StepCost(
            fixed_s=rates.compute_s(1) - per_token,
            s_per_token=per_token,
            s_per_row=per_token * _TOKENS_PER_ROW,
            s_per_kilo_pair=per_token * _TOKENS_PER_KILO_PAIR,
            s_per_kilo_read=per_token * _TOKENS_PER_KILO_READ,
        ),
        limits=SchedulerLimits(
            max_seqs=config.scheduler.max_seqs,
            max_queued=config.scheduler.max_queued,
            step_tokens=step_tokens,
            lone_step_tokens=lone_tokens,
            itl_target_s=config.scheduler.itl_target_s,
            least_chunk_tokens=least_chunk_tokens,
            chunked_prefill=config.experiment.chunked_prefill,
        ),
    )


def lone_step_tokens(config: EngineConfig, step_tokens: int) -> int:
    """Return the token budget of a step in which only prompts are computed and no sequence decodes. step_tokens: the
    budget of any other step."""
    return step_tokens * (1 if config.step_tokens else _LONE_STEP_FACTOR)


def _window(cache: CacheManager, max_context: int) -> int:
    """Return the size of the queue's window, in requests: as many turns as HBM holds sessions of mean length, because
    only their KV can be in HBM or on its way at once."""
    session_tokens = cache.sessions.mean_tokens or max_context / 4
    return min(_MOST_WINDOW, max(_LEAST_WINDOW, int(cache.hbm_tokens / session_tokens)))
