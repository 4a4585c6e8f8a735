"""Lists the attention backends by name. Each imports its library only when requested, so listing them loads nothing."""

from collections.abc import Callable

from reprise.kernels.attention.ragged_batch import AttentionBackend


def _naive() -> AttentionBackend:
    from reprise.kernels.attention.naive import NaiveAttention

    return NaiveAttention()


def _torch_cpu() -> AttentionBackend:
    from reprise.kernels.attention.torch_cpu import TorchAttention

    return TorchAttention()


def _flash() -> AttentionBackend:
    from reprise.kernels.attention.flash_attn import FlashAttention

    return FlashAttention()


def _triton() -> AttentionBackend:
    from reprise.kernels.attention.triton_paged import TritonPagedAttention

    return TritonPagedAttention()


# Creating one may raise BackendUnavailable. tests/kernels/test_attention.py compares every backend with the naive one.
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "naive": _naive,
    "torch_cpu": _torch_cpu,
    "flash": _flash,
    "triton": _triton,
}
