"""Holds conversations with a fleet for the scenarios of this folder, notes what clients see, and shows the results."""

import random
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.fleet.chat_stream import ChatStream, StreamFailed
from benchmarks.harness.experiment import Result
from benchmarks.harness.measures import ratio
from reprise.loadgen.percentile import percentile
from reprise.loadgen.workloads import filler_text

Row = dict[str, Any]
TIERS = ("hbm", "dram", "disk", "redis")
# Lists of a result that name single cases; their first entries are shown.
CASES = ("errors", "lost", "differences", "bad", "less_cached")
SHOWN_CASES = 20


@dataclass
class Talk:
    """A conversation as its client holds it. `stream` makes the request for a turn, and `take` adds the answer, so that
    the same turn can be sent to several servers."""

    name: str
    is_named: bool = True  # by its client; otherwise a fleet knows it by its messages
    body: dict[str, Any] = field(default_factory=dict)  # fields of every request
    messages: list[dict[str, str]] = field(default_factory=list)
    session_id: str = ""
    home: str = ""  # the replica that ended the last answer; "" on a server that is in no fleet
    history_tokens: int = 0  # tokens that earlier turns have run through the model

    def say(self, content: str) -> None:
        self.messages.append({"role": "user", "content": content})

    def stream(self, url: str, **body: Any) -> ChatStream:
        """Return the request for the next turn, not yet sent. It is greedy and ignores end tokens, unless `body` has
        other values for these fields. body: further fields of the request."""
        asked = {"temperature": 0, "ignore_eos": True, **self.body, **body, "messages": list(self.messages)}
        return ChatStream(url, asked, {"x-session-id": self.name} if self.is_named else {})

    def take(self, stream: ChatStream) -> None:
        """Add an answer to the conversation."""
        self.messages.append({"role": "assistant", "content": stream.text})
        self.session_id, self.home, self.history_tokens = stream.session_id, stream.replica, stream.context_tokens

    def row(self, stream: ChatStream, **more: Any) -> Row:
        """Return the figures of a turn for a result file. Call it before `take` adds the turn's answer. more: further
        fields of the row."""
        return {
            "conversation": self.name,
            "turn": len(self.messages) // 2,  # from 0
            "is_named": self.is_named,
            "replica": stream.replica,
            "is_known": stream.session_id == self.session_id if self.session_id else None,
            "at_home": stream.replica == self.home if self.home else None,
            "route": stream.route.get("route", ""),
            "ttft_ms": round(1e3 * stream.ttft_s, 2),
            "prompt_tokens": stream.usage["prompt_tokens"],
            "answer_tokens": stream.usage["completion_tokens"],
            "history_tokens": self.history_tokens,
            "cached_tokens": stream.cached_tokens,
            "tokens": {tier: int(stream.x_cache.get(f"{tier}_tokens", 0)) for tier in TIERS},
            **more,
        }


@dataclass(slots=True)
class Account:
    """The record of a scenario's turns and errors, as its clients saw them."""

    turns: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.perf_counter)

    async def turn(self, talk: Talk, url: str, words: str, max_tokens: int, **more: Any) -> ChatStream | None:
        """Play one turn and record it. Returns None after an error, which ends the conversation. words: what the user
        says. more: further fields of the turn's record."""
        talk.say(words)
        stream = talk.stream(url, max_tokens=max_tokens)
        if error := await error_of(stream):
            self.errors.append(f"turn {len(talk.messages) // 2 + 1} of {talk.name}, {more}: {error}")
            return None
        self.turns.append(talk.row(stream, sent_s=round(stream.sent_s - self.began_s, 3), **more))
        talk.take(stream)
        return stream


async def error_of(stream: ChatStream) -> str:
    """Run a stream to its end. Returns the error that its client got; "" if there was none."""
    try:
        await stream.run()
    except (StreamFailed, httpx.HTTPError) as error:
        return repr(error)[:300]
    return ""


def words(rng: random.Random, count: int) -> str:
    return filler_text.words(rng, count)


def p50_p95(values: Sequence[float]) -> dict[str, float] | None:
    return {"p50": percentile(values, 0.5), "p95": percentile(values, 0.95)} if values else None


def figures_of(turns: Sequence[Row]) -> dict[str, Any]:
    history = sum(turn["history_tokens"] for turn in turns)
    return {
        "turns": len(turns),
        "ttft_ms": p50_p95([turn["ttft_ms"] for turn in turns]),
        "history_cached": ratio(sum(min(turn["cached_tokens"], turn["history_tokens"]) for turn in turns), history),
        "routes": dict(Counter(turn["route"] for turn in turns)),
    }


def at_least(share: float | None, least: float) -> bool:
    """Return whether a share is at least `least`. None, which stands for a share of nothing, is not."""
    return share is not None and share >= least


def asks(**defaults: Any) -> Callable[[ArgumentParser], None]:
    """Return a function that adds the options of a scenario to a parser: one for each of `defaults`, with that name and
    default."""

    def options(parser: ArgumentParser) -> None:
        for name, default in defaults.items():
            flag, told = f"--{name.replace('_', '-')}", f"default: {default}"
            parser.add_argument(flag, type=type(default), default=default, help=told)

    return options


def show(console: Console, result: Result) -> None:
    """Print a scenario's result as a table, a line for each figure. Of a list the table shows only the length. The
    first entries of the lists in `CASES` follow after the table."""
    table = Table(show_header=False)
    for name, value in result.items():
        has_parts = isinstance(value, dict) and any(isinstance(part, dict) for part in value.values())
        for part, figures in (value if has_parts else {"": value}).items():
            if name not in ("held", "settings"):
                shown = len(figures) if isinstance(figures, list) else figures
                table.add_row(f"{name} {part}".replace("_", " "), str(shown))
    console.print(table)
    for case in (case for name in CASES for case in result.get(name, [])[:SHOWN_CASES]):
        console.print(case)
