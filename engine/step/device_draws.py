"""Draws tokens on the device where the logits are, for all rows at once and without waiting for it. The results are
those that `Sampler` finds row by row in numpy: tokens race, each waits for a random time divided by its probability,
and the first wins. Rows that need unlikely tokens too are left to `Sampler`."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from reprise.kernels import draws
from reprise.kernels.draws import NO_KEY, REST, Survey, waits
from reprise.kernels.triton_kernels import triton_draws
from reprise.scheduler.sequence import SamplingParams

_LOW = (1 << 32) - 1


def draw(logits: Tensor, settings: Sequence[SamplingParams], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw a token for each row. logits fp32 [rows, vocab], contiguous, with a finite maximum in each row and no NaN.
    settings: the sampling parameters of each row. starts: for each row, where its random numbers begin: the first word
    (unsigned, 64 bits) that the generator Philox gives for the row's seed and position. Returns the tokens int64
    [rows], and for each row whether its token is final [rows], so that `Sampler` need not draw it; both
    asynchronous."""
    device = logits.device
    numbers = torch.tensor(
        [[one.temperature, one.top_k, one.top_p, one.min_p] for one in settings], dtype=torch.float64
    ).to(device, non_blocking=True)
    signed = torch.from_numpy(np.array(starts, dtype=np.uint64).view(np.int64)).to(device, non_blocking=True)
    found = _survey(device)(logits, numbers[:, 0].float(), signed)
    is_filtered = [bool(one.top_k or one.top_p < 1 or one.min_p) for one in settings]
    if not any(is_filtered):
        return _unfiltered(found, signed)
    tokens, settled = _filtered(found, numbers, signed)
    if not all(is_filtered):
        plain, plain_settled = _unfiltered(found, signed)
        chosen = torch.tensor(is_filtered).to(device, non_blocking=True)
        tokens, settled = torch.where(chosen, tokens, plain), torch.where(chosen, settled, plain_settled)
    return tokens, settled


def _survey(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Survey]:
    kernels = triton_draws() if device.type == "cuda" else None
    return draws.survey if kernels is None else kernels.survey


def _unfiltered(found: Survey, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from all tokens. The tokens of a level (a range of probabilities, the likeliest first) race with one rival
    that stands for all less likely tokens; if the rival wins, the race continues at the next level."""
    levels = found.times.shape[1]
    rest = (1 - found.masses).clamp_min(0)
    rivals = waits(starts[:, None], torch.arange(REST, REST + levels, device=starts.device))
    wins = found.times.isfinite() & ~((rest > 0) & (rivals < found.times * rest))
    wins[:, -1] = found.times[:, -1].isfinite()  # below the last floor there is nothing
    level = wins.int().argmax(-1, keepdim=True)
    return found.ids.gather(-1, level)[:, 0], wins.any(-1)


def _filtered(found: Survey, numbers: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the tokens that top_k, then top_p and then min_p leave. A row's token is final if all tokens that are
    left are among those that `found` lists. numbers: temperature, top_k, top_p, min_p of each row."""
    _, top_k, top_p, min_p = numbers.unbind(-1)
    keys = found.keys.sort(-1).values
    held = found.counts
    is_listed = keys != NO_KEY
    costs = (keys >> 32).int().view(torch.float32)
    probs = (-costs.double()).exp().masked_fill(~is_listed, 0)
    mass = probs.cumsum(-1)
    kept = held + 1  # stands for "the ranking goes on"
    is_limited = top_k > 0
    kept = torch.where(is_limited, torch.minimum(kept, top_k.long()), kept)
    settled = ~is_limited | (kept <= held)
    last = (kept - 1).clamp(0, keys.shape[1] - 1)[:, None]
    total = torch.where(is_limited, mass.gather(-1, last)[:, 0], 1.0)
    lighter = ((mass < (top_p * total)[:, None]) & is_listed).sum(-1)
    kept = torch.where(top_p < 1, torch.minimum(kept, lighter + 1), kept)
    likely = ((probs >= min_p[:, None] * probs[:, :1]) & is_listed).sum(-1)
    kept = torch.where((min_p > 0) & (likely < held), torch.minimum(kept, likely), kept)
    settled &= (kept <= held) & (held > 0) & (held <= keys.shape[1])
    ids = keys & _LOW
    times = waits(starts[:, None], ids) / probs
    times.masked_fill_(torch.arange(keys.shape[1], device=keys.device) >= kept[:, None], torch.inf)
    return ids.gather(-1, times.argmin(-1, keepdim=True))[:, 0], settled
