"""Loads the model of an engine, probes it (checks that our attention can run it), and installs the attention that runs
it."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.storage.throttle import Throttle
from reprise.engine.build.codec import choose_codec, coded_fingerprint, selected_fingerprint
from reprise.engine.build.end_tokens import further_end_ids
from reprise.engine.build.page_dtype import ChosenPages, choose_pages, paged_fingerprint
from reprise.engine.build.resources import memory
from reprise.engine.build.weights import (
    is_gguf,
    load_weights,
    pack_weights,
    quantised_form,
    resolve_files,
    unpack_weights,
)
from reprise.engine.codec.activation import watch_inputs
from reprise.engine.codec.chosen import ChosenCodec
from reprise.engine.codec.quality import Subject
from reprise.engine.config import EngineConfig, ExperimentConfig
from reprise.engine.model.cpu.optimise import optimise_for_cpu
from reprise.engine.model.cuda.optimise import optimise_for_cuda
from reprise.engine.model.finite_weights import weight_not_finite
from reprise.engine.model.loading import ModelRefused, fingerprint, read_config, weights_digest
from reprise.engine.model.lookahead import Lookahead
from reprise.engine.model.offload.offloaded_weights import OffloadedWeights
from reprise.engine.model.pages import bytes_per_token
from reprise.engine.model.probe import ProbeResult, probe
from reprise.engine.model.text_of_wrapper import media_token_ids
from reprise.engine.packed.directory import is_packed, read_index
from reprise.engine.packed.load import size_of
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.ragged_batch import (
    AttentionBackend,
    AttentionUnsupported,
    BackendUnavailable,
    PageFormat,
)
from reprise.kernels.attention.torch_cpu import ExactAttention
from reprise.kernels.cpu.available import decode_kernels, flash_kernels, product_kernels, tiles_of_pairs
from reprise.kernels.triton_kernels import triton_packed

log = logging.getLogger(__name__)

# Triton goes first: its decode steps are replayed as graphs, without which a token takes about five times as long.
_ON_CUDA = ("triton", "flash", "torch_cpu")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The weights in memory, and the device that computes with them."""

    module: nn.Module
    path: Path  # directory of its files
    device: torch.device
    dtype: torch.dtype
    parameters: int
    weight_bytes: int
    packing: str  # form of packed weights; empty: they are not packed
    free_bytes: int  # free memory before the weights, which are a mapped file first and copies later
    link: Throttle  # cap of the link from DRAM to HBM
    offloaded: OffloadedWeights | None = None  # None: all weights are where they are computed with
    rank: int = 0  # part of the model that this process holds
    num_ranks: int = 1

    @property
    def text(self) -> Any:
        """The configuration of the language model: a part of the configuration if the model is multimodal, otherwise
        all of it."""
        return self.module.config.get_text_config()  # type: ignore[operator,union-attr]

    @property
    def hbm_weight_bytes(self) -> int:
        """The bytes of the weights that stay in HBM, and of the HBM buffers into which the weights of the other layers
        are copied from DRAM in every step."""
        all_bytes = self.weight_bytes
        return all_bytes if self.offloaded is None else all_bytes - self.dram_weight_bytes + self.offloaded.buffer_bytes

    @property
    def dram_weight_bytes(self) -> int:
        return 0 if self.offloaded is None else self.offloaded.dram_bytes

    @property
    def weights(self) -> Mapping[str, Any]:
        """All weights by name, from HBM and DRAM. Read them before modules are replaced by faster ones, because these
        rearrange their weights in memory."""
        return {**self.module.state_dict(), **({} if self.offloaded is None else self.offloaded.tensors())}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The token ids that end a text, from generation_config, else from the model's config, else from that of its
        language model; and the ids by which the tokenizer and the chat template end a turn."""
        holders = (getattr(self.module, "generation_config", None), self.module.config, self.text)
        values = (getattr(holder, "eos_token_id", None) for holder in holders)
        value = next((value for value in values if value is not None), ())
        configured = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        further = further_end_ids(self.path, vocab_size=self.text.vocab_size)
        if added := set(further).difference(configured):
            log.info("answers end at the tokens %s too, by which this model ends a turn", sorted(added))
        return tuple(dict.fromkeys((*configured, *further)))

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """The token ids that stand for images, videos and sounds in prompts of a multimodal model. Only its language
        model is served, so prompts must not contain them."""
        return tuple(
            token_id for token_id in media_token_ids(read_config(self.path)) if token_id < self.text.vocab_size
        )


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A loaded model with the attention, codec and pages with which it runs, and what the probe has found out about it
    (KV shapes, rotations)."""

    backend: AttentionBackend
    page_size: int  # tokens
    found: ProbeResult
    fingerprint: bytes  # names KV: model, and codec and selector if there are any
    codec: ChosenCodec
    pages: ChosenPages
    kv_bytes_per_token: int  # bytes as computed, over all layers and ranks
    hbm_bytes_per_token: int  # bytes in pages
    lookahead: Lookahead | None = None  # if a selector guesses queries

    @property
    def coded_segment_bytes(self) -> Sequence[int] | None:
        """The bytes, by layer, of one block's segment after the codec has compressed it; None: there is no codec."""
        return None if self.codec.codec is None else self.codec.codec.segment_bytes

    @property
    def coded_bytes(self) -> float:
        """The stored size of a block as a share of its size as computed KV; 1 if KV is stored as it is computed."""
        coded = self.coded_segment_bytes
        if coded is None:
            return self.stored_bytes_per_token / self.kv_bytes_per_token
        return sum(coded) / (BLOCK_TOKENS * self.kv_bytes_per_token)

    @property
    def stored_bytes_per_token(self) -> int:
        """The bytes that a token takes in the tiers below HBM, over all layers and ranks, before a codec compresses
        them: the bytes of its KV, or of its activations where these are stored instead."""
        made = self.codec.projection
        return self.kv_bytes_per_token if made is None else made.bytes_per_token


