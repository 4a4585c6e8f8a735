"""Measures how sparse attention is by layer, and what dropping tokens by that costs (CaR, Fig. 4 and §III-D):
benchmarks/results/sparsity*.json.

    python -m benchmarks.texts sparsity --data DIR [--model smollm2] [--texts N]

Profile: on the texts that calibrate codecs, which share of attention's weights is below 1 % of the largest of its row.
Only weights that causality allows count; in the mean of heads and rows.

Dropping: of a history, each layer keeps the tokens with the most attention from the history itself, summed over heads
and queries, and the first block. What follows is scored as by `codecs`, beside codecs that keep all tokens. A small
run: texts of 1,024 tokens at most, and 192 scored tokens each.

drop as sparse       each layer drops as many as its profile says: CaR
drop evenly          all layers drop as many, and as much in all
drop half            each layer drops half as many
transform, kivi2     codecs
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.models import name_of, result_name
from benchmarks.harness.tables import show_rows
from benchmarks.texts.history import History, load_subject, summary
from benchmarks.texts.quantised import other_codecs, raw_block_bytes
from benchmarks.texts.reading import encoder, text_options, texts_of
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.codec.calibration import calibrate
from reprise.engine.codec.quality import Quality, coded
from reprise.engine.codec.text import calibration_text
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, AttentionUnsupported, KvPages
from reprise.kernels.codecs.codec import Codec

BUDGET = 0.001  # nats a token, of the transform codec
ZERO = 0.01  # share of a row's largest weight: less counts as zero
SCORED = 192
MOST_HISTORY = 1024


class WeighedAttention:
    """An attention of one sequence by its definition, in fp32, whose weights are counted and which may leave tokens
    out."""

    name = "weighed"
    page_multiple = 1

    def __init__(self) -> None:
        self.dropped: list[Tensor] | None = None  # by layer [tokens] bool: of a history's first tokens
        self.is_counting = False
        self.small: list[float] = []  # by layer: weights that count as zero
        self.seen: list[int] = []  # by layer: all weights
        self.received: list[Tensor] = []  # by layer [tokens]: attention that each token has had
        self._layers: dict[int, int] = {}  # where a layer's pages are -> its number

    def count(self) -> None:
        """Begin to count, at a text from its first token on."""
        self.is_counting = True
        self.small, self.seen, self.received = [], [], []

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Implement `AttentionBackend.forward`. Layers are told apart by their pages, and come in their order."""
        if params.window is not None or params.softcap is not None or params.sinks is not None:
            raise AttentionUnsupported("windows, caps and sinks are not counted")
        layer = self._layers.setdefault(kv.k.data_ptr(), len(self._layers))
        (queries,), (rows,) = meta.query_lens, meta.context_lens
        groups = q.shape[1] // kv.k.shape[2]
        at = torch.arange(rows)
        pages, places = meta.block_table[0].long()[at // kv.k.shape[1]], at % kv.k.shape[1]
        k, v = (part[pages, places].float().repeat_interleave(groups, dim=1) for part in (kv.k, kv.v))
        allowed = at[None, :] <= torch.arange(rows - queries, rows)[:, None]
        if self.dropped is not None:
            allowed[:, : len(self.dropped[layer])] &= ~self.dropped[layer]
        logits = torch.einsum("qhd,khd->hqk", q.float(), k) * params.scale
        weights = logits.masked_fill(~allowed, float("-inf")).softmax(2)
        if self.is_counting:
            self._count(layer, weights, allowed)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)

    def _count(self, layer: int, weights: Tensor, allowed: Tensor) -> None:
        if layer == len(self.small):
            self.small.append(0.0)
            self.seen.append(0)
            self.received.append(torch.zeros(0))
        self.small[layer] += int(((weights < ZERO * weights.amax(2, keepdim=True)) & allowed).sum())
        self.seen[layer] += int(allowed.sum()) * len(weights)
        received = weights.sum((0, 1))
        received[: len(self.received[layer])] += self.received[layer]
        self.received[layer] = received


