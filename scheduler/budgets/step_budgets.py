"""Makes the budget that a step may spend on prompts: a number of tokens, a target of time, or the length that serves
decoding streams and waiting prompts best."""

from reprise.scheduler.budgets.budget import LEAST_CHUNK, StepBudget, StepCost, StepWork, TimeBudget, TokenBudget
from reprise.scheduler.budgets.priced import PricedBudget
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.running_batch import RunningBatch
from reprise.scheduler.sequence import Chunk
from reprise.scheduler.tenants import Tenants
from reprise.scheduler.waiting import Waiting


class StepBudgets:
    """A factory of step budgets. A step without decodes may take more prompt tokens than one with decodes, and has no
    target of time. It gets no such freedom if several tenants sent requests lately: another tenant's next request would
    have to wait for the end of that long step."""

    def __init__(
        self, *, cost: StepCost, limits: SchedulerLimits, batch: RunningBatch, waiting: Waiting, tenants: Tenants
    ) -> None:
        self._cost = cost
        self._limits = limits
        self._batch = batch
        self._waiting = waiting
        self._tenants = tenants
        self.most_tokens: int | None = None
        """The most tokens of any step, where it is lower than the limits; None: only the limits count."""

    def beside(self, decodes: list[Chunk], now: float, stretch: float = 1.0) -> StepBudget:
        """Return the budget that prompts have in a step that also runs the chunks `decodes`. stretch: factor on the
        step's best length or time target; 1 leaves it as it is."""
        limits = self._limits
        lone_tokens, tokens = limits.lone_step_tokens, limits.step_tokens - len(decodes)
        if self.most_tokens is not None:
            lone_tokens = min(lone_tokens, self.most_tokens)
            tokens = min(tokens, max(LEAST_CHUNK, self.most_tokens - len(decodes)))
        may_be_long = not decodes and not self._tenants.several(now)
        if limits.itl_target_s is None:
            prompts = len(self._batch) - len(decodes) + min(self._waiting.count, self._batch.free_places)
            return PricedBudget(
                cost=self._cost,
                decodes=StepWork.of(decodes),
                prompts=max(1, prompts),
                least_tokens=limits.least_chunk_tokens,
                most_tokens=lone_tokens if may_be_long else tokens,
                stretch=stretch,
            )
        if may_be_long:
            return TokenBudget(lone_tokens)
        if not limits.itl_target_s:
            return TokenBudget(tokens)
        target_s = stretch * limits.itl_target_s
        return TimeBudget(cost=self._cost, target_s=target_s, decodes=StepWork.of(decodes), tokens=tokens)
