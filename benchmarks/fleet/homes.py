"""Turns that come home: three replicas behind two gateways that share no memory. Real processes, the bundled model.

    python -m benchmarks.fleet homes [--conversations 200]

What the fleet can do is measured first, with many conversations and no pauses. Then conversations begin by Poisson at
half of that rate, and every request goes to the other gateway than the one before it. Half of the conversations are
named by their clients, the others are known by their messages alone. When all have ended, both gateways are killed and
started anew, and every conversation has one more turn.

Held: no error; at least 95 % of the returning turns are at home, named or not, before and after the restart.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.fleet.processes import FleetProcesses, fleet_processes
from benchmarks.fleet.scenario import Account, Talk, asks, at_least, show, words
from benchmarks.harness.experiment import Experiment, Quick, Run
from benchmarks.harness.measures import ratio, rounded
from reprise.loadgen.percentile import percentile
from reprise.loadgen.workloads.workload import Conversation, ConversationShape, Turn, poisson

NAMES = ("a", "b", "c")
GATEWAYS = 2
SHAPE = ConversationShape(turns=4, prompt_tokens=60, answer_tokens=50, think_s=2.0, spread=0.2)
FULL, HALF, RESTARTED = PARTS = ("full", "half", "restarted")
HOMES = {"half load": HALF, "new gateways": RESTARTED}
LOAD = 0.5
AT_ONCE = 12  # conversations, to find what the fleet can do
LEAST_HOME = 0.95


class Players:
    """Clients that hold conversations with a fleet. They send requests to the gateways in turn, one to each."""

    def __init__(self, fleet: FleetProcesses) -> None:
        self._urls = itertools.cycle(gateway.url for gateway in fleet.gateways)
        self._talks: dict[str, Talk] = {}
        self.account = Account()

    async def play(self, part: str, script: Conversation, start_s: float) -> None:
        """Send the turns of `script`, each after its think time, and record them. If a conversation of the same session
        id was played before, these turns continue it. part: name of the present part of the run, for the record.
        start_s: seconds to wait before the first turn."""
        name = script.session_id
        rng = random.Random(f"{part}/{name}")
        talk = self._talks.setdefault(name, Talk(name, is_named=rng.random() < 0.5))
        await asyncio.sleep(start_s)
        for turn in script.turns:
            await asyncio.sleep(turn.think_s)
            said = words(rng, turn.prompt_tokens)
            if await self.account.turn(talk, next(self._urls), said, turn.answer_tokens, part=part) is None:
                return

    async def flat_out(self, scripts: Sequence[Conversation]) -> float:
        """Play conversations without pauses, AT_ONCE of them at a time. Returns turns per second."""
        waiting = iter(scripts)
        began_s = time.perf_counter()

        async def one_after_the_other() -> None:
            for script in waiting:
                hurried = tuple(replace(turn, think_s=0.0) for turn in script.turns)
                await self.play(FULL, replace(script, turns=hurried), 0.0)

        await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
        return len(self.account.turns) / (time.perf_counter() - began_s)

    async def when_due(self, part: str, scripts: Sequence[Conversation]) -> None:
        await asyncio.gather(*(self.play(part, script, script.start_s) for script in scripts))


def scripts_of(part: str, count: int, rate_per_s: float, seed: int) -> list[Conversation]:
    drawn = poisson(rng=random.Random(f"{part}/{seed}"), count=count, rate_per_s=rate_per_s, shape=SHAPE)
    return [replace(script, session_id=f"{part}-{script.session_id}") for script in drawn]


def result_of(account: Account) -> dict[str, Any]:
    turns = account.turns
    homes: dict[str, dict[str, Any]] = {}
    for (title, part), is_named in itertools.product(HOMES.items(), (True, False)):
        at = [row["at_home"] for row in turns if row["part"] == part and row["is_named"] == is_named and row["turn"]]
        share = {"turns": len(at), "at_home": ratio(sum(at), len(at))}
        homes[f"{title}, {'named' if is_named else 'by messages'}"] = share
    ttft_ms = {part: [row["ttft_ms"] for row in turns if row["part"] == part] for part in PARTS}
    real_ms = {part: percentile(values, 0.5) for part, values in ttft_ms.items() if values}
    held = {"no errors": not account.errors}
    for title, share in homes.items():
        held[f"{title}: at least {LEAST_HOME:.0%} at home"] = at_least(share["at_home"], LEAST_HOME)
    return {"held": held, "homes": homes, "ttft_ms": real_ms, "errors": account.errors, "turns": turns}


def measure(run: Run) -> dict[str, Any]:
    asked = run.arguments
    with fleet_processes(run.directory, *NAMES, gateways=GATEWAYS) as fleet:
        players = Players(fleet)
        run.expect(len(PARTS), "flat out")
        turns_per_s = asyncio.run(players.flat_out(scripts_of(FULL, asked.full, 1.0, asked.seed)))
        rate_per_s = LOAD * turns_per_s / SHAPE.turns
        scripts = scripts_of(HALF, asked.conversations, rate_per_s, asked.seed)
        run.advance()
        run.describe("at half load")
        asyncio.run(players.when_due(HALF, scripts))
        run.advance()
        run.describe("with new gateways")
        for gateway in fleet.gateways:
            gateway.stop()
        for gateway in fleet.gateways:
            gateway.start()
        fleet.wait_for(len(NAMES))
        once_more = Turn(SHAPE.prompt_tokens, SHAPE.answer_tokens, 0.0)
        rng, start_s, again = random.Random(RESTARTED), 0.0, list[Conversation]()
        for script in scripts:
            start_s += rng.expovariate(LOAD * turns_per_s)
            again.append(replace(script, start_s=start_s, turns=(once_more,)))
        asyncio.run(players.when_due(RESTARTED, again))
    rates = {"turns_per_s": rounded(turns_per_s, 3), "conversations_per_s": rounded(rate_per_s, 4)}
    return {**rates, **result_of(players.account)}


EXPERIMENT = Experiment(
    name="fleet_homes", about=__doc__, measure=measure, show=show, options=asks(conversations=200, full=60, seed=0),
    quick=Quick({"conversations": 12, "full": 12}),
)  # fmt: skip
