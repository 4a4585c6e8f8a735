"""Replicas that are replaced one by one while clients talk: what their users see of it. Real processes, the bundled
model.

    python -m benchmarks.fidelity.fleet_roll [--steady-s 60]

Three replicas behind a gateway, with KV in a Redis of its own. Clients hold conversations and are known by their
messages. Each replica is ended (SIGTERM) and started again on its directory, when the one before it is back.

Held: no request fails; TTFT p95 from the first SIGTERM on is at most 1.5 times that before, and the share of history
that is cached at least 0.95 times.
"""

import asyncio
import random
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.fleet.chat_stream import ChatStream, StreamFailed
from benchmarks.fleet.processes import SMALL, FleetProcesses, fleet_processes
from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.measures import ratio, rounded
from reprise.loadgen.percentile import percentile
from reprise.loadgen.workloads import filler_text

NAMES = ("a", "b", "c")
SETTINGS = {"cache.redis_gib": 0.5, "server.drain_s": 10}
CLIENTS, TURNS, ANSWER_TOKENS, MESSAGE_WORDS = 3, 5, 60, 40
THINK_S = (0.5, 1.5)
MOST_TTFT, LEAST_HIT = 1.5, 0.95
PARTS = ("steady", "rolling")


@dataclass(frozen=True, slots=True)
class Served:
    """One turn."""

    sent_s: float  # since the part began
    ttft_ms: float
    history_tokens: int
    cached_tokens: int
    replica: str
    route: str


class Clients:
    """Hold conversations until they are told to stop."""

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._seed = url, seed
        self._began_s = time.perf_counter()
        self.turns: list[Served] = []
        self.errors: list[str] = []
        self._is_over = asyncio.Event()

    def now_s(self) -> float:
        return time.perf_counter() - self._began_s

    def stop(self) -> None:
        """Let each client end its conversation."""
        self._is_over.set()

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(CLIENTS)))

    async def _client(self, number: int) -> None:
        rng = random.Random(f"roll/{self._seed}/{number}")
        while not self._is_over.is_set():
            messages: list[dict[str, str]] = []
            history = 0
            for _ in range(TURNS):
                messages.append({"role": "user", "content": filler_text.words(rng, MESSAGE_WORDS)})
                body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
                stream = ChatStream(self._url, body)
                sent_s = self.now_s()
                try:
                    await stream.run()
                except (StreamFailed, httpx.HTTPError) as error:
                    self.errors.append(f"after {sent_s:.1f} s: {error!r}")
                    break
                route = stream.route
                self.turns.append(
                    Served(
                        round(sent_s, 3), round(1e3 * stream.ttft_s, 2), history, stream.cached_tokens,
                        route["replica"], route["route"],
                    )
                )  # fmt: skip
                history = stream.context_tokens
                messages.append({"role": "assistant", "content": stream.text})
                await asyncio.sleep(rng.uniform(*THINK_S))


async def roll(run: Run, fleet: FleetProcesses) -> dict[str, Any]:
    """Replace all replicas while clients talk."""
    clients = Clients(fleet.gateway_url, run.arguments.seed)
    talking = asyncio.create_task(clients.run())
    run.expect(2 + len(NAMES), "steady")
    await asyncio.sleep(run.arguments.steady_s)
    from_s = clients.now_s()
    run.advance()
    replaced = []
    for name in NAMES:
        run.describe(f"replacing {name}")
        began_s = clients.now_s()
        await asyncio.to_thread(fleet.stop, name)
        ended_s = clients.now_s()
        await asyncio.to_thread(fleet.start, name)
        await asyncio.to_thread(fleet.wait_for, len(NAMES))
        times_s = {"began_s": began_s, "ended_s": ended_s, "back_s": clients.now_s()}
        replaced.append({"replica": name, **{what: rounded(when_s) for what, when_s in times_s.items()}})
        run.advance()
    run.describe("after it")
    await asyncio.sleep(run.arguments.steady_s / 2)
    clients.stop()
    await talking
    run.advance()
    found = {
        "steady": figures_of([turn for turn in clients.turns if turn.sent_s < from_s]),
        "rolling": figures_of([turn for turn in clients.turns if turn.sent_s >= from_s]),
    }
    turns = [asdict(turn) for turn in clients.turns]
    return {
        "held": verdicts(found, clients.errors),
        **found,
        "replaced": replaced,
        "errors": clients.errors,
        "turns": turns,
    }


def figures_of(turns: Sequence[Served]) -> dict[str, Any]:
    ttfts = [turn.ttft_ms for turn in turns]
    history = sum(turn.history_tokens for turn in turns)
    cached = sum(min(turn.cached_tokens, turn.history_tokens) for turn in turns)
    return {
        "turns": len(turns),
        "ttft_ms": {"p50": percentile(ttfts, 0.5), "p95": percentile(ttfts, 0.95)} if ttfts else None,
        "history_cached": ratio(cached, history),
        "routes": dict(Counter(turn.route for turn in turns)),
    }


def verdicts(found: dict[str, Any], errors: list[str]) -> dict[str, bool]:
    """What is held -> whether it holds."""
    steady, rolling = (found[part] for part in PARTS)
    held = {"no request fails": not errors}
    if steady["ttft_ms"] and rolling["ttft_ms"]:
        most_ms = MOST_TTFT * steady["ttft_ms"]["p95"]
        held[f"TTFT p95 at most {MOST_TTFT} x steady"] = rolling["ttft_ms"]["p95"] <= most_ms
    if steady["history_cached"] and rolling["history_cached"]:
        least = LEAST_HIT * steady["history_cached"]
        held[f"history cached at least {LEAST_HIT} x steady"] = rolling["history_cached"] >= least
    return held


def measure(run: Run) -> dict[str, Any]:
    with fleet_processes(run.directory, *NAMES, settings=SETTINGS) as fleet:
        return {"settings": {**SMALL, **SETTINGS}, **asyncio.run(roll(run, fleet))}


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="Turns while replicas are replaced", title_justify="left")
    for heading in ("part", "turns", "TTFT p50 / p95, ms", "history cached", "routes"):
        table.add_column(heading, justify="right")
    for part in PARTS:
        found = result[part]
        ttft = "{p50:.0f} / {p95:.0f}".format(**found["ttft_ms"]) if found["ttft_ms"] else "-"
        cached = "-" if found["history_cached"] is None else f"{found['history_cached']:.1%}"
        table.add_row(part, str(found["turns"]), ttft, cached, str(found["routes"]))
    console.print(table)
    for error in result["errors"][:20]:
        console.print(error)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--steady-s", type=float, default=60.0, help="before replicas are replaced")
    parser.add_argument("--seed", type=int, default=0)


def unfailed(result: Result) -> float:
    """The share of requests."""
    failed, served = len(result["errors"]), len(result["turns"])
    return served / max(1, served + failed)


EXPERIMENT = Experiment(
    name="fleet_roll", about=__doc__, measure=measure, show=show, options=options,
    quick=Quick(
        options={"steady_s": 10.0},
        holds=False,  # a few turns have no p95
        figures=[Figure("requests without an error", unfailed, 1.0, more_is_better=True)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
