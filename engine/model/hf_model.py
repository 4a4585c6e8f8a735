"""Unmodified transformers models, driven by our attention.

transformers calls a registered attention function in every layer; with no mask function registered under that name it
builds no mask, so causality, windows and packing are ours. Its models rotate queries and keys just before that call, by
a function of their modelling module: while a step of ours runs, that function passes its arguments through untouched
and we rotate inside the attention function, after the un-rotated key has been seen (ENGINE_FACTS §1). Outside a step
both are what they always were.
"""

import os

# Before transformers is imported: it looks for a package called `kernels` to fetch code from a hub, and ours is none.
os.environ.setdefault("USE_HUB_KERNELS", "NO")

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from cache.transfer.capture import SavedRows
from kernels.attention.ragged_batch import AttentionBackend, AttentionMeta, AttentionParams, KvPages
from kernels.kv_copy import write_rows

_NAME = "reprise"
_ROTARY = "apply_rotary_pos_emb"
GGUF_SUFFIX = ".gguf"


class ModelRefused(Exception):
    """This model cannot be served correctly; the message says why and what would help."""


class KvSink(Protocol):
    """Sees the KV of a step before positions are rotated into it: what is saved below HBM."""

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None:
        """k_plain [tokens, kv_heads, k_dim], v [tokens, kv_heads, v_dim]; views that are valid during the call."""
        ...


@dataclass(slots=True)
class RopeCall:
    """A rotation that a layer asked for and that we have yet to do."""

    function: Callable[..., tuple[Tensor, Tensor]]
    cos: Tensor
    sin: Tensor
    extra: tuple[Any, ...]
    keywords: dict[str, Any]
    width: int  # how many leading dims were handed in: partial rotary embeddings slice before the call

    @property
    def is_by_halves(self) -> bool:
        """Whether `turn_halves` does what the layer asked for."""
        return turns_halves(self.function) and self.cos.shape[-1] == self.width and not self.extra and not self.keywords

    def rotate(self, *rows: Tensor) -> list[Tensor]:
        """Each of `rows` [tokens, heads, dim], rotated in its first `width` dims; new tensors."""
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
    """Rotary embedding as most models have it: dims i and i + R / 2 turn together. x [tokens, heads, dim], cos and sin
    [tokens, 1, R]. Three passes instead of six; the sums are rounded once."""
    width, half = cos.shape[-1], cos.shape[-1] // 2
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    torch.mul(x[..., :width], cos, out=out[..., :width])
    out[..., :half].addcmul_(x[..., half:width], sin[..., :half], value=-1)
    out[..., half:width].addcmul_(x[..., :half], sin[..., half:])
    return out


@functools.cache
def turns_halves(function: Callable[..., Any]) -> bool:
    """Whether a model's own rotation is the one of `turn_halves`; found out by trying."""
    generator = torch.Generator().manual_seed(0)
    x, angles = torch.randn(5, 2, 8, generator=generator), torch.randn(5, 8, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    try:
        q, k = function(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])
    except Exception:
        return False
    want = turn_halves(x, cos[:, None], sin[:, None])
    return all(t.shape[1:] == (2, 5, 8) and torch.allclose(t[0].transpose(0, 1), want, atol=1e-6) for t in (q, k))


@dataclass(slots=True)
class Step:
    """What the attention function finds while a step of ours runs."""

    meta: AttentionMeta
    pages: Callable[[int], KvPages]  # of a layer
    backend: AttentionBackend
    sink: KvSink | None
    saved: SavedRows | None = None  # where a layer may save its rows by itself, instead of showing them to the sink
    arrive: Callable[[int], None] | None = None  # waits until the KV that is being loaded into a layer is there
    logit_rows: Tensor | None = None  # [rows] int64, ascending: whose logits somebody wants; None: unknown
    layers_called: list[int] = field(default_factory=list)
    layers_rotated: list[int] = field(default_factory=list)
    params: dict[int, AttentionParams] = field(default_factory=dict)  # what each layer asked for
    pending_rope: RopeCall | None = None
    rope_seen: Callable[[int, RopeCall], None] | None = None  # the probe's ear


_STEP: ContextVar[Step | None] = ContextVar("reprise_step", default=None)


