"""ModelRunner: weights and KV pool on one device, and the forward pass over them."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from cache.blocks.keys import LAYOUT_VERSION, typed_fields
from cache.transfer.capture import SavedRows
from engine.model.batch import BatchInput
from engine.model.cpu.layer import saves_rows
from engine.model.hf_model import KvSink, Step, forward
from engine.model.probe import KvShape
from kernels.attention.ragged_batch import AttentionBackend, KvPages


def make_pages(
    shapes: Sequence[KvShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> list[KvPages]:
    """The KV pool: per layer K and V [pages, page_size, kv_heads, dim]. On CPU the kernel hands out the memory as it is
    first written. Raises torch's out-of-memory error on CUDA."""

    def pool(heads: int, dim: int) -> Tensor:
        if device.type != "cpu":
            return torch.empty(num_pages, page_size, heads, dim, dtype=dtype, device=device)
        # Heads outermost in memory: attention reads one head's rows in one stream, as far as pages lie in a row.
        memory = torch.empty(heads, num_pages, page_size, dim, dtype=dtype)
        return memory.permute(1, 2, 0, 3)

    return [KvPages(k=pool(s.kv_heads, s.k_dim), v=pool(s.kv_heads, s.v_dim)) for s in shapes]


def bytes_per_token(shapes: Sequence[KvShape], dtype: torch.dtype) -> int:
    """KV bytes of one token over all layers."""
    return sum(s.kv_heads * (s.k_dim + s.v_dim) for s in shapes) * dtype.itemsize


def weights_digest(model: nn.Module) -> bytes:
    """Names, shapes and bytes of all weights: another checkpoint of the same architecture is another model. Reads the
    weights once, at memory speed; call it before they are packed."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        data = tensor.detach().cpu().contiguous()
        digest.update(typed_fields(name, str(tuple(data.shape)), str(data.dtype)))
        digest.update(memoryview(data.flatten().view(torch.uint8).numpy()))
    return digest.digest()


def fingerprint(model: nn.Module, weights: bytes, backend: str) -> bytes:
    """16 bytes that name everything a KV row depends on besides its tokens. The attention backend is part of it: its
    rounding is, and nothing is lost but a cache when it changes."""
    text = model.config.to_json_string(use_diff=False)  # type: ignore[operator,union-attr]
    config = json.dumps(json.loads(text, object_hook=_without_path), sort_keys=True)
    dtype = str(next(model.parameters()).dtype)
    fields = typed_fields("reprise-model", LAYOUT_VERSION, weights, config, dtype, backend)
    return hashlib.blake2b(fields, digest_size=16).digest()


def _without_path(config: dict[str, Any]) -> dict[str, Any]:
    """A model that was moved is the same model: transformers notes in the config where it was loaded from."""
    return {name: value for name, value in config.items() if name != "_name_or_path"}


class ModelRunner:
    """One model on one device. Not thread-safe: the engine's loop is the only caller."""

    def __init__(
        self, *, model: nn.Module, pages: list[KvPages], backend: AttentionBackend, sink: KvSink | None
    ) -> None:
        self.model = model
        self.pages = pages
        self.backend = backend
        self.sink = sink  # the save path's ear; None while there is no tier below HBM
        self.saves_rows = saves_rows(model, len(pages))  # the layers can save what they compute by themselves

    @torch.inference_mode()
    def forward(
        self, batch: BatchInput, arrive: Callable[[int], None] | None, saved: SavedRows | None = None
    ) -> Tensor:
        """Logits [logit_rows, vocab] in the model's dtype. Writes the KV of every token of the batch to its slot.
        arrive(layer) is called before a layer attends: it returns when what the batch stands on there is loaded. saved:
        where layers that can may save their rows by themselves; the others show them to the sink."""
        step = Step(
            meta=batch.meta,
            pages=self.pages.__getitem__,
            backend=self.backend,
            sink=self.sink,
            saved=saved,
            arrive=arrive,
        )
        return forward(self.model, step, batch.token_ids, batch.positions, batch.logit_rows)
