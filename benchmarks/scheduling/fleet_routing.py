"""Compares ways to choose the replica that serves a turn: the gateway's own routing against others, in simulated
fleets.

    python -m benchmarks.scheduling.fleet_routing
    python -m benchmarks.scheduling.fleet_routing --parts grid --policies guarded four-looks --loads 0.9
    python -m benchmarks.scheduling.fleet_routing --parts grid --replicas 1000 --seconds 300 --rounds 1 --loads 0.7

Replicas are the event-driven simulator's servers (the server's own queue and eviction policies; a model of 8B on an
A100, 60 GB of DRAM, 25 Gbit/s Ethernet). Chats and one agent in ten sessions begin independently of each other. As
many as there are after a long time are under way at the start: in a fleet that begins empty contexts are short, and
no turn waits at loads that the fleet cannot carry for long. Load is a share of what one replica finishes whose batch is
always full. A gateway knows beats that are up to a second old; Redis has a rate that loads and uploads share.

    grid    policies at several loads and rates of Redis; contexts of at most 32,768 tokens
    kill    one replica ends without a warning; turns of the 40 s after it, with and without Redis

Expected: guarded routing has at most 0.6 of hashing's p95 TTFT at loads from 0.7 on with ample Redis, at most 1.02
of sticky sessions' at every rate, at most 1.2 of a clairvoyant's at half load, and after a kill at most 0.2 of what
hashing takes without Redis. All rounds count together; a round is another workload.
"""

import math
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Quick, Run
from benchmarks.harness.tables import show_rows
from reprise.loadgen.fleet import books
from reprise.loadgen.fleet.baselines import VARIANTS
from reprise.loadgen.fleet.result import FleetResult, summarize
from reprise.loadgen.fleet.simulation import FleetConfig, FleetSimulation
from reprise.loadgen.fleet.workload import (
    LINK_BYTES_PER_S,
    REPLICA,
    SERVER,
    already_under_way,
    conversations,
    lifetime_s,
    sessions_per_s,
)
from reprise.loadgen.workloads.workload import Conversation

PARTS = ("grid", "kill")
POLICIES = ("hash", "sticky", "guarded", "clairvoyant", "cheapest")
WITHOUT_REDIS = ("hash", "clairvoyant")  # what they do does not depend on its rate
HASHING, STICKY, CLAIRVOYANT, AFTER_KILL = 0.6, 1.02, 1.2, 0.2
AFTER_KILL_S = 40.0
CLAIRVOYANT_LOAD = 0.5
MOST_TOKENS = 32_768  # limit of a context
WARM = 0.35  # share of the time that does not count: homes are hashed at the start
AMPLE = "ample"

Row = dict[str, Any]


def measure(run: Run) -> dict[str, Any]:
    asked = run.arguments
    cells = [cell for part in asked.parts for cell in cells_of(part, asked)]
    capacity = sessions_per_s(REPLICA, SERVER, drawn(asked.agents, 1.0, 1600.0, 0))
    result: dict[str, Any] = {
        "replica": {
            "sessions_per_s": capacity, "dram_gb": REPLICA.dram_bytes / 1e9, "link_gb_per_s": LINK_BYTES_PER_S / 1e9
        },
        "seconds": asked.seconds, "rounds": asked.rounds, "rows": [],
    }  # fmt: skip
    run.expect(len(cells), "starting")
    simulate = partial(play, capacity=capacity, seconds=asked.seconds, rounds=asked.rounds)
    with ProcessPoolExecutor(asked.jobs) as pool:
        for cell, found in zip(cells, pool.map(simulate, cells), strict=True):
            run.describe(" ".join(str(cell[key]) for key in ("part", "load", "redis", "policy")))
            result["rows"].append(cell | found)
            run.advance()
            run.keep(result | {"held": held(result["rows"])})
    return result | {"held": held(result["rows"])}


def drawn(agents: float, rate_per_s: float, duration_s: float, seed: int) -> list[Conversation]:
    return conversations(
        rate_per_s=rate_per_s, duration_s=duration_s, seed=seed, agents=agents, most_tokens=MOST_TOKENS
    )


def cells_of(part: str, asked: Any) -> Iterator[Row]:
    """Yield what is simulated for a part. redis: GB/s of the fleet, `ample` for as much as all links, 0 for none."""
    plain = {"part": part} | {name: getattr(asked, name) for name in ("replicas", "agents", "gateways", "beat_s")}
    if part == "kill":
        for load in (0.7, 0.9):
            for redis, policy in ((0, "hash"), (0, "guarded"), (AMPLE, "hash"), (AMPLE, "guarded")):
                yield plain | {"load": load, "redis": redis, "policy": policy}
        return
    for load in asked.loads:
        for redis in (AMPLE, *asked.redis):
            for policy in asked.policies:
                if redis == AMPLE or policy not in WITHOUT_REDIS:
                    yield plain | {"load": load, "redis": redis, "policy": policy}


