"""Defines how the transfer threads rotate keys for positions and back."""

from typing import Protocol

import torch
from torch import Tensor


class KeyRotations(Protocol):
    """A rotator of keys to their positions (RoPE) and back, for one transfer thread.
    `reprise.engine.model.rotations.ModelRotations` implements it."""

    def rotate(self, layer: int, k_plain: Tensor, positions: Tensor) -> Tensor: ...
    def unrotate(self, layer: int, k: Tensor, positions: Tensor) -> Tensor: ...
    def halves(self, layer: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor] | None: ...