def load(config: EngineConfig, rank: int = 0, rendezvous: str = "") -> LoadedModel:
    """Load the model. With tensor parallelism, load a rank's part of it, together with all ranks. rendezvous: file in
    which ranks find each other. Raises ModelRefused."""
    num_ranks = config.model.tensor_parallel
    device = _device(config.device)
    if config.threads or num_ranks > 1:
        torch.set_num_threads(max(1, (config.threads or torch.get_num_threads()) // num_ranks))
    path, dtype = _files(config, device)
    if num_ranks > 1:
        from reprise.engine.model.join_ranks import join_ranks

        join_ranks(device, rank, num_ranks, rendezvous)
    free = memory().available
    is_offloaded = config.weights.offload == "dram"
    module = load_weights(path, dtype, torch.device("cpu") if is_offloaded else device, num_ranks)
    parameters, weight_bytes = size_of(module)
    link = dram_link(config.experiment, num_ranks)
    offloaded = _offloaded(module, config.weights.hbm_layers, device, link) if is_offloaded else None
    return LoadedModel(
        module=module,
        path=path,
        device=device,
        dtype=dtype,
        parameters=parameters,
        weight_bytes=weight_bytes,
        packing=read_index(path).weights if is_packed(path) else "",
        free_bytes=free,
        link=link,
        offloaded=offloaded,
        rank=rank,
        num_ranks=num_ranks,
    )


def find_files(config: EngineConfig) -> Path:
    """Return the directory of the model that `load` will load, after fetching, converting or packing its files where
    needed. Raises ModelRefused."""
    return _files(config, _device(config.device))[0]


def _files(config: EngineConfig, device: torch.device) -> tuple[Path, torch.dtype]:
    """Return the directory of the model, with its weights packed or unpacked as `model.weights` demands, and the type
    in which the model computes. Raises ModelRefused."""
    wanted, kept = config.model.weights, Path(config.cache.disk_dir) / "models"
    dtype = _dtype(config.model.dtype, device)
    # A CPU without products in bf16 is faster in fp32. But packed weights have kernels for bf16 alone, which add up in
    # fp32.
    in_bf16 = torch.bfloat16 if config.model.dtype == "auto" and device.type == "cpu" else dtype
    against = ""
    # Asked only where something may be packed: the kernels that this starts slow a CPU down that computes in fp32.
    if wanted in ("q4", "q8") or is_gguf(config.model.source):
        against = _against_packing(config, device, in_bf16)
    if against and wanted in ("q4", "q8"):
        raise ModelRefused(f"model.weights is {wanted}, but {against}: take auto")
    path = resolve_files(config.model.source, kept, keep=wanted == "auto" and not against)
    if is_packed(path) or quantised_form(path):
        against = _against_packing(config, device, in_bf16)
    if is_packed(path) and against:
        raise ModelRefused(f"the weights of {path} are packed, but {against}: take the original model")
    if is_packed(path) and wanted == "auto":
        return path, in_bf16
    if not is_packed(path) and quantised_form(path) and (against or wanted == "bf16"):
        if against:
            log.info("the weights are unpacked, because %s", against)
        where = torch.device("cpu") if config.weights.offload == "dram" else device
        return unpack_weights(path, kept, dtype, where, config.model.tensor_parallel), dtype
    if wanted in ("q4", "q8") or (wanted == "auto" and quantised_form(path)):
        return pack_weights(path, kept, wanted, device), in_bf16
    return path, dtype


def _against_packing(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why this engine cannot compute with packed weights; empty if it can."""
    if device.type != "cpu" and (dtype == torch.float32 or triton_packed() is None):
        return "packed weights need Triton, and model.dtype bfloat16 or float16"
    if device.type == "cpu" and (dtype != torch.bfloat16 or decode_kernels() is None):
        return "packed weights need model.dtype bfloat16, a processor with AVX2, and numba"
    if config.model.tensor_parallel > 1 or config.weights.offload != "none":
        return "packed weights need model.tensor_parallel 1 and weights.offload none"
    return ""


def dram_link(config: ExperimentConfig, num_ranks: int) -> Throttle:
    """Return a throttle that caps one direction of the link between DRAM and HBM at this rank's share of
    `dram_gbps`."""
    return Throttle(bytes_per_s=config.dram_gbps / num_ranks * 1e9, clock=time.monotonic, sleep=time.sleep)


def _offloaded(module: nn.Module, hbm_layers: int, device: torch.device, link: Throttle) -> OffloadedWeights:
    """Move the weights of layers after the first `hbm_layers` to DRAM, and return them. Raises ModelRefused."""
    num_layers: int = module.config.get_text_config().num_hidden_layers  # type: ignore[operator,union-attr]
    if hbm_layers >= num_layers:
        raise ModelRefused(
            f"weights.hbm_layers {hbm_layers} leaves none of {num_layers} layers to weights.offload: set that to none"
        )
    try:
        return OffloadedWeights(module, num_layers=num_layers, hbm_layers=hbm_layers, device=device, throttle=link)
    except ValueError as error:
        raise ModelRefused(f"weights.offload cannot move this model's layers one by one: {error}") from error


def probe_model(loaded: LoadedModel, config: EngineConfig, go_on: Callable[[], None] = lambda: None) -> ProbedModel:
    """Find an attention that computes what the model asks for, and replace modules that are slow on a CPU. Changes the
    model. go_on: called now and then during long work, to show that the start goes on. Raises ModelRefused."""
    module, device = loaded.module, loaded.device
    try:
        backend, page_size, found = find_attention(module, device)
    except ModelRefused as refusal:
        if (problem := weight_not_finite(loaded.weights, loaded.path)) is not None:
            raise ModelRefused(problem) from refusal
        raise
    log.debug(
        "probe: relative logit error %.1e of %.1e tolerated, positions decoupled: %s",
        found.logit_error,
        found.logit_tolerance,
        found.decouplable,
    )
    exact_kernels = config.model.exact == "on" and device.type == "cpu" and loaded.dtype == torch.bfloat16
    if exact_kernels and loaded.num_ranks > 1:
        raise ModelRefused("model.exact is on, but in bf16 its kernels run whole layers only: model.tensor_parallel 1")
    if exact_kernels:
        backend = _exact_attention()
    digest = fingerprint(module, weights_digest(loaded.weights), backend.name)  # taken before weights are packed
    subject = Subject(module, backend, page_size, found, go_on)
    codec = choose_codec(config.cache, subject, tokenizer=loaded.path / "tokenizer.json", fingerprint=digest)
    pages = choose_pages(config.cache, subject, tokenizer=loaded.path / "tokenizer.json", fingerprint=digest)
    if pages.is_packed and (config.selector.name != "none" or config.cache.larger_than_hbm):
        raise ModelRefused("cache.hbm_dtype int8: needs selector.name none and cache.larger_than_hbm false")
    digest = selected_fingerprint(coded_fingerprint(digest, codec.name), config.selector)
    digest = paged_fingerprint(digest, pages)
    lookahead = _lookahead(module, found) if config.selector.name == "infinigen" else None
    if device.type == "cpu" and loaded.num_ranks == 1:
        leave = frozenset[nn.Module]() if loaded.offloaded is None else loaded.offloaded.modules
        log.debug(
            "replaced for speed: %s", optimise_for_cpu(module, found, backend, exact_kernels, pages.format, leave)
        )
    if device.type == "cuda" and loaded.num_ranks == 1 and loaded.offloaded is None:
        log.debug("replaced for speed: %s", optimise_for_cuda(module, found, backend))
    if codec.projection is not None:
        watch_inputs(subject, codec.projection)
    if lookahead is not None:
        lookahead.watch(module)
    kv_bytes, hbm_bytes = (
        loaded.num_ranks * bytes_per_token(found.shapes, each) for each in (PageFormat(loaded.dtype), pages.format)
    )
    return ProbedModel(backend, page_size, found, digest, codec, pages, kv_bytes, hbm_bytes, lookahead)


def _lookahead(module: nn.Module, found: ProbeResult) -> Lookahead:
    """Return the part that guesses a layer's queries ahead, for the selector `infinigen`, which chooses the rows of
    long contexts that are read. Raises ModelRefused."""
    try:
        return Lookahead(module, found)
    except ValueError as error:
        raise ModelRefused(f"selector.name infinigen cannot guess this model's queries: {error}") from error


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelRefused("device is cuda, but torch sees no CUDA device")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def find_attention(module: nn.Module, device: torch.device) -> tuple[AttentionBackend, int, ProbeResult]:
    """Return (attention backend, page size in tokens, findings of the probe) for the first backend that runs here and
    computes what the model asks for. Raises ModelRefused."""
    problems = []
    for name in _ON_CUDA if device.type == "cuda" else ("torch_cpu",):
        try:
            backend = BACKENDS[name]()
            page_size = math.lcm(backend.page_multiple, BLOCK_TOKENS)
            return backend, page_size, probe(module, backend, page_size)
        except (BackendUnavailable, AttentionUnsupported) as error:
            problems.append(f"{name}: {error}")
            log.info("attention backend %s is passed over: %s", name, error)
    raise ModelRefused(f"no attention backend runs this model here: {'; '.join(problems)}")


def _exact_attention() -> AttentionBackend:
    """Return the attention that computes a row with the same bits whatever else is in the batch. Raises ModelRefused
    where bf16 cannot be exact."""
    if product_kernels() is None or flash_kernels(exact=True) is None:
        raise ModelRefused(
            "model.exact is on, but bf16 has kernels for it on processors with AVX512_BF16 only, and where numba runs: "
            "take model.exact auto"
        )
    return ExactAttention(kind="tiles" if tiles_of_pairs() else "pairs")