def play(cell: Row, capacity: float, seconds: float, rounds: int) -> Row:
    """Simulate a cell in all rounds, and put their turns together. capacity: sessions a second of a full replica."""
    replicas, redis, agents = cell["replicas"], cell["redis"], cell["agents"]
    kill_s = 0.75 * seconds if cell["part"] == "kill" else math.inf
    span = (WARM * seconds, seconds) if kill_s == math.inf else (kill_s, kill_s + AFTER_KILL_S)
    config = FleetConfig(
        replicas=replicas, policy=cell["policy"], machine=REPLICA, server=SERVER, gateways=cell["gateways"],
        beat_s=cell["beat_s"], link_bytes_per_s=LINK_BYTES_PER_S, until_s=seconds, kill_s=kill_s,
        redis_bytes_per_s=replicas * LINK_BYTES_PER_S if redis == AMPLE else 1e9 * redis,
    )  # fmt: skip
    since_s = max(lifetime_s(one, REPLICA) for one in drawn(agents, 1.0, 1000.0, 0))
    began_s = time.process_time()
    fleets = []
    for number in range(rounds):
        begun = drawn(agents, cell["load"] * capacity * replicas, since_s + seconds, 1000 + number)
        workload, histories = already_under_way(begun, REPLICA, since_s=since_s)
        fleets.append(FleetSimulation(workload, replace(config, seed=number), histories=histories))
        fleets[-1].run()
        books.check(fleets[-1])
    spent_s = time.process_time() - began_s
    turns = sum(len(fleet.records) for fleet in fleets)
    return figures(summarize(fleets, from_s=span[0], to_s=span[1])) | {
        "simulated_turns": turns, "processor_s": round(spent_s, 1), "us_per_turn": round(1e6 * spent_s / turns)
    }  # fmt: skip


def figures(result: FleetResult) -> Row:
    rounded = {name: round(value, 4) for name, value in result.figures().items() if isinstance(value, float)}
    shares = {tier: round(share, 4) for tier, share in result.tokens.items()}
    gigabytes = {name: round(value / 1e9, 1) for name, value in result.redis_bytes.items()}
    return {"turns": result.turns, **rounded, "tokens": shares, "routes": result.routes, "redis_gb": gigabytes}


def p95_s(rows: Sequence[Row], **wanted: Any) -> float:
    """Return the p95 TTFT of the row that is meant, nan if it was not simulated."""
    return next((r["ttft_p95_s"] for r in rows if all(r[key] == value for key, value in wanted.items())), math.nan)


def held(rows: Sequence[Row]) -> dict[str, bool]:
    """Judge guarded routing in each cell by the others of that cell."""
    found: dict[str, bool] = {}
    for row in rows:
        if row["policy"] != "guarded":
            continue
        same = {key: row[key] for key in ("part", "replicas", "agents", "load", "redis")}
        load, redis = row["load"], row["redis"]
        limits = [("sticky", STICKY, "sticky sessions", same)]
        if row["part"] == "kill":
            words = "hashing without Redis, after a kill"
            limits = [("hash", AFTER_KILL, words, same | {"redis": 0})] if redis == AMPLE else []
        elif redis == AMPLE and load >= 0.7:
            limits.append(("hash", HASHING, "hashing", same))
        elif redis == AMPLE and load == CLAIRVOYANT_LOAD:
            limits.append(("clairvoyant", CLAIRVOYANT, "a clairvoyant", same))
        rate = redis if redis == AMPLE else f"{redis:g} GB/s"
        for policy, most, words, there in limits:
            ratio = row["ttft_p95_s"] / p95_s(rows, **there, policy=policy)
            if not math.isnan(ratio):
                where = f"{row['part']}: {row['replicas']} replicas, load {load:g}, Redis {rate}"
                found[f"{where}: {ratio:.2f} <= {most:g} of {words}"] = ratio <= most
    return found


def show(console: Console, result: Mapping[str, Any]) -> None:
    rows = [
        {name: row[name] for name in ("part", "replicas", "load", "redis", "policy")}
        | {f"{name}, ms": round(1e3 * row[f"ttft_{name}_s"]) for name in ("p50", "p95", "p99")}
        | {"moved": row["routes"].get("moved", 0), "from Redis": row["tokens"]["redis"],
           "computed": row["tokens"]["computed"], "us/turn": row["us_per_turn"]}
        for row in result["rows"]
    ]  # fmt: skip
    show_rows(console, "TTFT; moved turns; shares of the history by where it was found", rows)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--policies", nargs="+", choices=(*POLICIES, *VARIANTS), default=list(POLICIES), help="of grid")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.9, 0.7, 0.5], help="of grid")
    parser.add_argument("--redis", nargs="+", type=float, default=[0.25, 2.0], help="of grid: GB/s, beside ample Redis")
    parser.add_argument("--replicas", type=int, default=6)
    parser.add_argument("--agents", type=float, default=0.1, help="share of the sessions")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--beat-s", type=float, default=1.0, help="between two beats of a replica")
    parser.add_argument("--seconds", type=float, default=450.0, help="of the virtual clock; a third is not counted")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once, each in a process of its own")


EXPERIMENT = Experiment(
    name="fleet_routing", about=__doc__, measure=measure, show=show, options=options, rounds=2,
    rounds_help="workloads; their turns count together",
    quick=Quick({"parts": ["grid"], "loads": [0.7], "redis": [], "replicas": 4, "seconds": 200.0, "rounds": 1}),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
