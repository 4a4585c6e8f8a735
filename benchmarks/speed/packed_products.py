"""Products of packed weights by form, and a layer of packed experts, beside what their bytes take.

    python -m benchmarks.speed.packed_products [--rounds 9]

Rows are multiplied by random weights that together are larger than the processor's caches, each read once a round:

q8, q4        groups of 32 inputs; q4 has lows
int4          a quantised checkpoint's own codes, without lows
fp4           places in the table of FP4, groups of 32 (MXFP4)
nvfp4         the same in groups of 16
experts       a layer of Qwen3-30B-A3B's shape in q4: 128 experts of 2,048 inputs and 768 in between, 8 a row, drawn
              anew for every call; transformers' module of experts with packed weights

The time of a call stands beside the time that the bytes it has to read take at the rate at which all cores read memory,
measured in every round. Arms take turns. Held: int4 takes as long as q4 or less, within the larger of both spreads; fp4
at most 1.1 x q4; experts at most 1.3 x what their bytes take.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Quick, Run
from benchmarks.harness.in_process import as_engine_process
from benchmarks.harness.measures import spread
from benchmarks.harness.tables import show_rows
from benchmarks.speed.raw_speed import read_rate

WIDTH, MATRICES = 4096, 24  # 250 MB of q4
EXPERTS, INPUTS, MIDDLE, EACH, LAYERS = 128, 2048, 768, 8, 3
ROWS = (1, 3, 16)
CALLS = 24
FORMS: dict[str, tuple[int, int, bool, str | None]] = {  # bits, group, lows, table
    "q8": (8, 32, False, None),
    "q4": (4, 32, True, None),
    "int4": (4, 32, False, None),
    "fp4": (4, 32, False, "e2m1"),
    "nvfp4": (4, 16, False, "e2m1"),
}
ARMS = (*FORMS, "experts")
MOST_FP4, MOST_EXPERTS = 1.1, 1.3


@dataclass(frozen=True, slots=True)
class Arm:
    """A form of weights to multiply by. call: multiplies `rows` rows by the next weight, and returns the bytes that
    this has to read."""

    call: Callable[[int], int]

    def time(self, rows: int) -> tuple[float, float]:
        """Return the mean milliseconds and megabytes of a call with `rows` rows."""
        began_s = time.perf_counter()
        size = sum(self.call(rows) for _ in range(CALLS))
        return (time.perf_counter() - began_s) * 1e3 / CALLS, size / 1e6 / CALLS


def random_weight(form: str, outputs: int, inputs: int, experts: int = 0) -> Any:
    """Return a packed weight with random codes. form: a key of FORMS. experts: 0 for a single matrix."""
    import torch

    from reprise.kernels.packed import BLOCK, GROUP, PackedWeight

    bits, group, has_lows, table = FORMS[form]
    blocks = max(1, experts) * (outputs // BLOCK)
    scales = (torch.rand(blocks, inputs // group, BLOCK) / 100).half()
    return PackedWeight(
        codes=torch.randint(0, 256, (blocks * BLOCK * inputs // GROUP * GROUP * bits // 8,), dtype=torch.uint8),
        scales=scales, lows=-8 * scales if has_lows else None, outputs=outputs, inputs=inputs, bits=bits,  # type: ignore[arg-type]
        group=group, table=table, experts=experts,  # type: ignore[arg-type]
    )  # fmt: skip


def matrices(form: str) -> Arm:
    import torch

    from reprise.engine.model.cpu.quantised import QuantisedLinear

    layers = [QuantisedLinear(random_weight(form, WIDTH, WIDTH), None) for _ in range(MATRICES)]
    if any(layer.few is None for layer in layers):
        raise RuntimeError("this processor runs no kernels for packed weights")
    place = 0

    def call(rows: int) -> int:
        nonlocal place
        place = (place + 1) % MATRICES
        layers[place](torch.ones(rows, WIDTH, dtype=torch.bfloat16))
        return int(layers[place].packed.size_bytes)

    return Arm(call)


def experts() -> Arm:
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from reprise.engine.model.cpu.quantised_experts import QuantisedProjection, compute_packed

    config = Qwen3MoeConfig(
        hidden_size=INPUTS, moe_intermediate_size=MIDDLE, num_experts=EXPERTS, num_experts_per_tok=EACH
    )
    layers = []
    for _ in range(LAYERS):
        with torch.device("meta"):
            layer = Qwen3MoeExperts(config)
        compute_packed(layer, "gate_up_proj", QuantisedProjection(random_weight("q4", 2 * MIDDLE, INPUTS, EXPERTS)))
        compute_packed(layer, "down_proj", QuantisedProjection(random_weight("q4", INPUTS, MIDDLE, EXPERTS)))
        layers.append(layer)
    size = sum(one.packed.size_bytes for one in (layers[0].gate_up_proj, layers[0].down_proj)) // EXPERTS
    place = 0

    def call(rows: int) -> int:
        nonlocal place
        place = (place + 1) % LAYERS
        chosen = torch.stack([torch.randperm(EXPERTS)[:EACH] for _ in range(rows)])
        layers[place](torch.ones(rows, INPUTS, dtype=torch.bfloat16), chosen, torch.rand(rows, EACH))
        return int(size) * len(chosen.unique())

    return Arm(call)


def measure(run: Run) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    with torch.inference_mode():
        names = run.arguments.arms
        arms = {name: experts() if name == "experts" else matrices(name) for name in run.track(names, "making weights")}
        samples: dict[str, dict[int, list[tuple[float, float]]]] = {name: {rows: [] for rows in ROWS} for name in arms}
        rates = []
        for number, in_order in run.rounds(names, range(run.arguments.rounds + 1)):
            rate = read_rate()
            for name in in_order:
                for rows in ROWS:
                    took_ms, size_mb = arms[name].time(rows)
                    if number:  # the first round warms up
                        samples[name][rows].append((took_ms, took_ms * rate / size_mb))
            rates.append(rate)
    found = {
        f"{name}, {rows} rows": {
            "call_ms": spread([took for took, _ in taken]), "over_bytes": spread([over for _, over in taken]),
        }
        for name, by_rows in samples.items() for rows, taken in by_rows.items()
    }  # fmt: skip
    return {"memory_read_gb_s": median(rates), "held": verdicts(found), "arms": found}


def verdicts(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, bool]:
    held = {}
    for rows in ROWS:
        q4, int4, fp4 = (found.get(f"{name}, {rows} rows") for name in ("q4", "int4", "fp4"))
        if q4 and int4:
            spare = max(one["call_ms"]["max"] - one["call_ms"]["min"] for one in (q4, int4))
            held[f"int4, {rows} rows: as fast as q4"] = int4["call_ms"]["median"] <= q4["call_ms"]["median"] + spare
        if q4 and fp4:
            ratio = fp4["call_ms"]["median"] / q4["call_ms"]["median"]
            held[f"fp4, {rows} rows: at most {MOST_FP4:g} x q4"] = ratio <= MOST_FP4
        if layer := found.get(f"experts, {rows} rows"):
            what = f"experts, {rows} rows: at most {MOST_EXPERTS:g} x what their bytes take"
            held[what] = layer["over_bytes"]["median"] <= MOST_EXPERTS
    return held


def show(console: Console, result: Mapping[str, Any]) -> None:
    show_rows(console, "Median, least, greatest", result["arms"])
    console.print(f"memory read by all cores: {result['memory_read_gb_s']} GB/s")


EXPERIMENT = Experiment(
    name="packed_products", about=__doc__, measure=measure, show=show, rounds=9, arms=ARMS,
    quick=Quick({"rounds": 1, "arms": ["q4", "int4"]}, holds=False),
)  # fmt: skip

if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