def profile(attention: WeighedAttention, history: History, texts: Sequence[Tensor]) -> list[float]:
    """Return by layer the share of weights that count as zero."""
    small, seen = torch.zeros(1), torch.zeros(1)
    for text in texts:
        attention.count()
        history.compute(text)
        small, seen = small + torch.tensor(attention.small), seen + torch.tensor(attention.seen)
    return [float(share) for share in small / seen]


def least_attended(received: Tensor, share: float) -> Tensor:
    """Return which tokens of a history to drop [tokens] bool: so large a share, least attended first, but for the first
    block."""
    count = min(int(share * len(received)), len(received) - BLOCK_TOKENS)
    ranked = received.clone()
    ranked[:BLOCK_TOKENS] = float("inf")
    dropped = torch.zeros(len(received), dtype=torch.bool)
    dropped[ranked.argsort()[: max(0, count)]] = True
    return dropped


def shares_to_drop(sparse: Sequence[float]) -> dict[str, list[float]]:
    """Return by arm the share that each layer drops."""
    mean = sum(sparse) / len(sparse)
    return {
        "drop as sparse": list(sparse),
        "drop evenly": [mean] * len(sparse),
        "drop half": [share / 2 for share in sparse],
    }


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    subject = load_subject(arguments.model, threads=arguments.threads)
    learned, scored = calibration_text(arguments.model / "tokenizer.json")
    attention = WeighedAttention()
    history = History(replace(subject, backend=attention), most_tokens=MOST_HISTORY + SCORED)
    sparse = profile(attention, history, [text[:MOST_HISTORY] for text in learned])
    codecs: dict[str, Codec] = {"kivi2": other_codecs(subject.found)["kivi2"]}
    made = calibrate(subject, budget=BUDGET, learned=learned, scored=scored)
    if made is not None:
        codecs[f"transform {BUDGET:g}"] = made.codec
    arms = shares_to_drop(sparse)
    qualities: dict[str, list[Quality]] = {name: [] for name in (*arms, *codecs)}
    kept = {name: sum(codec.segment_bytes) / raw_block_bytes(subject.found) for name, codec in codecs.items()}
    texts = texts_of(arguments.data, encoder(arguments.model), [arguments.history + SCORED] * arguments.texts)
    for ids in run.track(texts, "texts"):
        behind = ids[arguments.history :]
        attention.count()
        rows = history.compute(ids[: arguments.history])
        received, attention.is_counting = attention.received, False
        history.place(rows)
        raw = history.score(behind)
        for name, by_layer in arms.items():
            attention.dropped = [least_attended(had, share) for had, share in zip(received, by_layer, strict=True)]
            qualities[name].append(history.quality(raw, behind))
            kept[name] = 1 - float(torch.stack(attention.dropped).float().mean())
        attention.dropped = None
        for name, codec in codecs.items():
            history.place(coded(codec, rows)[0])
            qualities[name].append(history.quality(raw, behind))
    return {
        "model": name_of(arguments.model), "sparsity": [round(share, 4) for share in sparse],
        "texts": len(texts), "scored_tokens": len(texts) * SCORED,
        "arms": {name: {"bytes_of_raw": round(kept[name], 4), **summary(found)} for name, found in qualities.items()},
    }  # fmt: skip


def show(console: Console, result: Any) -> None:
    sparse = result["sparsity"]
    console.print(f"{result['model']}: {', '.join(f'{share:.0%}' for share in sparse)} of the weights count as zero")
    show_rows(console, "What follows a history, by what each layer dropped", result["arms"])


def options(parser: ArgumentParser) -> None:
    text_options(parser)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--history", type=int, default=512, help="tokens, whole blocks, at most 1,024")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("sparsity", arguments.model),
    about=__doc__, measure=measure, show=show, options=options,
)  # fmt: skip
