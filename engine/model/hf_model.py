"""Drives unmodified transformers models with our attention.

transformers calls a registered attention function in every layer. No mask function is registered under its name, so
transformers builds no mask, and causality, windows and packing are up to us. The models rotate queries and keys just
before that call, by a function of their modelling module. While one of our steps runs, that function returns its
arguments unchanged, and the attention function rotates after it has seen the un-rotated key. Outside a step both behave
as usual.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from reprise.cache.transfer.capture import SavedRows
from reprise.engine.model.batch import BatchInput
from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta, AttentionParams, KvPages
from reprise.kernels.attention.selection import LOG2_E, Selecting, StepSelection
from reprise.kernels.attention.watched import WatchedAttention
from reprise.kernels.cpu.available import decode_kernels, use_torch_threads
from reprise.kernels.kv_copy import write_rows
from reprise.kernels.triton_kernels import triton_rows

SHORT_WAY = "reprise_short_way"
"""The name of the attribute in which a model has its `Shortcut`."""
_NAME = "reprise"
_ROTARY = "apply_rotary_pos_emb"
_WITHOUT_MEANING = frozenset(("dropout", "logits_to_keep", "position_ids", "use_cache"))
"""Arguments that transformers passes to attention and that attention may ignore: no row is dropped outside of training,
rotations happen elsewhere, and which rows get logits is decided after the last layer. Together with `output_*` and the
arguments that are read, these are all that 90 architectures of transformers 5.23 pass."""


class KvSink(Protocol):
    """A receiver of a step's KV before keys are rotated, for saving it below HBM."""

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None:
        """Take a layer's K and V. k_plain [tokens, kv_heads, k_dim], v [tokens, kv_heads, v_dim]; views that are valid
        during the call."""
        ...


@dataclass(slots=True)
class RopeCall:
    """A rotation of queries and keys that a layer has requested and that has not been done yet."""

    function: Callable[..., tuple[Tensor, Tensor]]
    cos: Tensor
    sin: Tensor
    extra: tuple[Any, ...]
    keywords: dict[str, Any]
    width: int  # leading dims given to the call: with partial rotary embeddings, the model slices before it

    @property
    def is_by_halves(self) -> bool:
        """Whether `turn_halves` gives the requested rotation."""
        turned = self.cos.shape[-1]
        is_known = turned <= self.width and not self.extra and not self.keywords
        return is_known and turns_halves(self.function, turned < self.width)

    @property
    def num_turned(self) -> int:
        """The number of leading dims that the rotation turns, if `is_by_halves`; it returns further dims unchanged."""
        return min(self.cos.shape[-1], self.width)

    def rotate(self, *rows: Tensor) -> list[Tensor]:
        """Return `rows`, each [tokens, heads, dim], as new tensors in which the leading dims are rotated; dims beyond
        those that the layer gave to its rotation are copied unchanged."""
        if self.is_by_halves:
            cos, sin = self.cos[0][:, None], self.sin[0][:, None]
            return [turn_halves(x, cos, sin) for x in rows]
        return [self._rotate_as_is(x) for x in rows]

    def _rotate_as_is(self, x: Tensor) -> Tensor:
        heads_first = x.transpose(0, 1)[None]
        turning = heads_first[..., : self.width]
        turned = self.function(turning, turning, self.cos, self.sin, *self.extra, **self.keywords)[0]
        if self.width < x.shape[-1]:
            turned = torch.cat((turned, heads_first[..., self.width :]), -1)
        return turned[0].transpose(0, 1)


def turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding of most models, in which dims i and i + R / 2 turn together. x [tokens, heads, dim];
    cos, sin [tokens, 1, R]. Takes three passes over memory instead of six, or one on CUDA, and rounds the sums once."""
    if x.is_cuda and cos.dtype == x.dtype != torch.float32 and (kernels := triton_rows()) is not None:
        turned: Tensor = kernels.turn_halves(x, cos[:, 0], sin[:, 0])
        return turned
    width, half = cos.shape[-1], cos.shape[-1] // 2
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    torch.mul(x[..., :width], cos, out=out[..., :width])
    out[..., :half].addcmul_(x[..., half:width], sin[..., :half], value=-1)
    out[..., half:width].addcmul_(x[..., :half], sin[..., half:])
    return out


@functools.cache
def turns_halves(function: Callable[..., Any], is_partial: bool = False) -> bool:
    """Return whether a model's own rotation is that of `turn_halves`, found by a trial. is_partial: try it with fewer
    angles than dims."""
    generator = torch.Generator().manual_seed(0)
    x, angles = torch.randn(5, 2, 8, generator=generator), torch.randn(5, 8, generator=generator)
    if is_partial:
        angles = angles[:, :4]
    cos, sin = angles.cos(), angles.sin()
    try:
        q, k = function(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])
    except Exception:
        return False
    want = turn_halves(x, cos[:, None], sin[:, None])
    return all(t.shape[1:] == (2, 5, 8) and torch.allclose(t[0].transpose(0, 1), want, atol=1e-6) for t in (q, k))


@dataclass(slots=True)
class Step:
    """The state that the attention function needs while one of our steps runs."""

    meta: AttentionMeta
    pages: Callable[[int], KvPages]  # layer -> its pages
    backend: AttentionBackend
    sink: KvSink | None
    # where layers that can may save their rows themselves instead of passing them to the sink
    saved: SavedRows | None = None
    inputs: Callable[[int, Tensor], None] | None = None  # receives what each layer's attention begins with
    arrive: Callable[[int], None] | None = None  # waits until the KV being loaded into a layer is there
    selection: StepSelection | None = None  # the rows that sequences read in part; None: all read whole contexts
    computed_layers: int = 0  # layers before this one have been computed together with an earlier one
    logit_rows: Tensor | None = None  # [rows] int64, ascending: rows whose logits are wanted; None: unknown
    layers_called: list[int] = field(default_factory=list)
    layers_rotated: list[int] = field(default_factory=list)
    params: dict[int, AttentionParams] = field(default_factory=dict)  # what each layer requested
    pending_rope: RopeCall | None = None
    rope_seen: Callable[[int, RopeCall], None] | None = None  # called for every rotation; used by the probe


_STEP: ContextVar[Step | None] = ContextVar("reprise_step", default=None)


@contextlib.contextmanager
def running(step: Step) -> Iterator[None]:
    """Make `step` the current step of this thread until the end of the `with` block."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def is_in_step() -> bool:
    """Return whether this thread is running one of our steps."""
    return _STEP.get() is not None


def current_step() -> Step:
    """Return the current step. Raises RuntimeError outside a step."""
    step = _STEP.get()
    if step is None:
        raise RuntimeError("our attention runs inside a step only")
    return step


