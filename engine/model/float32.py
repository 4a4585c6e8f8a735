"""Runs a low-precision model in fp32 without a second copy: a layer's weights are fp32 only while that layer runs.

The result has no rounding to the model's own precision, so it shows how much of a difference is rounding.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute calls of `model` in fp32 until the end of the `with` block. Needs memory for one decoder layer in fp32,
    or for the embedding or the head if that is larger; packed weights stay packed, since their modules compute in the
    type of their inputs. Afterwards the parameters are the original objects again."""
    units = [unit for unit in map(_Unit, _parts(model)) if unit.is_narrow]
    handles = []
    try:
        for unit in units:
            handles.append(unit.module.register_forward_pre_hook(unit.widen, with_kwargs=True))
            handles.append(unit.module.register_forward_hook(unit.restore))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for unit in units:  # needed after a call that raised
            unit.restore()


class _Unit:
    """Modules whose weights are converted to fp32 together while the first of them is called."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.module = parts[0]
        self._tables: list[dict[str, Any]] = [table for m in parts for table in (m._parameters, m._buffers)]
        self._replaced: list[tuple[dict[str, Any], str, Tensor]] = []

    @property
    def is_narrow(self) -> bool:
        return any(_is_narrow(tensor) for table in self._tables for tensor in table.values())

    def widen(self, _: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        for table in self._tables:
            for name, tensor in table.items():
                if _is_narrow(tensor):
                    self._replaced.append((table, name, tensor))
                    table[name] = _widened(tensor)
        return tuple(map(_widened, args)), {name: _widened(value) for name, value in keywords.items()}

    def restore(self, *_: Any) -> None:
        while self._replaced:
            table, name, tensor = self._replaced.pop()
            table[name] = tensor


def _parts(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield each element of a layer list together with all its submodules, and every other module alone."""
    for child in module.children():
        if isinstance(module, nn.ModuleList):
            yield list(child.modules())
        else:
            yield [child]
            yield from _parts(child)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < torch.float32.itemsize


def _widened(value: Any) -> Any:
    if not _is_narrow(value):
        return value
    return nn.Parameter(value.float(), False) if isinstance(value, nn.Parameter) else value.float()
