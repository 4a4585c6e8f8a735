"""Rounds weights to 4 or 8 bits, with a scale for every 32 inputs."""

import torch
from torch import Tensor

from reprise.kernels.packed import GROUP, Bits, Codes

_SHRINKS = [1.0 - 0.02 * step for step in range(14)]  # shares of a group's range that are tried
_NUMBERS_TOGETHER = 1 << 22  # numbers rounded together


def quantise(weight: Tensor, bits: Bits) -> Codes:
    """Round a weight [outputs, inputs] to `bits` bits; inputs must be a multiple of GROUP. With 8 bits, a group of
    inputs is scaled symmetrically by its largest number. With 4 bits, it has a scale and a low (the value of code 0),
    which span the range that gives the least error; errors of large numbers weigh more. Raises ValueError for numbers
    that are not finite, or too large."""
    step = max(1, _NUMBERS_TOGETHER // weight.shape[1])
    parts = [(_eight if bits == 8 else _four)(_groups(rows)) for rows in weight.split(step)]
    codes, scales, *lows = (torch.cat(part) for part in zip(*parts, strict=True))
    return Codes(codes.flatten(1), scales, lows[0] if lows else None, bits)


def _groups(rows: Tensor) -> Tensor:
    """Return rows [outputs, inputs] as fp32 [outputs, groups, GROUP]. Raises ValueError."""
    wide = rows.float()
    if not wide.isfinite().all():
        raise ValueError("a number is not finite")
    groups: Tensor = wide.unflatten(1, (-1, GROUP))
    return groups


def _half(x: Tensor) -> Tensor:
    """Round numbers to fp16, the type in which scales are stored; returns them as fp32."""
    return x.half().float()


def _eight(x: Tensor) -> tuple[Tensor, ...]:
    scales = _half(x.abs().amax(-1) / 127)
    codes = (x / scales.clamp_min(1e-8)[..., None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales


def _four(x: Tensor) -> tuple[Tensor, ...]:
    """Round groups of numbers to 4 bits. Several ranges are tried for each group: round to codes within the range, then
    fit the scale and the low (the value of code 0) to the codes. The range with the least error is kept. Returns
    (codes, scales, lows). Raises ValueError."""
    weights = x.square() + x.square().mean(-1, keepdim=True)
    low, high = x.amin(-1), x.amax(-1)
    middle, reach = (low + high) / 2, (high - low) / 2
    best_error = torch.full_like(low, torch.inf)
    best = [torch.zeros_like(x), torch.zeros_like(low), torch.zeros_like(low)]
    for shrink in _SHRINKS:
        scale, start = reach * shrink * 2 / 15, middle - reach * shrink
        codes = _codes(x, scale, start)
        scale, start = (_half(part) for part in _fit(x, codes, weights, scale, start))
        codes = _codes(x, scale, start)
        error = ((codes * scale[..., None] + start[..., None] - x).square() * weights).sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = [
            torch.where(better.view(better.shape + (1,) * (new.dim() - better.dim())), new, old)
            for new, old in zip((codes, scale, start), best, strict=True)
        ]
    if not best_error.isfinite().all():
        raise ValueError("numbers are too large for scales of fp16")
    codes, scale, start = best
    return codes.to(torch.int8), scale, start


def _codes(x: Tensor, scale: Tensor, start: Tensor) -> Tensor:
    return ((x - start[..., None]) / scale.clamp_min(1e-8)[..., None]).round_().clamp_(0, 15)


def _fit(x: Tensor, codes: Tensor, weights: Tensor, scale: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the low (the value of code 0) of each group with the least weighted squared error for given
    codes. scale, start: the scale and low to return where all codes of a group are equal."""
    total = weights.sum(-1)
    mean_code, mean = (weights * codes).sum(-1) / total, (weights * x).sum(-1) / total
    spread = (weights * (codes - mean_code[..., None]).square()).sum(-1)
    slope = (weights * (codes - mean_code[..., None]) * (x - mean[..., None])).sum(-1) / spread.clamp_min(1e-20)
    fits = (spread > 0) & (slope > 0)
    return torch.where(fits, slope, scale), torch.where(fits, mean - slope * mean_code, start)
