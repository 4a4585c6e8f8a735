"""Measures, while the engine runs, how fast this machine computes and moves bytes, for the choice between loading a
block and computing it."""

from collections.abc import Mapping
from typing import NamedTuple

_KEPT_SHARE = 0.95  # share of the evidence that stays after one more sample: about the last twenty count
_KEPT_TRUST_SHARE = 0.5  # share of the trust in the prior's level that stays after each sample but the first
_PRIOR_WEIGHT = 0.02  # weight of each of the prior's two points, in samples
_PRIOR_TOKENS, _PRIOR_BYTES = 256, 4 << 20  # distance between the prior's two points
_PASSED_LOADS = 8  # loads of a direction that are not worth it before one block is loaded to measure the direction
_KEPT_PASSED_SHARE = 0.8  # share of a direction's evidence that stays after each load that was not worth it
_SURPRISE_FACTOR = 2  # a block that loads so many times faster than expected shows that the device has changed
_FETCH_WORTH_FACTOR = 4  # a fetch may take so many times as long as computing, since it happens while the turn waits
_LEAST_WAIT_S = 0.25  # every load may take so long: any device stutters now and then, and less is not noticed


class _Duration:
    """An estimate of durations: seconds ~ fixed + per_unit * units, where units are bytes or tokens, by least squares
    over samples that fade exponentially.

    A mean of seconds per unit would mislead. A step of a few tokens is all fixed cost (launches, reading the weights),
    and a load of one block is all latency. So a history's price would be overrated many times after a while of
    decoding, or after a first load that was small.

    The prior enters as two light points, `span` units apart, scaled to the level of what was measured. While all
    samples have one size the line's slope is unknown, and only the proportion between its parts comes from the prior.
    The first samples are often cold or a hiccup. So the prior's own level weighs as much as the first sample, and half
    as much after each further sample.
    """

    def __init__(self, fixed_s: float, s_per_unit: float, span: int) -> None:
        self._prior, self._span = (fixed_s, s_per_unit), span
        self._sums = [0.0] * 5  # decayed: weight, units, units^2, seconds, units * seconds
        self._trust = 1.0  # weight of the prior's level, in samples
        self._line: tuple[float, float] | None = None  # fixed_s, s_per_unit; None: to be found

    def update(self, units: int, seconds: float) -> None:
        sample = (1.0, units, units * units, seconds, units * seconds)
        if self._sums[0]:
            self._trust *= _KEPT_TRUST_SHARE
        self._sums = [total * _KEPT_SHARE + part for total, part in zip(self._sums, sample, strict=True)]
        self._line = None

    def believe(self, units: int, seconds: float) -> None:
        """Replace the estimate by this sample. Of earlier samples, only the proportion between fixed and per-unit
        seconds remains."""
        self._sums, self._trust = [0.0] * 5, 0.0
        self.update(units, seconds)

    def expect(self, fixed_s: float, s_per_unit: float) -> None:
        """Replace the prior by a better one, in seconds."""
        self._prior, self._line = (fixed_s, s_per_unit), None

    def fade(self) -> None:
        """Give the measured samples less weight, as if they were older."""
        self._sums = [total * _KEPT_PASSED_SHARE for total in self._sums]
        self._line = None

    @property
    def s_per_unit(self) -> float:
        return self._fitted()[1]

    def of(self, units: int) -> float:
        """Return the seconds that `units` units take; 0 for none."""
        if units <= 0:
            return 0.0
        fixed_s, s_per_unit = self._fitted()
        return fixed_s + s_per_unit * units

    def _fitted(self) -> tuple[float, float]:
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        fixed, slope = self._prior
        n, u, uu, s, us = self._sums
        if n:  # the prior as a sample of the usual size
            usual, trust = u / n, self._trust
            expected_s = fixed + slope * usual
            n, u, uu = n + trust, u + trust * usual, uu + trust * usual * usual
            s, us = s + trust * expected_s, us + trust * usual * expected_s
        level = s / (fixed * n + slope * u) if n else 1.0  # the machine's pace, in units of the prior's
        fixed, slope = fixed * level, slope * level
        for units_at in (0, self._span):
            seconds_at = fixed + slope * units_at
            n += _PRIOR_WEIGHT
            u += _PRIOR_WEIGHT * units_at
            uu += _PRIOR_WEIGHT * units_at * units_at
            s += _PRIOR_WEIGHT * seconds_at
            us += _PRIOR_WEIGHT * units_at * seconds_at
        measured = (n * us - u * s) / (n * uu - u * u)  # two points of the prior: the denominator is positive
        if measured > 0:  # noise can tilt the line downwards; then the prior's proportion is the better guess
            fixed, slope = (s - measured * u) / n, measured
        if fixed < 0:
            fixed, slope = 0.0, us / uu
        return fixed, slope


