"""Many conversations at once, with everything clients do to a server, and then the accounts.

    python -m benchmarks.fidelity.soak [--seconds 300] [--streams 64]

Each stream holds one conversation after another: shared and unshared system prompts, follow-up turns, greedy and seeded
sampling, stop strings, and clients that leave in the middle of an answer, half of which come back with what they saw of
it. The server has little HBM, less DRAM and a small disk, and remembers few sessions, so that eviction from every tier
and every cap are at work before the measurement of memory begins.

Held, or the exit status is 1: no error; the greedy answers are those that a second server with `cache.mode` recompute
gives to the same requests one at a time (a difference is excused where that server's two best tokens were closer than
1e-4, in at most 0.5 % of the answers); seeded answers repeat as well; resident memory is flat in both processes; at the
end nothing runs, waits, is leased or on its way, and every page is free or cached. History came from all three tiers.
"""

import asyncio
import random
import time
from argparse import ArgumentParser
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from openai import OpenAIError
from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.models import kv_bytes_per_token
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Message, StreamedAnswer, ask, client_of, first_difference
from benchmarks.harness.tables import show_rows
from reprise.model.directories import BUNDLED

MIB, GIB = 1 << 20, 1 << 30
HBM_TOKENS, DRAM_TOKENS, DISK_TOKENS = 8_192, 6_144, 65_536  # 64 streams hold more at once than the first two
STAGING_TOKENS = 4_096
SETTINGS: dict[str, str | int | float] = {
    "model.dtype": "float32",
    "cache.hbm_tokens": HBM_TOKENS,
    "cache.max_sessions": 300,
}
WARM_UP = 0.4  # share of the run in which caches and caps fill up
MAX_GROWTH_MIB_PER_MIN = 2.0
MAX_DIFFERENT = 0.005
ACCOUNTS = ("running_requests", "waiting_requests", "active_requests", "leases", "in_flight_transfers")  # 0 at idle
MARKUP_TOKENS = 64  # chat markup and slack in the estimate of a prompt's length

SHARED_SYSTEMS = (
    "You are a friendly person who likes to chat.",
    "You are a helpful assistant that helps people find and book things. Be brief, be polite, ask when something is "
    "missing, and never promise what you cannot keep. Repeat the time and the place before you book anything.",
)
SENTENCES = (
    "Hi, how are you today?", "Do you like music?", "I watched a good movie last night.", "What do you do for fun?",
    "Did you see the football game?", "I want to find a restaurant in San Jose.", "Can I get a large latte?",
    "My favorite book is about the sea.", "Do you think it will rain tomorrow?", "That is interesting.",
    "I have never heard of that.", "How many people live there?", "I would like to book a table for two.",
    "She plays the guitar in a band.", "What is the price of a ticket?", "I need a bus to Sacramento at ten.",
    "Who won the election?", "Have you ever been to Japan?", "My dog likes to run on the beach.",
    "Thanks, that is all.",
)  # fmt: skip
STOPS = (".", "?", " you", " the", "\n")


@dataclass(slots=True)
class Turn:
    """One request as it was sent, and its answer. `left`: the client disconnected before the end."""

    messages: list[Message]
    parameters: dict[str, Any]
    answer: StreamedAnswer
    left: bool

    @property
    def is_greedy(self) -> bool:
        return bool(self.parameters["temperature"] == 0)


@dataclass(slots=True)
class Tally:
    """The conversations, errors and memory sizes that the streams have recorded."""

    conversations: list[list[Turn]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, int, int]] = field(default_factory=list)  # seconds since start, bytes of app and engine


def draw_parameters(rng: random.Random) -> dict[str, Any]:
    parameters: dict[str, Any] = {"max_tokens": rng.choice((4, 16, 32, 64))}
    if rng.random() < 0.6:
        parameters |= {"temperature": 0, "logprobs": True, "top_logprobs": 2}
    else:
        parameters |= {"temperature": rng.uniform(0.5, 1.2), "seed": rng.getrandbits(32)}
        parameters |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"frequency_penalty": 0.5}))
    if rng.random() < 0.25:
        parameters["stop"] = rng.sample(STOPS, rng.randint(1, 2))
    return parameters