def attend(step: Step, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """Write the keys and values of the step's own tokens in one layer to their slots, wait until KV that is being
    loaded for this layer is there, then attend. queries, keys [tokens, heads, k_dim], rotated; values [tokens,
    kv_heads, v_dim]. Returns [tokens, heads, v_dim]."""
    step.params[layer] = params
    pages = step.pages(layer)
    write_rows(pages.k, step.meta.slots, pages.to_rows(keys))
    write_rows(pages.v, step.meta.slots, pages.to_rows(values))
    if step.arrive is not None:
        step.arrive(layer)
    return step.backend.forward(queries, pages, step.meta, in_part(step, layer, queries, pages, params))


def in_part(step: Step, layer: int, queries: Tensor, pages: KvPages, params: AttentionParams) -> AttentionParams:
    """Return `params` of a layer, with the context rows (KV of earlier tokens) that each sequence is to read there, if
    the step has a selector and it chooses some; otherwise `params` as it is. Call it once the keys of the step's own
    tokens are in `pages`, since the selector reads them. queries [tokens, heads, k_dim], rotated."""
    if step.selection is None:
        return params
    scaled = queries[step.selection.candidates.tokens].float().mul_(params.scale * LOG2_E)
    return replace(params, selection=step.selection.of_layer(layer, scaled, pages, params))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention interface demands: q, k, v [1, heads, tokens, dim] -> [1, tokens, heads, dim].
    Raises RuntimeError for an unknown argument, because it may change what has to be computed."""
    step = current_step()
    if attention_mask is not None:
        raise RuntimeError("transformers built a mask for an attention that has none")
    for name, given in others.items():
        if given is not None and name not in _WITHOUT_MEANING and not name.startswith("output_"):
            raise RuntimeError(
                f"{type(module).__name__} passes {name} to its attention, and ours cannot take it into account"
            )
    layer: int = module.layer_idx  # type: ignore[assignment]
    rope, step.pending_rope = step.pending_rope, None
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, dim]
    if step.sink is not None:
        step.sink.write(layer, keys, values)
    if rope is not None:
        queries, keys = rope.rotate(queries, keys)
        step.layers_rotated.append(layer)
        if step.rope_seen is not None:
            step.rope_seen(layer, rope)
    step.layers_called.append(layer)
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attend(step, layer, queries.contiguous(), keys, values, params)[None], None


def _passing_through(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the model's rotation so that, while a step runs, it only records that the rotation was requested
    (`RopeCall`)."""

    @functools.wraps(original)
    def rotary(*args: Any, **keywords: Any) -> Any:
        step = _STEP.get()
        if step is None or len(args) < 4 or not all(isinstance(a, Tensor) and a.dim() == 4 for a in args[:2]):
            return original(*args, **keywords)
        q, k, cos, sin, *extra = args
        step.pending_rope = RopeCall(original, cos, sin, tuple(extra), keywords, q.shape[-1])
        return q, k

    rotary.passes_through = True  # type: ignore[attr-defined]
    return rotary


def take_over_attention(model: nn.Module) -> None:
    """Make a transformers model call our attention while a step runs. Other models of the process are unaffected."""
    AttentionInterface.register(_NAME, _attention)
    for module_name in {type(m).__module__ for m in model.modules()}:
        modelling = sys.modules[module_name]
        original = getattr(modelling, _ROTARY, None)
        if original is not None and not hasattr(original, "passes_through"):
            setattr(modelling, _ROTARY, _passing_through(original))


@contextlib.contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Let the model use the attention implementation `name` until the end of the `with` block."""
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


class Shortcut(Protocol):
    """A faster forward pass without transformers' code, for the steps that it can compute. `ShortWay` implements it."""

    def logits(self, step: Step, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor | None:
        """Return the logits that `forward` would return, or None if the step cannot be computed without transformers'
        code."""
        ...


def forward(
    model: nn.Module,
    step: Step,
    token_ids: Tensor,
    positions: Tensor,
    logit_rows: Tensor,
    short_way: Shortcut | None = None,
) -> Tensor:
    """Run one flat ragged batch. token_ids, positions [tokens] int64; logit_rows [rows] int64, ascending indices into
    the batch. short_way: a faster forward pass, used for the steps that it can compute. Returns logits [rows, vocab].
    Afterwards the KV of every token is in its slot."""
    keep_rows = takes_logit_rows(type(model).forward)
    extra = {"logits_to_keep": logit_rows} if keep_rows else {}
    step.logit_rows = logit_rows
    with running(step):
        if short_way is not None:
            found = short_way.logits(step, token_ids, positions, logit_rows)
            if found is not None:
                return found
        logits: Tensor = model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **extra
        ).logits
    return logits[0] if keep_rows else logits[0, logit_rows]


@functools.cache
def takes_logit_rows(model_forward: Callable[..., Any]) -> bool:
    """Return whether a model's forward function can compute logits of given rows only (`logits_to_keep`)."""
    return "logits_to_keep" in inspect.signature(model_forward).parameters


def prepare(model: nn.Module) -> nn.Module:
    """Put the model into eval mode without gradients, and make it call our attention. Returns the model."""
    model.requires_grad_(False)
    model.eval()
    take_over_attention(model)
    config: Any = model.config
    config._attn_implementation = _NAME
    return model


class LayerWeights(Protocol):
    """A provider of layers' weights, which copies them from DRAM to HBM before these layers run.
    `reprise.engine.model.offload` implements it."""

    copied_bytes: int
    """Bytes of weights copied since the start."""
    waited_s: float
    """Seconds that layers have waited for their weights, since the start."""

    def close(self) -> None:
        """End the thread that copies weights."""
        ...


class ModelRunner:
    """One model on one device, with its KV pool. Made and called by one thread, that of the engine's loop."""

    takes_host_batches = False
    """Whether `forward` takes batches whose tensors are on the host, and is faster with them."""

    def __init__(
        self,
        *,
        model: nn.Module,
        pages: list[KvPages],
        backend: AttentionBackend,
        sink: KvSink | None,
        inputs: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        self.model = model
        self.pages = pages
        self.backend = backend
        self.sink = sink  # receives KV to be saved; None if there is no tier below HBM, or it has activations
        self.inputs = inputs  # receives these: by layer, [tokens, width]
        self.selecting: Selecting | None = None  # what may be read in part; None: nothing
        self.watch: WatchedAttention | None = None  # takes the backend's place in steps that it wants to see
        self.replayed_steps = 0  # steps replayed as graphs since the start
        self.stand_in: AttentionBackend | None = None  # takes it in every step; set for those that need it
        self.short_way: Shortcut | None = getattr(model, SHORT_WAY, None)
        self.weights: LayerWeights | None = None  # through which layers' weights come to HBM; None: they are there
        # whether each layer can write its rows to where they are saved
        self.saves_rows = inputs is None and sum(getattr(m, "saves_rows", False) for m in model.modules()) == len(pages)
        if pages[0].k.device.type == "cpu" and pages[0].has_kernels and decode_kernels() is not None:
            use_torch_threads()  # for all calls from this thread

    @torch.inference_mode()
    def forward(
        self, batch: BatchInput, arrive: Callable[[int], None] | None, saved: SavedRows | None = None
    ) -> Tensor:
        """Return logits [logit_rows, vocab] in the model's dtype, and write the KV of every token of the batch to its
        slot. arrive(layer): called before a layer attends; returns when the KV that the batch needs in that layer is
        loaded. saved: where layers that can save their own rows in DRAM write them; all other layers hand their KV to
        the KvSink."""
        backend: AttentionBackend = self.backend
        if self.stand_in is not None:
            backend = self.stand_in
        elif self.watch is not None and self.watch.begin(batch.meta):
            backend = self.watch
        step = Step(
            meta=batch.meta,
            pages=self.pages.__getitem__,
            backend=backend,
            sink=self.sink,
            saved=saved,
            inputs=self.inputs,
            arrive=arrive,
            selection=None if self.selecting is None else self.selecting.of_step(batch.meta),
        )
        return forward(self.model, step, batch.token_ids, batch.positions, batch.logit_rows, self.short_way)
