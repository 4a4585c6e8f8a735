"""ModelRunner: a model's weights and KV pool on one device, and the forward pass."""

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
    """Allocate the KV pool: for each layer K and V [pages, page_size, kv_heads, dim]. On CPU, memory becomes resident
    when it is first written. Raises torch's out-of-memory error on CUDA."""

    def pool(heads: int, dim: int) -> Tensor:
        if device.type != "cpu":
            return torch.empty(num_pages, page_size, heads, dim, dtype=dtype, device=device)
        # Heads are outermost in memory: attention then reads one head's rows as one stream where pages are adjacent.
        memory = torch.empty(heads, num_pages, page_size, dim, dtype=dtype)
        return memory.permute(1, 2, 0, 3)

    return [KvPages(k=pool(s.kv_heads, s.k_dim), v=pool(s.kv_heads, s.v_dim)) for s in shapes]


def bytes_per_token(shapes: Sequence[KvShape], dtype: torch.dtype) -> int:
    """Return the KV bytes of one token over all layers."""
    return sum(s.kv_heads * (s.k_dim + s.v_dim) for s in shapes) * dtype.itemsize


def weights_digest(model: nn.Module) -> bytes:
    """Hash the names, shapes and bytes of all weights, which tell checkpoints of one architecture apart. Reads the
    weights once, at memory speed; must be called before they are packed."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        data = tensor.detach().cpu().contiguous()
        digest.update(typed_fields(name, str(tuple(data.shape)), str(data.dtype)))
        digest.update(memoryview(data.flatten().view(torch.uint8).numpy()))
    return digest.digest()


def fingerprint(model: nn.Module, weights: bytes, backend: str) -> bytes:
    """Return 16 bytes that identify everything a KV row depends on besides its tokens. The attention backend is
    included because its rounding matters; changing it only costs the cached KV."""
    text = model.config.to_json_string(use_diff=False)  # type: ignore[operator,union-attr]
    config = json.dumps(json.loads(text, object_hook=_without_path), sort_keys=True)
    dtype = str(next(model.parameters()).dtype)
    fields = typed_fields("reprise-model", LAYOUT_VERSION, weights, config, dtype, backend)
    return hashlib.blake2b(fields, digest_size=16).digest()


def _without_path(config: dict[str, Any]) -> dict[str, Any]:
    """Drop the path that transformers notes in the config: a model that was moved is still the same model."""
    return {name: value for name, value in config.items() if name != "_name_or_path"}


class ModelRunner:
    """One model on one device. Not thread-safe: only the engine's loop calls it."""

    def __init__(
        self, *, model: nn.Module, pages: list[KvPages], backend: AttentionBackend, sink: KvSink | None
    ) -> None:
        self.model = model
        self.pages = pages
        self.backend = backend
        self.sink = sink  # receives KV to be saved; None if there is no tier below HBM
        self.saves_rows = saves_rows(model, len(pages))  # whether the layers can save their own rows

    @torch.inference_mode()
    def forward(
        self, batch: BatchInput, arrive: Callable[[int], None] | None, saved: SavedRows | None = None
    ) -> Tensor:
        """Return logits [logit_rows, vocab] in the model's dtype, and write the KV of every token of the batch to its
        slot. arrive(layer) is called before a layer attends and returns when the KV that the batch needs there is
        loaded. saved: where layers that can save their own rows write them; other layers pass theirs to the sink."""
        step = Step(
            meta=batch.meta,
            pages=self.pages.__getitem__,
            backend=self.backend,
            sink=self.sink,
            saved=saved,
            arrive=arrive,
        )
        return forward(self.model, step, batch.token_ids, batch.positions, batch.logit_rows)
