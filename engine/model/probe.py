"""The load-time probe: checks that an architecture does what our attention assumes.

1. Is our attention function called exactly once per layer, with arguments that it knows, and is KV all that the model
remembers? (falcon, gptj and bloom never call it, and raise no error; Falcon-H1 has a recurrent state besides.)
2. Do our logits, computed in chunks over pages, equal those of the model's own eager attention? In a type that rounds,
the allowed difference is the model's own error: the distance of its eager attention in this type from that in fp32.
3. Is the key that we see independent of position, so that it may be saved and rotated for another position later?

The first two decide whether a model is served at all, the third whether its saved KV survives truncation.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reprise.engine.model.float32 import in_float32
from reprise.engine.model.hf_model import RopeCall, Step, attention_implementation, forward
from reprise.engine.model.kept_states import find_states
from reprise.engine.model.loading import ModelRefused, rope_limit
from reprise.kernels.attention.ragged_batch import (
    AttentionBackend,
    AttentionMeta,
    AttentionParams,
    AttentionUnsupported,
    KvPages,
)

_TOKENS = 40
# The text's second half comes in short chunks: most of its rows follow the begin of a chunk so closely that they show
# what a model remembers besides KV, and would have lost there.
_LATER_CHUNKS = (7, 4, 3, 2, 2, 1, 1)
# Some models do something else at far positions only: Llama 4 scales queries from 8,192 on.
_FIRST_POSITION = 20_000
# A near-tie between two experts early in a text changes every later row; then another text is tried. A real difference
# of the architecture shows in all of them.
_TEXTS = 3
# Relative RMS error of logits. In fp32, another order of sums gives 1e-5; a missed rotation or window gives about 0.1.
_FLOAT32_TOLERANCE = 1e-3
# Allowed share of the model's own rounding error. That error is 6 % in SmolLM2-135M and 11.5 % in Qwen2.5-0.5B, whose
# keys have channels of 200 and more. Another order of the same sums differs from fp32 by 0.7 to 1.0 times as much.
_NOISE_SHARE = 1.5


@dataclass(frozen=True, slots=True)
class RopeSource:
    """The origin of a layer's cos and sin tables, with which saved keys can be rotated for any position."""

    module: nn.Module
    arguments: tuple[Any, ...]  # the arguments after (x, position_ids)
    keywords: dict[str, Any]
    call: RopeCall

    def tables(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1, tokens, R] for positions [tokens] int64, in the dtype and on the device of `like`. R:
        the number of dims that the rotation turns."""
        cos, sin = self.module(like, positions[None], *self.arguments, **self.keywords)
        return cos, sin

    def rotate(self, k_plain: Tensor, positions: Tensor) -> Tensor:
        """Rotate k_plain [tokens, kv_heads, dim] for positions [tokens] int64. The result equals, bit for bit, the keys
        that the model would cache, because it comes from the model's own tables and function."""
        cos, sin = self.tables(k_plain, positions)
        call = RopeCall(self.call.function, cos, sin, self.call.extra, self.call.keywords, self.call.width)
        return call.rotate(k_plain)[0]


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of one token's KV in one layer."""

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The findings of the probe about a model: shapes of its KV, rotations, and whether saved keys can be rotated for
    other positions."""

    shapes: list[KvShape]  # per layer
    decouplable: bool
    ropes: list[RopeSource | None]  # per layer; None: the layer does not rotate
    params: list[AttentionParams]  # per layer
    logit_error: float  # relative RMS error of our logits against the model's own attention in fp32
    logit_tolerance: float  # the part of `logit_error` that the model's own rounding explains


class _ShapeFinder:
    """A replacement of pages and attention backend during the first pass of the model, which records shapes and attends
    to nothing."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None:
        self.keys[layer] = k_plain.clone()
        self.values[layer] = v