@contextlib.contextmanager
def running(step: Step) -> Iterator[None]:
    """`step` is the one that attention finds, in this thread, until the end of the block."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def current_step() -> Step:
    """The step that runs. Raises RuntimeError outside of one."""
    step = _STEP.get()
    if step is None:
        raise RuntimeError("our attention runs inside a step only")
    return step


def attend(step: Step, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """Write one layer's rows to their slots and attend. queries, keys [tokens, heads, k_dim], rotated; values [tokens,
    kv_heads, v_dim]. Returns [tokens, heads, v_dim]."""
    step.params[layer] = params
    pages = step.pages(layer)
    write_rows(pages.k, step.meta.slots, keys)
    write_rows(pages.v, step.meta.slots, values)
    if step.arrive is not None:
        step.arrive(layer)
    return step.backend.forward(queries, pages, step.meta, params)


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
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q, k, v [1, heads, tokens, dim] -> [1, tokens, heads, dim]."""
    step = current_step()
    if attention_mask is not None:
        raise RuntimeError("transformers built a mask for an attention that has none")
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
    """`original`, but while a step runs it only notes that a rotation was asked for."""

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
    """Make a transformers model call us while a step runs. Other models of the process are unaffected."""
    AttentionInterface.register(_NAME, _attention)
    for module_name in {type(m).__module__ for m in model.modules()}:
        modelling = sys.modules[module_name]
        original = getattr(modelling, _ROTARY, None)
        if original is not None and not hasattr(original, "passes_through"):
            setattr(modelling, _ROTARY, _passing_through(original))


@contextlib.contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Let the model attend by the implementation `name` for a while."""
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def forward(model: nn.Module, step: Step, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
    """One flat ragged batch. token_ids, positions [tokens] int64; logit_rows [rows] int64 into the batch, ascending.
    Returns logits [rows, vocab]. The KV of every token is in its slot afterwards."""
    keep_rows = takes_logit_rows(type(model).forward)
    extra = {"logits_to_keep": logit_rows} if keep_rows else {}
    step.logit_rows = logit_rows
    with running(step):
        logits: Tensor = model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **extra
        ).logits
    return logits[0] if keep_rows else logits[0, logit_rows]


@functools.cache
def takes_logit_rows(model_forward: Callable[..., Any]) -> bool:
    """Whether a model projects to its vocabulary only the rows that it is told to."""
    return "logits_to_keep" in inspect.signature(model_forward).parameters


# --- loading ----------------------------------------------------------------------------------------------------------


def resolve_files(model: str, conversions: Path) -> Path:
    """The local directory of a model named by directory, GGUF file or hub id. A file is converted into `conversions`,
    once; of a hub model what serving needs is downloaded, safetensors only."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix == GGUF_SUFFIX and path.exists():
        from engine.gguf.converted import converted
        from engine.gguf.reader import GgufRefused

        try:
            return converted(path, conversions)
        except GgufRefused as error:
            raise ModelRefused(str(error)) from error
    if path.exists() or model.startswith((".", "/", "~")):
        raise ModelRefused(f"{model} is neither a directory with a model in it nor a {GGUF_SUFFIX} file")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        wanted = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(model, allow_patterns=wanted))
    except HFValidationError as error:
        raise ModelRefused(f"{model} is neither a directory nor a hub id: {error}") from error
    except Exception as error:
        raise ModelRefused(f"{model} could not be fetched from the hub: {error}") from error


def load_model(path: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A transformers causal LM in eval mode, attention taken over. Raises ModelRefused."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelRefused(f"{path} needs code of its own, which is never run; transformers has none") from error
        raise ModelRefused(f"{path} has no configuration that transformers can read: {error}") from error
    _check_config(config)
    transformers.utils.logging.disable_progress_bar()  # it runs into our log lines
    if not any(path.glob("*.safetensors")):
        raise ModelRefused(f"{path} has no safetensors weights; other formats are not read, they can run code")
    try:
        with torch.device("cpu"):
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelRefused(f"transformers cannot load {path}: {error}") from error
    if missing := sorted(report["missing_keys"]):  # transformers has filled them with random numbers
        raise ModelRefused(f"{len(missing)} weights are missing from {path}, among them {', '.join(missing[:3])}")
    return prepare(model.to(device))


def prepare(model: nn.Module) -> nn.Module:
    """Eval mode, no gradients, attention taken over."""
    model.requires_grad_(False)
    model.eval()
    take_over_attention(model)
    config: Any = model.config
    config._attn_implementation = _NAME
    return model


def _check_config(config: Any) -> None:
    name = config.model_type
    if getattr(config, "quantization_config", None) is not None:
        method = getattr(config.quantization_config, "quant_method", None) or dict(config.quantization_config).get(
            "quant_method", "unknown"
        )
        raise ModelRefused(f"quantised checkpoints ({method}) cannot be run; use the unquantised one")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{name} is an encoder-decoder model; only causal language models are served")
    if getattr(config, "attention_chunk_size", None):
        raise ModelRefused(f"{name} attends in chunks, which is not supported")


def rope_limit(config: Any) -> int | None:
    """The context up to which positions mean the same for every request, or None if there is no such limit. `dynamic`
    and `longrope` change their frequencies with the length seen, so a cached key would go stale behind that length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(v for v in parameters.values() if isinstance(v, dict))]
    if not any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds):
        return None
    original = [kind.get("original_max_position_embeddings") for kind in kinds]
    limits = [value for value in original if value]
    limits.append(getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings)
    return min(limits)


def version() -> str:
    return transformers.__version__
