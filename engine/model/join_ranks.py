"""Connects the processes that share a model."""

import datetime
import os

import torch
import torch.distributed as dist

from reprise.engine.model.loading import ModelRefused

_TIMEOUT = datetime.timedelta(hours=2)  # a hang is found by the app, which hears nothing then


def join_ranks(device: torch.device, rank: int, num_ranks: int, rendezvous: str) -> None:
    """Connect this process with the other ranks, over gloo on CPU and NCCL on CUDA. Waits for all of them. Raises
    ModelRefused."""
    accelerator = torch.accelerator.current_accelerator()
    if device.type == "cpu" and accelerator is not None:
        # transformers shares a model out to the accelerators that torch sees, whatever the setting says.
        raise ModelRefused(f"tensor parallelism on CPU: hide the {accelerator.type} devices (CUDA_VISIBLE_DEVICES='')")
    if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ModelRefused(f"model.tensor_parallel is {num_ranks}, and there are {torch.cuda.device_count()} devices")
    # Sums travel over the loopback interface only; rank 0's environment is its own, the others' is made by it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=dist.FileStore(rendezvous, num_ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=num_ranks,
        timeout=_TIMEOUT,
    )
