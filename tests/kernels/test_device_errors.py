"""Tests of what errors of a device are told by: their class where torch raises them, else their text."""

import errno

import pytest
import torch

from reprise.kernels.device_errors import is_sticky, lacks_memory

STICKY = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: misaligned address"),
    RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA driver error: unspecified launch failure"),
]
NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4503599627370496 bytes."),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
OTHERS = [
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    RuntimeError("a file named illegal memory access"),
    torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
    torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture"),
    ValueError("CUDA error: device-side assert triggered"),
    OSError(errno.EIO, "out of memory on a device's controller"),
]


@pytest.mark.parametrize("error", STICKY, ids=str)
def test_errors_after_which_a_device_does_nothing_more(error: Exception) -> None:
    assert is_sticky(error)
    assert not lacks_memory(error)
    wrapped = RuntimeError("a thread failed")
    wrapped.__cause__ = error
    outer = RuntimeError("a load failed")
    outer.__cause__ = wrapped
    assert is_sticky(outer)


@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_a_lack_of_memory_passes(error: Exception) -> None:
    assert lacks_memory(error)
    assert not is_sticky(error)


def test_host_memory_that_torch_lacks_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 52, dtype=torch.uint8)
    assert lacks_memory(raised.value)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_say_nothing_of_the_device(error: Exception) -> None:
    assert not is_sticky(error)
    assert not lacks_memory(error)