def single_sequence_meta(device: torch.device, done: int, num_tokens: int, page_size: int) -> AttentionMeta:
    """Describe a batch of one sequence, whose pages are 0, 1, 2 and so on: `num_tokens` query rows after a context of
    `done` rows."""
    total = done + num_tokens
    pages = torch.arange(-(-total // page_size), dtype=torch.int32, device=device)
    return AttentionMeta(
        query_lens=[num_tokens],
        context_lens=[total],
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        context_len=torch.tensor([total], dtype=torch.int32, device=device),
        block_table=pages[None],
        slots=torch.arange(done, total, device=device),
    )


@torch.inference_mode()
def probe(model: nn.Module, backend: AttentionBackend, page_size: int) -> ProbeResult:
    """Check that a model (1) calls our attention once per layer and remembers nothing but KV, (2) has the same logits
    as with its own attention, (3) shows keys before rotation. Raises ModelRefused if check 1 or 2 fails or the model
    cannot be run at all; the outcome of check 3 is in the result. Raises AttentionUnsupported if another backend may do
    what this one cannot."""
    with _refusing(model):
        return _probe(model, backend, page_size)


@contextlib.contextmanager
def _refusing(model: nn.Module) -> Iterator[None]:
    """Turn an error of the model's code into a refusal, unless it is a lack of memory or a broken device, which are not
    the model's fault."""
    try:
        yield
    except (ModelRefused, AttentionUnsupported, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise ModelRefused(f"{type(model).__name__} cannot be driven by our attention: {error}") from error


def _probe(model: nn.Module, backend: AttentionBackend, page_size: int) -> ProbeResult:
    config: Any = model.config
    text = config.get_text_config()
    layers: int = text.num_hidden_layers
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    window = getattr(text, "max_position_embeddings", None) or _TOKENS
    limit = min(_TOKENS, window)
    first_position = max(0, min(_FIRST_POSITION, (rope_limit(text) or window) - limit))
    texts = torch.randint(0, text.vocab_size, (_TEXTS, limit), generator=generator).to(device)

    _check_states(model, texts[0][:4])
    shapes = _find_shapes(model, backend, layers, texts[0])
    num_pages = -(-limit // page_size)
    pages = [
        KvPages(
            k=torch.zeros(num_pages, page_size, s.kv_heads, s.k_dim, dtype=dtype, device=device),
            v=torch.zeros(num_pages, page_size, s.kv_heads, s.v_dim, dtype=dtype, device=device),
        )
        for s in shapes
    ]

    def run(
        token_ids: Tensor, chunks: list[int], listen: Callable[[int, RopeCall], None] | None
    ) -> tuple[Tensor, Step]:
        done, logits = 0, []
        for num_tokens in chunks:
            step = Step(single_sequence_meta(device, done, num_tokens, page_size), pages.__getitem__, backend, sink)
            step.rope_seen = listen
            rows = torch.arange(num_tokens, device=device)
            positions = torch.arange(done, done + num_tokens, device=device) + first_position
            logits.append(forward(model, step, token_ids[done : done + num_tokens], positions, rows))
            done += num_tokens
        return torch.cat(logits), step

    sink = _ShapeFinder()
    later = list(_LATER_CHUNKS) if limit == _TOKENS else [1] * (limit // 2)
    chunks = [limit - sum(later), *later]
    for ids in texts:
        ours, step = run(ids, chunks, None)
        exact, tolerance = _yardstick(model, ids, first_position)
        # A median over all rows alone would be one of the first chunk's, to which nothing comes before.
        error = max(relative_error(ours, exact), relative_error(ours[chunks[0] :], exact[chunks[0] :]))
        if error <= tolerance < math.inf:
            break
    else:
        raise ModelRefused(
            f"{text.model_type}: logits differ from the model's own attention by {error:.1%} (relative RMS), "
            f"{tolerance:.1%} is the most that rounding explains; this architecture needs an adapter"
        )
    windows = {layer: params.window for layer, params in step.params.items() if params.window is not None}
    _check_windows(text, windows)

    ropes, layers_rotated = _find_ropes(model, run, ids, layers)
    same = ids[:1].expand(8).contiguous()
    run(same, [8], None)
    keys = sink.keys[0].float()
    spread = (keys - keys[:1]).abs().max() / keys.abs().max().clamp_min(1e-20)
    # Rows of one product may be rounded differently, but position changes a key by about its own size.
    decouplable = bool(spread < 1e-2) and all(ropes[layer] is not None for layer in layers_rotated)
    params = [step.params[layer] for layer in range(layers)]
    return ProbeResult(shapes, decouplable, ropes, params, error, tolerance)


def _check_states(model: nn.Module, ids: Tensor) -> None:
    """Raise ModelRefused if a module remembers something that is not KV."""
    if not (states := find_states(model, ids)):
        return
    kinds = " and ".join(sorted({state.module for state in states}))
    layers = sorted({state.layer for state in states})
    raise ModelRefused(
        f"{type(model).__name__} remembers more than KV: {kinds} keeps a state in {len(layers)} layers, from layer "
        f"{layers[0]} on. States of linear-attention layers and the like are not served yet: reused history would be "
        "wrong; a model whose layers keep nothing but K and V is served"
    )


def _find_shapes(model: nn.Module, backend: AttentionBackend, layers: int, ids: Tensor) -> list[KvShape]:
    """Run check 1 of the module, whether attention is called once per layer, and find the shape of each layer's KV,
    while the model's own attention computes."""
    sink = _ShapeFinder()

    def pages(layer: int) -> KvPages:
        """Return room for one token in a layer whose KV shape has been recorded."""
        k, v = sink.keys[layer], sink.values[layer]
        size = (1, backend.page_multiple)
        return KvPages(k.new_zeros(*size, *k.shape[1:]), v.new_zeros(*size, *v.shape[1:]))

    step = Step(single_sequence_meta(ids.device, 0, 1, backend.page_multiple), pages, backend, sink)
    forward(model, step, ids[:1], torch.zeros(1, dtype=torch.int64, device=ids.device), ids.new_zeros(1))
    if step.layers_called != list(range(layers)):
        raise ModelRefused(
            f"{type(model).__name__} has {layers} layers but called our attention for {step.layers_called}; "
            "it does not use transformers' attention interface and would answer wrongly"
        )
    return [KvShape(sink.keys[i].shape[1], sink.keys[i].shape[2], sink.values[i].shape[2]) for i in range(layers)]


def _yardstick(model: nn.Module, ids: Tensor, first_position: int) -> tuple[Tensor, float]:
    """Return the logits [tokens, vocab] of the model's own attention in fp32, and the relative error that rounding to
    the model's type causes."""
    text = {"input_ids": ids[None], "position_ids": torch.arange(len(ids), device=ids.device)[None] + first_position}
    dtype = next(model.parameters()).dtype
    with attention_implementation(model, "eager"):
        theirs = model(**text, use_cache=False).logits[0]
        if dtype == torch.float32:
            return theirs, _FLOAT32_TOLERANCE
        try:
            with in_float32(model):
                exact = model(**text, use_cache=False).logits[0]
        except RuntimeError as error:
            raise ModelRefused(
                f"{type(model).__name__} does not run in fp32, so its rounding cannot be measured ({error}); "
                "model.dtype float32 needs no such measure"
            ) from error
    return exact, _NOISE_SHARE * relative_error(theirs, exact)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the RMS difference of the median row of logits, divided by the spread of `theirs`. In bf16, a near-tie
    between two experts changes whole rows, so the worst row tells little."""
    ours, theirs = ours.float(), theirs.float()
    centred = theirs - theirs.mean(dim=-1, keepdim=True)
    return ((ours - theirs).square().mean(dim=-1).sqrt().median() / centred.square().mean().sqrt()).item()


def _check_windows(config: Any, seen: dict[int, int]) -> None:
    """Compare the windows that layers requested with those in the config, because the probe's text is shorter than real
    windows. Raises ModelRefused."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not window:
        return
    if types is not None:
        promised = {i for i, kind in enumerate(types[: config.num_hidden_layers]) if kind == "sliding_attention"}
    elif window < config.max_position_embeddings:  # PhiMoE, for one, has it in its masks only
        promised = set(range(config.num_hidden_layers))
    else:
        promised = set()
    if promised and set(seen) != promised:
        raise ModelRefused(
            f"{config.model_type}: layers {sorted(promised)} slide a window, but {sorted(seen)} told us so"
        )


def _find_ropes(
    model: nn.Module, run: Callable[..., tuple[Tensor, Step]], ids: Tensor, layers: int
) -> tuple[list[RopeSource | None], list[int]]:
    """Find which rotary module made the tables of each layer, by watching one pass of the model."""
    made: list[tuple[Tensor, nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def hook(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], out: Any) -> None:
        # x and position_ids come first, by position or by name; the rest is a layer type and the like.
        rest = {k: v for k, v in keywords.items() if k not in ("x", "position_ids")}
        if isinstance(out, tuple) and len(out) == 2:
            made.append((out[0], module, args[2:], rest))

    used: dict[int, RopeCall] = {}
    handles = [
        m.register_forward_hook(hook, with_kwargs=True)
        for m in model.modules()
        if type(m).__name__.endswith("RotaryEmbedding")
    ]
    try:
        _, step = run(ids[:4], [4], used.__setitem__)
    finally:
        for handle in handles:
            handle.remove()
    ropes: list[RopeSource | None] = [None] * layers
    for layer, call in used.items():
        for cos, module, args, keywords in made:
            if cos is call.cos:
                ropes[layer] = RopeSource(module, args, keywords, call)
    return ropes, step.layers_rotated
