"""One session on two replicas at once, as when two gateways do not know of each other. Real processes, the bundled
model.

    python -m benchmarks.fidelity.fleet_branches [--turns 500]

Two replicas are asked directly, at the same time, for different turns that go on with the same history of the same
session. Both claim it; the directory takes the turn of one, and the other's is a branch. The next two turns go on with
one of the two answers, drawn at random. After 12 rounds the conversation begins anew under the same name, so that it
fits the window.

Held: no error; every text, and the number of tokens in every prompt, are those of one server with the same requests.
"""

import asyncio
import random
from argparse import ArgumentParser
from contextlib import ExitStack
from typing import Any

import httpx
from rich.console import Console

from benchmarks.fleet.chat_stream import ChatStream, StreamFailed
from benchmarks.fleet.processes import SMALL, FleetProcesses, fleet_processes
from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.measures import ratio
from benchmarks.harness.servers import ServerProcess, serve
from reprise.loadgen.workloads import filler_text

NAMES = ("a", "b")
HEADERS = {"x-session-id": "branches"}
ANSWER_TOKENS, MESSAGE_WORDS = 12, 10
ROUNDS_OF_A_CHAT = 12
Messages = list[dict[str, str]]


def stream_of(url: str, messages: Messages) -> ChatStream:
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return ChatStream(url, body, HEADERS)


async def play(run: Run, fleet: FleetProcesses, alone: ServerProcess) -> dict[str, Any]:
    rng = random.Random(run.arguments.seed)
    urls = [fleet.replicas[name].url for name in NAMES]
    errors: list[str] = []
    differences: list[dict[str, Any]] = []
    cached = history = turns = 0
    kept: ChatStream | None = None  # the answer that both turns go on with
    messages: Messages = []
    for number in run.track(range(run.arguments.turns // 2), "two at once"):
        if kept is None or number % ROUNDS_OF_A_CHAT == 0:
            kept, messages = None, [{"role": "system", "content": f"You tell story number {number}."}]
        asked = [[*messages, {"role": "user", "content": filler_text.words(rng, MESSAGE_WORDS)}] for _ in urls]
        both = [stream_of(url, said) for url, said in zip(urls, asked, strict=True)]
        ended = await asyncio.gather(*(stream.run() for stream in both), return_exceptions=True)
        answered = []
        for name, said, stream, how in zip(NAMES, asked, both, ended, strict=True):
            if isinstance(how, BaseException):
                if not isinstance(how, StreamFailed | httpx.HTTPError):
                    raise how
                errors.append(f"round {number}, {name}: {how!r}")
                continue
            turns += 1
            expected = await stream_of(alone.url, said).run()
            tokens, expected_tokens = stream.usage["prompt_tokens"], expected.usage["prompt_tokens"]
            if (stream.text, tokens) != (expected.text, expected_tokens):
                differences.append(
                    {
                        "round": number, "replica": name, "expected": expected.text, "found": stream.text,
                        "expected_tokens": expected_tokens, "tokens": tokens,
                    }
                )  # fmt: skip
                continue
            if kept is not None:
                history += kept.context_tokens
                cached += min(stream.cached_tokens, kept.context_tokens)
            answered.append((said, stream))
        kept = None
        if answered:
            said, kept = rng.choice(answered)
            messages = [*said, {"role": "assistant", "content": kept.text}]
    return {
        "held": {"no errors": not errors, "texts and prompts of one server": not differences},
        "turns": turns, "history_cached": ratio(cached, history), "errors": errors, "differences": differences,
    }  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    with ExitStack() as stack:
        alone = stack.enter_context(serve("alone", SMALL))
        fleet = stack.enter_context(fleet_processes(run.directory, *NAMES, settings={"cache.redis_gib": 0.5}))
        return {"settings": SMALL, **asyncio.run(play(run, fleet, alone))}


def show(console: Console, result: dict[str, Any]) -> None:
    console.print(
        f"{result['turns']} turns, {len(result['errors'])} errors, {len(result['differences'])} differences; "
        f"{result['history_cached']:.1%} of the history cached",
        highlight=False,
    )
    for entry in (*result["errors"][:20], *result["differences"][:20]):
        console.print(entry)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)


def same(result: Result) -> float:
    """The share of turns as on one server."""
    turns, failed, others = result["turns"], len(result["errors"]), len(result["differences"])
    return float((turns - others) / max(1, turns + failed))


EXPERIMENT = Experiment(
    name="fleet_branches", about=__doc__, measure=measure, show=show, options=options,
    quick=Quick(
        options={"turns": 40},
        figures=[Figure("turns as on one server", same, 1.0, more_is_better=True)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
