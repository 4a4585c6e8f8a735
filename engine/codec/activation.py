"""Stores activations instead of KV below HBM: the input of a layer's attention, which has half the bytes of its K and V
where every head has its own. A load computes K and V from it again, with the layer's own weights.

Sources: HybridServe (arXiv 2501.01792) and HCache (arXiv 2410.05004). Both store the hidden state and compute the norm
again; this stores the norm's output, which has the same size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.codec.quality import Subject
from reprise.engine.model.cpu.modules import PackedLinear, packing_works
from reprise.engine.model.hf_model import Step, current_step, forward
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.pages import bytes_per_token, make_pages
from reprise.engine.model.probe import KvShape, single_sequence_meta
from reprise.kernels.attention.ragged_batch import PageFormat

# Where an attention gets its K from: a projection of its own, or one that gives queries and values too.
_APART, _FUSED = ("k_proj", "v_proj"), ("qkv_proj", "query_key_value")
_CHECK_TOKENS = (40, 3)  # sizes of two steps: layers may compute a few rows in another way
# Relative RMS error. In a type that rounds, another order of sums moves some numbers to the next one, and kernels for
# a few rows do not round what comes out of the norm.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.002}


@dataclass(frozen=True, slots=True)
class LayerProjection:
    """A function that computes a layer's keys [rows, kv_heads * k_dim], before rotation, and its values from
    activations [rows, width]."""

    shape: KvShape
    width: int
    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    k_norm: nn.Module | None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._normed(self.keys(x)), self.values(x)

    def _normed(self, keys: Tensor) -> Tensor:
        if self.k_norm is None:
            return keys
        of_all_heads = self.k_norm.weight.numel() != self.shape.k_dim  # type: ignore[operator]
        rows = keys if of_all_heads else keys.view(len(keys), -1, self.shape.k_dim)
        normed: Tensor = self.k_norm(rows)
        return normed.view(len(keys), -1)


class KvProjection:
    """A decoder that computes K and V of all layers from activations, which the tiers below HBM store in place of KV.
    Implements `reprise.kernels.codecs.codec.Projection`; a Decoder calls it."""

    name = "activation"

    def __init__(self, layers: Sequence[LayerProjection], dtype: torch.dtype, device: torch.device) -> None:
        self._layers, self._dtype, self.device = layers, dtype, device
        self.widths = tuple(layer.width for layer in layers)
        self.row_elements = tuple(s.kv_heads * (s.k_dim + s.v_dim) for s in (layer.shape for layer in layers))
        products = sum(width * outputs for width, outputs in zip(self.widths, self.row_elements, strict=True))
        self.flops_per_token = 2 * products
        self.bytes_per_token = sum(self.widths) * dtype.itemsize
        # An upper bound: in fp32 these are the file's mapped pages, which the kernel may drop.
        self.weight_bytes = products * dtype.itemsize if device.type == "cpu" else 0

    def decode(self, layer: int, segments: Tensor, raw: Tensor, *, together: bool = False) -> None:
        """Make the K and V rows of a layer from activations. segments uint8 [blocks, bytes of a block's activations];
        raw [blocks, elements] receives each block's K before rotation, then its V. together: has no effect; torch's
        products use as many threads as the calling thread may."""
        project = self._layers[layer]
        x = segments.view(self._dtype).view(-1, project.width).to(self.device)
        keys, values = project(x)
        split = BLOCK_TOKENS * keys.shape[1]
        for target, rows in ((raw[:, :split], keys), (raw[:, split:], values)):
            target.view(len(raw), BLOCK_TOKENS, -1).copy_(rows.view(len(raw), BLOCK_TOKENS, -1))


@torch.inference_mode()
def find_projection(subject: Subject) -> KvProjection:
    """Find the matrix products that make K and V in a model whose modules were not yet replaced by faster ones. Raises
    ModelRefused if activations are not smaller than KV, or the model makes its KV in an unknown way."""
    found = _attentions(subject.model)
    if sorted(found) != list(range(len(subject.found.shapes))):
        raise ModelRefused(_unknown(f"its attention has none of {', '.join(('k_proj', *_FUSED))}"))
    widths = [getattr(found[layer], _entry(found[layer])).in_features for layer in sorted(found)]
    ours = sum(widths) * subject.dtype.itemsize
    theirs = bytes_per_token(subject.found.shapes, PageFormat(subject.dtype))
    if ours >= theirs:
        raise ModelRefused(
            f"cache.codec activation saves nothing with this model: its activations take {ours:,} bytes a token, its K "
            f"and V {theirs:,}; take raw or transform"
        )
    parts = _parts(subject, found)
    device = subject.device
    pack = device.type == "cpu" and subject.dtype == torch.bfloat16 and packing_works()

    def product(part: Part) -> Callable[[Tensor], Tensor]:
        weight, bias = part
        return PackedLinear(weight, bias) if pack else partial(F.linear, weight=weight, bias=bias)

    layers = []
    for layer, (shape, width) in enumerate(zip(subject.found.shapes, widths, strict=True)):
        keys, values = parts[layer]
        k_norm = getattr(found[layer], "k_norm", None)
        layers.append(LayerProjection(shape, width, product(keys), product(values), k_norm))
    return KvProjection(layers, subject.dtype, device)


@torch.inference_mode()
def watch_inputs(subject: Subject, projection: KvProjection) -> None:
    """Add hooks to a model's layers that hand the input of their attention to the step (`Step.inputs`), and check that
    `projection` makes the same K and V from it as the layers compute. Raises ModelRefused if it does not. The layers
    may be the model's own or faster replacements."""
    for layer, attention in _attentions(subject.model).items():
        getattr(attention, _entry(attention)).register_forward_pre_hook(partial(_show, layer))
    for num_tokens in _CHECK_TOKENS:
        seen = _seen(subject, num_tokens)
        if seen.layers != list(range(len(subject.found.shapes))):
            raise ModelRefused(_unknown("its layers do not show what their attention begins with"))
        for layer, (x, keys, values) in enumerate(zip(seen.inputs, seen.keys, seen.values, strict=True)):
            raw = torch.empty(1, BLOCK_TOKENS * projection.row_elements[layer], dtype=x.dtype, device=x.device)
            block = F.pad(x[:BLOCK_TOKENS], (0, 0, 0, max(0, BLOCK_TOKENS - len(x))))
            projection.decode(layer, block.cpu().contiguous().view(torch.uint8).view(1, -1), raw)
            split = BLOCK_TOKENS * keys[0].numel()
            made = raw[0, :split].view(BLOCK_TOKENS, -1), raw[0, split:].view(BLOCK_TOKENS, -1)
            for got, want in zip(made, (keys.flatten(1), values.flatten(1)), strict=True):
                error = _relative_error(got[: len(want)], want[:BLOCK_TOKENS])
                if not error <= _TOLERANCE[x.dtype]:
                    raise ModelRefused(_unknown(f"K and V made of layer {layer}'s differ by {error:.1e}"))


def _show(layer: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    step = current_step()
    if step.inputs is not None:
        step.inputs(layer, args[0][0])


def _unknown(why: str) -> str:
    return f"cache.codec activation cannot make K and V of this model's activations: {why}; take raw or transform"


def _attentions(model: nn.Module) -> dict[int, Any]:
    """Return the attention module of each layer, by the layer's index, where K and V can be made from activations."""
    modules: Any = model.modules()
    return {module.layer_idx: module for module in modules if hasattr(module, "layer_idx") and _entry(module)}


def _entry(attention: nn.Module) -> str:
    """Return the name of the child module that gets an attention's input and makes keys from it; empty if there is
    none."""
    if all(isinstance(getattr(attention, name, None), nn.Module) for name in _APART):
        return _APART[0]
    return next((name for name in _FUSED if isinstance(getattr(attention, name, None), nn.Module)), "")


Part = tuple[Tensor, Tensor | None]
"""Weight and bias of one matrix product; None: no bias."""


def _parts(subject: Subject, attentions: dict[int, Any]) -> dict[int, tuple[Part, Part]]:
    """Return, by layer, the matrix products that give its K and its V."""
    fused = {layer: getattr(attention, _entry(attention)) for layer, attention in attentions.items()}
    parts = {}
    for layer, attention in attentions.items():
        if _entry(attention) == _APART[0]:
            k, v = attention.k_proj, attention.v_proj
            parts[layer] = ((k.weight, k.bias), (v.weight, v.bias))
            del fused[layer]
    if not fused:
        return parts
    made: dict[int, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _, __, out, layer=layer: made.__setitem__(layer, out[0]))
        for layer, module in fused.items()
    ]
    try:
        seen = _seen(subject, _CHECK_TOKENS[0])
    finally:
        for handle in handles:
            handle.remove()
    for layer, module in fused.items():
        rows = [_columns(made[layer], wanted.flatten(1)) for wanted in (seen.keys[layer], seen.values[layer])]
        k, v = ((module.weight[r], None if module.bias is None else module.bias[r]) for r in rows)
        parts[layer] = (k, v)
    return parts


def _columns(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Return the index of each column of `wanted` among the columns of `outputs`, since models lay out the results of
    one product in many ways. Raises ModelRefused if a column is missing."""
    whole = outputs.float().T.contiguous()
    index = torch.cat([torch.cdist(columns, whole).argmin(1) for columns in wanted.float().T.split(256)])
    if not torch.equal(outputs[:, index], wanted):
        raise ModelRefused(_unknown("its K and V are no part of a product"))
    return index


class _Seen:
    """A recorder of the attention inputs and the KV that the layers report during one step."""

    def __init__(self) -> None:
        self.layers: list[int] = []  # layers that have shown their inputs
        self.inputs: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None:
        """Record copies of a layer's K before rotation and V, [tokens, kv_heads, dim] each."""
        self.keys.append(k_plain.clone())
        self.values.append(v.clone())

    def write_input(self, layer: int, x: Tensor) -> None:
        self.layers.append(layer)
        self.inputs.append(x.clone())


def _seen(subject: Subject, num_tokens: int) -> _Seen:
    """Compute a random text of `num_tokens` tokens and return what its layers have reported."""
    model: Any = subject.model
    text, device = model.config.get_text_config(), next(model.parameters()).device
    num_tokens = min(num_tokens, getattr(text, "max_position_embeddings", None) or num_tokens)
    num_pages = -(-num_tokens // subject.page_size)
    pages = make_pages(subject.found.shapes, num_pages, subject.page_size, PageFormat(subject.dtype), device)
    ids = torch.randint(0, text.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0)).to(device)
    seen = _Seen()
    step = Step(
        single_sequence_meta(device, 0, num_tokens, subject.page_size),
        pages.__getitem__,
        subject.backend,
        seen,
        inputs=seen.write_input,
    )
    rows = torch.arange(num_tokens, device=device)
    forward(model, step, ids, rows, rows)
    return seen


def _relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.float(), want.float()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
