"""Measures how much a codec changes a model's next-token distributions. In each text the KV of a history is compressed
and decompressed, and the tokens after it are computed as usual and scored.

All is computed in fp32, with KV rounded to the type in which it is stored. In bf16 even the smallest change of the KV
changes the rounding of everything after it. That alone is 0.0015 nats a token on SmolLM2, more than the measured codec.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.model.float32 import in_float32
from reprise.engine.model.hf_model import Step, forward
from reprise.engine.model.pages import make_pages
from reprise.engine.model.probe import ProbeResult, single_sequence_meta
from reprise.engine.model.rotations import ModelRotations
from reprise.kernels.attention.ragged_batch import AttentionBackend, KvPages, PageFormat
from reprise.kernels.codecs.codec import Codec
from reprise.kernels.kv_copy import write_rows

Part = Literal["kv", "k", "v"]
_CHUNK_TOKENS = 512  # tokens of a history that are computed together
_PLAIN = PageFormat(torch.float32)


@dataclass(frozen=True, slots=True)
class Quality:
    """The effect of a codec, or of a page format, on a model's predictions for some texts. Each field has a number per
    scored token, except `refused`. `added` joins the results of several texts."""

    divergence: Tensor  # nats: KL of the distribution after coded KV from that after raw KV
    same_choice: Tensor  # bool: whether the likeliest token is the same
    loss: Tensor  # nats: minus the log probability of the text's token, after coded KV
    raw_loss: Tensor  # loss after unchanged KV
    refused: float  # share of blocks that could not be coded and stayed raw

    @property
    def mean_divergence(self) -> float:
        return float(self.divergence.mean())

    @property
    def same_choices(self) -> float:
        """The share of tokens, from 0 to 1, for which the likeliest next token stays the same."""
        return float(self.same_choice.float().mean())

    def perplexity_change(self) -> tuple[float, float]:
        """Return the share by which perplexity rises, and the standard error of the mean change in loss."""
        change = self.loss - self.raw_loss
        return math.expm1(float(change.mean())), float(change.std()) / math.sqrt(len(change))

    @classmethod
    def added(cls, parts: Sequence["Quality"]) -> "Quality":
        """Join the results of several texts into one. Their histories must be equally long, because `refused`, the
        share of blocks that the codec could not compress, is averaged."""
        return cls(
            divergence=torch.cat([part.divergence for part in parts]),
            same_choice=torch.cat([part.same_choice for part in parts]),
            loss=torch.cat([part.loss for part in parts]),
            raw_loss=torch.cat([part.raw_loss for part in parts]),
            refused=sum(part.refused for part in parts) / len(parts),
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded, prepared and probed model, on which codecs and page formats are measured."""

    model: nn.Module
    backend: AttentionBackend
    page_size: int
    found: ProbeResult
    go_on: Callable[[], None] = lambda: None  # called before every chunk of tokens that is computed

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's weights, in which its KV is stored."""
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device on which the model computes its KV."""
        return next(self.model.parameters()).device


class HistoryCoder:
    """A runner of a model over single texts. A text is a history and the tokens after it; the history's KV is used as
    it was computed, or as a codec returns it. most_tokens: tokens of the longest text. page_format: number format of
    the KV pages that it runs on. Used by one thread at a time."""

    def __init__(self, subject: Subject, *, most_tokens: int, page_format: PageFormat = _PLAIN) -> None:
        self._subject = subject
        self._device = subject.device
        num_pages = -(-most_tokens // subject.page_size)
        self._pages = make_pages(subject.found.shapes, num_pages, subject.page_size, page_format, self._device)
        self._rotations = ModelRotations(ropes=subject.found.ropes)
        self._seen: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in subject.found.shapes]

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None:
        """Record copies of a layer's K before rotation and V, [tokens, kv_heads, dim] each."""
        k, values = self._seen[layer]
        k.append(k_plain.clone())
        values.append(v.clone())

    @torch.inference_mode()
    def compute(self, token_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Compute a history [tokens]. Returns for each layer K without position [tokens, kv_heads, k_dim] and V,
        rounded to the type in which they are stored. `place` writes them into the pages."""
        self._forget_seen()
        for start in range(0, len(token_ids), _CHUNK_TOKENS):
            self._run(token_ids[start : start + _CHUNK_TOKENS], start, logit_rows=1, listens=True)
        return self._stored()

    @torch.inference_mode()
    def go_on(self, token_ids: Tensor, start: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Compute `token_ids`, which follow a history of `start` tokens whose KV is in the pages. Returns (log
        probabilities as from `score`, K and V of these tokens as from `compute`)."""
        self._forget_seen()
        logits = self._run(token_ids, start, logit_rows=len(token_ids), listens=True)
        return logits.float().log_softmax(-1), self._stored()

    @torch.inference_mode()
    def score(self, token_ids: Tensor, start: int) -> Tensor:
        """Return the log probabilities of the next token after each of `token_ids`, fp32 [tokens, vocabulary].
        `token_ids` follow a history of `start` tokens whose KV is in the pages."""
        return self._run(token_ids, start, logit_rows=len(token_ids), listens=False).float().log_softmax(-1)

    @torch.inference_mode()
    def place(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write the K and V of a history into the pages, from its first token on. rows: a result of `compute`."""
        slots = torch.arange(len(rows[0][0]), device=self._device)
        for layer, ((k, v), pages) in enumerate(zip(rows, self._pages, strict=True)):
            write_rows(pages.k, slots, pages.to_rows(self._rotations.rotate(layer, k.float(), slots)))
            write_rows(pages.v, slots, pages.to_rows(v.float()))

    def _forget_seen(self) -> None:
        for k, v in self._seen:
            k.clear()
            v.clear()

    def _stored(self) -> list[tuple[Tensor, Tensor]]:
        stored = self._subject.dtype
        return [(torch.cat(k).to(stored), torch.cat(v).to(stored)) for k, v in self._seen]

    def _run(self, token_ids: Tensor, start: int, *, logit_rows: int, listens: bool) -> Tensor:
        self._subject.go_on()
        count = len(token_ids)
        meta = single_sequence_meta(self._device, start, count, self._subject.page_size)
        step = Step(meta, self._pages_of, self._subject.backend, self if listens else None)
        ids = token_ids.to(self._device)
        positions = torch.arange(start, start + count, device=self._device)
        rows = torch.arange(count - logit_rows, count, device=self._device)
        with in_float32(self._subject.model):
            return forward(self._subject.model, step, ids, positions, rows)

    def _pages_of(self, layer: int) -> KvPages:
        return self._pages[layer]


def coded(
    codec: Codec, rows: Sequence[tuple[Tensor, Tensor]], part: Part = "kv"
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Compress and decompress the KV of a history, except its first block, and return it with the share of blocks that
    the codec could not compress. rows: K [tokens, kv_heads, k_dim] and V of each layer, whole blocks. part: whether the
    codec is applied to K, V or both."""
    out, refused, count = [], 0, 0
    for layer, (k, v) in enumerate(rows):
        raw = raw_blocks(k[BLOCK_TOKENS:], v[BLOCK_TOKENS:])
        segments = torch.empty(len(raw), codec.segment_bytes[layer], dtype=torch.uint8)
        is_coded = torch.tensor(codec.encode(layer, raw, segments))
        back = torch.empty_like(raw)
        codec.decode(layer, segments, back)
        back[~is_coded] = raw[~is_coded]
        refused, count = refused + int((~is_coded).sum()), count + len(raw)
        new_k, new_v = rows_of(back, k.shape[1:], v.shape[1:])
        k, v = (
            torch.cat([old[:BLOCK_TOKENS], new]) if name in part else old
            for name, old, new in (("k", k, new_k.to(k.device)), ("v", v, new_v.to(v.device)))
        )
        out.append((k, v))
    return out, refused / max(count, 1)


def raw_blocks(k: Tensor, v: Tensor) -> Tensor:
    """Return one layer's KV as the uncompressed blocks that the DRAM tier holds, [blocks, elements], on the CPU: each
    row is a block's K, flattened, and then its V. k: [tokens, kv_heads, k_dim]. v: [tokens, kv_heads, v_dim]. The
    number of tokens is a multiple of BLOCK_TOKENS."""
    blocks = len(k) // BLOCK_TOKENS
    return torch.cat([k.reshape(blocks, -1), v.reshape(blocks, -1)], 1).cpu().contiguous()


def rows_of(raw: Tensor, k_shape: Sequence[int], v_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return K and V, as rows of these shapes, of blocks that `raw_blocks` made."""
    split = BLOCK_TOKENS * math.prod(k_shape)
    return raw[:, :split].reshape(-1, *k_shape), raw[:, split:].reshape(-1, *v_shape)


def measure(
    coder: HistoryCoder, token_ids: Tensor, history: int, codecs: Sequence[tuple[Codec, Part]]
) -> list[Quality]:
    """Measure some codecs on one text [tokens]. history: number of leading tokens, whole blocks, whose KV the codec
    changes; the others are scored."""
    if history % BLOCK_TOKENS or not 0 < history < len(token_ids) - 1:
        raise ValueError(f"a history of {history} out of {len(token_ids)} tokens")
    rows = coder.compute(token_ids[:history])
    behind = token_ids[history:]
    coder.place(rows)
    raw = coder.score(behind, history)
    measured = []
    for codec, part in codecs:
        changed, refused = coded(codec, rows, part)
        coder.place(changed)
        measured.append(compared(raw, coder.score(behind, history), behind.to(raw.device), refused))
    return measured


def pages_quality(subject: Subject, texts: Sequence[Tensor], page_format: PageFormat) -> Quality:
    """Measure how much pages of a format change answers on some texts [tokens]. Each text is computed in such pages
    from its first token on, and its second half is scored."""
    most = max(map(len, texts))
    plain, packed = (HistoryCoder(subject, most_tokens=most, page_format=each) for each in (_PLAIN, page_format))
    found = []
    for text in texts:
        half = len(text) // 2
        behind = text[half:]
        scored = []
        for coder in (plain, packed):
            coder.compute(text[:half])
            scored.append(coder.score(behind, half))
        found.append(compared(scored[0], scored[1], behind.to(scored[0].device), 0.0))
    return Quality.added(found)


def compared(raw: Tensor, coded: Tensor, token_ids: Tensor, refused: float) -> Quality:
    """Return how much a codec changes the model's predictions of `token_ids`. raw, coded: the log probabilities from
    `score`, after the unchanged history and after the one that the codec changed. refused: share of blocks that the
    codec could not compress."""
    wanted = token_ids[1:]
    return Quality(
        divergence=(raw.exp() * (raw - coded)).sum(-1).cpu(),
        same_choice=(raw.argmax(-1) == coded.argmax(-1)).cpu(),
        loss=F.nll_loss(coded[:-1], wanted, reduction="none").cpu(),
        raw_loss=F.nll_loss(raw[:-1], wanted, reduction="none").cpu(),
        refused=refused,
    )
