"""Decides how much of a context is stored as activations and how much as KV: HybridServe's Algorithm 1 and Equation 11.
Pure.

A block of activations is half as large as one of KV with full multi-head attention, but keys and values have to be
computed from it. The link brings weights and KV while the GPU computes keys and values, so both should take as long. A
model whose activations are no smaller than its KV, as with grouped heads, gains nothing: it gets none.
"""

from dataclasses import dataclass

from reprise.loadgen.offload.hardware import Host, OffloadedModel


@dataclass(frozen=True, slots=True)
class Allocation:
    """A division of memory: how many tokens have their activations on the GPU (`act_gpu`) and in host memory
    (`act_host`), and how many have their KV in host memory (`kv_host`). Every token counts with all of its layers."""

    act_gpu: float
    act_host: float
    kv_host: float

    @property
    def kv_per_act(self) -> float:
        """Blocks of KV for each block of activations in host memory, which is the ratio that the paper states."""
        return self.kv_host / self.act_host if self.act_host else float("inf")


def allocate(model: OffloadedModel, host: Host, host_bytes: float | None = None) -> Allocation:
    """Divide host memory between KV and activations by the paper's Algorithm 1. host_bytes: bytes of host memory to
    divide; None: all that the model's weights leave.

    A layer's weights load while the GPU computes keys and values from the activations that lie on the GPU. If the GPU
    would then be idle, as many activations are put into host memory as it can turn into KV in that time. If the link
    would be idle, as much KV is put there as it can load. The rest of the memory is divided so that loading its KV
    takes as long as computing KV from its activations. As in the paper's Equation 9, the time to load activations is
    not counted.
    """
    if host_bytes is None:
        host_bytes = host.host_bytes - model.num_layers * model.weight_bytes
    kv_bytes, act_bytes = model.num_layers * model.kv_bytes, model.num_layers * model.act_bytes
    if act_bytes >= kv_bytes:
        return Allocation(0.0, 0.0, host_bytes / kv_bytes)
    load_s, make_s = host.load_s(model.kv_bytes), host.kv_gen_s(model, 1)  # times of a token: both are linear
    act_gpu = host.free_bytes(model) / act_bytes
    idle_s = host.weights_s(model, 0.0) - act_gpu * make_s
    act_host = min(max(0.0, idle_s) / make_s, host_bytes / act_bytes)
    kv_host = min(max(0.0, -idle_s) / load_s, host_bytes / kv_bytes)
    rest = host_bytes - act_host * act_bytes - kv_host * kv_bytes
    per_act = make_s / load_s
    more_act = rest / (per_act * kv_bytes + act_bytes)
    return Allocation(act_gpu, act_host + more_act, kv_host + per_act * more_act)


def next_is_act(act_blocks: int, kv_blocks: int, allocation: Allocation) -> bool:
    """Return whether a request's next block is to hold activations, not KV. The answer keeps the ratio of the request's
    blocks close to that of host memory."""
    return (act_blocks + 1) * allocation.kv_host <= (kv_blocks + 1) * allocation.act_host


def divide(num_blocks: int, allocation: Allocation) -> tuple[int, int]:
    """Return how many of a request's blocks hold activations and how many KV."""
    act = 0
    for number in range(num_blocks):
        act += next_is_act(act, number - act, allocation)
    return act, num_blocks - act
