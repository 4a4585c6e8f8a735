"""Draws one token id from each row of logits: penalties, temperature, top-k, top-p, min-p, seeded draws, logprobs.

A draw depends only on the row's logits, parameters, seed and position, and not on its batch or on preemptions. All sums
over the vocabulary are computed for each row alone.

Tokens are drawn in a race (Gumbel's trick). Each waits for an exponential time whose rate is its probability, and the
first wins, so each wins as often as its probability says. A token's time depends on the seed, the position, its id and
its own probability. So logits whose last bits differ by rounding draw the same token, unless the two fastest arrive
together. A draw from the cumulative distribution would change whenever sums or ranks of unlikely tokens do.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reprise.engine.messages import TokenLogprob
from reprise.engine.step.device_draws import draw
from reprise.engine.step.grammar import Constraint
from reprise.kernels.draws import FLOORS, REST
from reprise.scheduler.sequence import SamplingParams

# Below this, dividing would overflow before it made a difference.
GREEDY_TEMPERATURE = 1e-5

_WORD = 2**64 - 1


class BadLogits(Exception):
    """Some rows cannot be drawn from: they have a NaN, +inf, or only -inf (after bias and masks)."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"no token can be drawn in batch rows {list(rows)}: NaN, infinite or fully masked logits")
        self.rows = tuple(rows)


