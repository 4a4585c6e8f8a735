"""Measures what coded KV hits in the bytes of raw KV, on a recorded trace: benchmarks/results/coded_capacity.json.

    python -m benchmarks.paper.coded_capacity --trace ../shared/data/traces/mooncake_conversation.jsonl.gz

One tier, such as a disk, of the bytes that so many tokens of raw KV take; the first half of the trace warms up. Blocks
are as many times smaller as `benchmarks.texts codecs` measured at a budget, on SmolLM2; first and open ones stay raw
(`reprise.loadgen.blocks.replay`). Beside the server's policy stand LRU and Belady's.

Loads: how long it takes to read and decode what the requests that hit something hit, in the mean, of KV of SmolLM2, on
one core, with a fast disk and a slow one. It says when capacity is paid for with time.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.tables import show_rows
from reprise.loadgen.blocks.replay import BLOCK_TOKENS, hit_blocks
from reprise.loadgen.codec import RAW, CodedKV
from reprise.loadgen.workloads.traces import TraceRequest, read

SHARES = {0.001: 0.232, 0.004: 0.178}  # share of raw's bytes, by budget in nats a token
DECODE_BYTES_PER_S = 500e6  # raw, one core; docs/codec.md
KV_BYTES_PER_TOKEN = 23_040
DISKS = {"5 GB/s": 5e9, "0.15 GB/s": 0.15e9}
LEAST = {1_000_000: 0.22, 2_000_000: 0.30}  # share of blocks, in the bytes of so many raw tokens, at the first budget
POLICIES = "default", "lru", "belady"


def arms() -> dict[str, CodedKV]:
    coded = {f"transform {budget:g}": CodedKV(1 / share, DECODE_BYTES_PER_S) for budget, share in SHARES.items()}
    return {"raw": RAW, **coded}


def row(requests: list[TraceRequest], policy: str, capacity: int, arm: str, codec: CodedKV) -> dict[str, Any]:
    """Hits of the second half, and what their loads take."""
    half = len(requests) // 2
    hits = hit_blocks(requests, policy, capacity, codec=codec)[half:]
    blocks = sum(len(request.block_names) for request in requests[half:])
    hit_tokens = [
        min(hit * BLOCK_TOKENS, request.prompt_tokens)
        for hit, request in zip(hits, requests[half:], strict=True)
        if hit
    ]
    mean = sum(hit_tokens) / max(1, len(hit_tokens))
    loads = {name: codec.read_s(mean * KV_BYTES_PER_TOKEN, rate) for name, rate in DISKS.items()}
    return {
        "policy": policy, "capacity_tokens": capacity, "kv": arm, "ratio": round(codec.ratio, 3),
        "block_hit_rate": round(sum(hits) / blocks, 4), "hit_tokens_mean": round(mean),
        "load_ms": {name: round(1e3 * seconds, 1) for name, seconds in loads.items()},
    }  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    requests = read(run.arguments.trace)
    wanted = [(policy, capacity, arm) for policy in POLICIES for capacity in run.arguments.capacities for arm in arms()]
    rows = [row(requests, policy, capacity, arm, arms()[arm]) for policy, capacity, arm in run.track(wanted, "replays")]
    return {"trace": run.arguments.trace.name, "requests": len(requests), "rows": rows, "held": held(rows)}


def held(rows: list[dict[str, Any]]) -> dict[str, bool]:
    coded = f"transform {min(SHARES):g}"
    return {
        f"{coded} in the bytes of {found['capacity_tokens'] / 1e6:g} M raw tokens: at least {least} of the blocks": (
            found["block_hit_rate"] >= least
        )
        for found in rows
        if found["policy"] == "default"
        and found["kv"] == coded
        and (least := LEAST.get(found["capacity_tokens"])) is not None
    }


def show(console: Console, result: Any) -> None:
    show_rows(console, "Blocks hit, and the time to load what a request hits", result["rows"])


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument(
        "--capacities", type=lambda text: [int(word) for word in text.split(",")], default=[1_000_000, 2_000_000],
        help="tokens, comma-separated",
    )  # fmt: skip


EXPERIMENT = Experiment(name="coded_capacity", about=__doc__, measure=measure, show=show, options=options)

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
