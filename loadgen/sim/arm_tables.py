"""`reprise simulate` without a trace: compares policies on a simulated server like those of the papers, as JSON and
tables."""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast, get_args

from rich.table import Table

from reprise.loadgen.codec import CodedKV
from reprise.loadgen.sim import Config, Costs, Machine, presets, simulate_belady
from reprise.loadgen.sim import simulate as run
from reprise.loadgen.sim.machine import Truncation
from reprise.loadgen.sim.policies import SIMULATED_POLICIES

DEFAULT = "lookahead"  # the server's own policy
# The baselines neither look ahead for victims nor fetch ahead. Every other policy is simulated with fetches.
WITHOUT_LOOK_AHEAD = frozenset({"lru", "fifo", "first-come"})
LOADS = {"saturated": presets.saturated, "unsaturated": presets.unsaturated}


def preset(model: str, load: str, *, dram_bytes: float, disk_bytes: float) -> Machine:
    """Return the preset machine. Raises ValueError for unknown names and sizes."""
    _known("model", model, presets.SHAPES)
    _known("load", load, LOADS)
    if not (dram_bytes < math.inf and disk_bytes < math.inf):
        raise ValueError("a tier has a size: `unbounded` among the policies is storage without end")
    return presets.machine(model, dram_bytes=dram_bytes, disk_bytes=disk_bytes)


def read_machine(path: Path) -> Machine:
    """Read the machine from an earlier result, with what had been measured on a server. Raises ValueError, OSError."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))["machine"]
        codec = CodedKV(**fields.get("codec", {}))
        return Machine(**{**fields, "costs": Costs(**fields["costs"]), "codec": codec}).check()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no machine: {error}") from None


def simulate(
    *,
    machine: Machine,
    load: str,
    sessions: int,
    sessions_per_s: float | None,
    policies: Sequence[str],
    truncation: str,
    warmup_turns: int,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Simulate recomputation and every policy: keys of SIMULATED_POLICIES, default, belady, unbounded. load: a key of
    LOADS. sessions_per_s: None for the load's own rate. truncation: "decoupled", or "coupled", in which a cut loses
    what is saved. warmup_turns: the first turns, which do not count. progress: called with each policy's name. Raises
    ValueError for unknown names."""
    _known("load", load, LOADS)
    _known("truncation", truncation, get_args(Truncation))
    for policy in policies:
        _known("policy", policy, ("default", *SIMULATED_POLICIES, "belady", "unbounded"))
    rate = {} if sessions_per_s is None else {"rate_per_s": sessions_per_s}
    workload = LOADS[load](sessions=sessions, seed=seed, **rate)
    base = Config(answer_share=0.0, truncation=cast(Truncation, truncation), warmup_turns=warmup_turns)
    arms = []
    for arm in ("recompute", *policies):
        progress(arm)
        began = time.process_time()
        policy = DEFAULT if arm in ("default", "unbounded") else arm
        config = replace(base, policy=policy, prefetch=policy not in WITHOUT_LOOK_AHEAD)
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
            figures |= {"cost": None, "cost_storage": None}  # unlimited storage has no price
        arms.append({"arm": arm} | figures)
    return {
        "machine": _fields(machine), "load": load, "sessions": sessions, "sessions_per_s": sessions_per_s, "seed": seed,
        "truncation": truncation, "warmup_turns": warmup_turns,
        "assumptions": [asdict(row) for row in presets.TABLE], "arms": arms,
    }  # fmt: skip


def _fields(machine: Machine) -> dict[str, Any]:
    """Return the machine for JSON, which has no infinity; fields that are unlimited by default are left out."""
    fields = asdict(machine)
    if machine.codec.decode_bytes_per_s == math.inf:
        del fields["codec"]["decode_bytes_per_s"]
    if machine.costs.attention_span == math.inf:
        del fields["costs"]["attention_span"]
    return fields


def _known(kind: str, name: str, known: Iterable[str]) -> None:
    if name not in (known := tuple(known)):
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(known)}")


def shown(result: dict[str, Any]) -> list[Table]:
    """Return tables of the arms (the compared variants) and of the assumptions."""
    arms = Table(title=f"{result['machine']['name']}, {result['load']}, {result['sessions']:,} sessions")
    for column in ("", "hit rate", "turns >= 2", "tokens", "DRAM", "prefill", "TTFT", "tokens/s", "GPU time", "cost"):
        # fold, so that no digit is cut off
        arms.add_column(column, justify="left" if not column else "right", overflow="fold")
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
