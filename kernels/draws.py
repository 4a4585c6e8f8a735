"""Surveys rows of logits for drawing tokens. `reprise.engine.step.sampler` draws by a race: each token arrives after a
random time, divided by its probability, and the first one wins. A survey finds the likely tokens, and the first token
to arrive in each of several ranges of probability. It uses torch's operations, on CPU and CUDA;
`reprise.kernels.triton_draws` does the same in one kernel.

Asynchronous on CUDA, on the current stream.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FLOORS = (math.log(1e-4), math.log(1e-6), float(torch.finfo(torch.float32).min))
"""Log-probabilities that divide the tokens of a row into levels. The first level has tokens at least as likely as the
first floor, and so on."""
REST = 1 << 40
"""The first of the ids, larger than any token's, of the rivals that stand in a race for all tokens below a floor."""
MOST_LIKELY = 1024  # tokens above the first floor that a survey lists
NO_KEY = (1 << 63) - 1  # stands where there is no key
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # step of SplitMix64, as signed words
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


@dataclass(frozen=True, slots=True)
class Survey:
    """The facts about rows of logits with which tokens are drawn, so that a draw reads only few tokens. FLOORS are
    descending log-probabilities; the level of a floor holds the tokens above it, but not above the previous floor. A
    token arrives at a random time, divided by its probability, and the first one is drawn."""

    keys: Tensor  # [rows, n] int64: bits of the fp32 -logprob << 32 | id of tokens above the first floor; else NO_KEY
    counts: Tensor  # [rows] int64: how many there are above the first floor, perhaps more than n
    times: Tensor  # [rows, levels] fp64: when the first token of a level arrives; inf: it has none
    ids: Tensor  # [rows, levels] int64: which
    masses: Tensor  # [rows, levels] fp64: the probability of all tokens above the floor


def waits(starts: Tensor, ids: Tensor) -> Tensor:
    """Return for each row and token id a random time, exponential with a mean of 1, the same as
    `reprise.engine.step.sampler.waits` returns. starts int64 [rows, 1]: for each row the random
    word of 64 bits that the generator Philox gives for its position; ids int64, of a shape that broadcasts -> fp64."""
    words = (ids + 1) * _STEP + starts
    for shift, factor in _FACTORS:
        words = (words ^ _shifted(words, shift)) * factor
    words ^= _shifted(words, 31)
    return -torch.log((_shifted(words, 11).double() + 0.5) * 2.0**-53)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Return unsigned words, which torch holds as signed ones, shifted to the right."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def survey(logits: Tensor, temperatures: Tensor, starts: Tensor) -> Survey:
    """Return the facts with which a token is drawn for each row. For each level (a range of log-probabilities between
    two FLOORS) it is the token that arrives first in the sampler's race, and for each floor the probability of all
    tokens above it. logits fp32 [rows, vocab], with a finite maximum in each row and no NaN; temperatures fp32 [rows];
    starts int64 [rows], where the random numbers of a row begin, as in `waits`."""
    logprobs = (logits / temperatures[:, None]).log_softmax(-1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    probs = logprobs.double().exp()
    arrivals = waits(starts[:, None], ids) / probs
    times, winners, masses = [], [], []
    taken = torch.zeros_like(logprobs, dtype=torch.bool)
    for floor in FLOORS:
        above = logprobs >= floor
        time, winner = arrivals.masked_fill(~above | taken, torch.inf).min(-1)
        times.append(time)
        winners.append(winner)
        masses.append(probs.masked_fill(~above, 0).sum(-1))
        taken = above
    likely = logprobs >= FLOORS[0]
    keys = (logprobs.abs().view(torch.int32).long() << 32 | ids).masked_fill(~likely, NO_KEY)
    most = min(MOST_LIKELY, keys.shape[1])
    return Survey(
        keys.sort(-1).values[:, :most],
        likely.sum(-1),
        torch.stack(times, 1),
        torch.stack(winners, 1),
        torch.stack(masses, 1),
    )
