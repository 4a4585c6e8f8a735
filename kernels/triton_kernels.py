"""Imports the modules of Triton kernels, if there is Triton."""

import functools
import importlib
from types import ModuleType


@functools.cache
def triton_copies() -> ModuleType | None:
    """Return `reprise.kernels.triton_copies`, or None without Triton."""
    return _imported("reprise.kernels.triton_copies")


@functools.cache
def triton_rows() -> ModuleType | None:
    """Return `reprise.kernels.triton_rows`, or None without Triton."""
    return _imported("reprise.kernels.triton_rows")


@functools.cache
def triton_draws() -> ModuleType | None:
    """Return `reprise.kernels.triton_draws`, or None without Triton."""
    return _imported("reprise.kernels.triton_draws")


@functools.cache
def triton_packed() -> ModuleType | None:
    """Return `reprise.kernels.triton_packed`, or None without Triton."""
    return _imported("reprise.kernels.triton_packed")


@functools.cache
def triton_transform() -> ModuleType | None:
    """Return `reprise.kernels.triton_transform`, or None without Triton."""
    return _imported("reprise.kernels.triton_transform")


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
