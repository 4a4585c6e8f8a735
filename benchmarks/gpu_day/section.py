"""What the measuring sections have in common: their arguments, the model, and how a duration is taken."""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Asked:
    device: torch.device
    shape: str
    model: Path
    out: Path

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def made_model(self) -> str:
        """Directory of the random model, made if it is not there."""
        from benchmarks.harness.make_model import SHAPES, make_model

        if not self.model.exists():
            make_model(self.model, SHAPES[self.shape], seed=0, device=self.device)
        return str(self.model)

    def write(self, result: Mapping[str, Any]) -> None:
        """What is known so far: a section that is stopped leaves that."""
        self.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


def asked() -> Asked:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return Asked(**vars(parser.parse_args()))


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of a call with what it has put on the device; once before, unmeasured."""
    taken = []
    for _ in range(repeats + 1):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        taken.append(time.perf_counter() - started)
    return median(taken[1:])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
