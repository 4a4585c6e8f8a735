"""The parts of a day: sections, which are processes, and their items, which are measured one after the other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of a section's process. carried: the folder of files that are not of this project
    (`benchmarks.gpu_day.carried`)."""

    device: torch.device
    carried: Path
    out: Path  # for nothing but what a tool must write itself

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement. measure: takes what the section's `open_section` returned, and yields each line of results as
    soon as it is known. limit_s: seconds after which the section's process is ended; a new process goes on with the
    next item."""

    name: str
    limit_s: float
    measure: Callable[[Any], Iterable[Values]]


class Section(Protocol):
    """The functions that the module of a section has."""

    def open_section(self, asked: Asked) -> Any:
        """Return the state that all items of the section use. Called once in each process of the section."""
        ...

    def items(self, asked: Asked) -> Sequence[Item]:
        """Return the section's measurements, in order."""
        ...
