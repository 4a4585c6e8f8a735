"""Conversations that change their replica every turn: real processes, texts, and what a move costs.

    python -m benchmarks.fidelity.fleet_moves [--conversations 24] [--turns 6]

As many replicas as turns, behind a gateway, with KV in a Redis of its own. An operator sends every turn to a replica
that has never seen its conversation, so all of its history that is not computed comes from Redis. Every other
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
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.fleet.chat_stream import ChatStream, StreamFailed
from benchmarks.fleet.processes import FleetProcesses, fleet_processes
from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run, turned
from benchmarks.harness.in_process import kv_bytes_per_token
from benchmarks.harness.measures import ratio
from benchmarks.harness.servers import serve
from benchmarks.speed.hierarchy import WORDS
from reprise.loadgen.percentile import percentile
from reprise.model.directories import BUNDLED

ARMS = ("moved", "home", "recompute")
TIERS = ("hbm", "dram", "disk", "redis")
LEAST_FROM_REDIS, MOST_OF_HOME, MOST_OF_RECOMPUTE = 0.95, 1.3, 0.3
LATER_TOKENS = 40  # of a later message
MARKUP_TOKENS = 16  # of the chat template, a message
PAUSE_S = 2.0  # between two turns of all
IN_HBM = 2  # conversations


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn on one arm."""

    arm: str
    conversation: int
    turn: int  # from 0
    replica: str  # "" on one server
    ttft_ms: float
    history_tokens: int  # that earlier turns have computed
    tokens: dict[str, int]  # tier -> prompt tokens found there
    same_text: bool  # as `home`
    same_session: bool  # as the turn before


class Conversation:
    """What one client says, and what each arm has answered."""

    def __init__(self, number: int, first_tokens: int, answer_tokens: int) -> None:
        self._rng = random.Random(f"moves/{number}")
        self._first_tokens, self._answer_tokens = first_tokens, answer_tokens
        self.number = number
        self.headers = {} if number % 2 else {"x-session-id": f"moves-{number}"}
        self.messages: dict[str, list[dict[str, str]]] = {arm: [] for arm in ARMS}
        self.context_tokens: dict[str, int] = dict.fromkeys(ARMS, 0)
        self.session_id = ""
        self.homes: set[str] = set()  # replicas that have seen it

    def asks(self) -> None:
        """Add the next message on every arm."""
        words = LATER_TOKENS if self.messages[ARMS[0]] else self._first_tokens
        content = " ".join(self._rng.choice(WORDS) for _ in range(words))
        for messages in self.messages.values():
            messages.append({"role": "user", "content": content})

    async def turn(self, arm: str, url: str, model: str) -> ChatStream:
        body = {"model": model, "messages": self.messages[arm], "max_tokens": self._answer_tokens}
        stream = ChatStream(url, {**body, "temperature": 0, "ignore_eos": True}, self.headers)
        await stream.run()
        self.messages[arm].append({"role": "assistant", "content": stream.text})
        return stream


def settings_of(arguments: Namespace, model: Path) -> dict[str, Any]:
    """Two conversations fit HBM, none DRAM, all of them the disk."""
    later = LATER_TOKENS + MARKUP_TOKENS + arguments.answer_tokens
    tokens = arguments.first_tokens + MARKUP_TOKENS + later * arguments.turns
    gib = 2 * kv_bytes_per_token(str(model)) * tokens * arguments.conversations / (1 << 30)  # 2: float32
    return {
        "model.source": str(model), "model.dtype": "float32", "engine.threads": 1, "model.max_context": 2 * tokens,
        "cache.hbm_tokens": IN_HBM * tokens + 32, "cache.dram_gib": 0, "cache.disk_gib": 1.5 * gib,
    }  # fmt: skip


async def play(run: Run, fleet: FleetProcesses, urls: dict[str, str], model: str) -> tuple[list[Sample], list[str]]:
    """Play all conversations. One that meets an error ends there."""
    arguments = run.arguments
    names = list(fleet.replicas)
    talks = [Conversation(n, arguments.first_tokens, arguments.answer_tokens) for n in range(arguments.conversations)]
    samples: list[Sample] = []
    errors: list[str] = []
    run.expect(len(talks) * arguments.turns, "starting")
    for turn in range(arguments.turns):
        for talk in list(talks):
            run.describe(f"turn {turn + 1}, conversation {talk.number + 1}")
            talk.asks()
            try:
                if turn:
                    fleet.move(talk.session_id, next(name for name in turned(names, turn) if name not in talk.homes))
                streams = {arm: await talk.turn(arm, urls[arm], model) for arm in turned(ARMS, turn + talk.number)}
            except (StreamFailed, httpx.HTTPError) as error:
                errors.append(f"turn {turn + 1} of conversation {talk.number + 1}: {error!r}")
                talks.remove(talk)
                continue
            samples += [sample_of(talk, arm, turn, stream, streams) for arm, stream in streams.items()]
            talk.session_id = streams["moved"].session_id
            talk.homes.add(streams["moved"].route["replica"])
            talk.context_tokens = {arm: stream.context_tokens for arm, stream in streams.items()}
            run.advance()
        await asyncio.sleep(PAUSE_S)  # people read an answer before they reply; meanwhile its KV is written behind
        run.keep(result_of(samples, errors))
    return samples, errors


