"""Plans the DRAM and disk for a workload: what each amount of storage hits, and what it costs in time and money.

Two ways lead to the same table. A trace that names its blocks is replayed block by block
(`reprise.loadgen.blocks.replay`), without a queue. Conversations from stated distributions are simulated with queue,
batch and loads (`reprise.loadgen.sim`), on as many machines as they need. The amounts double from row to row, up to
what keeps everything. Storage is DRAM up to a given size per machine, then disk. What would take longer to load than to
compute is computed.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.table import Table

from reprise.loadgen.blocks.replay import BLOCK_TOKENS, hit_blocks
from reprise.loadgen.codec import RAW
from reprise.loadgen.measure.summary import Prices
from reprise.loadgen.sim import Config, Machine, presets, simulate
from reprise.loadgen.workloads import think, traces
from reprise.loadgen.workloads.synthetic import Distribution
from reprise.loadgen.workloads.traces import TraceRequest
from reprise.loadgen.workloads.workload import Conversation, arrive

ROWS = 8
_HALVINGS = 3  # steps of bisection within the last doubling, to find the least storage that meets the target
_BUSY = 0.6  # highest share of a machine's time to plan for
_FEWEST, _MOST = 300, 1500  # bounds on the number of conversations simulated if none is given
_KV_ELEMENT_BYTES = 2  # bf16
_MAX_SEQS = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One amount of storage, summed over all machines, with what it hits and costs. Hit rates are shares of all prompt
    tokens."""

    dram_gb: float
    disk_gb: float
    hit_rate: float  # tokens loaded instead of computed; like the server, computes what would take longer to load
    dram_hit_rate: float
    ttft_s: float  # mean; for a trace without queueing
    gpus_busy: float  # mean number of GPUs busy with prompts
    dollars_per_hour: float  # cost of these GPUs and of the storage

    @property
    def stored_gb(self) -> float:
        return self.dram_gb + self.disk_gb


@dataclass(frozen=True, slots=True)
class Plan:
    workload: str
    model: str
    machines: int  # 0 for a trace, which is not assigned to machines
    kv_mb_per_token: float
    target: float
    most: float  # the best hit rate of all rows
    rows: tuple[Row, ...]  # by ascending storage; the first has none, the last room for everything
    notes: tuple[str, ...] = ()
    codec_ratio: float = 1.0  # how many times smaller KV is on disk

    @property
    def chosen(self) -> Row:
        """The row with the least storage that reaches the share `target` of the best hit rate of all rows."""
        return _least(self.rows, self.target)

    def figures(self) -> dict[str, Any]:
        return {**asdict(self), "chosen": asdict(self.chosen)}


def machine_of(model: str) -> Machine:
    """Return a preset of `reprise.loadgen.sim.presets`, or the machine for a directory with a config.json (KV in bf16,
    on one GPU like those of the presets). Raises ValueError."""
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
        if min(layers, hidden, heads, kv_heads, head_dim, parameters, window - 1) <= 0:
            raise ValueError("its sizes are none")
    except (OSError, LookupError, ValueError, TypeError, ArithmeticError) as error:
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
    """Plan the DRAM and disk for the requests of a trace: what each amount of storage hits and costs. Every request is
    considered alone: none waits for another, however many GPUs that takes. dram_gb: the most GB of DRAM; any storage
    beyond them is disk. target: the share (0 to 1) of the best hit rate that the chosen amount has to reach. progress:
    called with each amount, in GB. Raises ValueError for a trace that cannot be read or names no blocks, OSError."""
    requests = traces.read(path)
    blocks = {name for request in requests for name in request.block_names}
    if not blocks:
        raise ValueError(f"{path} names no blocks: nothing is known of what its prompts share")
    duration_s = max(requests[-1].at_s, 1.0)
    prompts = sum(request.prompt_tokens for request in requests)

    @cache
    def hits(dram: float, disk: float) -> list[int]:
        return _trace_hits(requests, dram, disk, machine)

    def row(stored: float) -> Row:
        progress(stored)
        dram = min(stored, dram_gb)
        anywhere, in_dram = hits(dram, stored - dram), hits(dram, 0.0)
        ttft_s = prefill_s = 0.0
        loaded = Counter[str]()
        for request, found, near in zip(requests, anywhere, in_dram, strict=True):
            near = min(near, found)
            first_s, compute_s, sources = _fastest(machine, request.prompt_tokens, near, found - near)
            ttft_s += first_s
            prefill_s += compute_s
            loaded.update(sources)
        busy = prefill_s / duration_s * machine.gpus
        rates = (loaded["dram"] + loaded["disk"]) / prompts, loaded["dram"] / prompts
        return _row(stored, dram, *rates, ttft_s / len(requests), busy, prices)

    rows = _rows(row, len(blocks) * BLOCK_TOKENS * machine.kv_bytes_per_token / 1e9, target)
    notes = []
    if longer := sum(request.prompt_tokens > machine.window for request in requests):
        notes.append(
            f"{longer / len(requests):.0%} of the prompts are longer than this model's window of {machine.window:,} "
            "tokens; they count as if it had room"
        )
    kv_mb = machine.kv_bytes_per_token / 1e6
    return Plan(path.name, machine.name, 0, kv_mb, target, _best(rows), tuple(rows), tuple(notes), machine.codec.ratio)


