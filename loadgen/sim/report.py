"""`reprise simulate` without a trace: a server of the papers' kind, arm beside arm, as JSON and as tables."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, cast, get_args

from rich.table import Table

from cache.policies import POLICIES
from loadgen.sim import Config, presets, simulate_belady
from loadgen.sim import simulate as run
from loadgen.sim.machine import Truncation

DEFAULT = "lookahead"  # the server's own for its lower tiers
LOADS = {"saturated": presets.saturated, "unsaturated": presets.unsaturated}


def simulate(
    *,
    model: str,
    load: str,
    sessions: int,
    policies: Sequence[str],
    dram_bytes: float,
    disk_bytes: float,
    truncation: str,
    warmup_turns: int,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Recompute, and every policy: keys of POLICIES, default, belady, unbounded. Raises ValueError for what is not
    known."""
    for kind, name, known in (
        ("model", model, presets.SHAPES),
        ("load", load, LOADS),
        ("truncation", truncation, get_args(Truncation)),
    ):
        if name not in known:
            raise ValueError(f"no {kind} {name!r}; there are {', '.join(known)}")
    known = ("default", *POLICIES, "belady", "unbounded")
    if unknown := [policy for policy in policies if policy not in known]:
        raise ValueError(f"no policy {', '.join(unknown)}; there are {', '.join(known)}")
    workload = LOADS[load](sessions=sessions, seed=seed)
    layer_s = presets.LAYER_S if load == "saturated" else 0.0
    machine = presets.machine(model, layer_s=layer_s, dram_bytes=dram_bytes, disk_bytes=disk_bytes)
    base = Config(answer_share=0.0, truncation=cast(Truncation, truncation), warmup_turns=warmup_turns)
    arms = []
    for arm in ("recompute", *policies):
        progress(arm)
        began = time.process_time()
        policy = DEFAULT if arm in ("default", "unbounded") else arm
        config = replace(base, policy=policy, prefetch=policy not in ("lru", "fifo"))
        if arm == "recompute":
            result = run(workload, machine, replace(base, reuse=False))
        elif arm == "belady":
            result = simulate_belady(workload, machine, replace(base, prefetch=False))
        elif arm == "unbounded":
            result = run(
                workload, replace(machine, dram_bytes=float("inf"), disk_bytes=0.0), replace(config, policy="lru")
            )
        else:
            result = run(workload, machine, config)
        figures = result.figures() | {"processor_s": round(time.process_time() - began, 1)}
        if arm == "unbounded":
            figures |= {"cost": None, "cost_storage": None}  # nobody sells it
        arms.append({"arm": arm} | figures)
    return {
        "model": model, "load": load, "sessions": sessions, "seed": seed, "truncation": truncation,
        "dram_bytes": dram_bytes, "disk_bytes": disk_bytes, "warmup_turns": warmup_turns,
        "assumptions": [asdict(row) for row in presets.TABLE], "arms": arms,
    }  # fmt: skip


def shown(result: dict[str, Any]) -> list[Table]:
    """The arms, and what is assumed."""
    arms = Table(title=f"{result['model']}, {result['load']}, {result['sessions']:,} sessions")
    for column in ("", "hit rate", "turns >= 2", "tokens", "DRAM", "prefill", "TTFT", "tokens/s", "GPU time", "cost"):
        arms.add_column(column, justify="left" if not column else "right")
    for arm in result["arms"]:
        arms.add_row(
            arm["arm"],
            *(f"{arm[key]:.1%}" for key in ("hit_rate", "hit_rate_returning", "token_hit_rate")),
            f"{arm['tier_hit_share'].get('dram', 0.0):.1%}",
            f"{arm['prefill_mean_s'] * 1e3:,.0f} ms",
            f"{arm['ttft_mean_s']:,.2f} s",
            f"{arm['prefill_tokens_per_s']:,.0f}",
            f"{arm['gpu_s'] / 3600:,.2f} h",
            "" if arm["cost"] is None else f"${arm['cost']:,.0f}",
        )
    assumed = Table(title="What is stated, and what is assumed")
    for column in ("what", "value", "from"):
        assumed.add_column(column)
    for row in result["assumptions"]:
        assumed.add_row(row["what"], row["value"], row["source"])
    return [arms, assumed]
