"""Conversations that change their replica every turn: texts, and what a move costs.

    python -m benchmarks.fleet moves [--conversations 24] [--turns 6]

As many replicas as turns stand behind a gateway, with KV in a Redis of its own. An operator sends every turn to a
replica that has never seen its conversation, so all of its history that is not computed comes from Redis. Every other
conversation is named by its client, the rest are known by their messages. Turn by turn, the same is asked of three
arms:

    moved      the fleet, through the gateway
    home       one server that keeps the conversation on disk alone
    recompute  one server that reuses nothing

The conversations take turns, so that none is in HBM any more when it returns to `home`. Redis, gateway and servers
share the machine; one turn runs at a time.

Held: no error; every text is that of `home` and `recompute` (float32); at least 95 % of the history of moved turns
comes from Redis; TTFT p50 of a moved turn is at most 1.3 times that of a turn at home, and 0.3 times a recompute's.
"""

import asyncio
import random
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.fleet.processes import FleetProcesses, fleet_processes
from benchmarks.fleet.scenario import TIERS, Account, Row, Talk, asks, figures_of, show, words
from benchmarks.harness.experiment import Experiment, Quick, Run, turned
from benchmarks.harness.measures import ratio
from benchmarks.harness.models import kv_bytes_per_token
from benchmarks.harness.servers import serve
from reprise.model.directories import BUNDLED

ARMS = ("moved", "home", "recompute")
LEAST_FROM_REDIS, MOST_OF_HOME, MOST_OF_RECOMPUTE = 0.95, 1.3, 0.3
LATER_TOKENS = 40  # length of a later message
MARKUP_TOKENS = 16  # tokens of the chat template, per message
PAUSE_S = 2.0  # between two turns of all
CONVERSATIONS_IN_HBM = 2


def settings_of(arguments: Namespace, model: Path) -> dict[str, Any]:
    """Return settings with which HBM holds two conversations, DRAM none, and the disk all of them."""
    later = LATER_TOKENS + MARKUP_TOKENS + arguments.answer_tokens
    tokens = arguments.first_tokens + MARKUP_TOKENS + later * arguments.turns
    gib = 2 * kv_bytes_per_token(str(model)) * tokens * arguments.conversations / (1 << 30)  # 2: float32
    return {
        "model.source": str(model), "model.dtype": "float32", "engine.threads": 1, "model.max_context": 2 * tokens,
        "cache.hbm_tokens": CONVERSATIONS_IN_HBM * tokens + 32, "cache.dram_gib": 0, "cache.disk_gib": 1.5 * gib,
    }  # fmt: skip


async def play(run: Run, fleet: FleetProcesses, urls: dict[str, str], model: str) -> dict[str, Any]:
    """Play all conversations and return the result. A conversation ends at its first error."""
    asked, account, differences = run.arguments, Account(), list[Row]()
    talks = {
        n: {arm: Talk(f"moves-{n}", n % 2 == 0, {"model": model}) for arm in ARMS} for n in range(asked.conversations)
    }
    homes: dict[int, set[str]] = {number: set() for number in talks}
    run.expect(asked.conversations * asked.turns, "starting")
    for turn in range(asked.turns):
        for number, arms in list(talks.items()):
            run.describe(f"turn {turn + 1}, conversation {number + 1}")
            said = words(random.Random(f"moves/{number}/{turn}"), LATER_TOKENS if turn else asked.first_tokens)
            if turn:
                new = next(name for name in turned(tuple(fleet.replicas), turn) if name not in homes[number])
                fleet.move(arms["moved"].session_id, new)
            for arm in turned(ARMS, turn + number):
                if await account.turn(arms[arm], urls[arm], said, asked.answer_tokens, arm=arm) is None:
                    del talks[number]
                    break
            else:
                homes[number].add(arms["moved"].home)
                texts = {arm: talk.messages[-1]["content"] for arm, talk in arms.items()}
                if len(set(texts.values())) > 1:
                    differences.append({"conversation": number, "turn": turn, **texts})
            run.advance()
        await asyncio.sleep(PAUSE_S)  # people read an answer before they reply, while its KV is written
        run.keep(result_of(account, differences))
    return result_of(account, differences)


def result_of(account: Account, differences: list[Row]) -> dict[str, Any]:
    arms: dict[str, Any] = {}
    for arm in ARMS:
        returning = [turn for turn in account.turns if turn["arm"] == arm and turn["turn"]]
        if returning:
            history = sum(turn["history_tokens"] for turn in returning)
            found = {tier: sum(turn["tokens"][tier] for turn in returning) for tier in TIERS}
            arms[arm] = figures_of(returning) | {
                "history_tokens_min": min(turn["history_tokens"] for turn in returning),
                "history_from": {tier: ratio(tokens, history) for tier, tokens in found.items()},
            }
    moved = [turn for turn in account.turns if turn["arm"] == "moved"]
    seen = {(turn["conversation"], turn["replica"]) for turn in moved}
    held = {
        "no errors": not account.errors,
        "every turn is on a replica that never saw its conversation": len(seen) == len(moved),
        "every conversation is known again": all(turn["is_known"] for turn in moved if turn["turn"]),
        "identical text": not differences,
    }
    if arms.keys() == set(ARMS):
        ttft, home, recompute = (arms[arm]["ttft_ms"]["p50"] for arm in ARMS)
        sources = {arm: arms[arm]["history_from"] for arm in ARMS}
        least = f"{LEAST_FROM_REDIS:.0%}"
        held |= {
            f"moved: at least {least} of the history from Redis": sources["moved"]["redis"] >= LEAST_FROM_REDIS,
            "home: most history from disk": sources["home"]["disk"] >= LEAST_FROM_REDIS,
            f"TTFT p50 of a moved turn at most {MOST_OF_HOME} x that of home": ttft <= MOST_OF_HOME * home,
            f"TTFT p50 of a moved turn at most {MOST_OF_RECOMPUTE} x a recompute's": ttft
            <= MOST_OF_RECOMPUTE * recompute,
        }
    return {
        "held": held, "arms": arms, "errors": account.errors, "differences": differences, "turns": account.turns,
    }  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    model = run.random_model()
    settings = settings_of(run.arguments, model)
    in_fleet = {**settings, "cache.redis_gib": settings["cache.disk_gib"]}
    names = [f"r{n}" for n in range(run.arguments.turns)]
    with ExitStack() as stack:
        home, recompute = (
            stack.enter_context(serve(arm, {**settings, "cache.mode": mode}))
            for arm, mode in (("home", "attentionstore"), ("recompute", "recompute"))
        )
        fleet = stack.enter_context(fleet_processes(run.directory, *names, settings=in_fleet))
        urls = {"moved": fleet.gateway_url, "home": home.url, "recompute": recompute.url}
        found = asyncio.run(play(run, fleet, urls, home.model["id"]))
    return {"settings": in_fleet, "replicas": len(names), **found}


EXPERIMENT = Experiment(
    name="fleet_moves", about=__doc__, measure=measure, show=show, takes_model=True,
    options=asks(conversations=24, turns=6, first_tokens=1200, answer_tokens=24),
    quick=Quick({"model": str(BUNDLED), "conversations": 4, "turns": 3, "first_tokens": 400}),
)  # fmt: skip
