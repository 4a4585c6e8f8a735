"""A whole decoder layer in bf16 on CPU, of the kind used by Llama, Mistral, Qwen2, Qwen3 and others.

The model's own code makes some sixty torch calls; this makes about twenty, with queries and keys rotated together, and
residual sums and the gate computed inside the matrix products. A layer is replaced only if the replacement gives the
same result. Anything unusual (another norm, a scale, no rotation) makes them differ, and the layer is left as it is.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.model.cpu.few_rows import FewRows
from engine.model.cpu.many_rows import NOWHERE, rotate_and_write
from engine.model.cpu.modules import ExactGate, ExactLinear, PackedLinear, RmsNorm, agree, few_row_product, pack_weight
from engine.model.hf_model import Step, attend, current_step, running, turn_halves, turns_halves
from engine.model.loading import rope_limit
from engine.model.probe import ProbeResult, single_sequence_meta
from kernels.attention.ragged_batch import AttentionBackend, AttentionMeta, AttentionParams, KvPages

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_CHECK_TOKENS = 6  # half of them near the end of the window


class DecoderLayer(nn.Module):
    """Computes hidden [1, tokens, width] -> the same shape, inside a step. Takes the arguments of a transformers layer;
    uses the rotary tables and the current step."""

    def __init__(self, layer: nn.Module, index: int, params: AttentionParams, exact: bool) -> None:
        """exact: rows must not depend on how many there are, at any cost in speed."""
        super().__init__()
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [linear.bias for linear in inputs if linear.bias is not None]
        head_dim: int = attention.head_dim
        self.index, self._params, self._head_dim = index, params, head_dim
        self._heads = [linear.out_features // head_dim for linear in inputs]
        self._input_norm = _norm(layer.input_layernorm)
        self._qkv: Any = (ExactLinear if exact else PackedLinear)(
            torch.cat([linear.weight.data for linear in inputs]), torch.cat(biases) if biases else None
        )
        self._q_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._k_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._rotate = rotate_and_write(self._heads[0], self._heads[1], head_dim)
        self._post_norm = _norm(layer.post_attention_layernorm)
        self._gate: Any = (ExactGate if exact else _Gate)(mlp.gate_proj, mlp.up_proj)
        self._out, self._down = (_summed(linear, exact) for linear in (attention.o_proj, mlp.down_proj))
        self.few = None if exact else self._few_rows()
        self.is_last = False  # if True, only rows whose logits are wanted are finished

    @property
    def saves_rows(self) -> bool:
        return self._rotate is not None and (self.few is not None or isinstance(self._qkv, ExactLinear))

    def _few_rows(self) -> "FewRows | None":
        gate, up = self._gate.few
        products = (self._qkv.few, self._out.few, gate, up, self._down.few)
        if any(product is None for product in products) or gate.lanes != up.lanes:
            return None
        norms = (self._input_norm, self._q_norm, self._k_norm, self._post_norm)
        return FewRows(self.index, self._params, self._heads, self._head_dim, products, norms)

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        hidden = hidden_states[0]
        if self.few is not None and self.few.takes(hidden, *position_embeddings):
            return self.few(hidden, *position_embeddings)[None]
        wanted = current_step().logit_rows if self.is_last else None
        if wanted is not None and len(wanted) == len(hidden):
            wanted = None
        mixed = self._attend(self._input_norm(hidden), *position_embeddings, wanted)
        if wanted is None:
            return self._finish(mixed, hidden)[None]
        out = torch.full_like(hidden, float("nan"))  # so that a read of an unwanted row shows
        if len(wanted):
            out[wanted] = self._finish(mixed, hidden[wanted])
        return out[None]

    def _finish(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        hidden = self._out(mixed, hidden)
        out: Tensor = self._down(self._gate(self._post_norm(hidden)), hidden)
        return out

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, wanted: Tensor | None) -> Tensor:
        """Write the keys and values of all rows to their slots; return [rows, width] for all rows or for the wanted
        ones."""
        step = current_step()
        tokens = x.shape[0]
        num_q, num_k, _ = self._heads
        rows = self._qkv(x).view(tokens, -1, self._head_dim)
        turning, values = rows[:, : num_q + num_k], rows[:, num_q + num_k :]
        if self._q_norm is not None and self._k_norm is not None:
            turning = torch.cat((self._q_norm(turning[:, :num_q]), self._k_norm(turning[:, num_q:])), dim=1)
        pages = step.pages(self.index)
        rotate = self._rotate if self._rotate is not None and self._rotate.takes(turning, cos, sin, pages) else None
        saved = NOWHERE
        if rotate is not None and step.saved is not None:
            saved = step.saved.blocks[self.index], step.saved.spots
        elif step.sink is not None:
            step.sink.write(self.index, turning[:, num_q:], values)
        step.layers_called.append(self.index)
        step.layers_rotated.append(self.index)
        if rotate is not None:
            queries = rotate(turning, values, cos[0], sin[0], step.meta.slots, pages, *saved)
            step.params[self.index] = self._params
            if step.arrive is not None:
                step.arrive(self.index)
            meta = step.meta
            if wanted is not None:
                queries, meta = queries[wanted], single_rows(meta, wanted)
            return step.backend.forward(queries, pages, meta, self._params).flatten(1)
        turned = turn_halves(turning, cos[0][:, None], sin[0][:, None])
        out = attend(step, self.index, turned[:, :num_q], turned[:, num_q:], values, self._params).flatten(1)
        return out if wanted is None else out[wanted]


def saves_rows(model: nn.Module, num_layers: int) -> bool:
    """Whether every layer of the model has kernels that write rows to where they are saved."""
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
    return len(layers) == num_layers and all(layer.saves_rows for layer in layers)


def single_rows(meta: AttentionMeta, rows: Tensor) -> AttentionMeta:
    """Describe some rows of a step [n] int64 as sequences with one query row each."""
    sequence = torch.searchsorted(meta.query_start, rows, right=True) - 1
    behind = meta.query_start[sequence + 1] - 1 - rows  # number of later rows of the same sequence
    context_len = (meta.context_len[sequence] - behind).to(torch.int32)
    return AttentionMeta(
        query_lens=[1] * len(rows),
        context_lens=context_len.tolist(),
        query_start=torch.arange(len(rows) + 1, dtype=torch.int32),
        context_len=context_len,
        block_table=meta.block_table[sequence],
        slots=meta.slots[rows],
    )


class _Summed(nn.Module):
    """A linear layer that adds a residual: x [tokens, in], residual [tokens, out] -> [tokens, out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._packed, self._bias = pack_weight(linear.weight), linear.bias
        self.few = few_row_product(self._packed, linear.weight, linear.bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")
        return out


def _summed(linear: nn.Linear, exact: bool) -> Any:
    return ExactLinear(linear.weight, linear.bias) if exact else _Summed(linear)


class _Gate(nn.Module):
    """Computes silu(gate(x)) * up(x), with the activation and the product inside the two matrix products."""

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        super().__init__()
        self._gate, self._gate_bias = pack_weight(gate.weight), gate.bias
        self._up, self._up_bias = pack_weight(up.weight), up.bias
        self.few = (
            few_row_product(self._gate, gate.weight, gate.bias),
            few_row_product(self._up, up.weight, up.bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.ops.mkldnn._linear_pointwise(x, self._gate, self._gate_bias, "swish", [], "")
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, gate, self._up, self._up_bias, "mul")
        return out


def _norm(module: Any) -> RmsNorm:
    return RmsNorm(module.weight, module.variance_epsilon)


def replace_layers(model: nn.Module, probed: ProbeResult, backend: AttentionBackend, exact: bool) -> int:
    """Replace the decoder layers of the known kind, in place; returns how many."""
    replaced = 0
    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    last = rope_limit(text) or text.max_position_embeddings
    positions = torch.arange(_CHECK_TOKENS)
    positions[_CHECK_TOKENS // 2 :] += max(0, last - _CHECK_TOKENS)
    for container in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for place, layer in enumerate(container):
            index = getattr(getattr(layer, "self_attn", None), "layer_idx", None)
            if index is None or not _is_known(layer, probed, index):
                continue
            ours = DecoderLayer(layer, index, probed.params[index], exact)
            if _same_answer(ours, layer, index, probed, backend, positions):
                if ours.few is not None and not _few_agree(ours, probed, backend, positions):
                    ours.few = None
                container[place] = ours
                replaced += 1
    return replaced


def _few_agree(ours: DecoderLayer, probed: ProbeResult, backend: AttentionBackend, positions: Tensor) -> bool:
    """Whether a layer's two implementations agree on a few rows: same answer, same keys and values."""
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
        # Heads outermost, as in the engine: kernels are compiled for a kind of strides.
        k, v = (hidden.new_zeros(shape.kv_heads, 1, backend.page_multiple, dim) for dim in (shape.k_dim, shape.v_dim))
        pages = KvPages(k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))
        meta = single_sequence_meta(hidden.device, 0, len(positions), backend.page_multiple)
        with running(Step(meta, lambda _, pages=pages: pages, backend, None)):  # type: ignore[misc]
            if way is not None and not way.takes(hidden[0], *tables):
                return False
            answers.append((ours(hidden, position_embeddings=tables) - hidden, pages.k, pages.v))
    ours.few = few
    return all(agree(got, want) for got, want in zip(*answers, strict=True))


def _is_known(layer: nn.Module, probed: ProbeResult, index: int) -> bool:
    attention: Any = layer.self_attn
    children = {name for name, _ in attention.named_children()}
    norms = [layer.input_layernorm, layer.post_attention_layernorm] if _children(layer) == _LAYER else []
    norms += [getattr(attention, name) for name in sorted(children - set(_ATTENTION))]
    rope = probed.ropes[index]
    biases = [getattr(attention, name, None) for name in _ATTENTION[:3]]
    return (
        _children(layer) == _LAYER
        and children in (set(_ATTENTION), {*_ATTENTION, "q_norm", "k_norm"})
        and all(type(getattr(attention, name)) is nn.Linear for name in _ATTENTION)
        and len({linear.bias is None for linear in biases if linear is not None}) == 1
        and all(type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon") for norm in norms)
        and is_gated_mlp(layer.mlp)  # type: ignore[arg-type]
        and hasattr(attention, "head_dim")
        and rope is not None
        and rope.call.width == attention.head_dim
        and turns_halves(rope.call.function)
        and not rope.call.extra
        and not rope.call.keywords
    )


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether the parts of a module are those of down(silu(gate(x)) * up(x))."""
    linears = [child for child in module.children() if type(child) is nn.Linear]
    return (
        len(linears) == 3
        and all(
            any(getattr(module, name, None) is m for m in linears) for name in ("gate_proj", "up_proj", "down_proj")
        )
        and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    )


class _Listening:
    """A backend that records the queries it was given."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.name, self.page_multiple = backend.name, backend.page_multiple
        self._backend = backend
        self.queries: Tensor

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        self.queries = q
        return self._backend.forward(q, kv, meta, params)


def _same_answer(
    ours: nn.Module,
    theirs: nn.Module,
    index: int,
    probed: ProbeResult,
    backend: AttentionBackend,
    positions: Tensor,
) -> bool:
    """Run both layers on the same few random rows, each with its own pages. Queries are compared too, because the
    effect of positions on the result may be too small to show."""
    weight = next(theirs.parameters())
    shape, rope = probed.shapes[index], probed.ropes[index]
    assert rope is not None
    generator = torch.Generator().manual_seed(0)
    width: int = theirs.self_attn.q_proj.in_features  # type: ignore[union-attr,assignment]
    hidden = torch.randn(1, len(positions), width, generator=generator).to(weight.dtype)
    tables = rope.tables(hidden, positions)
    answers = []
    for layer in (ours, theirs):
        page = (1, backend.page_multiple, shape.kv_heads)
        pages = KvPages(hidden.new_zeros(*page, shape.k_dim), hidden.new_zeros(*page, shape.v_dim))
        meta = single_sequence_meta(hidden.device, 0, len(positions), backend.page_multiple)
        listening = _Listening(backend)
        with running(Step(meta, lambda _, pages=pages: pages, listening, None)):  # type: ignore[misc]
            try:
                out = layer(hidden, position_embeddings=tables, position_ids=positions[None], attention_mask=None)
            except Exception:
                return False  # it needs more arguments than this kind of layer gets
        if not isinstance(out, Tensor):
            return False  # the code around it would unpack our result
        answers.append((listening.queries, out - hidden))
    return all(agree(got, want) for got, want in zip(*answers, strict=True))