def opening(rng: random.Random) -> list[Message]:
    """Return the system message of a new conversation: one that many conversations share, one of its own, or none."""
    kind = rng.random()
    if kind < 0.5:
        return [{"role": "system", "content": rng.choice(SHARED_SYSTEMS)}]
    if kind < 0.8:
        return [{"role": "system", "content": f"You are number {rng.getrandbits(40)}. {rng.choice(SENTENCES)}"}]
    return []


class Soak:
    """A number of streams (clients that hold one conversation after another) on one server."""

    def __init__(self, server: ServerProcess, *, seconds: float, streams: int) -> None:
        self._server, self._client = server, client_of(server.url)
        self._seconds, self._streams = seconds, streams
        self._started_s = 0.0
        self.tally = Tally()

    async def run(self, run: Run) -> Tally:
        self._started_s = time.monotonic()
        watch = asyncio.create_task(self._watch_memory(run))
        streams = (self._stream(random.Random(number)) for number in range(self._streams))
        await asyncio.gather(*streams)
        await watch
        await self._client.close()
        return self.tally

    def _over(self) -> bool:
        return time.monotonic() - self._started_s >= self._seconds

    async def _stream(self, rng: random.Random) -> None:
        """One conversation after another, until time is up."""
        while not self._over():
            turns: list[Turn] = []
            self.tally.conversations.append(turns)
            messages = opening(rng)
            # Half of the clients name their conversation; the others are recognised by their messages.
            named = {"session_id": f"soak-{rng.getrandbits(64):x}"} if rng.random() < 0.5 else {}
            room = self._server.max_context - MARKUP_TOKENS
            for _ in range(rng.randint(1, 6)):
                parameters = {**named, **draw_parameters(rng)}
                content = " ".join(rng.sample(SENTENCES, rng.randint(1, 4)))
                messages = [*messages, {"role": "user", "content": content}]
                # A token is at least one byte, so bytes bound what the tokenizer will make of the text.
                if sum(len(m["content"]) + MARKUP_TOKENS for m in messages) + parameters["max_tokens"] > room:
                    break
                turn = await self._turn(rng, messages, parameters)
                if turn is None or self._over():
                    break
                turns.append(turn)
                if turn.left and rng.random() < 0.5:
                    break
                messages = [*messages, {"role": "assistant", "content": turn.answer.text}]
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.uniform(0, 1))

    async def _turn(self, rng: random.Random, messages: list[Message], parameters: dict[str, Any]) -> Turn | None:
        leave_after = rng.randint(1, parameters["max_tokens"]) if rng.random() < 0.2 else None
        kinds = self.tally.kinds
        kinds["requests"] += 1
        kinds["greedy" if parameters["temperature"] == 0 else "seeded"] += 1
        kinds["with stop strings"] += "stop" in parameters
        kinds["follow-ups"] += any(m["role"] == "assistant" for m in messages)
        try:
            answer = await ask(self._client, self._server.model["id"], messages, leave_after=leave_after, **parameters)
        except (OpenAIError, RuntimeError) as error:
            self.tally.errors.append(f"{error!r} after {time.monotonic() - self._started_s:.1f} s")
            return None
        left = answer.done_s == 0.0
        kinds["left by the client"] += left
        kinds["generated tokens"] += answer.completion_tokens
        kinds["prompt tokens"] += answer.prompt_tokens
        kinds["cached tokens"] += answer.cached_tokens
        return Turn(messages, parameters, answer, left)

    async def _watch_memory(self, run: Run) -> None:
        shown_s = 0.0
        while not self._over():
            elapsed_s = time.monotonic() - self._started_s
            sizes = self._server.resident_bytes()
            self.tally.memory.append((elapsed_s, sizes["app"], sizes["engine"]))
            done, errors = self.tally.kinds["requests"], len(self.tally.errors)
            run.describe(f"{done} requests, {errors} errors")
            run.advance(elapsed_s - shown_s)
            shown_s = elapsed_s
            await asyncio.sleep(1)


