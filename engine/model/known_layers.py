"""Finds the decoder layers of the known kind (that of Llama, Mistral, Qwen2, Qwen3, Phi-3 and others), and checks that
their replacements give the same results.

Anything unusual in a layer (another norm, a scale, no rotation) makes its replacement differ, and the layer is left as
it is.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reprise.engine.model.hf_model import Step, running
from reprise.engine.model.known_parts import agree, is_gated_mlp
from reprise.engine.model.loading import rope_limit
from reprise.engine.model.pages import blank_pages
from reprise.engine.model.probe import ProbeResult, RopeSource, single_sequence_meta
from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta, AttentionParams, KvPages, PageFormat
from reprise.kernels.kv_copy import gather_rows

_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("q_norm", "k_norm")
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_CHECK_TOKENS = 6  # half of them near the end of the window


@dataclass(frozen=True, slots=True)
class KnownLayer:
    """The parts of a decoder layer of the known kind, that of Llama and others: norm, attention, residual sum, norm,
    gated MLP, residual sum."""

    norms: tuple[Any, Any]  # before attention and before the MLP
    qkv: tuple[Any, ...]  # linear layers of queries, keys and values, or one of them all
    head_norms: tuple[Any, Any] | None  # norms of queries and of keys
    out: Any
    gate_up: tuple[Any, ...]  # two linear layers, or one of both
    down: Any
    head_dim: int

    @property
    def is_apart(self) -> bool:
        """Whether each of q, k, v, gate and up is a linear layer of its own."""
        return len(self.qkv) == len(_QKV) and len(self.gate_up) == len(_GATE_UP)


def known_layer(
    layer: nn.Module, rope: RopeSource | None, linear: tuple[type[nn.Module], ...] = (nn.Linear,)
) -> KnownLayer | None:
    """Return the parts of a decoder layer that is built as Llama's; None for any other layer. rope: the source of its
    rotary tables. linear: the accepted types of its linear layers."""
    if {name for name, child in layer.named_children() if type(child) is not nn.Dropout} != {
        "self_attn",
        "mlp",
        *_NORMS,
    }:
        return None
    attention, mlp = _children(layer.self_attn), _children(layer.mlp)
    head_dim = getattr(layer.self_attn, "head_dim", None)
    qkv, gate_up = _either(attention, _QKV, "qkv_proj"), _either(mlp, _GATE_UP, "gate_up_proj")
    if not (qkv and gate_up and "o_proj" in attention and "down_proj" in mlp and head_dim):
        return None
    if rope is None or not rope.call.is_by_halves:
        return None
    head_norms = tuple(attention[name] for name in _HEAD_NORMS if name in attention)
    products = [*qkv, attention["o_proj"], *gate_up, mlp["down_proj"]]
    norms = [*(getattr(layer, name) for name in _NORMS), *head_norms]
    if (
        len(attention) != len(qkv) + 1 + len(head_norms)
        or len(head_norms) not in (0, len(_HEAD_NORMS))
        or len({type(product) for product in products}) != 1
        or type(products[0]) not in linear
        or any(len({one.bias is None for one in together}) != 1 for together in (qkv, gate_up))
        or not all(type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon") for norm in norms)
        or not _is_gated(layer.mlp, gate_up, linear)  # type: ignore[arg-type]
    ):
        return None
    return KnownLayer(
        norms=(norms[0], norms[1]),
        qkv=qkv,
        head_norms=(head_norms[0], head_norms[1]) if head_norms else None,
        out=attention["o_proj"],
        gate_up=gate_up,
        down=mlp["down_proj"],
        head_dim=head_dim,
    )


def _children(module: Any) -> dict[str, Any]:
    return dict(module.named_children())


def _either(children: dict[str, Any], apart: tuple[str, ...], joined: str) -> tuple[Any, ...]:
    """Return the child modules named in `apart`, or the one named `joined` that replaces them; empty if some are
    missing."""
    names = (joined,) if joined in children else apart
    return tuple(children[name] for name in names) if all(name in children for name in names) else ()


def _is_gated(mlp: nn.Module, gate_up: tuple[Any, ...], linear: tuple[type[nn.Module], ...]) -> bool:
    """Return whether an MLP computes down(silu(gate(x)) * up(x))."""
    if len(gate_up) == len(_GATE_UP):
        return is_gated_mlp(mlp, linear)
    activation = type(getattr(mlp, "activation_fn", None)).__name__
    return len([*mlp.children()]) == 3 and activation in ("SiLU", "SiLUActivation")


def layers_in_lists(model: nn.Module, leave: Collection[nn.Module] = ()) -> Iterator[tuple[nn.ModuleList, int, int]]:
    """Yield (module list, index in the list, layer number) for each of a model's decoder layers. leave: layers that are
    left out."""
    for container in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for place, layer in enumerate(container):
            index = getattr(getattr(layer, "self_attn", None), "layer_idx", None)
            if index is not None and layer not in leave:
                yield container, place, index


def check_positions(model: nn.Module) -> Tensor:
    """Return the positions [tokens], on CPU, at which layers and their replacements are compared: the first and the
    last ones of the context window."""
    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    last = rope_limit(text) or text.max_position_embeddings
    positions = torch.arange(_CHECK_TOKENS)
    positions[_CHECK_TOKENS // 2 :] += max(0, last - _CHECK_TOKENS)
    return positions


class _Listening:
    """An attention backend that records the queries it was given, and attends as another does."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.name, self.page_multiple = backend.name, backend.page_multiple
        self._backend = backend
        self.queries: Tensor

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        self.queries = q
        return self._backend.forward(q, kv, meta, params)


def same_answer(
    ours: nn.Module,
    theirs: nn.Module,
    index: int,
    probed: ProbeResult,
    backend: AttentionBackend,
    positions: Tensor,
    page_format: PageFormat,
) -> bool:
    """Run a layer and its replacement on the same few random rows, each with its own pages, and return whether they
    agree. Queries are compared too, because the effect of positions on the result may be too small to show. positions:
    from `check_positions`."""
    weight = next(theirs.parameters())
    shape, rope = probed.shapes[index], probed.ropes[index]
    assert rope is not None
    generator = torch.Generator().manual_seed(0)
    width: int = theirs.input_layernorm.weight.shape[0]  # type: ignore[union-attr,index,assignment]
    hidden = torch.randn(1, len(positions), width, generator=generator).to(weight)
    positions = positions.to(weight.device)
    tables = rope.tables(hidden, positions)
    answers, page = [], backend.page_multiple
    for layer in (ours, theirs):
        pages = blank_pages([shape], -(-len(positions) // page), page, page_format, weight.device)[0]
        meta = single_sequence_meta(weight.device, 0, len(positions), page)
        listening = _Listening(backend)
        with running(Step(meta, lambda _, pages=pages: pages, listening, None)):  # type: ignore[misc]
            try:
                out = layer(hidden, position_embeddings=tables, position_ids=positions[None], attention_mask=None)
            except Exception:
                return False  # it needs more arguments than this kind of layer gets
        if not isinstance(out, Tensor):
            return False  # the code around it would unpack our result
        rows = (pages.to_numbers(gather_rows(pool, meta.slots)) for pool in (pages.k, pages.v))
        answers.append((listening.queries, out - hidden, *rows))
    return all(agree(got, want) for got, want in zip(*answers, strict=True))
