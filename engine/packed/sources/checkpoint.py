"""Reads the tensors of a checkpoint in safetensors, whole or some rows of them."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from reprise.engine.model.checkpoint_files import checkpoint_files


class SourceRefused(ValueError):
    """A quantised checkpoint cannot be read as what it says it is. The message says why."""


class Checkpoint:
    """The tensors of a model directory's safetensors files, which are mapped, not read. For one thread."""

    def __init__(self, path: Path) -> None:
        """Read the names in all files that belong to the checkpoint. Raises SourceRefused."""
        self.path = path
        self._opened: dict[str, Any] = {}  # file by tensor
        try:
            for file in checkpoint_files(path):
                opened: Any = safe_open(file, framework="pt")
                for name in opened.keys():  # noqa: SIM118
                    if name in self._opened:
                        raise SourceRefused(f"two files of {path} have a tensor {name[:80]}")
                    self._opened[name] = opened
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            raise (
                error if isinstance(error, SourceRefused) else SourceRefused(f"{path} cannot be read: {error}")
            ) from error
        self.names = tuple(sorted(self._opened))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The type of a tensor's numbers as safetensors writes it: F32, BF16, F8_E4M3, I32, U8."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[name].get_tensor(name)
        return tensor

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return a tensor's rows `first` to `last` (not included)."""
        tensor: Tensor = self._slice(name)[first:last]
        return tensor

    def columns(self, name: str, first: int, last: int) -> Tensor:
        """Return columns `first` to `last` (not included) of a matrix."""
        tensor: Tensor = self._slice(name)[:, first:last]
        return tensor

    def _slice(self, name: str) -> Any:
        return self._opened[name].get_slice(name)
