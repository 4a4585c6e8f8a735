"""Finds the quantisation steps of the transform codec at which a model's answers change by no more than a budget, on
texts that ship with Reprise.

The statistics come from one list of texts, and the divergence is measured on another. Keys and values get half of the
budget each. One more bit divides the divergence that keys cause by the same factor as the divergence that values cause,
and both have as many numbers, so equal shares cost the fewest bits.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.codec.quality import HistoryCoder, Part, Quality, Subject, measure
from reprise.engine.model.probe import RopeSource
from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta, AttentionParams, KvPages
from reprise.kernels.codecs.transform import LayerStatistics, TransformCodec, basis_of

log = logging.getLogger(__name__)

FIRST_STEPS = 0.5, 0.33  # first steps of keys and of values: about 0.001 nats on SmolLM2
_STEP_POWER = 2.2  # divergence grows with about this power of a step (measured on SmolLM2: 2.0 to 2.3)
_AIM_SHARE = 0.9  # share of the budget to aim at, because a measurement has an error
_MOST_TRIES = 4
_LEAST_STEP, _MOST_CHANGE = 1e-3, 8.0


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibrated codec, with its measured divergence."""

    codec: TransformCodec
    k_step: float
    v_step: float
    divergence: float  # nats a token, mean
    same_choices: float
    tokens: int  # scored


class _Listener:
    """An attention backend that also sums the squares of its queries. The thread that calibrates calls it for the
    layers in order."""

    def __init__(self, backend: AttentionBackend, num_layers: int) -> None:
        self.name, self.page_multiple = backend.name, backend.page_multiple
        self._backend, self._calls = backend, 0
        self._sums: list[Tensor | None] = [None] * num_layers
        self._rows = [0] * num_layers

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Sum the squares of a layer's queries, and attend as the inner backend does."""
        layer = self._calls % len(self._sums)
        self._calls += 1
        kv_heads = kv.k.shape[2]
        squares = q.float().square().sum(0).view(kv_heads, -1, q.shape[-1]).mean(1)
        known = self._sums[layer]
        self._sums[layer] = squares if known is None else known + squares
        self._rows[layer] += len(q)
        return self._backend.forward(q, kv, meta, params)

    def energy(self, layer: int, rope: RopeSource | None) -> Tensor:
        """Return the mean square of a layer's queries [kv_heads, k_dim], averaged over the dims that a rotation mixes.
        rope: the layer's rotation; None: it has none, and nothing is averaged over dims."""
        known = self._sums[layer]
        assert known is not None
        energy = known / self._rows[layer]
        if rope is None:
            return energy
        if not rope.call.is_by_halves:  # pairs unknown
            return energy.mean(-1, keepdim=True).expand_as(energy)
        half = rope.call.num_turned // 2
        pair = (energy[:, :half] + energy[:, half : 2 * half]) / 2
        return torch.cat([pair, pair, energy[:, 2 * half :]], 1)


def statistics(subject: Subject, texts: Sequence[Tensor]) -> list[LayerStatistics]:
    """Run a model over texts [tokens] and return statistics of each layer. The first block of each text is left out,
    because the codec never compresses it."""
    shapes, ropes = subject.found.shapes, subject.found.ropes
    listener = _Listener(subject.backend, len(shapes))
    coder = HistoryCoder(replace(subject, backend=listener), most_tokens=max(map(len, texts)))
    found: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in shapes]
    for text in texts:
        for (keys, values), (k, v) in zip(found, coder.compute(text), strict=True):
            keys.append(k[BLOCK_TOKENS:].float().cpu())
            values.append(v[BLOCK_TOKENS:].float().cpu())
    return [
        LayerStatistics(
            torch.cat(keys).numpy(), torch.cat(values).numpy(), listener.energy(layer, ropes[layer]).cpu().numpy()
        )
        for layer, (keys, values) in enumerate(found)
    ]


def calibrate(
    subject: Subject, *, budget: float, learned: Sequence[Tensor], scored: Sequence[Tensor]
) -> Calibrated | None:
    """Find the coarsest quantisation steps whose divergence keeps to `budget`, in nats per token. learned: texts
    [tokens] for the statistics. scored: texts for the measurement, which scores the last fifth of each. Returns None if
    no step keeps to the budget."""
    bases = [basis_of(layer) for layer in statistics(subject, learned)]
    coder = HistoryCoder(subject, most_tokens=max(map(len, scored)))

    def made(k_step: float, v_step: float) -> TransformCodec:
        return TransformCodec.fitted(bases, k_step=k_step, v_step=v_step, dtype=subject.dtype)

    def measured(*codecs: tuple[TransformCodec, Part]) -> list[Quality]:
        by_text = []
        for text in scored:
            history = int(len(text) * 0.8) // BLOCK_TOKENS * BLOCK_TOKENS
            by_text.append(measure(coder, text, history, codecs))
        return [Quality.added(parts) for parts in zip(*by_text, strict=True)]

    k_step, v_step = FIRST_STEPS
    codec = made(k_step, v_step)
    of_k, of_v = measured((codec, "k"), (codec, "v"))
    k_step, v_step = (
        _nearer(step, quality.mean_divergence, _AIM_SHARE * budget / 2)
        for step, quality in ((k_step, of_k), (v_step, of_v))
    )
    best: Calibrated | None = None
    for _ in range(_MOST_TRIES):
        try:
            codec = made(k_step, v_step)
        except ValueError:  # finer than any sense
            break
        [quality] = measured((codec, "kv"))
        divergence = quality.mean_divergence
        log.debug("steps %.3f and %.3f: %.5f nats a token, budget %.5f", k_step, v_step, divergence, budget)
        if divergence <= budget:
            best = Calibrated(codec, k_step, v_step, divergence, quality.same_choices, len(quality.divergence))
            if divergence >= budget * _AIM_SHARE**2:
                break
        k_step, v_step = (_nearer(step, divergence, _AIM_SHARE * budget) for step in (k_step, v_step))
    return best


def _nearer(step: float, divergence: float, wanted: float) -> float:
    """Return the next guess in a search for the quantisation step whose divergence is `wanted`. step: the last guess;
    divergence: what was measured with it. Both divergences in nats per token."""
    change = (wanted / max(divergence, 1e-12)) ** (1 / _STEP_POWER) if math.isfinite(divergence) else 1 / _MOST_CHANGE
    return max(_LEAST_STEP, step * min(max(change, 1 / _MOST_CHANGE), _MOST_CHANGE))