def of_distribution(
    machine: Machine, *, sessions: int, sessions_per_s: float, ttl_s: float, think_time: str,
    distribution: Distribution, seed: int, dram_gb: float, target: float, prices: Prices,
    progress: Callable[[float], None],
) -> Plan:  # fmt: skip
    """Plan the DRAM and disk for conversations drawn from `distribution`, of which `sessions_per_s` begin per second:
    what each amount of storage hits and costs. Assumes as many machines as could serve the conversations if no KV were
    stored. Simulates one of these machines with its part of the conversations; the first half of the simulated turns
    only fills the storage and is not counted.

    sessions: number of conversations to simulate; 0: enough for twice the TTL, within bounds. dram_gb: the most GB of
    DRAM per machine; any storage beyond them is disk. target: the share (0 to 1) of the best hit rate that the chosen
    amount has to reach. progress: called with each amount, in GB over all machines. Raises ValueError.
    """

    def drawn(count: int, rate: float) -> list[Conversation]:
        return workload(
            machine, sessions=count, sessions_per_s=rate, think_time=think_time, distribution=distribution, seed=seed
        )

    bare = replace(machine, dram_bytes=0.0, disk_bytes=0.0)
    rush = simulate(drawn(_FEWEST, 1e6), bare, Config(ttl_s=ttl_s))  # all at once: the least time per conversation
    machines = max(1, math.ceil(sessions_per_s * rush.gpu_s / _FEWEST / _BUSY))
    rate = sessions_per_s / machines
    count = sessions or enough(ttl_s, rate)
    conversations = drawn(count, rate)
    turns = [turn for conversation in conversations for turn in conversation.turns]
    all_gb = sum(turn.prompt_tokens + turn.answer_tokens for turn in turns) * machine.kv_bytes_per_token / 1e9
    warmup = len(turns) // 2
    turns_per_s = sessions_per_s * len(turns) / count

    def row(stored: float) -> Row:
        progress(stored)
        dram = min(stored / machines, dram_gb)
        sized = replace(machine, dram_bytes=dram * 1e9, disk_bytes=max(0.0, stored / machines - dram) * 1e9)
        result = simulate(conversations, sized, Config(ttl_s=ttl_s, recompute_if_faster=True, warmup_turns=warmup))
        # GPU seconds for prompts, and for contexts that were cut and recomputed in the middle of an answer
        busy = turns_per_s * result.prefill_gpu_s / len(turns) * machine.gpus
        in_dram = result.tier_token_hit_rate.get("dram", 0.0)
        return _row(stored, dram * machines, result.token_hit_rate, in_dram, result.ttft_mean_s, busy, prices)

    rows = _rows(row, all_gb * machines, target)
    notes = []
    span_s = conversations[-1].start_s
    if span_s < ttl_s < math.inf:
        notes.append(
            f"{count:,} conversations are simulated, {span_s:,.0f} s of them: less than the TTL. With more "
            "(--sessions) old ones take up more storage"
        )
    if machine.max_seqs == 1:
        notes.append(f"a machine with {machine.name} answers one request at a time")
    name = f"{sessions_per_s:g} sessions a second, TTL {ttl_s:g} s"
    kv_mb = machine.kv_bytes_per_token / 1e6
    return Plan(
        name, machine.name, machines, kv_mb, target, _best(rows), tuple(rows), tuple(notes), machine.codec.ratio
    )


def enough(ttl_s: float, sessions_per_s: float) -> int:
    """Return how many conversations begin within twice the time that KV is stored (`ttl_s`), within bounds."""
    return math.ceil(min(_MOST, max(_FEWEST, 2 * ttl_s * sessions_per_s)))


def workload(
    machine: Machine, *, sessions: int, sessions_per_s: float, think_time: str, distribution: Distribution, seed: int
) -> list[Conversation]:
    rng = random.Random(seed)
    scripts = [distribution.script(rng) for _ in range(sessions)]
    return arrive(scripts, rng=rng, rate_per_s=sessions_per_s, think=think.parse(think_time))