class Rates:
    """A record of one engine's measured rates, which has priors and so answers before the first sample.

    A direction is a word such as "dram_to_hbm", "disk_to_dram", "disk_to_hbm"; a direction without a prior is unknown
    (KeyError). The engine's loop adds the samples; the cache and the scheduler ask, on the same thread.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        step_fixed_s: float,
        prefill_s_per_token: float,
        transfer_fixed_s: float,
        bytes_per_s: Mapping[str, float],
        fixed_s: Mapping[str, float] | None = None,
    ) -> None:
        """Set the priors. transfer_fixed_s: fixed seconds of any transfer. fixed_s: fixed seconds of single directions
        instead. bytes_per_s: by direction."""
        fixed = fixed_s or {}
        if prefill_s_per_token <= 0 or any(rate <= 0 for rate in bytes_per_s.values()):
            raise ValueError("priors of rates must be positive")
        if min(step_fixed_s, transfer_fixed_s, *fixed.values()) < 0:
            raise ValueError("priors of fixed costs must be positive or 0")
        self.num_layers = num_layers
        self.version = 0  # another number after every change of what is expected
        self._step = _Duration(step_fixed_s, prefill_s_per_token, _PRIOR_TOKENS)
        self._transfers = {
            name: _Duration(fixed.get(name, transfer_fixed_s), 1 / rate, _PRIOR_BYTES)
            for name, rate in bytes_per_s.items()
        }
        self._passes = dict.fromkeys(bytes_per_s, 0)
        self._late = dict.fromkeys(bytes_per_s, 0)  # number of late loads since one was as fast as believed

    def expect_steps(self, step_fixed_s: float, prefill_s_per_token: float) -> None:
        """Set the step times that were measured on this machine before the first request. Decoding tells next to
        nothing about what a history costs to compute. So these times give the proportion between a step's fixed seconds
        and its seconds per prompt token, until a history was computed."""
        if prefill_s_per_token <= 0 or step_fixed_s < 0:
            raise ValueError("what a token takes must be positive, and a step's fixed cost positive or 0")
        self.version += 1
        self._step.expect(step_fixed_s, prefill_s_per_token)

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a step that computed `tokens` tokens in `seconds`, without its waits for loads."""
        if tokens > 0 and seconds > 0:
            self.version += 1
            self._step.update(tokens, seconds)

    def moved(self, direction: str, num_bytes: int, seconds: float) -> None:
        """Record a transfer that has ended. direction: such as "disk_to_hbm". A transfer without bytes or duration is
        ignored."""
        if num_bytes <= 0 or seconds <= 0:
            return
        self.version += 1
        transfer = self._transfers[direction]
        if self.is_look_due(direction) and seconds * _SURPRISE_FACTOR < transfer.of(num_bytes):
            transfer.believe(num_bytes, seconds)
        else:
            transfer.update(num_bytes, seconds)
            self._late[direction] = 0
        self._passes[direction] = 0

    def late(self, direction: str, num_bytes: int, seconds: float) -> None:
        """Record a transfer that failed or was given up. seconds: how long it would have taken at the least. If that is
        slower than expected, it replaces the estimates of all directions that begin at the same tier (such as
        disk_to_dram and disk_to_hbm). In a mean with twenty transfers it would hardly show, and the next transfers
        would be late too."""
        if num_bytes <= 0 or seconds <= 0:
            return
        self.version += 1
        device = direction.partition("_to_")[0]
        for name, transfer in self._transfers.items():
            if name.partition("_to_")[0] == device and seconds > transfer.of(num_bytes):
                transfer.believe(num_bytes, seconds)
        self._late[direction] += 1
        self._passes[direction] = 0

    def passed_over(self, direction: str) -> None:
        """Record that a request computes what it could have loaded in this direction, such as "disk_to_hbm". A link
        that is never used is never measured, and would seem slow for ever; so its evidence loses weight, and now and
        then a block is loaded to measure it."""
        self.version += 1
        self._passes[direction] += 1
        self._transfers[direction].fade()

    def is_look_due(self, direction: str) -> bool:
        """Return whether a direction, such as "disk_to_hbm", is to be measured again by loading the next block that it
        could bring, even if computing seems faster. After a single late load, which any device has now and then, the
        answer is soon True; after each further late load, more loads must have been passed over."""
        late = self._late[direction]
        return self._passes[direction] >= (min(1 << late, _PASSED_LOADS) if late else _PASSED_LOADS)

    def is_worth_fetching(self, direction: str, num_bytes: int, tokens: int) -> bool:
        """Return whether to fetch the KV of `tokens` tokens, `num_bytes` bytes, for a turn that still waits. True
        unless the fetch would take several times as long as computing the tokens: it would hardly ever be in time, and
        would delay later fetches. A shorter fetch is worth it even if computing is faster, because it costs no request
        anything while the turn waits. direction: such as "disk_to_dram"."""
        return self.load_s(direction, num_bytes) <= max(_LEAST_WAIT_S, _FETCH_WORTH_FACTOR * self.compute_s(tokens))

    @property
    def prefill_s_per_token(self) -> float:
        """The seconds that one more token adds to a step."""
        return self._step.s_per_unit

    def compute_s(self, tokens: int) -> float:
        """Return the seconds of a step of `tokens` tokens; 0 tokens need no step."""
        return self._step.of(tokens)

    def bytes_per_s(self, direction: str) -> float:
        """Return the bytes per second of a transfer, without its fixed seconds. direction: such as "disk_to_hbm"."""
        return 1 / self._transfers[direction].s_per_unit

    def load_s(self, direction: str, num_bytes: int) -> float:
        """Return the seconds of one transfer of `num_bytes`. They include a fixed cost per transfer, so for one
        transfer of several parts add up bytes, not seconds."""
        return self._transfers[direction].of(num_bytes)


