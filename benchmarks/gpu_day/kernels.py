"""Measures what single kernels reach, beside their neighbours in size: draws, attention of steps that decode, products
with packed weights, coded blocks. On the CPU, where it only proves that it runs, Triton's kernels are left out."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from benchmarks.gpu_day.items import Asked, Item
from benchmarks.gpu_day.timing import wall_ms
from benchmarks.harness.in_process import greedy
from reprise.engine.model.cuda.layer import linear
from reprise.engine.model.cuda.quantised import CudaQuantisedLinear
from reprise.engine.step.sampler import Sampler, SampleRow
from reprise.kernels import draws
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages
from reprise.kernels.codecs.codec import Decodes
from reprise.kernels.packed import GROUP, Bits
from reprise.kernels.packed_rows import PackedRows
from reprise.kernels.triton_kernels import triton_draws, triton_packed

HEADS, KV_HEADS, DIM, PAGE, BLOCK_ROWS = 32, 8, 128, 64, 32  # shape of an 8 B model


def open_section(asked: Asked) -> Asked:
    return asked


def items(asked: Asked) -> Sequence[Item]:
    return [
        Item("draws", 20, lambda asked: [_draws(asked.device)]),
        Item("attention of steps that decode", 20, lambda asked: [_decode(asked.device)]),
        Item("products with packed weights", 25, lambda asked: [_packed(asked.device)]),
        Item("a layer of coded blocks decoded", 25, lambda asked: [_decoded(asked.device)]),
    ]


def _draws(device: torch.device) -> dict[str, Any]:
    """Rows as models give them (Zipf's law), with top_p: the whole draw, and the survey that is a part of it."""
    rows, vocab = (64, 128_256) if device.type == "cuda" else (4, 1000)
    ranks = torch.stack([torch.randperm(vocab) for _ in range(rows)]).to(device)
    logits = (-1.5 * (ranks + 1.0).log()).bfloat16()
    found: dict[str, Any] = {}
    for name, changes in (("top_p 0.9", {"top_p": 0.9}), ("no filter", {}), ("greedy", {"temperature": 0.0})):
        sampling = replace(greedy(1), **{"temperature": 1.0} | changes)
        asked_for = [SampleRow(sampling, seed=row, position=0, penalties=None, end_ids=()) for row in range(rows)]
        taken = seconds(lambda: Sampler().sample(logits, asked_for), device, 20)  # noqa: B023
        found[f"{rows} draws of {vocab}, {name}, ms"] = round(1e3 * taken, 3)
    wide, ones = logits.float(), torch.ones(rows, device=device)
    starts = torch.arange(rows, device=device)
    ways = {"torch": draws.survey}
    if device.type == "cuda" and (kernels := triton_draws()) is not None:
        ways["Triton"] = kernels.survey
    for name, survey in ways.items():
        found[f"survey by {name}, ms"] = round(1e3 * seconds(lambda: survey(wide, ones, starts), device), 3)  # noqa: B023
    return found


def _decode(device: torch.device) -> dict[str, str]:
    """ms a layer, and GB/s of its K and V; by warps a program on CUDA."""
    on_gpu = device.type == "cuda"
    found = {}
    for sequences, context in ((1, 1024), (32, 1024), (32, 2048), (1, 28_000)) if on_gpu else ((2, 40),):
        pages = -(-context // PAGE)
        pool = torch.randn(2, sequences * pages, PAGE, KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
        q = torch.randn(sequences, HEADS, DIM, device=device, dtype=torch.bfloat16)
        table = torch.randperm(sequences * pages, dtype=torch.int32).view(sequences, pages).to(device)
        params = AttentionParams(scale=DIM**-0.5, window=None, softcap=None, sinks=None)
        for warps in (4, 8) if on_gpu else (0,):
            meta = _meta(sequences, context, table)
            backend = _backend(warps)
            taken = seconds(lambda: backend.forward(q, KvPages(pool[0], pool[1]), meta, params), device, 20)  # noqa: B023
            moved = 2 * sequences * context * KV_HEADS * DIM * 2 / taken / 1e9
            found[f"{sequences} x {context}, {warps or 'no'} warps"] = f"{1e3 * taken:.3f} ms, {moved:.0f} GB/s"
    return found


def _packed(device: torch.device) -> dict[str, str]:
    """us a product, and GB/s of the weight as it lies; beside a weight of bf16."""
    on_gpu = device.type == "cuda"
    kernels = triton_packed() if on_gpu else None
    shapes = (
        {"qkv": (6144, 4096), "gate and up": (28_672, 4096), "down": (4096, 14_336)} if on_gpu else {"qkv": (96, 64)}
    )
    found = {}
    for name, (outputs, inputs) in shapes.items():
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        layers: dict[str, tuple[nn.Module, int]] = {"bf16": (linear(weight, None), weight.nbytes)}
        for bits in (8, 4):
            packed = _random(outputs, inputs, bits, device)
            layers[f"{bits} bits"] = CudaQuantisedLinear(packed, None, torch.bfloat16, kernels), packed.size_bytes
        for rows in (1, 8, 32, 64, 2048) if on_gpu else (2,):
            x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
            for kind, (layer, size) in layers.items():
                taken = seconds(lambda: layer(x), device, 20)  # noqa: B023
                found[f"{name}, {rows} rows, {kind}"] = f"{1e6 * taken:.0f} us, {size / taken / 1e9:.0f} GB/s"
    return found


def _random(outputs: int, inputs: int, bits: Bits, device: torch.device) -> PackedRows:
    """Return random weights, packed as `model.weights` packs: groups of 32 inputs, 4 bits with lows."""
    codes = torch.randint(0, 256, (outputs, inputs * bits // 8), dtype=torch.uint8, device=device)
    scales = torch.rand(2, outputs, inputs // GROUP, device=device).half()
    return PackedRows(codes, scales[0], scales[1] if bits == 4 else None, inputs, bits, GROUP)


def _decoded(device: torch.device) -> dict[str, str]:
    """ms, and GB/s of the rows that come of it; beside the processor. Rows are random, so they take more bytes than a
    model's."""
    try:
        from reprise.kernels.codecs.transform import LayerStatistics, TransformCodec, basis_of
    except ImportError as error:
        return {"not run": str(error)}
    on_gpu = device.type == "cuda"
    heads, dim, count = (KV_HEADS, DIM, 512) if on_gpu else (1, 8, 2)
    rng, numbers = np.random.default_rng(0), heads * dim
    k, v = (rng.standard_normal((2 * numbers, heads, dim), np.float32) for _ in range(2))
    basis = basis_of(LayerStatistics(k, v, np.ones((heads, dim), np.float32)))
    codec = TransformCodec.fitted([basis], k_step=0.3, v_step=0.3, dtype=torch.bfloat16)
    raw = torch.randn(count, 2 * BLOCK_ROWS * numbers).bfloat16()
    segments = torch.zeros(count, codec.segment_bytes[0], dtype=torch.uint8)
    codec.encode(0, raw, segments)
    found = {}
    ways: tuple[Decodes, ...] = codec, codec.on(device)
    for decodes in ways:
        out = torch.empty_like(raw, device=decodes.device)
        for blocks in (32, count) if on_gpu else (count,):
            taken = seconds(lambda: decodes.decode(0, segments[:blocks], out[:blocks]), device, 3)  # noqa: B023
            size = out[:blocks].nbytes
            found[f"{blocks} blocks, {decodes.device.type}"] = f"{1e3 * taken:.1f} ms, {size / taken / 1e9:.2f} GB/s"
    return found


def _backend(warps: int) -> Any:
    if not warps:
        return BACKENDS["torch_cpu"]()
    from reprise.kernels.attention import triton_paged

    triton_paged._warps = lambda rows, v_padded: warps
    return BACKENDS["triton"]()


def _meta(sequences: int, context: int, table: Tensor) -> AttentionMeta:
    device = table.device
    return AttentionMeta(
        query_lens=[1] * sequences,
        context_lens=[context] * sequences,
        query_start=torch.arange(sequences + 1, device=device, dtype=torch.int32),
        context_len=torch.full((sequences,), context, device=device, dtype=torch.int32),
        block_table=table,
        slots=torch.arange(sequences, device=device),
    )


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median seconds of a call, from its start until the device has done the work that the call has
    queued."""
    return wall_ms(call, device, repeats) / 1e3
