"""How sparse attention is by layer, and what dropping tokens by that costs (CaR, Fig. 4 and §III-D):
benchmarks/results/sparsity*.json.

    python -m benchmarks.fidelity.sparsity --data DIR [--model smollm2] [--texts N]

Profile: on the texts that calibrate codecs, which share of attention's weights is below 1 % of the largest of its row.
Only weights that causality allows count; in the mean of heads and rows.

Dropping: of a history, each layer keeps the tokens with the most attention from the history itself, summed over heads
and queries, and the first block. What follows is scored as in `benchmarks.fidelity.codecs`, beside codecs that keep all
tokens. A small run: texts of 1,024 tokens at most, and 192 scored tokens each.

drop as sparse       each layer drops as many as its profile says: CaR
drop evenly          all layers drop as many, and as much in all
drop half            each layer drops half as many
transform, kivi2     codecs
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.fidelity.quantised import KiviCodec
from benchmarks.harness.documents import documents
from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.models import model_directory, name_of, result_name
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.build.model import find_attention
from reprise.engine.codec.calibration import calibrate
from reprise.engine.codec.quality import HistoryCoder, Part, Quality, Subject, compared, measure
from reprise.engine.codec.text import calibration_text
from reprise.engine.model.loading import load_model
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, AttentionUnsupported, KvPages
from reprise.kernels.codecs.codec import Codec

BUDGET = 0.001  # nats a token, of the transform codec
ZERO = 0.01  # of a row's largest weight: less counts as zero
SCORED = 192
MOST_HISTORY = 1024


class WatchedAttention:
    """Attention of one sequence by its definition, in fp32, of which the weights can be seen and tokens left out."""

    name = "watched"
    page_multiple = 1

    def __init__(self) -> None:
        self.dropped: list[Tensor] | None = None  # by layer [tokens] bool: of a history's first tokens
        self.is_watched = False
        self.small: list[float] = []  # by layer: weights that count as zero
        self.seen: list[int] = []  # by layer: all weights
        self.received: list[Tensor] = []  # by layer [tokens]: attention that each token has had
        self._layers: dict[int, int] = {}  # where a layer's pages are -> its number

    def watch(self) -> None:
        """Begin to look, at a text from its first token on."""
        self.is_watched = True
        self.small.clear()
        self.seen.clear()
        self.received.clear()

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See AttentionBackend. Layers are told apart by their pages, and come in their order."""
        if params.window is not None or params.softcap is not None or params.sinks is not None:
            raise AttentionUnsupported("windows, caps and sinks are not watched")
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
        if self.is_watched:
            self._see(layer, weights, allowed)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)

    def _see(self, layer: int, weights: Tensor, allowed: Tensor) -> None:
        if layer == len(self.small):
            self.small.append(0.0)
            self.seen.append(0)
            self.received.append(torch.zeros(0))
        self.small[layer] += int(((weights < ZERO * weights.amax(2, keepdim=True)) & allowed).sum())
        self.seen[layer] += int(allowed.sum()) * len(weights)
        received = weights.sum((0, 1))
        received[: len(self.received[layer])] += self.received[layer]
        self.received[layer] = received


def profile(watched: WatchedAttention, coder: HistoryCoder, texts: Sequence[Tensor]) -> list[float]:
    """Return by layer the share of weights that count as zero."""
    small, seen = torch.zeros(0), torch.zeros(0)
    for text in texts:
        watched.watch()
        coder.compute(text)
        small = torch.tensor(watched.small) + (small if len(small) else 0)
        seen = torch.tensor(watched.seen) + (seen if len(seen) else 0)
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


def arms(sparse: Sequence[float]) -> dict[str, list[float]]:
    """By arm, the share that each layer drops."""
    mean = sum(sparse) / len(sparse)
    return {
        "drop as sparse": list(sparse),
        "drop evenly": [mean] * len(sparse),
        "drop half": [share / 2 for share in sparse],
    }


def measure_dropping(
    watched: WatchedAttention, coder: HistoryCoder, ids: Tensor, history: int, shares: dict[str, list[float]]
) -> dict[str, tuple[Quality, float]]:
    """Return for each arm what it does to what follows a history, and the share of tokens that it keeps."""
    watched.watch()
    rows = coder.compute(ids[:history])
    received = list(watched.received)
    watched.is_watched = False
    coder.place(rows)
    behind = ids[history:]
    raw = coder.score(behind, history)
    found = {}
    for arm, by_layer in shares.items():
        dropped = [least_attended(had, share) for had, share in zip(received, by_layer, strict=True)]
        watched.dropped = dropped
        try:
            scores = coder.score(behind, history)
        finally:
            watched.dropped = None
        kept = 1 - sum(float(layer.float().mean()) for layer in dropped) / len(dropped)
        found[arm] = compared(raw, scores, behind, 0.0), kept
    return found