class LoadProgress(NamedTuple):
    """The progress of a load from the disk or Redis. Time counts only while that tier is being asked for the load's
    bytes."""

    layers: int  # number that have come
    reading_s: float  # time until the last of these layers came
    silent_s: float  # time since then

    def left_s(self, num_layers: int) -> float:
        """Return the least seconds that the rest of the load takes: the time at the pace of the layers so far, or the
        time since the last layer came, whichever is longer. num_layers: layers of the whole load."""
        if self.layers >= num_layers:
            return 0.0
        pace_s = self.reading_s / self.layers if self.layers else 0.0
        return max(pace_s * (num_layers - self.layers), self.silent_s)

    def whole_s(self, num_layers: int) -> float:
        """Return the expected seconds of the whole load: the number of layers times the seconds per layer so far, or
        times the seconds since the last layer came if these are more."""
        pace_s = self.reading_s / self.layers if self.layers else 0.0
        return max(pace_s, self.silent_s) * num_layers


def worth_waiting_s(new_s: float, all_s: float, num_layers: int) -> float:
    """Return the longest, in seconds, that a load may take without delaying the first token, compared with computing
    everything. new_s: time to compute what comes after the load. all_s: time to compute everything. This solves
    first_token_s(load, new_s) = all_s for the load, but is never below the delay that any disk or network has now and
    then."""
    exposed = all_s - new_s / num_layers
    return max(_LEAST_WAIT_S, exposed if exposed >= new_s else num_layers * (all_s - new_s))