class PenaltyState:
    """The counts of each token in one choice, which repetition, presence and frequency penalties need.

    Sparse over the ids seen and kept incrementally. Owned by the choice, whose owner calls `append` once per generated
    token; a preempted sequence keeps its state. Not thread-safe.
    """

    def __init__(self, *, prompt_ids: Sequence[int]) -> None:
        seen = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._size = len(seen)
        self._place = {token_id: place for place, token_id in enumerate(seen.tolist())}
        self._ids = np.concatenate([seen, np.zeros(64, dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    @classmethod
    def of(cls, sampling: SamplingParams, prompt_ids: Sequence[int]) -> "PenaltyState | None":
        """Return the state that a choice needs; None for one without penalties. Prompt tokens matter only to the
        repetition penalty."""
        if sampling.repetition_penalty != 1:
            return cls(prompt_ids=prompt_ids)
        if sampling.presence_penalty or sampling.frequency_penalty:
            return cls(prompt_ids=())
        return None

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._size
            self._size += 1
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def seen(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The distinct ids of prompt and output, and how often each was generated. Views, valid until `append`."""
        return self._ids[: self._size], self._counts[: self._size]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The parameters with which a token is drawn from one row of logits."""

    sampling: SamplingParams
    seed: int  # the choice's: choice_seed(sampling.seed, choice)
    position: int  # tokens this choice has generated so far
    penalties: PenaltyState | None  # PenaltyState.of(sampling, prompt)
    end_ids: tuple[int, ...]  # ids that would end the choice; not drawn before sampling.min_tokens
    constraint: Constraint | None = None  # the grammar of the answer; it alone says when the choice may end

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_TEMPERATURE

    @property
    def edited(self) -> bool:
        """Whether the logits are changed before the temperature applies, by a bias, penalties or masks."""
        return bool(
            self.penalties is not None or self.sampling.logit_bias or self.masked_ids or self.constraint is not None
        )

    @property
    def masked_ids(self) -> tuple[int, ...]:
        return self.end_ids if self.position < self.sampling.min_tokens and self.constraint is None else ()


class Sampled(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None  # None unless the row asked


class Sampler:
    """A sampler of tokens from logits, on CPU or CUDA, wherever the logits are. Stateless; may be called from any
    thread."""

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Draw a token for each row. logits [rows, vocab], any float dtype, not modified.

        In order: logit_bias; repetition, then frequency and presence penalty; the masks of min_tokens and grammars;
        temperature; top_k; top_p and then min_p of what top_k kept; the draw. Logprobs are those of the raw logits.
        Among equals the lowest id comes first. Raises BadLogits, with nothing changed, when a row is unusable: call
        again without the rows that it names.
        """
        if logits.dim() != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"{len(rows)} rows need logits [{len(rows)}, vocab], got {list(logits.shape)}")
        if not rows:
            return []
        tokens = (tokens_on_host if logits.device.type == "cpu" else tokens_on_device)(logits, rows)
        logprobs = _logprobs(logits, tokens, rows)
        return [Sampled(token, logprobs.get(i)) for i, token in enumerate(tokens)]


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of a request's n choices, unsigned 64 bit. seed: the request's; choice: index of the
    choice."""
    return philox((seed, 1), choice)[0]


def waits(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return, for each token id, its exponential random time of rate 1. The token at a position is drawn by a race: the
    token with the smallest time / probability wins. The times are independent. Each is made of word number `id` of the
    generator SplitMix64 (Steele et al., OOPSLA 2014), whose start is the generator Philox's word for (seed,
    position)."""
    words = ids.astype(np.uint64)
    words += np.uint64(1)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(philox((seed, 0), position)[0])
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    uniforms = (words >> np.uint64(11)).astype(np.float64)
    uniforms += 0.5  # neither 0 nor 1
    uniforms *= 2.0**-53
    return -np.log(uniforms)


def philox(key: tuple[int, int], counter: int) -> tuple[int, int, int, int]:
    """Compute Philox4x64-10 (Salmon et al., SC 2011): four words, a pure function of key and counter. Written in plain
    Python, because setting up numpy's generator costs more than the ten rounds."""
    k0, k1 = key[0] & _WORD, key[1] & _WORD
    c0, c1, c2, c3 = counter & _WORD, 0, 0, 0
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & _WORD, (low >> 64) ^ c3 ^ k1, low & _WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _WORD, (k1 + 0xBB67AE8584CAA73B) & _WORD
    return c0, c1, c2, c3


def tokens_on_host(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Return the sampled token of each row of logits that are on the host. Raises BadLogits."""
    tokens, peaks = _argmax(logits)
    _check(peaks, range(len(rows)))
    special = _special(rows)
    if not special:
        return tokens
    picked = [rows[i] for i in special]
    work = _edited(logits[special].float(), picked)
    found, peaks = _argmax(work)
    _check(peaks, special)
    drawn = [i for i, row in enumerate(picked) if not row.greedy]
    if drawn:
        work = work if len(drawn) == len(picked) else work[drawn]
        for i, token in zip(drawn, _drawn(work, [picked[i] for i in drawn]), strict=True):
            found[i] = token
    for i, token in zip(special, found, strict=True):
        tokens[i] = token
    return tokens


def tokens_on_device(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Return the same tokens as `tokens_on_host`, computed where the logits are. The host waits for the device once,
    and again for each draw that needs unlikely tokens. Raises BadLogits."""
    special = _special(rows)
    picked = [rows[i] for i in special]
    drawn = [i for i, row in enumerate(picked) if not row.greedy]
    parts, work = [*_best(logits)], logits[:0]
    if special:
        work = _edited(logits[special].float(), picked)
        parts += _best(work)
    if drawn:
        settings = [picked[i] for i in drawn]
        starts = [philox((row.seed, 0), row.position)[0] for row in settings]
        parts += [part.double() for part in draw(work[drawn], [row.sampling for row in settings], starts)]
    sizes = [len(rows)] * 2 + [len(special)] * 2 + [len(drawn)] * 2
    best, peaks, found, tops, draws, settled = np.split(torch.cat(parts).cpu().numpy(), np.cumsum(sizes)[:-1])
    _check(peaks.tolist(), range(len(rows)))
    _check(tops.tolist(), special)
    tokens = [int(token) for token in best]
    for i, token in zip(special, found, strict=True):
        tokens[i] = int(token)
    for i, token, is_settled in zip(drawn, draws, settled, strict=True):
        tokens[special[i]] = int(token) if is_settled else _drawn(work[i : i + 1], [picked[i]])[0]
    return tokens


def _special(rows: Sequence[SampleRow]) -> list[int]:
    """Return the indices of the rows that are not plain greedy: they are sampled, or their logits are changed first."""
    return [i for i, row in enumerate(rows) if row.edited or not row.greedy]


def _argmax(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return the lowest id with the greatest logit, and that logit, per row of logits on the host. NaN counts as the
    greatest."""
    # Per row of 150k: 20 us, with the bf16 conversion 65; torch.max takes 66 and 113, torch.argmax 210 and 530.
    values = logits.float().numpy()
    ids = values.argmax(axis=1)
    return ids.tolist(), values[np.arange(len(ids)), ids].tolist()


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as `_argmax`, as fp64 tensors [rows], on any device."""
    peaks, best = logits.max(dim=-1)
    return best.double(), peaks.double()


def _check(peaks: list[float], names: Iterable[int]) -> None:
    # The maximum alone tells: NaN and +inf win it, and -inf wins only when there is nothing else.
    if bad := [name for name, peak in zip(names, peaks, strict=True) if not math.isfinite(peak)]:
        raise BadLogits(bad)


def _edited(work: Tensor, picked: list[SampleRow]) -> Tensor:
    """Apply each row's bias, penalties and masks, in place, to logits [rows, vocab] fp32, and return them."""
    if any(row.edited for row in picked):
        _apply_bias(work, picked)
        _apply_penalties(work, picked)
        _apply_masks(work, picked)
    return work


def _drawn(work: Tensor, picked: list[SampleRow]) -> list[int]:
    """Draw the token of each row. work [rows, vocab] fp32, overwritten.

    Only tokens whose log-probability is above the first of `FLOORS` are ranked. If the drawn token may lie below it,
    the next floor is used. At most 10^4 tokens reach the first floor. With a vocabulary of 150k, a row takes 40 us to
    find them and a few us to rank them; torch.topk takes 290 us, a stable sort of all 12 ms, our sort of all 2 ms.
    """
    if any(row.sampling.temperature != 1 for row in picked):
        work /= torch.tensor([[row.sampling.temperature] for row in picked], device=work.device)
    # Row by row in the library too, so the batch has no part in the result.
    logprobs = work.log_softmax(dim=-1)
    tokens = []
    for row, settings, prefix in zip(logprobs, picked, _ranked(logprobs, [FLOORS[0]] * len(picked)), strict=True):
        token = _draw(*prefix, settings, 0)
        for level in range(1, len(FLOORS)):
            if token is None:
                [prefix] = _ranked(row[None], [FLOORS[level]])
                token = _draw(*prefix, settings, level)
        assert token is not None
        tokens.append(token)
    return tokens


def _draw(ids: NDArray[np.int64], logprobs: NDArray[np.float32], row: SampleRow, level: int) -> int | None:
    """Return the token that wins the race among those that top_k, top_p and min_p keep; None if a token below this
    floor may be the winner. ids and logprobs [n]: the most likely tokens, down to log-probability FLOORS[level]."""
    sampling, complete = row.sampling, level == len(FLOORS) - 1
    held = len(ids)
    if not held:
        return None
    probs = np.exp(logprobs.astype(np.float64))
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        return _win_unfiltered(ids, probs, logprobs, row, level)
    mass = np.cumsum(probs)
    end = held if complete else held + 1  # tokens kept; held + 1 stands for "the ranking goes on"
    total = 1.0  # what they weigh together
    if sampling.top_k:
        end = min(end, sampling.top_k)
        if end > held:
            return None
        total = mass[end - 1]
    if sampling.top_p < 1:
        end = min(end, 1 + int(np.searchsorted(mass, sampling.top_p * total)))
        if end > held and not sampling.min_p:
            return None
    if sampling.min_p:
        likely = int(np.count_nonzero(probs >= sampling.min_p * probs[0]))
        if likely < held:
            end = min(end, likely)
        if end > held:
            return None
    return int(ids[_first(ids[:end], probs[:end], row)[0]])


def _win_unfiltered(
    ids: NDArray[np.int64], probs: NDArray[np.float64], logprobs: NDArray[np.float32], row: SampleRow, level: int
) -> int | None:
    """Return the token that wins the race among all; None if its log-probability is below FLOORS[level]. The tokens
    above that floor race with one rival that stands for all tokens below."""
    known = int(np.count_nonzero(logprobs >= FLOORS[level - 1])) if level else 0  # they have lost
    if known == len(ids):
        return int(ids[-1]) if level == len(FLOORS) - 1 else None  # rounding: what had won has no mass
    place, time = _first(ids[known:], probs[known:], row)
    if level < len(FLOORS) - 1:
        rest = max(0.0, 1.0 - float(probs.sum()))
        if rest and waits(row.seed, row.position, np.array([REST + level]))[0] < time * rest:
            return None
    return int(ids[known + place])


def _first(ids: NDArray[np.int64], probs: NDArray[np.float64], row: SampleRow) -> tuple[int, float]:
    """Return the index in `ids` of the token that wins the race, and its time."""
    with np.errstate(divide="ignore", over="ignore"):  # a token of probability 0 never comes
        times = waits(row.seed, row.position, ids) / probs
    place = int(np.argmin(times))
    return place, float(times[place])


def _ranked(logprobs: Tensor, floors: list[float]) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Return for each row the ids with at least the log-probability in `floors`, most likely first, lowest id first
    among equals."""
    if logprobs.device.type == "cpu":
        ranked = []
        for row, floor in zip(logprobs.numpy(), floors, strict=True):
            ids = np.flatnonzero(row >= floor)
            ranked.append(_rank(ids, row[ids]))
        return ranked
    # Only what passes crosses the bus.
    row_of, found = (logprobs >= torch.tensor(floors, device=logprobs.device)[:, None]).nonzero(as_tuple=True)
    passed = torch.stack((row_of.double(), found.double(), logprobs[row_of, found].double())).cpu().numpy()
    edges = np.searchsorted(passed[0], np.arange(1, len(floors)))
    parts = np.split(passed, edges, axis=1)
    return [_rank(part[1].astype(np.int64), part[2].astype(np.float32)) for part in parts]


def _rank(ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    # One sort of integer keys: the bits of non-negative floats order like the floats, the id decides among equals.
    costs = np.abs(logprobs)
    keys = np.sort((costs.view(np.uint32).astype(np.uint64) << np.uint64(32)) | ids.astype(np.uint64))
    order = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return order, -((keys >> np.uint64(32)).astype(np.uint32).view(np.float32))


def token_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Return the logprob of tokens[i] by row i of logits [rows, vocab], with the counts[i] most likely tokens. `top`
    has no token at -inf, so it may be shorter than asked for. Takes twice the memory of the logits in fp32."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs[range(len(tokens)), list(tokens)].tolist()
    result = [TokenLogprob(logprob=value, top=[]) for value in chosen]
    most = min(max(counts), logits.shape[1])
    if most:
        # Everything at or above the n-th value, then ranked: topk itself leaves the order of equals open.
        best = logprobs.topk(most, dim=-1).values.tolist()
        floors = [max(top[min(max(count, 1), most) - 1], FLOORS[-1]) for top, count in zip(best, counts, strict=True)]
        for entry, count, (ids, values) in zip(result, counts, _ranked(logprobs, floors), strict=True):
            entry.top.extend(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
    return result


def _logprobs(logits: Tensor, tokens: list[int], rows: Sequence[SampleRow]) -> dict[int, TokenLogprob]:
    """Return the log probabilities of the rows that ask for them, by row index."""
    counts = {i: n for i, row in enumerate(rows) if (n := row.sampling.logprobs) is not None}
    if not counts:
        return {}
    asked = list(counts)
    found = token_logprobs(logits[asked], [tokens[i] for i in asked], list(counts.values()))
    return dict(zip(asked, found, strict=True))


def _apply_bias(work: Tensor, rows: list[SampleRow]) -> None:
    parts = [
        (i, np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32))
        for i, row in enumerate(rows)
        if (bias := row.sampling.logit_bias)
    ]
    if parts:
        index, kept = _flat_index(work, [(i, ids) for i, ids, _ in parts])
        values = torch.from_numpy(np.concatenate([values for _, _, values in parts])[kept])
        work.view(-1).index_add_(0, index, values.to(work.device))


def _apply_penalties(work: Tensor, rows: list[SampleRow]) -> None:
    parts = [(i, row.penalties.seen, row.sampling) for i, row in enumerate(rows) if row.penalties is not None]
    if not parts:
        return
    index, kept = _flat_index(work, [(i, ids) for i, (ids, _), _ in parts])
    repetition = np.concatenate([np.full(len(ids), s.repetition_penalty, np.float32) for _, (ids, _), s in parts])
    lowered = np.concatenate(
        [s.frequency_penalty * counts + s.presence_penalty * (counts > 0) for _, (_, counts), s in parts]
    ).astype(np.float32)
    factor = torch.from_numpy(repetition[kept]).to(work.device)
    flat = work.view(-1)
    values = flat[index]
    values = torch.where(values > 0, values / factor, values * factor)
    flat[index] = values - torch.from_numpy(lowered[kept]).to(work.device)


def _apply_masks(work: Tensor, rows: list[SampleRow]) -> None:
    parts = [(i, np.array(row.masked_ids, dtype=np.int64)) for i, row in enumerate(rows) if row.masked_ids]
    if parts:
        work.view(-1).index_fill_(0, _flat_index(work, parts)[0], -math.inf)
    for i, row in enumerate(rows):
        if row.constraint is not None:
            banned = torch.from_numpy(~row.constraint.allowed(work.shape[1]))
            work[i].masked_fill_(banned.to(work.device), -math.inf)


def _flat_index(work: Tensor, parts: list[tuple[int, NDArray[np.int64]]]) -> tuple[Tensor, NDArray[np.bool_]]:
    """Return the indices of (row, id) pairs in the flattened logits, and a mask of the pairs that have an index. Ids
    outside the vocabulary have none, because they would land in another row."""
    vocab = work.shape[1]
    ids = np.concatenate([ids for _, ids in parts])
    kept = (ids >= 0) & (ids < vocab)
    flat = np.concatenate([np.full(len(ids), i * vocab) for i, ids in parts]) + ids
    return torch.from_numpy(flat[kept]).to(work.device), kept
