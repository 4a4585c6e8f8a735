"""Finds the decoder layers of a transformers model."""

from collections.abc import Sequence

from torch import nn


def decoder_layers(model: nn.Module, count: int) -> Sequence[nn.Module]:
    """Return a model's decoder layers. Raises ValueError if no module list has `count` modules."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(f"there is no list of {count} layers")
