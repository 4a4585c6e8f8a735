"""Installs the faster modules of `modules` and `layer` in a loaded model, wherever they give the same result."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from reprise.engine.model.cpu.few_rows import FewRows, Layers, join_runs
from reprise.engine.model.cpu.last_layer import finish_wanted_rows_only
from reprise.engine.model.cpu.layer import DecoderLayer
from reprise.engine.model.cpu.modules import (
    ExactLinear,
    GatedMlp,
    PackedLinear,
    PlainLinear,
    RmsNorm,
    packing_works,
)
from reprise.engine.model.cpu.quantised import QuantisedLinear
from reprise.engine.model.cpu.short_way import find_short_way
from reprise.engine.model.hf_model import SHORT_WAY, Step, running
from reprise.engine.model.known_layers import check_positions, known_layer, layers_in_lists, same_answer
from reprise.engine.model.known_parts import agree, is_gated_mlp, replace_child, share_product
from reprise.engine.model.pages import blank_pages
from reprise.engine.model.probe import ProbeResult, single_sequence_meta
from reprise.kernels.attention.ragged_batch import AttentionBackend, PageFormat
from reprise.kernels.kv_copy import gather_rows

_LINEAR = (nn.Linear, QuantisedLinear)
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(slots=True)
class Optimised:
    """The numbers of modules that were replaced by faster ones, for the log."""

    layers: int = 0
    fused: int = 0
    packed: int = 0
    gated: int = 0
    norms: int = 0
    short: bool = False  # whether a few rows pass by transformers' own code
    last: bool = False  # whether the last layer skips rows whose logits are not wanted


@torch.inference_mode()
def optimise_for_cpu(
    model: nn.Module,
    probed: ProbeResult,
    backend: AttentionBackend,
    exact: bool,
    page_format: PageFormat,
    leave: Collection[nn.Module] = (),
) -> Optimised:
    """Replace modules in place: decoder layers of Llama's kind (`known_layers`) as a whole, and in others the norms,
    gated MLPs and linear layers. Embeddings keep their own copy of a tied weight. exact: use bf16 products whose rows
    do not depend on how many rows there are; raises RuntimeError if there are none. page_format: format of the pages in
    use, for which replacements are checked. leave: modules that stay as they are."""
    done = Optimised()
    dtype = next(model.parameters()).dtype
    pack = dtype == torch.bfloat16 and packing_works()
    linear = (ExactLinear if exact else PackedLinear) if pack else PlainLinear
    if pack:
        done.layers = _replace_layers(model, probed, backend, exact, page_format, leave)
    for module in _but(model, leave):
        for name, child in list(module.named_children()):
            if pack and not exact and is_gated_mlp(child, _LINEAR) and type(child.gate_proj) is nn.Linear:
                replacement: nn.Module = GatedMlp(child.gate_proj, child.up_proj, child.down_proj)  # type: ignore[arg-type]
                done.gated += replace_child(module, name, child.gate_proj.in_features, replacement)
            elif type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                weight: Tensor = child.weight  # type: ignore[assignment]
                replacement = RmsNorm(weight, child.variance_epsilon)  # type: ignore[arg-type]
                done.norms += replace_child(module, name, weight.shape[0], replacement)
    for module in _but(model, leave):
        done.fused += sum(share_product(module, names, linear) for names in _SIBLINGS)
        for name, child in list(module.named_children()):
            if pack and type(child) is nn.Linear:
                setattr(module, name, linear(child.weight, child.bias))
                done.packed += 1
    done.last = finish_wanted_rows_only(model, probed, backend, page_format)
    short_way = find_short_way(model, probed, backend, page_format) if pack and not exact else None
    setattr(model, SHORT_WAY, short_way)
    done.short = short_way is not None
    return done


def _but(model: nn.Module, leave: Collection[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if module not in leave]


def _replace_layers(
    model: nn.Module,
    probed: ProbeResult,
    backend: AttentionBackend,
    exact: bool,
    page_format: PageFormat,
    leave: Collection[nn.Module],
) -> int:
    """Replace the decoder layers of Llama's kind (`known_layers`), in place. Returns how many were replaced."""
    replaced, positions = 0, check_positions(model)
    for container, place, index in layers_in_lists(model, leave):
        layer = container[place]
        known = known_layer(layer, probed.ropes[index], _LINEAR)
        if known is None or not known.is_apart:
            continue
        ours = DecoderLayer(layer, index, probed.params[index], exact)
        if same_answer(ours, layer, index, probed, backend, positions, page_format):
            if ours.few is not None and not _few_agree(ours, probed, backend, positions, page_format):
                ours.few = None
            container[place] = ours
            replaced += 1
    for parent, name, container in _lists(model):
        if all(isinstance(layer, DecoderLayer) for layer in container) and len(container) == len(probed.shapes):
            setattr(parent, name, Layers(container))
    _join_runs(model, probed, positions)
    return replaced


def _lists(model: nn.Module) -> list[tuple[nn.Module, str, nn.ModuleList]]:
    """Return all nn.ModuleLists in a model, as (module that has it, its name in that module, list)."""
    return [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList)
    ]


def _join_runs(model: nn.Module, probed: ProbeResult, positions: Tensor) -> None:
    """Let adjacent layers with the same rotary tables compute a few rows in one call."""
    ways: list[FewRows | None] = [None] * len(probed.shapes)
    for module in model.modules():
        if isinstance(module, DecoderLayer):
            ways[module.index] = module.few
    like = torch.zeros(1, dtype=torch.bfloat16)
    tables = [None if rope is None else rope.tables(like, positions) for rope in probed.ropes]
    together = [False] * (len(ways) + 1)
    for index, (one, other) in enumerate(pairwise(tables), 1):
        together[index] = one is not None and other is not None and all(map(torch.equal, one, other))
    join_runs(ways, together)


def _few_agree(
    ours: DecoderLayer, probed: ProbeResult, backend: AttentionBackend, positions: Tensor, page_format: PageFormat
) -> bool:
    """Return whether a layer's implementations for few and for many rows agree on a few rows: the same output, the same
    keys and values."""
    few, index = ours.few, ours.index
    assert few is not None
    positions = positions[1::2]
    shape, rope = probed.shapes[index], probed.ropes[index]
    assert rope is not None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, len(positions), few.width, generator=generator).to(torch.bfloat16)
    tables = rope.tables(hidden, positions)
    answers = []
    for way in (few, None):
        ours.few = way
        pages = blank_pages([shape], 1, backend.page_multiple, page_format)[0]
        meta = single_sequence_meta(hidden.device, 0, len(positions), backend.page_multiple)
        with running(Step(meta, lambda _, pages=pages: pages, backend, None)):  # type: ignore[misc]
            if way is not None and not way.takes(hidden[0], *tables):
                return False
            answer = ours(hidden, position_embeddings=tables) - hidden
            rows = (pages.to_numbers(gather_rows(pool, meta.slots)) for pool in (pages.k, pages.v))
            answers.append((answer, *rows))
    ours.few = few
    return all(agree(got, want) for got, want in zip(*answers, strict=True))
