"""Draws conversations from stated distributions. The defaults are what AttentionStore (arXiv 2403.19708, §2.3 and §4.1)
reports of ShareGPT; assumptions where it is silent are marked as such."""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from reprise.loadgen.workloads.workload import Script, Turn

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of the turns and tokens of conversations. Turns: one with probability `1 - multi_turn`, else two
    or more, distributed geometrically so that the overall mean is `mean_turns`. Tokens of a conversation: log-normal,
    so that `over_2k` of them have more than 2,048 tokens and `over_4k` more than 4,096."""

    multi_turn: float = 0.73
    mean_turns: float = 5.75
    over_2k: float = 0.47
    over_4k: float = 0.30
    # Assumed, because the paper does not say:
    max_turns: int = 40  # its figures end at these maxima
    max_tokens: int = 32_768
    correlation: float = 0.7  # correlation of the normal scores of turns and tokens: long conversations have more turns
    prompt_share: float = 1 / 3  # share of a turn's tokens; answers are the longer part in ShareGPT
    turn_spread: float = 0.8  # log-normal spread of the turns' lengths within a conversation

    def __post_init__(self) -> None:
        if not (0 <= self.multi_turn < 1 and 0 < self.over_4k < self.over_2k < 1 and 0 < self.prompt_share < 1):
            raise ValueError("shares must lie between 0 and 1, and more conversations be over 2K than over 4K tokens")
        if self.multi_turn and not 2 <= self._mean_of_several() < self.max_turns:
            raise ValueError(f"{self.mean_turns} turns in the mean cannot be with {self.multi_turn:.0%} of several")

    def _mean_of_several(self) -> float:
        return (self.mean_turns - (1 - self.multi_turn)) / self.multi_turn

    def script(self, rng: random.Random) -> Script:
        score = rng.gauss(0.0, 1.0)
        other = self.correlation * score + math.sqrt(1 - self.correlation**2) * rng.gauss(0.0, 1.0)
        turns, tokens = self._turns(_NORMAL.cdf(score)), self._tokens(other)
        weights = [math.exp(rng.gauss(0.0, self.turn_spread)) for _ in range(turns)]
        lengths = [max(2.0, tokens * weight / sum(weights)) for weight in weights]
        return tuple(Turn(max(1, round(n * self.prompt_share)), max(1, round(n * (1 - self.prompt_share))), 0.0)
                     for n in lengths)  # fmt: skip

    def _turns(self, quantile: float) -> int:
        if quantile < 1 - self.multi_turn:
            return 1
        rest = (quantile - (1 - self.multi_turn)) / self.multi_turn
        more = self._mean_of_several() - 2
        if more == 0:
            return 2
        # the number of failures before a success: P(at least k) = stay ** k
        stay = more / (1 + more)
        return min(self.max_turns, 2 + int(math.log(max(1e-12, 1 - rest)) / math.log(stay)))

    def _tokens(self, score: float) -> float:
        above_2k, above_4k = _NORMAL.inv_cdf(1 - self.over_2k), _NORMAL.inv_cdf(1 - self.over_4k)
        sigma = math.log(2) / (above_4k - above_2k)
        return min(float(self.max_tokens), 2048 * math.exp(sigma * (score - above_2k)))
