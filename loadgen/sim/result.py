"""Defines the result of a simulated run: hit rates by turns, by prompt tokens and by history tokens; times, bytes and
costs."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from reprise.loadgen.measure.summary import Prices
from reprise.loadgen.percentile import percentile
from reprise.loadgen.sim.simulated_server import SimulatedServer
from reprise.loadgen.sim.turn import TurnRecord


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of the turns that count (those that start after the warm-up), unless a field says "of the whole run"."""

    turns: int
    first_turns: int
    hit_rate: float  # share of all turns; a session's first turn cannot hit
    hit_rate_returning: float  # share of turns >= 2
    token_hit_rate: float  # share of prompt tokens
    tier_token_hit_rate: dict[str, float]  # `token_hit_rate` split by tier
    tier_hit_share: dict[str, float]  # share of the tokens found, by tier; adds up to 1 unless nothing was found
    history_token_hit_rate: float  # share of history tokens
    prompt_tokens: int
    computed_tokens: int
    answer_tokens: int
    ttft_mean_s: float  # arrival to first token
    ttft_p50_s: float
    ttft_p95_s: float
    prefill_mean_s: float  # start to first token: TTFT without queueing
    queue_mean_s: float
    stalled_s: float  # time spent waiting for loads
    prefill_tokens_per_s: float  # prompt tokens per second of their prefills
    gpu_s: float  # time during which the machine was busy with them
    prefill_gpu_s: float  # GPU time of prefills in the whole run
    decode_gpu_s: float  # GPU time of decode steps in the whole run
    makespan_s: float  # length of the whole run
    cost: float  # dollars for the whole run; storage is charged only where KV is kept
    cost_storage: float  # the part of `cost` for storage
    cut_turns: int
    ttft_by_turn_s: list[float]  # mean, by turn of the conversation
    bytes: dict[
        str, float
    ]  # bytes of the whole run: into HBM by source, fetched into DRAM; evicted and refused by tier
    records: list[TurnRecord] = field(repr=False)

    def figures(self) -> dict[str, Any]:
        """Return all fields except the turns, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "records"}


def cost(seconds: float, *, gpus: float, dram_bytes: float, disk_bytes: float) -> tuple[float, float]:
    """Return ($ in total, $ for storage) for running a machine for `seconds`, at the AttentionStore paper's prices."""
    prices = Prices(gpus=gpus, dram_gb=dram_bytes / 1e9, ssd_gb=disk_bytes / 1e9)
    hours = seconds / 3600
    return hours * prices.per_hour, hours * (prices.per_hour - prices.gpus * prices.gpu)


def summarize(server: SimulatedServer) -> Result:
    machine, config = server.machine, server.config
    counted = server.records[config.warmup_turns :]
    if not counted:
        raise ValueError(
            f"{len(server.records):,} turns, and {config.warmup_turns:,} of them warm up (--warmup-turns): none is left"
        )
    prompts = sum(record.prompt_tokens for record in counted)
    history = sum(record.history_tokens for record in counted)
    found = {tier: sum(record.sources.get(tier, 0) for record in counted) for tier in ("hbm", "dram", "disk")}
    hits = sum(found.values())
    returning = [record for record in counted if record.turn]
    ttfts = [record.ttft_s for record in counted]
    prefill_s = sum(record.prefill_s for record in counted)
    by_turn: dict[int, list[float]] = {}
    for record in counted:
        by_turn.setdefault(record.turn, []).append(record.ttft_s)
    kept = config.reuse
    dollars, storage = cost(
        server.now,
        gpus=machine.gpus,
        dram_bytes=machine.dram_bytes if kept else 0.0,
        disk_bytes=machine.disk_bytes if kept else 0.0,
    )
    moved = {**server.loads.moved, "fetched": server.ahead.fetched_bytes}
    for name, tier in server.store.tiers.items():
        moved |= {f"evicted_{name}": tier.evicted, f"refused_{name}": tier.refused, f"written_{name}": tier.written}
    return Result(
        turns=len(counted),
        first_turns=len(counted) - len(returning),
        hit_rate=fmean(record.hit for record in counted),
        hit_rate_returning=fmean(record.hit for record in returning) if returning else 0.0,
        token_hit_rate=hits / prompts,
        tier_token_hit_rate={tier: tokens / prompts for tier, tokens in found.items()},
        tier_hit_share={tier: tokens / hits for tier, tokens in found.items()} if hits else {},
        history_token_hit_rate=hits / history if history else 0.0,
        prompt_tokens=prompts,
        computed_tokens=prompts - hits,
        answer_tokens=sum(record.answer_tokens for record in counted),
        ttft_mean_s=fmean(ttfts),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p95_s=percentile(ttfts, 0.95),
        prefill_mean_s=prefill_s / len(counted),
        queue_mean_s=fmean(record.started_s - record.arrived_s for record in counted),
        stalled_s=sum(record.stalled_s for record in counted),
        prefill_tokens_per_s=prompts / prefill_s,
        gpu_s=server.busy_s - server.marks[config.warmup_turns][1],
        prefill_gpu_s=server.prefill_s + server.stalled_s,
        decode_gpu_s=server.decode_s,
        makespan_s=server.now,
        cost=dollars,
        cost_storage=storage,
        cut_turns=sum(1 for record in counted if record.cut_tokens),
        ttft_by_turn_s=[fmean(by_turn[turn]) for turn in sorted(by_turn)],
        bytes=moved,
        records=server.records,
    )