def sample_of(talk: Conversation, arm: str, turn: int, stream: ChatStream, streams: dict[str, ChatStream]) -> Sample:
    return Sample(
        arm=arm,
        conversation=talk.number,
        turn=turn,
        replica=stream.route["replica"] if arm == "moved" else "",
        ttft_ms=round(1e3 * stream.ttft_s, 2),
        history_tokens=talk.context_tokens[arm],
        tokens={tier: int(stream.x_cache[f"{tier}_tokens"]) for tier in TIERS},
        same_text=stream.text == streams["home"].text,
        same_session=not turn or arm != "moved" or stream.session_id == talk.session_id,
    )


def result_of(samples: list[Sample], errors: list[str]) -> dict[str, Any]:
    arms: dict[str, Any] = {}
    for arm in ARMS:
        returning = [sample for sample in samples if sample.arm == arm and sample.turn]
        if not returning:
            continue
        ttfts, history = [one.ttft_ms for one in returning], sum(one.history_tokens for one in returning)
        arms[arm] = {
            "turns": len(returning),
            "ttft_ms": {"p50": percentile(ttfts, 0.5), "p95": percentile(ttfts, 0.95)},
            "history_tokens_min": min(one.history_tokens for one in returning),
            "history_from": {tier: ratio(sum(one.tokens[tier] for one in returning), history) for tier in TIERS},
        }
    moved = [(one.conversation, one.replica) for one in samples if one.arm == "moved"]
    returned = len(moved) - len(set(moved))
    differences = [asdict(one) for one in samples if not one.same_text]
    strangers = sum(not one.same_session for one in samples)
    return {
        "held": verdicts(arms, errors, len(differences), strangers, returned),
        "arms": arms, "errors": errors, "differences": differences, "turns": [asdict(one) for one in samples],
    }  # fmt: skip


def verdicts(
    arms: dict[str, Any], errors: list[str], differences: int, strangers: int, returned: int
) -> dict[str, bool]:
    """What is held -> whether it holds."""
    held = {
        "no errors": not errors,
        "every turn is on a replica that never saw its conversation": not returned,
        "every conversation is known again": not strangers,
        "identical text": not differences,
    }
    if set(arms) == set(ARMS):
        moved, home, recompute = (arms[arm]["ttft_ms"]["p50"] for arm in ARMS)
        held |= {
            f"moved: at least {LEAST_FROM_REDIS:.0%} of the history from Redis": arms["moved"]["history_from"]["redis"]
            >= LEAST_FROM_REDIS,
            "home: most history from disk": arms["home"]["history_from"]["disk"] >= LEAST_FROM_REDIS,
            f"TTFT p50 of a moved turn at most {MOST_OF_HOME} x that of home": moved <= MOST_OF_HOME * home,
            f"TTFT p50 of a moved turn at most {MOST_OF_RECOMPUTE} x a recompute's": moved
            <= MOST_OF_RECOMPUTE * recompute,
        }
    return held


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    model = run.random_model()
    settings = settings_of(arguments, model)
    in_fleet = {**settings, "cache.redis_gib": settings["cache.disk_gib"]}
    names = [f"r{n}" for n in range(arguments.turns)]
    with ExitStack() as stack:
        home, recompute = (
            stack.enter_context(serve(arm, {**settings, "cache.mode": mode}))
            for arm, mode in (("home", "attentionstore"), ("recompute", "recompute"))
        )
        fleet = stack.enter_context(fleet_processes(run.directory, *names, settings=in_fleet))
        urls = {"moved": fleet.gateway_url, "home": home.url, "recompute": recompute.url}
        samples, errors = asyncio.run(play(run, fleet, urls, home.model["id"]))
    return {"settings": in_fleet, "replicas": len(names), **result_of(samples, errors)}


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="Turns after the first", title_justify="left")
    for heading in ("arm", "turns", "history", "from HBM / disk / Redis", "TTFT p50 (p95), ms"):
        table.add_column(heading, justify="right")
    for arm, found in result["arms"].items():
        shares = " / ".join(f"{found['history_from'][tier]:.1%}" for tier in ("hbm", "disk", "redis"))
        ttft = f"{found['ttft_ms']['p50']:.0f} ({found['ttft_ms']['p95']:.0f})"
        table.add_row(arm, str(found["turns"]), f">= {found['history_tokens_min']}", shares, ttft)
    console.print(table)
    for entry in (*result["errors"], *result["differences"]):
        console.print(entry)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6, help="of a conversation, and replicas")
    parser.add_argument("--first-tokens", type=int, default=1200, help="of a first message, about")
    parser.add_argument("--answer-tokens", type=int, default=24)


def from_redis(result: Result) -> float | None:
    share: float | None = result["arms"]["moved"]["history_from"]["redis"]
    return share


def of_recompute(result: Result) -> float | None:
    moved, recompute = (result["arms"][arm]["ttft_ms"]["p50"] for arm in ("moved", "recompute"))
    return ratio(moved, recompute)


EXPERIMENT = Experiment(
    name="fleet_moves", about=__doc__, measure=measure, show=show, options=options, takes_model=True,
    quick=Quick(
        options={"model": str(BUNDLED), "conversations": 4, "turns": 3, "first_tokens": 400},
        holds=False,  # a small model's recompute is quick, and four conversations are few
        figures=[
            Figure("history of moved turns from Redis", from_redis, 1.03, more_is_better=True),
            Figure("TTFT of moved turns / recompute", of_recompute, 8.0),
        ],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
