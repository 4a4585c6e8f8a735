"""Computes tokens per second of a batch whose weights and contexts lie in host memory, by the form in which contexts
are stored.

A layer is computed for one mini-batch after another, as in FlexGen, so that its weights are loaded once. While one
mini-batch is computed, the next one and a part of the next layer's weights are loaded; new KV goes the other way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from reprise.loadgen.offload.allocation import Allocation, allocate, divide
from reprise.loadgen.offload.hardware import Host, OffloadedModel
from reprise.loadgen.offload.mini_batches import Load, pack

Arm = Literal["kv", "act", "hybrid", "static"]
"""The form in which contexts are stored. kv: KV alone, with as many weights on the GPU as fit (FlexGen); act:
activations alone; hybrid: both, by Algorithm 1 over as much host memory as the batch takes; static: both, by Algorithm
1 over all of it, whatever the batch takes."""
BLOCK_TOKENS = 16  # vLLM's
_LAYERS = 4  # simulated until times repeat


@dataclass(frozen=True, slots=True)
class Generated:
    """The rate, times and bytes of generating with a batch, from its prompts to the last tokens."""

    tokens_per_s: float
    prefill_s: float
    decode_s: float
    link_bytes: float  # bytes to the GPU while decoding
    gpu_busy: float  # share of the decoding time


def pipeline_s(weights_s: float, loads_s: Sequence[float], computes_s: Sequence[float]) -> float:
    """Return the seconds that a layer takes when layers follow each other. Its mini-batches are loaded in order
    (loads_s: seconds of each) into a buffer that holds two, and computed in order (computes_s: seconds of each). An
    equal part of the next layer's weights, which take weights_s together, is loaded before each mini-batch."""
    link_s = done_s = ended_s = weights_there_s = 0.0
    computed: list[float] = []
    for _ in range(_LAYERS):
        ended_s = done_s
        for load_s, compute_s in zip(loads_s, computes_s, strict=True):
            room_s = computed[-2] if len(computed) > 1 else 0.0
            link_s = max(link_s + weights_s / len(loads_s), room_s) + load_s
            done_s = max(done_s, link_s, weights_there_s) + compute_s
            computed.append(done_s)
        weights_there_s = link_s
    return done_s - ended_s


def generate(arm: Arm, model: OffloadedModel, host: Host, *, batch: int, prompt: int, answer: int) -> Generated:
    """Simulate the generation of a batch. arm: the form in which contexts are stored. batch: sequences. prompt, answer:
    tokens of each. Raises ValueError if the batch does not fit."""
    allocation, resident = _allocation(arm, model, host, batch * (prompt + answer / 2)), 0.0
    if allocation.act_host == 0:
        resident = min(1.0, host.free_bytes(model) / (model.num_layers * model.weight_bytes))
    most_bytes = model.num_layers * batch * (prompt + answer) * max(model.kv_bytes, model.act_bytes)
    if most_bytes + (1 - resident) * model.num_layers * model.weight_bytes > host.host_bytes:
        raise ValueError(f"{model.name}: {most_bytes / 1e9:.0f} GB of contexts do not fit beside the weights")
    decode_s = link_bytes = busy_s = 0.0
    for step in range(answer):
        layer_s, layer_bytes, layer_busy_s = _layer(model, host, allocation, resident, batch, prompt + step)
        decode_s += model.num_layers * layer_s
        link_bytes += model.num_layers * layer_bytes
        busy_s += model.num_layers * layer_busy_s
    prefill_s = host.prefill_s(model, batch, prompt, resident)
    return Generated(batch * answer / (prefill_s + decode_s), prefill_s, decode_s, link_bytes, busy_s / decode_s)


def _layer(
    model: OffloadedModel, host: Host, allocation: Allocation, resident: float, batch: int, context: int
) -> tuple[float, float, float]:
    """Return (seconds of a layer in a step, bytes over the link, seconds that the GPU computes). resident: the share of
    the layer's weights that stays on the GPU. batch: sequences. context: tokens of each."""
    act_blocks, _ = divide(-(-context // BLOCK_TOKENS), allocation)
    act = min(context, act_blocks * BLOCK_TOKENS)
    requests = [Load(act, context - act)] * batch
    most_tokens = int(host.buffer_bytes / (model.kv_bytes + (model.act_bytes if act else 0)))
    kv_s = model.kv_bytes / host.link_bytes_per_s
    batches = pack(
        requests, most_tokens=most_tokens, make_s=partial(host.kv_gen_s, model), load_s=lambda tokens: tokens * kv_s
    )
    on_gpu = min(1.0, allocation.act_gpu / (batch * act)) if act else 0.0
    moved = [
        len(chosen) * ((1 - on_gpu) * act * model.act_bytes + (context - act) * model.kv_bytes) for chosen in batches
    ]
    computes_s = [
        host.kv_gen_s(model, len(chosen) * act) + host.forward_s(model, len(chosen), len(chosen) * context)
        for chosen in batches
    ]
    weights_s = host.weights_s(model, resident)
    seconds = pipeline_s(weights_s, [host.load_s(size) for size in moved], computes_s)
    return seconds, (1 - resident) * model.weight_bytes + sum(moved), sum(computes_s)


def _allocation(arm: Arm, model: OffloadedModel, host: Host, tokens: float) -> Allocation:
    """Return the division of memory for an arm (a form in which contexts are stored). tokens: those of all the batch's
    contexts together, averaged over the generation."""
    if arm == "kv":
        return Allocation(0.0, 0.0, 1.0)
    if arm == "act":
        return Allocation(host.free_bytes(model) / (model.num_layers * model.act_bytes), 1.0, 0.0)
    if arm == "static":
        return allocate(model, host)
    least, most = 0.0, host.host_bytes
    for _ in range(60):
        middle = (least + most) / 2
        found = allocate(model, host, middle)
        if found.act_gpu + found.act_host + found.kv_host < tokens:
            least = middle
        else:
            most = middle
    found = allocate(model, host, most)
    # A request's blocks are those on the GPU, too, which are no small part here.
    return replace(found, act_host=found.act_gpu + found.act_host)
