"""What the machine does per second, measured as it runs, and the choice that follows: load a block or compute it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_TRANSFER_WEIGHT = 0.2  # of a new transfer in the means: about the last ten count
_STEP_KEPT = 0.95  # of the evidence after one more step: about the last twenty count
_PRIOR_STEPS = 0.02  # the weight of each of the prior's two points, in steps
_PRIOR_SPAN = 256  # tokens between them


class Ewma:
    """Exponentially weighted moving mean. Starts at its prior, which the first sample replaces."""

    __slots__ = ("_seen", "value")

    def __init__(self, prior: float) -> None:
        self.value = prior
        self._seen = False

    def update(self, sample: float, weight: float) -> None:
        """weight: the share of the new sample, in (0, 1]."""
        self.value += (sample - self.value) * (weight if self._seen else 1.0)
        self._seen = True


class _StepTime:
    """seconds ~ fixed + per_token * tokens, by least squares over steps that fade exponentially.

    A mean of seconds per token would mislead: a step of a few tokens is all fixed cost (launches, reading the weights),
    so a history's price would be overrated many times after a while of decoding. The prior enters as two light points,
    scaled to the level of what was measured: while all steps have one size the line's slope is unknown, and only the
    proportion between its parts is the prior's.
    """

    def __init__(self, fixed_s: float, s_per_token: float) -> None:
        self._prior = (fixed_s, s_per_token)
        self._sums = [0.0] * 5  # decayed: weight, tokens, tokens^2, seconds, tokens * seconds
        self.fixed_s, self.s_per_token = fixed_s, s_per_token

    def update(self, tokens: int, seconds: float) -> None:
        sample = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [total * _STEP_KEPT + part for total, part in zip(self._sums, sample, strict=True)]
        n, t, tt, s, ts = self._sums
        fixed, slope = self._prior
        level = s / (fixed * n + slope * t)  # the machine's pace, in units of the prior's
        fixed, slope = fixed * level, slope * level
        for tokens_at in (0, _PRIOR_SPAN):
            seconds_at = fixed + slope * tokens_at
            n += _PRIOR_STEPS
            t += _PRIOR_STEPS * tokens_at
            tt += _PRIOR_STEPS * tokens_at * tokens_at
            s += _PRIOR_STEPS * seconds_at
            ts += _PRIOR_STEPS * tokens_at * seconds_at
        measured = (n * ts - t * s) / (n * tt - t * t)  # two points of the prior: the denominator is positive
        if measured > 0:  # noise can tilt the line downwards; then the prior's proportion is the better guess
            fixed, slope = (s - measured * t) / n, measured
        if fixed < 0:
            fixed, slope = 0.0, ts / tt
        self.fixed_s, self.s_per_token = fixed, slope


class Rates:
    """Live rates of one engine, usable before the first sample through their priors.

    A direction is a word such as "dram_to_hbm", "disk_to_dram", "disk_to_hbm"; those without a prior are unknown
    (KeyError). Single-threaded: samples are handed in by the loop that owns it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        step_fixed_s: float,
        prefill_s_per_token: float,
        bytes_per_s: Mapping[str, float],
    ) -> None:
        if prefill_s_per_token <= 0 or step_fixed_s < 0 or any(rate <= 0 for rate in bytes_per_s.values()):
            raise ValueError("priors of rates must be positive")
        self.num_layers = num_layers
        self._step = _StepTime(step_fixed_s, prefill_s_per_token)
        # A ratio of means, not a mean of ratios: a transfer counts by its size, so the small ones don't drown the rest.
        self._transfers = {name: (Ewma(rate), Ewma(1.0)) for name, rate in bytes_per_s.items()}

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so many seconds, waiting for loads not included."""
        if tokens > 0 and seconds > 0:
            self._step.update(tokens, seconds)

    def moved(self, direction: str, num_bytes: int, seconds: float) -> None:
        """A transfer ended. Ones without bytes or duration tell nothing."""
        if num_bytes > 0 and seconds > 0:
            bytes_mean, seconds_mean = self._transfers[direction]
            bytes_mean.update(num_bytes, _TRANSFER_WEIGHT)
            seconds_mean.update(seconds, _TRANSFER_WEIGHT)

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds that one more token adds to a step."""
        return self._step.s_per_token

    def compute_s(self, tokens: int) -> float:
        """Seconds of a step of so many tokens; 0 tokens need no step."""
        return self._step.fixed_s + self._step.s_per_token * tokens if tokens > 0 else 0.0

    def bytes_per_s(self, direction: str) -> float:
        bytes_mean, seconds_mean = self._transfers[direction]
        return bytes_mean.value / seconds_mean.value

    def load_s(self, direction: str, num_bytes: int) -> float:
        return num_bytes / self.bytes_per_s(direction)


@dataclass(frozen=True, slots=True)
class LoadOption:
    """A block behind the resident prefix that a lower tier could deliver."""

    size_bytes: int
    source: str  # the direction it would take, as in Rates
    num_tokens: int


def first_token_s(load_s: float, compute_s: float, num_layers: int) -> float:
    """Time of a step whose loads arrive layer by layer behind its computation (AttentionStore §3.2.1): layer i starts
    when it has arrived, (i+1)/n of the load, and the n-i layers from it on follow. That is worst for the first or the
    last layer: max(load/n + compute, load + compute/n)."""
    return max(load_s, compute_s) + min(load_s, compute_s) / num_layers


def choose_load(blocks: Sequence[LoadOption], rates: Rates, new_tokens: int) -> int:
    """How many leading blocks to load; the rest is computed with the `new_tokens` behind it. All of them, as long as
    the first token comes no later than if all were computed: it leaves the processors to others. Where the link is
    slower than that, so many that the first token comes soonest. 0: it is cheaper to recompute all.

    One load stream: times add up over blocks. A faster tier never makes it load less, because speed-up gains most
    where most is loaded.
    """
    tokens = new_tokens + sum(block.num_tokens for block in blocks)
    best, best_s = 0, rates.compute_s(tokens)
    load_all_s = sum(rates.load_s(block.source, block.size_bytes) for block in blocks)
    if first_token_s(load_all_s, rates.compute_s(new_tokens), rates.num_layers) <= best_s:
        return len(blocks)
    for count, (load_s, left) in enumerate(_prefixes(blocks, rates, tokens), start=1):
        total_s = first_token_s(load_s, rates.compute_s(left), rates.num_layers)
        if total_s <= best_s:
            best, best_s = count, total_s
    return best


def _prefixes(blocks: Sequence[LoadOption], rates: Rates, tokens: int) -> Iterable[tuple[float, int]]:
    """(seconds of loading the first n blocks, tokens left to compute), for n = 1, 2, ..."""
    load_s = 0.0
    for block in blocks:
        load_s += rates.load_s(block.source, block.size_bytes)
        tokens -= block.num_tokens
        yield load_s, tokens
