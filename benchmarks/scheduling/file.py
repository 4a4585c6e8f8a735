"""What `benchmarks.scheduling.compare` has measured so far, in a file from which it goes on."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.scheduling.legs import Leg, Sample


@dataclass(frozen=True, slots=True)
class Calibration:
    prefill_s: float  # for a turn's new tokens after a mean history in HBM, nobody else running
    disk_gbps: float
    load_s: float  # of a mean history from the throttled disk, as measured
    service_rate: float  # turns a second
    begin_s: float  # of a leg's conversations at the same time: the pace at which that rate holds
    window: int  # places


def save(file: Path, workload: dict[str, Any], calibration: Calibration, legs: Sequence[Leg]) -> None:
    """All of it, so that a run that is cut short leaves the file as it was."""
    content = {"workload": workload, "calibration": asdict(calibration), "legs": [_fields(leg) for leg in legs]}
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".tmp")
    fresh.write_text(json.dumps(content), encoding="utf-8")
    fresh.replace(file)


def load(file: Path, workload: dict[str, Any]) -> tuple[Calibration, list[Leg]] | None:
    """Read what was measured so far; None if there is no file. Raises ValueError if it is of another workload."""
    if not file.exists():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["workload"] != workload:
        raise ValueError(f"{file} is of another workload: {content['workload']}")
    return Calibration(**content["calibration"]), [_leg(values) for values in content["legs"]]


def _fields(leg: Leg) -> dict[str, Any]:
    named = {field.name: getattr(leg, field.name) for field in fields(Leg)}
    return {**named, "samples": [asdict(sample) for sample in leg.samples]}


def _leg(values: dict[str, Any]) -> Leg:
    samples = [Sample(**{**sample, "gaps_s": tuple(sample["gaps_s"])}) for sample in values["samples"]]
    return Leg(**{**values, "counts": Counter(values["counts"]), "samples": samples})


def next_round(legs: Sequence[Leg], legs_per_round: int) -> int:
    """The first that is not complete."""
    done = Counter(leg.round_ for leg in legs)
    return next(round_ for round_ in range(len(done) + 1) if done[round_] < legs_per_round)
