"""How much DRAM and disk a workload wants: what each amount of storage hits, and what it costs in time and money.

Two ways to the same table. A trace that names its blocks is replayed block by block (`loadgen.trace`), without a queue;
conversations from stated distributions are simulated with queue, batch and loads (`loadgen.sim`). The amounts double
from row to row, up to what keeps everything. DRAM comes first, up to a given size; the rest is disk.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from loadgen import replay, think
from loadgen.metrics import Prices
from loadgen.replay import Request
from loadgen.sim import Config, Machine, presets, simulate
from loadgen.synthetic import Distribution
from loadgen.trace import BLOCK_TOKENS, hit_rate
from loadgen.workload import Conversation, arrive

ROWS = 8
_KV_ELEMENT_BYTES = 2  # bf16
_MAX_SEQS = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One amount of storage. Rates are shares of all prompt tokens."""

    dram_gb: float
    disk_gb: float
    hit_rate: float
    dram_hit_rate: float
    ttft_s: float  # mean; of a trace that of its mean prompt, without queueing
    gpus_busy: float  # for prompts, in the mean
    dollars_per_hour: float  # these GPUs, and the storage


@dataclass(frozen=True, slots=True)
class Plan:
    workload: str
    model: str
    kv_mb_per_token: float
    target: float
    most: float  # the hit rate with room for everything
    rows: tuple[Row, ...]  # by storage, ascending; the first has none, the last room for everything

    @property
    def chosen(self) -> Row:
        """The least storage that hits `target` of what can be hit."""
        return next(row for row in self.rows if row.hit_rate >= self.target * self.most - 1e-9)

    def figures(self) -> dict[str, Any]:
        return {**asdict(self), "chosen": asdict(self.chosen)}