def measure_sparsity(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device("cpu")
    model = load_model(arguments.model, torch.bfloat16, device)
    backend, page_size, found = find_attention(model, device)
    learned, scored = calibration_text(arguments.model / "tokenizer.json")
    watched = WatchedAttention()
    coder = HistoryCoder(Subject(model, watched, page_size, found), most_tokens=MOST_HISTORY + SCORED)
    sparse = profile(watched, coder, [text[:MOST_HISTORY] for text in learned])
    shapes = [((s.kv_heads, s.k_dim), (s.kv_heads, s.v_dim)) for s in found.shapes]
    codecs: dict[str, Codec] = {"kivi2": KiviCodec(shapes, bits=2, v_group=min(32, found.shapes[0].v_dim))}
    made = calibrate(Subject(model, backend, page_size, found), budget=BUDGET, learned=learned, scored=scored)
    if made is not None:
        codecs[f"transform {BUDGET:g}"] = made.codec
    raw_bytes = sum(BLOCK_TOKENS * s.kv_heads * (s.k_dim + s.v_dim) * 2 for s in found.shapes)
    qualities: dict[str, list[Quality]] = {}
    kept = {name: sum(codec.segment_bytes) / raw_bytes for name, codec in codecs.items()}
    wanted: list[tuple[Codec, Part]] = [(codec, "kv") for codec in codecs.values()]
    texts = _texts(arguments)
    for history, ids in run.track(texts, "texts"):
        for arm, (quality, share) in measure_dropping(watched, coder, ids, history, arms(sparse)).items():
            qualities.setdefault(arm, []).append(quality)
            kept[arm] = kept.get(arm, 0.0) + share / len(texts)
        for name, quality in zip(codecs, measure(coder, ids, history, wanted), strict=True):
            qualities.setdefault(name, []).append(quality)
    return {
        "model": name_of(arguments.model), "sparsity": [round(share, 4) for share in sparse],
        "texts": len(texts), "scored_tokens": len(texts) * SCORED,
        "arms": {name: _row(Quality.added(by_text), kept[name]) for name, by_text in qualities.items()},
    }  # fmt: skip


def _row(quality: Quality, kept: float) -> dict[str, float]:
    change, error = quality.perplexity_change()
    return {
        "bytes_of_raw": round(kept, 4), "kl": quality.mean_divergence,
        "kl_error": float(quality.divergence.std()) / sqrt(len(quality.divergence)),
        "same_choice": round(quality.same_choices, 4), "perplexity_change": change, "perplexity_error": error,
    }  # fmt: skip


def _texts(arguments: Any) -> list[tuple[int, Tensor]]:
    """Histories of whole blocks, each with the tokens behind it."""
    encode = Tokenizer.from_file(str(arguments.model / "tokenizer.json")).encode
    texts: list[tuple[int, Tensor]] = []
    for text in documents(arguments.data):
        if len(texts) == arguments.texts:
            break
        ids = torch.tensor(encode(text, add_special_tokens=False).ids[: arguments.history + SCORED])
        if len(ids) == arguments.history + SCORED:
            texts.append((arguments.history, ids))
    return texts


def show(console: Console, result: Any) -> None:
    sparse = result["sparsity"]
    console.print(f"{result['model']}: {', '.join(f'{share:.0%}' for share in sparse)} of the weights count as zero")
    shown = Table("arm", "bytes, x raw", "KL, nats", "same choice", "perplexity")
    for name, row in result["arms"].items():
        shown.add_row(
            name, f"{row['bytes_of_raw']:.3f}", f"{row['kl']:.5f} ± {row['kl_error']:.5f}",
            f"{row['same_choice']:.1%}", f"{row['perplexity_change']:+.1%} ± {row['perplexity_error']:.1%}",
        )  # fmt: skip
    console.print(shown)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="directory of the texts")
    parser.add_argument("--model", type=model_directory, default="smollm2", help="bundled, smollm2 or a directory")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--history", type=int, default=512, help="tokens, whole blocks, at most 1,024")
    parser.add_argument("--threads", type=int, help="of torch")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("sparsity", arguments.model),
    about=__doc__,
    measure=measure_sparsity,
    show=show,
    options=options,
)

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