def _rows(row: Callable[[float], Row], all_gb: float, target: float) -> list[Row]:
    """Return rows by ascending storage. The first has none, and from the second on storage doubles up to slightly more
    than `all_gb`. Further rows halve the distance to the least storage that meets the target."""
    rows = [row(stored) for stored in (0.0, *(1.01 * all_gb / 2**place for place in reversed(range(ROWS))))]
    for _ in range(_HALVINGS):
        place = rows.index(_least(rows, target))
        if place < 2:  # little or no storage is needed
            break
        rows.insert(place, row((rows[place - 1].stored_gb + rows[place].stored_gb) / 2))
    return rows


def _best(rows: Sequence[Row]) -> float:
    """Return the best hit rate of all rows, which need not be the last row's: by chance, a tier can do worse with more
    room, and what loads slowly is computed."""
    return max(row.hit_rate for row in rows)


def _least(rows: Sequence[Row], target: float) -> Row:
    most = _best(rows)
    return next(row for row in rows if row.hit_rate >= target * most - 1e-9)


def _trace_hits(requests: Sequence[TraceRequest], dram_gb: float, disk_gb: float, machine: Machine) -> list[int]:
    """Return the hit tokens of every request, with DRAM and disk taken as one tier. Its capacity counts in coded KV: a
    codec compresses blocks on disk by its ratio, so DRAM, where KV is raw, holds fewer blocks per gigabyte."""
    codec = machine.codec if disk_gb else RAW
    capacity = (dram_gb / codec.ratio + disk_gb) * 1e9 / machine.kv_bytes_per_token
    if capacity < BLOCK_TOKENS:
        return [0] * len(requests)
    hits = hit_blocks(requests, "default", capacity, codec=codec)
    return [
        min(blocks * BLOCK_TOKENS, request.prompt_tokens - 1) for blocks, request in zip(hits, requests, strict=True)
    ]


def _fastest(machine: Machine, prompt: int, in_dram: int, on_disk: int) -> tuple[float, float, dict[str, int]]:
    """Return (seconds to the first token, seconds of computation, tokens loaded by tier) for the fastest of three ways:
    loading everything kept, only what is in DRAM, or nothing. Loads overlap with the computation layer by layer; only
    the excess counts."""
    found = []
    for dram, disk in ((in_dram, on_disk), (in_dram, 0), (0, 0)):
        prefill_s = machine.costs.prefill_s(prompt - dram - disk, dram + disk)
        load_s = machine.kv_bytes_per_token * dram / machine.dram_to_hbm + machine.disk_s(disk)
        found.append((max(prefill_s, load_s), prefill_s, {"dram": dram, "disk": disk}))
    return min(found, key=lambda one: one[0])


def _row(
    stored_gb: float, dram_gb: float, rate: float, in_dram: float, ttft_s: float, busy: float, prices: Prices
) -> Row:
    disk_gb = max(0.0, stored_gb - dram_gb)
    disk_gb = disk_gb if disk_gb > 1e-9 * stored_gb else 0.0
    dollars = replace(prices, gpus=busy, dram_gb=dram_gb, ssd_gb=disk_gb).per_hour
    return Row(dram_gb, disk_gb, rate, in_dram, ttft_s, busy, dollars)


def table(plan: Plan) -> Table:
    machines = f" on {plan.machines:,} machine{'s' * (plan.machines > 1)}" if plan.machines else ""
    coded = f", {plan.codec_ratio:g} times less on disk" if plan.codec_ratio > 1 else ""
    shown = Table(
        "", "DRAM GB", "disk GB", "hits, %", "of DRAM, %", "TTFT, s", "GPUs for prompts", "$ an hour",
        title=f"{plan.workload}; {plan.model}{machines}, {plan.kv_mb_per_token:.3g} MB of KV a token{coded}",
        caption=f"Hits: share of all prompt tokens that are loaded instead of computed; of DRAM: those that are there "
        f"when their turn begins. TTFT: mean{'' if plan.machines else ', without queueing'}. "
        f"*: the least that hits {plan.target:.0%} of the most, {plan.most:.1%}.",
    )  # fmt: skip
    for row in plan.rows:
        chosen = row == plan.chosen
        shown.add_row(
            "*" if chosen else "", amount(row.dram_gb), amount(row.disk_gb), f"{100 * row.hit_rate:.1f}",
            f"{100 * row.dram_hit_rate:.1f}", f"{row.ttft_s:.3f}", f"{row.gpus_busy:.2f}",
            f"{row.dollars_per_hour:.2f}", style="bold green" if chosen else None,
        )  # fmt: skip
    return shown


def amount(gb: float) -> str:
    return f"{gb:,.0f}" if gb >= 100 else f"{gb:.3g}"


def draw(plan: Plan, out: Path) -> None:
    """Draw hit rate, TTFT and cost over the amount of storage into the picture file `out`. Raises ImportError without
    matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    stored = [row.stored_gb for row in plan.rows[1:]]
    least = plan.chosen.stored_gb
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
