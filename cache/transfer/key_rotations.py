"""Rotates keys for positions and back, as the transfer threads need it."""

from typing import Protocol

import torch
from torch import Tensor


class KeyRotations(Protocol):
    """Implemented by `reprise.engine.model.rotations.ModelRotations`. One per thread."""

    def rotate(self, layer: int, k_plain: Tensor, positions: Tensor) -> Tensor: ...
    def unrotate(self, layer: int, k: Tensor, positions: Tensor) -> Tensor: ...
    def halves(self, layer: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor] | None: ...
