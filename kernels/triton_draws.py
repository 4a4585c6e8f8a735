"""Computes the result of `reprise.kernels.draws.survey` in one Triton kernel, which reads the logits twice and writes
only what it returns. Importing it needs Triton. It runs on CUDA, on the current stream. With TRITON_INTERPRET=1 in the
environment before the import, it runs on CPU tensors in Triton's interpreter."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from reprise.kernels.draws import FLOORS, MOST_LIKELY, NO_KEY, Survey

_TILE = 2048
_FIRST, _SECOND, _LAST = (tl.constexpr(floor) for floor in FLOORS)


@triton.jit  # type: ignore[untyped-decorator]
def _waits(start: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return the waiting times, as `reprise.kernels.draws.waits` does."""
    words = (ids.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15 + start
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    words = words ^ (words >> 31)
    return -tl.log(((words >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16)


@triton.jit  # type: ignore[untyped-decorator]
def _first(time: tl.tensor, winner: tl.tensor, arrivals: tl.tensor, ids: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return (time, id) of the token that arrives first, among the winner so far (`winner`, at `time`) and more tokens
    (`ids`, at `arrivals`)."""
    now = tl.min(arrivals, 0)
    who = tl.min(tl.where(arrivals == now, ids, 1 << 40), 0)
    return tl.minimum(time, now), tl.where(now < time, who, winner)


@triton.jit  # type: ignore[untyped-decorator]
def _survey(
    logits_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    times_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    vocab: tl.tensor,
    most: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Compute the fields of `reprise.kernels.draws.Survey` for one row of logits: its likely tokens, the first token to
    arrive in each level, and the probability above each floor."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    start = tl.load(starts_ptr + row).to(tl.uint64, bitcast=True)
    place = tl.arange(0, tile)
    top = tl.full([], float("-inf"), tl.float32)
    for first in range(0, vocab, tile):
        mask = first + place < vocab
        x = tl.div_rn(tl.load(logits_ptr + row * vocab + first + place, mask=mask, other=float("-inf")), temperature)
        top = tl.maximum(top, tl.max(x, 0))
    weight = tl.zeros([tile], tl.float32)
    for first in range(0, vocab, tile):
        mask = first + place < vocab
        x = tl.div_rn(tl.load(logits_ptr + row * vocab + first + place, mask=mask, other=float("-inf")), temperature)
        weight += tl.exp(x - top)
    weight_log = tl.log(tl.sum(weight, 0))

    never = tl.full([], float("inf"), tl.float64)
    nobody = tl.full([], 0, tl.int64)
    time0, time1, time2 = never, never, never
    winner0, winner1, winner2 = nobody, nobody, nobody
    mass0, mass1, mass2 = tl.zeros([tile], tl.float64), tl.zeros([tile], tl.float64), tl.zeros([tile], tl.float64)
    count = tl.full([], 0, tl.int64)
    for first in range(0, vocab, tile):
        ids = (first + place).to(tl.int64)
        x = tl.div_rn(tl.load(logits_ptr + row * vocab + ids, mask=ids < vocab, other=float("-inf")), temperature)
        logprob = (x - top) - weight_log
        prob = tl.exp(logprob.to(tl.float64))
        arrivals = _waits(start, ids) / prob
        likely, rare, any_ = logprob >= _FIRST, logprob >= _SECOND, logprob >= _LAST
        time0, winner0 = _first(time0, winner0, tl.where(likely, arrivals, never), ids)
        time1, winner1 = _first(time1, winner1, tl.where(rare & (likely == 0), arrivals, never), ids)
        time2, winner2 = _first(time2, winner2, tl.where(any_ & (rare == 0), arrivals, never), ids)
        mass0 += tl.where(likely, prob, 0.0)
        mass1 += tl.where(rare, prob, 0.0)
        mass2 += tl.where(any_, prob, 0.0)
        at = count + tl.cumsum(likely.to(tl.int64), 0) - 1
        key = (tl.abs(logprob).to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids
        tl.store(keys_ptr + row * most + at, key, mask=likely & (at < most))
        count += tl.sum(likely.to(tl.int64), 0)

    tl.store(counts_ptr + row, count)
    tl.store(times_ptr + row * 3, time0)
    tl.store(times_ptr + row * 3 + 1, time1)
    tl.store(times_ptr + row * 3 + 2, time2)
    tl.store(ids_ptr + row * 3, winner0)
    tl.store(ids_ptr + row * 3 + 1, winner1)
    tl.store(ids_ptr + row * 3 + 2, winner2)
    tl.store(masses_ptr + row * 3, tl.sum(mass0, 0))
    tl.store(masses_ptr + row * 3 + 1, tl.sum(mass1, 0))
    tl.store(masses_ptr + row * 3 + 2, tl.sum(mass2, 0))


def survey(logits: Tensor, temperatures: Tensor, starts: Tensor) -> Survey:
    """Return the facts with which a token is drawn for each row, the same as `reprise.kernels.draws.survey`. logits
    must be contiguous."""
    rows, vocab = logits.shape
    levels = len(FLOORS)
    found = Survey(
        keys=torch.full((rows, MOST_LIKELY), NO_KEY, dtype=torch.int64, device=logits.device),
        counts=torch.empty(rows, dtype=torch.int64, device=logits.device),
        times=torch.empty(rows, levels, dtype=torch.float64, device=logits.device),
        ids=torch.empty(rows, levels, dtype=torch.int64, device=logits.device),
        masses=torch.empty(rows, levels, dtype=torch.float64, device=logits.device),
    )
    if rows:
        memory = found.keys, found.counts, found.times, found.ids, found.masses
        _survey[(rows,)](logits, temperatures, starts, *memory, vocab, most=MOST_LIKELY, tile=_TILE, num_warps=8)
    return found
