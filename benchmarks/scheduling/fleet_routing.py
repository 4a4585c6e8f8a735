"""Which replica serves a turn: the gateway's own routing against others, in simulated fleets.

    python -m benchmarks.scheduling.fleet_routing
    python -m benchmarks.scheduling.fleet_routing --parts large     1,000 replicas; about a million turns

Replicas are the event-driven simulator's servers (the server's own queue and eviction policies; a model of 8B on an
A100, 60 GB of DRAM, 25 Gbit/s Ethernet). Chats and one agent in ten sessions begin independently of each other. Load is
a share of what one replica finishes whose batch is always full. A fleet carries more than 1 for a while, since sessions
that have just begun have short contexts. A gateway knows beats that are up to a second old; Redis has a rate that loads
and uploads share.

    grid    policies at several loads and rates of Redis; contexts of at most 32,768 tokens
    long    contexts of at most 120,000 tokens
    kill    one replica ends without a warning; turns of the 40 s after it, with and without Redis
    late    guarded routing with older beats and more gateways
    large   1,000 replicas, guarded routing and hashing, and what a turn costs to simulate

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
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from loadgen.fleet import books
from loadgen.fleet.result import FleetResult, summarize
from loadgen.fleet.simulation import FleetConfig, FleetSimulation
from loadgen.fleet.workload import LINK_BYTES_PER_S, REPLICA, SERVER, conversations, sessions_per_s

PARTS = ("grid", "long", "kill", "late", "large")
HASHING, STICKY, CLAIRVOYANT, AFTER_KILL = 0.6, 1.02, 1.2, 0.2
KILL_LOAD, AFTER_KILL_S = 1.0, 40.0
CLAIRVOYANT_LOAD = 0.5
LARGE = 1000
SHORT, LONG = 32_768, 120_000  # tokens of a context at most
AMPLE = "ample"

Row = dict[str, Any]


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    cells = [cell for part in arguments.parts for cell in cells_of(part, arguments)]
    capacity = {
        most: sessions_per_s(
            REPLICA, SERVER, conversations(rate_per_s=1.0, duration_s=1600.0, seed=0, most_tokens=most)
        )
        for most in sorted({cell["most_tokens"] for cell in cells})
    }
    result: dict[str, Any] = {
        "replica": {
            "sessions_per_s": capacity,
            "dram_gb": REPLICA.dram_bytes / 1e9,
            "link_gb_per_s": LINK_BYTES_PER_S / 1e9,
        },
        "replicas": arguments.replicas,
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
        "rows": [],
    }
    run.expect(len(cells), "starting")
    simulate = partial(play, capacity=capacity, seconds=arguments.seconds, rounds=arguments.rounds)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for cell, found in zip(cells, pool.map(simulate, cells), strict=True):
            run.describe(" ".join(str(cell[key]) for key in ("part", "load", "redis", "policy")))
            result["rows"].append(cell | found)
            run.advance()
            run.keep(result)
    return result | {"held": held(result["rows"])}


def cells_of(part: str, arguments: Any) -> Iterator[Row]:
    """What is simulated for a part. redis: GB/s of the fleet, `ample` for as much as all links, 0 for none."""
    plain = {"part": part, "replicas": arguments.replicas, "most_tokens": SHORT, "gateways": 1, "beat_s": 1.0}
    if part == "grid":
        for load in arguments.loads:
            for redis in (*arguments.redis, AMPLE):
                for policy in ("sticky", "guarded"):
                    yield plain | {"load": load, "redis": redis, "policy": policy}
            for policy in ("hash", "cheapest", *(["clairvoyant"] if load == CLAIRVOYANT_LOAD else [])):
                yield plain | {"load": load, "redis": AMPLE, "policy": policy}
            yield plain | {"load": load, "redis": min(arguments.redis, default=AMPLE), "policy": "cheapest"}
    elif part == "long":
        for load in arguments.long_loads:
            for redis in (min(arguments.redis, default=AMPLE), AMPLE):
                for policy in ("sticky", "guarded", *(["hash"] if redis == AMPLE else [])):
                    yield plain | {"most_tokens": LONG, "load": load, "redis": redis, "policy": policy}
    elif part == "kill":
        for redis in (0, AMPLE):
            for policy in ("hash", "guarded"):
                yield plain | {"most_tokens": LONG, "load": KILL_LOAD, "redis": redis, "policy": policy}
    elif part == "late":
        for gateways, beat_s in ((1, 0.2), (1, 2.5), (4, 1.0)):
            yield plain | {"load": 0.7, "redis": AMPLE, "policy": "guarded", "gateways": gateways, "beat_s": beat_s}
    else:
        for policy in ("hash", "guarded"):
            yield plain | {"replicas": LARGE, "load": 0.7, "redis": AMPLE, "policy": policy}


def play(cell: Row, capacity: Mapping[int, float], seconds: float, rounds: int) -> Row:
    """Simulate a cell in all rounds, and put their turns together."""
    replicas, redis = cell["replicas"], cell["redis"]
    rounds = 1 if cell["part"] == "large" else rounds
    kill_s = 0.75 * seconds if cell["part"] == "kill" else math.inf
    span = (0.5 * seconds, seconds) if kill_s == math.inf else (kill_s, kill_s + AFTER_KILL_S)
    config = FleetConfig(
        replicas=replicas, policy=cell["policy"], machine=REPLICA, server=SERVER, gateways=cell["gateways"],
        beat_s=cell["beat_s"], link_bytes_per_s=LINK_BYTES_PER_S, until_s=seconds, kill_s=kill_s,
        redis_bytes_per_s=replicas * LINK_BYTES_PER_S if redis == AMPLE else 1e9 * redis,
    )  # fmt: skip
    began_s = time.process_time()
    fleets = []
    for number in range(rounds):
        most = cell["most_tokens"]
        rate = cell["load"] * capacity[most] * replicas
        workload = conversations(rate_per_s=rate, duration_s=seconds, seed=1000 + number, most_tokens=most)
        fleets.append(FleetSimulation(workload, replace(config, seed=number)))
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
    """Judge what was simulated."""
    found: dict[str, bool] = {}
    for row in rows:
        if row["policy"] != "guarded" or row["part"] not in ("grid", "long", "kill"):
            continue
        same = {key: row[key] for key in ("part", "most_tokens", "load", "redis")}
        own, load, redis = row["ttft_p95_s"], row["load"], row["redis"]
        where = f"{row['most_tokens']:,} tokens, load {load:g}, Redis {redis if redis == AMPLE else f'{redis:g} GB/s'}"
        if row["part"] == "kill":
            if redis == AMPLE:
                without_s = p95_s(rows, **same | {"redis": 0}, policy="hash")
                found[f"{where}: after a kill {own / without_s:.2f} <= {AFTER_KILL:g} of hashing without Redis"] = (
                    own <= AFTER_KILL * without_s
                )
            continue
        ratio = own / p95_s(rows, **same, policy="sticky")
        found[f"{where}: {ratio:.2f} <= {STICKY:g} of sticky sessions"] = ratio <= STICKY
        if redis == AMPLE and load >= 0.7:
            ratio = own / p95_s(rows, **same, policy="hash")
            found[f"{where}: {ratio:.2f} <= {HASHING:g} of hashing"] = ratio <= HASHING
        if redis == AMPLE and load == CLAIRVOYANT_LOAD:
            ratio = own / p95_s(rows, **same, policy="clairvoyant")
            found[f"{where}: {ratio:.2f} <= {CLAIRVOYANT:g} of a clairvoyant"] = ratio <= CLAIRVOYANT
    return found


def show(console: Console, result: Mapping[str, Any]) -> None:
    table = Table(title="TTFT in ms; redis, computed: shares of the history, by where it was found")
    for column in (
        "part",
        "tokens",
        "load",
        "Redis GB/s",
        "policy",
        "p50",
        "p95",
        "p99",
        "moved",
        "redis",
        "computed",
        "µs/turn",
    ):
        table.add_column(column, justify="left" if column in ("part", "policy") else "right")
    for row in result["rows"]:
        sent = sum(row["routes"].get(route, 0) for route in ("home", "new", "moved"))
        table.add_row(
            row["part"], f"{row['most_tokens']:,}", f"{row['load']:g}", str(row["redis"]), row["policy"],
            *(f"{1e3 * row[f'ttft_{name}_s']:,.0f}" for name in ("p50", "p95", "p99")),
            f"{row['routes'].get('moved', 0) / sent:.1%}", f"{row['tokens']['redis']:.1%}",
            f"{row['tokens']['computed']:.1%}", str(row["us_per_turn"]),
        )  # fmt: skip
    console.print(table)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["grid", "long", "kill", "late"])
    parser.add_argument("--replicas", type=int, default=6, help="of all parts but `large`")
    parser.add_argument("--seconds", type=float, default=900.0, help="of the virtual clock; the second half counts")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once, each in a process of its own")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 0.7, 0.9])
    parser.add_argument("--long-loads", nargs="+", type=float, default=[0.7, 1.2], help="of the part `long`")
    parser.add_argument("--redis", nargs="+", type=float, default=[0.25, 2.0], help="GB/s, beside ample Redis")


EXPERIMENT = Experiment(
    name=lambda arguments: "fleet_routing_large" if arguments.parts == ["large"] else "fleet_routing",
    about=__doc__, measure=measure, show=show, options=options, rounds=2,
    rounds_help="workloads; their turns count together",
    quick=Quick(
        {"parts": ["grid"], "loads": [0.7], "redis": [], "replicas": 4, "seconds": 300.0, "rounds": 1},
        (Figure("guarded / hash, p95 TTFT, ample Redis",
                lambda result: p95_s(result["rows"], part="grid", load=0.7, redis=AMPLE, policy="guarded")
                / p95_s(result["rows"], part="grid", load=0.7, redis=AMPLE, policy="hash"), 1.5),),
        holds=False,
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