def machine_of(model: str) -> Machine:
    """A preset of `loadgen.sim.presets` by name, or a directory with a config.json (KV in bf16, on one GPU like
    those of the presets). Raises ValueError."""
    if model in presets.SHAPES:
        return presets.machine(model)
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        layers, hidden, heads = (config[k] for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        layer = 2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
        parameters = layers * layer + config["vocab_size"] * hidden
        window = int(config["max_position_embeddings"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        known = ", ".join(presets.SHAPES)
        raise ValueError(f"{model!r} is neither one of {known} nor a directory with a config.json: {error}") from None
    like = presets.machine("llama-13b")
    kv_bytes = 2.0 * layers * kv_heads * head_dim * _KV_ELEMENT_BYTES
    shape = replace(
        presets.one_gpu(presets.SHAPES["llama-13b"]), parameters=float(parameters), num_layers=layers,
        hidden_size=hidden, kv_bytes_per_token=kv_bytes, window=window, max_seqs=_MAX_SEQS,
    )  # fmt: skip
    return replace(
        like, name=Path(model).name, gpus=1, costs=presets.costs(shape), num_layers=layers,
        kv_bytes_per_token=kv_bytes, window=window, max_seqs=_MAX_SEQS,
    )  # fmt: skip


def of_trace(
    path: Path, machine: Machine, *, dram_gb: float, target: float, prices: Prices, progress: Callable[[float], None]
) -> Plan:
    """Raises ValueError for a trace that cannot be read or names no blocks, OSError."""
    requests = replay.read(path)
    blocks = {name for request in requests for name in request.block_names}
    if not blocks:
        raise ValueError(f"{path} names no blocks: nothing is known of what its prompts share")
    duration_s = max(requests[-1].at_s, 1.0)
    mean_tokens = sum(request.prompt_tokens for request in requests) / len(requests)
    rows = []
    for stored in _amounts(len(blocks) * BLOCK_TOKENS * machine.kv_bytes_per_token / 1e9):
        progress(stored)
        dram = min(stored, dram_gb)
        rate, in_dram = (_trace_rate(requests, gb, machine) for gb in (stored, dram))
        hits = {"dram": in_dram * mean_tokens, "disk": max(0.0, rate - in_dram) * mean_tokens}
        computed = round(mean_tokens * (1 - rate))
        prefill_s = machine.costs.prefill_s(max(1, computed), round(mean_tokens) - computed)
        # Loads hide behind the prefill layer by layer; what is longer than it shows.
        load_s = machine.kv_bytes_per_token * (hits["dram"] / machine.dram_to_hbm + hits["disk"] / machine.disk_to_dram)
        busy = prefill_s * len(requests) / duration_s * machine.gpus
        rows.append(_row(stored, dram, rate, min(in_dram, rate), max(prefill_s, load_s), busy, prices))
    return Plan(path.name, machine.name, machine.kv_bytes_per_token / 1e6, target, rows[-1].hit_rate, tuple(rows))


def of_distribution(
    machine: Machine, *, sessions: int, sessions_per_s: float, ttl_s: float, think_time: str,
    distribution: Distribution, seed: int, dram_gb: float, target: float, prices: Prices,
    progress: Callable[[float], None],
) -> Plan:  # fmt: skip
    """`sessions` conversations that begin `sessions_per_s` a second. Raises ValueError."""
    conversations = workload(
        machine, sessions=sessions, sessions_per_s=sessions_per_s, think_time=think_time, distribution=distribution,
        seed=seed,
    )  # fmt: skip
    turns = [turn for conversation in conversations for turn in conversation.turns]
    all_gb = sum(turn.prompt_tokens + turn.answer_tokens for turn in turns) * machine.kv_bytes_per_token / 1e9
    rows = []
    for stored in _amounts(all_gb):
        progress(stored)
        dram = min(stored, dram_gb)
        sized = replace(machine, dram_bytes=dram * 1e9, disk_bytes=(stored - dram) * 1e9)
        result = simulate(conversations, sized, Config(reuse=stored > 0, ttl_s=ttl_s))
        busy = result.prefill_gpu_s / result.makespan_s * machine.gpus
        in_dram = result.tier_token_hit_rate["dram"]
        rows.append(_row(stored, dram, result.token_hit_rate, in_dram, result.ttft_mean_s, busy, prices))
    name = f"{sessions_per_s:g} sessions a second, {sessions:,} of them, TTL {ttl_s:g} s"
    # A tier can do worse with more room by chance; the most is what was seen.
    most = max(row.hit_rate for row in rows)
    return Plan(name, machine.name, machine.kv_bytes_per_token / 1e6, target, most, tuple(rows))


def workload(
    machine: Machine, *, sessions: int, sessions_per_s: float, think_time: str, distribution: Distribution, seed: int
) -> list[Conversation]:
    rng = random.Random(seed)
    scripts = [distribution.script(rng) for _ in range(sessions)]
    return arrive(scripts, rng=rng, rate_per_s=sessions_per_s, think=think.parse(think_time))


def _amounts(all_gb: float) -> list[float]:
    """Nothing, then doubling up to room for everything and a little more."""
    return [0.0, *(1.01 * all_gb / 2**place for place in reversed(range(ROWS)))]


def _trace_rate(requests: Sequence[Request], stored_gb: float, machine: Machine) -> float:
    capacity = int(stored_gb * 1e9 / machine.kv_bytes_per_token)
    return hit_rate(requests, "default", capacity).token_hit_rate if capacity >= BLOCK_TOKENS else 0.0


def _row(
    stored_gb: float, dram_gb: float, rate: float, in_dram: float, ttft_s: float, busy: float, prices: Prices
) -> Row:
    disk_gb = stored_gb - dram_gb
    dollars = replace(prices, gpus=busy, dram_gb=dram_gb, ssd_gb=disk_gb).per_hour
    return Row(dram_gb, disk_gb, rate, in_dram, ttft_s, busy, dollars)


def table(plan: Plan) -> Table:
    shown = Table(
        "DRAM GB", "disk GB", "hits, %", "of DRAM, %", "TTFT, s", "GPUs for prompts", "$ an hour",
        title=f"{plan.workload}; {plan.model}, {plan.kv_mb_per_token:.3g} MB of KV a token",
        caption=f"Marked: the least that hits {plan.target:.0%} of what can be hit, {plan.most:.1%} of prompt tokens.",
    )  # fmt: skip
    for row in plan.rows:
        shown.add_row(
            f"{row.dram_gb:,.4g}", f"{row.disk_gb:,.4g}", f"{100 * row.hit_rate:.1f}",
            f"{100 * row.dram_hit_rate:.1f}", f"{row.ttft_s:.3f}", f"{row.gpus_busy:.2f}",
            f"{row.dollars_per_hour:.2f}", style="bold green" if row == plan.chosen else None,
        )  # fmt: skip
    return shown


def draw(plan: Plan, out: Path) -> None:
    """Hit rate, TTFT and cost over storage. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    stored = [row.dram_gb + row.disk_gb for row in plan.rows[1:]]
    least = plan.chosen.dram_gb + plan.chosen.disk_gb
    panels = (
        ("prompt tokens hit, %", [100 * row.hit_rate for row in plan.rows]),
        ("mean TTFT, s", [row.ttft_s for row in plan.rows]),
        ("$ an hour", [row.dollars_per_hour for row in plan.rows]),
    )
    for axes, (label, (without, *values)) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.plot(stored, values, marker="o", markersize=3)
        axes.axhline(without, color="grey", linestyle=":", label="nothing kept")
        if least > 0:
            axes.axvline(least, color="green", linestyle="--", label=f"{plan.target:.0%} of what can be hit")
        axes.set(xlabel="DRAM and disk, GB", ylabel=label, xscale="log")
        axes.set_ylim(bottom=0, top=1.1 * max(without, *values) or 1)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(f"{plan.workload}; {plan.model}", fontsize=10)
    figure.savefig(out, dpi=120)
