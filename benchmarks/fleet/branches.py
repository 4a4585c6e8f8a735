"""One session on two replicas at once, as when two gateways do not know of each other. Real processes and the bundled
model.

    python -m benchmarks.fleet branches [--turns 500]

Two replicas are asked directly, at the same time, for different turns that go on with the same history of the same
session. Both claim it; the directory takes the turn of one, and the other's is a branch. The next two turns go on with
one of the two answers, drawn at random. After 12 rounds the conversation begins anew under the same name, so that it
fits the window.

Held: no error; every text, and the number of tokens in every prompt, are those of one server with the same requests.
"""

import asyncio
import random
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from benchmarks.fleet.processes import SMALL, FleetProcesses, fleet_processes
from benchmarks.fleet.scenario import Account, Row, Talk, asks, figures_of, show, words
from benchmarks.harness.experiment import Experiment, Quick, Run
from benchmarks.harness.servers import serve

NAMES = ("a", "b")
ANSWER_TOKENS, MESSAGE_WORDS = 12, 10
ROUNDS_OF_A_CHAT = 12


async def play(run: Run, fleet: FleetProcesses, alone_url: str) -> dict[str, Any]:
    rng, account = random.Random(run.arguments.seed), Account()
    differences: list[Row] = []
    kept: Talk | None = None  # the history that both turns go on with
    for number in run.track(range(run.arguments.turns // 2), "two at once"):
        if kept is None or number % ROUNDS_OF_A_CHAT == 0:
            system = {"role": "system", "content": f"You tell story number {number}."}
            kept = Talk("branches", messages=[system])
        branches = {name: replace(kept, messages=list(kept.messages)) for name in NAMES}
        streams = await asyncio.gather(
            *(
                account.turn(talk, fleet.replicas[name].url, words(rng, MESSAGE_WORDS), ANSWER_TOKENS, asked=name)
                for name, talk in branches.items()
            )
        )
        going_on: list[Talk] = []
        for (name, talk), stream in zip(branches.items(), streams, strict=True):
            if stream is None:
                continue
            said = replace(kept, messages=talk.messages[:-1])
            expected = await said.stream(alone_url, max_tokens=ANSWER_TOKENS).run()
            texts = {which: (one.text, one.usage["prompt_tokens"]) for which, one in
                     (("expected", expected), ("found", stream))}  # fmt: skip
            if texts["expected"] == texts["found"]:
                going_on.append(talk)
            else:
                differences.append({"round": number, "asked": name, **texts})
        kept = rng.choice(going_on) if going_on else None
    return result_of(account, differences)


def result_of(account: Account, differences: list[Row]) -> dict[str, Any]:
    return {
        "held": {"no errors": not account.errors, "texts and prompts of one server": not differences},
        **figures_of(account.turns), "errors": account.errors, "differences": differences,
    }  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    with ExitStack() as stack:
        alone = stack.enter_context(serve("alone", SMALL))
        fleet = stack.enter_context(fleet_processes(run.directory, *NAMES))
        return {"settings": SMALL, **asyncio.run(play(run, fleet, alone.url))}


EXPERIMENT = Experiment(
    name="fleet_branches", about=__doc__, measure=measure, show=show, options=asks(turns=500, seed=0),
    quick=Quick({"turns": 40}),
)  # fmt: skip