def memory_growth(memory: list[tuple[float, int, int]]) -> dict[str, dict[str, Any]]:
    """Return for each process the growth of its resident memory after the warm-up (slope of least squares, MiB a
    minute), its mean, and its course in tenths of the run. memory: (seconds, bytes of the app, bytes of the engine)."""
    seconds, app, engine = np.array(memory).T
    settled = seconds >= WARM_UP * seconds[-1]
    growth: dict[str, dict[str, Any]] = {}
    for name, sizes in (("app", app), ("engine", engine)):
        slope, _ = np.polyfit(seconds[settled], sizes[settled], 1)
        growth[name] = {
            "mib_per_min": round(float(slope) * 60 / 2**20, 3),
            "mean_mib": round(float(sizes[settled].mean()) / 2**20, 1),
            "by_tenth_mib": [round(float(part.mean()) / 2**20, 1) for part in np.array_split(sizes, 10)],
        }
    return growth


def wait_idle(server: ServerProcess, timeout_s: float) -> dict[str, float]:
    """Wait until the server's accounts (what runs, waits or is leased) are all 0, at most `timeout_s`. Returns them."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        metrics = server.metrics()
        accounts = {name: metrics[f"reprise_{name}"] for name in ACCOUNTS}
        pages = {state: metrics[f'reprise_hbm_pages{{state="{state}"}}'] for state in ("total", "free", "cached")}
        accounts["pages_unaccounted"] = pages["total"] - pages["free"] - pages["cached"]
        if not any(accounts.values()) or time.monotonic() > deadline_s:
            return {**accounts, **{f"pages_{state}": value for state, value in pages.items()}}
        time.sleep(0.5)


async def compare_alone(server: ServerProcess, conversations: list[list[Turn]], turns: int, run: Run) -> dict[str, Any]:
    """Send the same requests again, one at a time, to a server that computes everything anew.

    Whole conversations are replayed, from the first turn up to the turn whose client disconnected. (A prompt contains
    the exact tokens of earlier answers, and a server knows these only for answers that it gave itself.) turns: replay
    conversations until they have at least so many turns together.
    """
    client = client_of(server.url)
    chosen: list[list[Turn]] = []
    for conversation in conversations:
        complete = next((i for i, turn in enumerate(conversation) if turn.left), len(conversation))
        if complete and sum(map(len, chosen)) < turns:
            chosen.append(conversation[:complete])
    differences: list[dict[str, Any]] = []
    compared: Counter[str] = Counter()
    for conversation in run.track(chosen, "the same alone"):
        for turn in conversation:
            alone = await ask(client, server.model["id"], turn.messages, **turn.parameters)
            kind = "greedy" if turn.is_greedy else "seeded"
            compared[kind] += 1
            difference = first_difference(expected=alone, got=turn.answer)
            if difference is None:
                continue
            both = {"alone": alone.text, "soak": turn.answer.text, "messages": len(turn.messages)}
            differences.append({"kind": kind, **difference.as_row(), **both})
            break
    await client.close()
    return {"greedy": compared["greedy"], "seeded": compared["seeded"], "differences": differences}


def tier_settings(model: str) -> dict[str, str | int | float]:
    """Return the settings of the lower tiers for a model. KV in float32 takes twice as many bytes as in bfloat16."""
    per_token = 2 * kv_bytes_per_token(model)
    return {
        "cache.mode": "attentionstore",
        "cache.dram_gib": DRAM_TOKENS * per_token / GIB,
        "experiment.staging_mib": STAGING_TOKENS * per_token // MIB,
        "cache.disk_gib": DISK_TOKENS * per_token / GIB,
    }


def history_by_tier(metrics: dict[str, float]) -> dict[str, int]:
    """Return tier -> number of tokens of earlier turns whose KV was found there."""
    return {tier: int(metrics[f'reprise_history_tokens_total{{outcome="{tier}"}}']) for tier in ("hbm", "dram", "disk")}


def verdicts(
    errors: list[str], growth: dict[str, Any], idle: dict[str, float], alone: dict[str, Any], history: dict[str, int]
) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    greedy = [d for d in alone["differences"] if d["kind"] == "greedy"]
    seeded = [d for d in alone["differences"] if d["kind"] == "seeded"]
    slow = f"grows by at most {MAX_GROWTH_MIB_PER_MIN:g} MiB a minute"
    few_ties = len(greedy) <= MAX_DIFFERENT * alone["greedy"]
    return {
        "no errors": not errors,
        "greedy answers are those of the same requests alone": all(d["excused"] for d in greedy) and few_ties,
        "seeded answers are those of the same requests alone": len(seeded) <= MAX_DIFFERENT * alone["seeded"],
        **{f"{name} memory {slow}": size["mib_per_min"] <= MAX_GROWTH_MIB_PER_MIN for name, size in growth.items()},
        "idle: nothing runs, waits, is leased or on its way": not any(idle[name] for name in ACCOUNTS),
        "idle: every page is free or cached": idle["pages_unaccounted"] == 0,
        "history came from HBM, DRAM and disk": all(history.values()),
    }


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    settings = {**SETTINGS, "model.source": str(arguments.model)}
    run.expect(arguments.seconds, f"{arguments.streams} streams")
    with serve("soak", {**settings, **tier_settings(str(arguments.model))}) as server:
        tally = asyncio.run(Soak(server, seconds=arguments.seconds, streams=arguments.streams).run(run))
        idle = wait_idle(server, timeout_s=15)
        metrics = server.metrics()
        model = server.model
    history = history_by_tier(metrics)
    with serve("alone", {**settings, "cache.mode": "recompute"}) as server:
        alone = asyncio.run(compare_alone(server, tally.conversations, arguments.check, run))
    growth = memory_growth(tally.memory)
    return {
        "model": model, "settings": settings, "held": verdicts(tally.errors, growth, idle, alone, history),
        "seconds": arguments.seconds,
        "streams": arguments.streams, "counts": dict(tally.kinds), "errors": tally.errors[:100],
        "memory": growth, "idle": idle, "alone": alone, "history": history,
        "metrics": {name: value for name, value in metrics.items() if "_total" in name},
    }  # fmt: skip


def show(console: Console, result: dict[str, Any]) -> None:
    rows: dict[str, Any] = {**result["counts"], "errors": len(result["errors"])}
    rows |= {f"history from {tier}, tokens": tokens for tier, tokens in result["history"].items()}
    rows |= {f"compared alone, {kind}": result["alone"][kind] for kind in ("greedy", "seeded")}
    rows |= {f"{name} memory, MiB": size["mean_mib"] for name, size in result["memory"].items()}
    rows |= {f"{name} memory growth, MiB/min": size["mib_per_min"] for name, size in result["memory"].items()}
    rows |= {f"idle: {name}": value for name, value in result["idle"].items()}
    title = f"{result['streams']} streams for {result['seconds']:g} s"
    show_rows(console, title, {what: {"how many": value} for what, value in rows.items()})
    for entry in (*result["errors"][:20], *result["alone"]["differences"]):
        console.print(entry)


def answered(result: Result) -> float:
    """Return the share of requests without an error."""
    failed, requests = len(result["errors"]), int(result["counts"]["requests"])
    return 1.0 - failed / max(1, requests)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--check", type=int, default=200, help="answers to compare with the same requests alone")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="model directory")


EXPERIMENT = Experiment(
    name="soak", about=__doc__, measure=measure, show=show, options=options,
    quick=Quick(
        options={"seconds": 20.0, "check": 40},
        holds=False,  # caps fill up, and memory becomes flat, in minutes
        figures=[Figure("requests without an error", answered, 1.0, more_is_better=True)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
