"""Replicas that are replaced one by one while clients talk: what their users see of it. Real processes, the bundled
model.

    python -m benchmarks.fleet roll [--steady-s 60]

Three replicas stand behind a gateway, with KV in a Redis of its own. Clients hold conversations and are known by their
messages. Each replica is ended (SIGTERM) and started again on its directory, when the one before it is back.

Held: no request fails; TTFT p95 from the first SIGTERM on is at most 1.5 times that before, and the share of history
that is cached at least 0.95 times.
"""

import asyncio
import random
import time
from typing import Any

from benchmarks.fleet.processes import SMALL, FleetProcesses, fleet_processes
from benchmarks.fleet.scenario import Account, Talk, asks, figures_of, show, words
from benchmarks.harness.experiment import Experiment, Quick, Run

NAMES = ("a", "b", "c")
SETTINGS = {"server.drain_s": 10}
CLIENTS, TURNS, ANSWER_TOKENS, MESSAGE_WORDS = 3, 5, 60, 40
THINK_S = (0.5, 1.5)
MOST_TTFT, LEAST_HIT = 1.5, 0.95
PARTS = ("steady", "rolling")


class Clients:
    """Hold conversations, one after the other, until `is_over`. `part` names the turns that are sent from now on."""

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._seed = url, seed
        self.account = Account()
        self.part = PARTS[0]
        self.is_over = False

    async def run(self, number: int) -> None:
        rng = random.Random(f"roll/{self._seed}/{number}")
        conversations = 0
        while not self.is_over:
            conversations += 1
            talk = Talk(f"roll-{number}-{conversations}", is_named=False)
            for _ in range(TURNS):
                said = words(rng, MESSAGE_WORDS)
                if await self.account.turn(talk, self._url, said, ANSWER_TOKENS, part=self.part) is None:
                    break
                await asyncio.sleep(rng.uniform(*THINK_S))


async def play(run: Run, fleet: FleetProcesses) -> dict[str, Any]:
    """Replace all replicas while clients talk."""
    clients = Clients(fleet.gateway_url, run.arguments.seed)
    replaced_s: dict[str, float] = {}
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(clients.run(number))
        run.expect(1 + len(NAMES), "steady")
        await asyncio.sleep(run.arguments.steady_s)
        clients.part = PARTS[1]
        for name in NAMES:
            run.advance()
            run.describe(f"replacing {name}")
            began_s = time.monotonic()
            await asyncio.to_thread(fleet.stop, name)
            await asyncio.to_thread(fleet.start, name)
            await asyncio.to_thread(fleet.wait_for, len(NAMES))
            replaced_s[name] = round(time.monotonic() - began_s, 2)
        run.describe("after it")
        await asyncio.sleep(run.arguments.steady_s / 2)
        clients.is_over = True
    return result_of(clients.account) | {"replaced_s": replaced_s}


def result_of(account: Account) -> dict[str, Any]:
    found = {part: figures_of([turn for turn in account.turns if turn["part"] == part]) for part in PARTS}
    steady, rolling = (found[part] for part in PARTS)
    held = {"no request fails": not account.errors}
    if steady["ttft_ms"] and rolling["ttft_ms"]:
        most_ms = MOST_TTFT * steady["ttft_ms"]["p95"]
        held[f"TTFT p95 at most {MOST_TTFT} x steady"] = rolling["ttft_ms"]["p95"] <= most_ms
    if steady["history_cached"] and rolling["history_cached"]:
        least = LEAST_HIT * steady["history_cached"]
        held[f"history cached at least {LEAST_HIT} x steady"] = rolling["history_cached"] >= least
    return {"held": held, **found, "errors": account.errors, "turns": account.turns}


def measure(run: Run) -> dict[str, Any]:
    with fleet_processes(run.directory, *NAMES, settings=SETTINGS) as fleet:
        return {"settings": {**SMALL, **SETTINGS}, **asyncio.run(play(run, fleet))}


EXPERIMENT = Experiment(
    name="fleet_roll", about=__doc__, measure=measure, show=show, options=asks(steady_s=60.0, seed=0),
    quick=Quick({"steady_s": 10.0}),
)  # fmt: skip
