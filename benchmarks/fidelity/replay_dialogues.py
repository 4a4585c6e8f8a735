"""Replay real dialogues against two servers that differ in one setting: `cache.mode` prefix and recompute.

    python -m benchmarks.fidelity.replay_dialogues --data DIR [--model smollm2]

The user's turns are as recorded, the assistant's are generated, greedily and in float32, so that the answers of the two
servers must be the same, token for token. A dialogue ends at its first difference, when its turns are used up, or when
the next prompt and its answer might not fit the context window.

The two servers take turns: a step sends the next turn of every open conversation to one server, waits for all answers,
then does the same with the other; which one is first changes with every step. So neither slows the other down, and a
slow minute of the machine hits both.

Held: no error; every difference is a near-tie, and they are at most 0.5 % of the turns; and from the second turn on at
least 97 % of the history tokens (prompt and answer of the turn before) come from the cache. The exit status says so.
"""

import asyncio
import gzip
import json
import random
from argparse import ArgumentParser
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.models import model_directory, result_name
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Difference, Message, StreamedAnswer, ask, client_of, first_difference
from benchmarks.harness.tables import show_rows

MODES = ("prefix", "recompute")
MIN_CACHED, MAX_NEAR_TIES = 0.97, 0.005
# Bound of the chat markup from the end of one answer to the start of the next; ChatML takes up to 13.
MARKUP_TOKENS = 16


@dataclass(slots=True)
class Turn:
    """One turn of one dialogue on both servers."""

    dialogue: str
    index: int  # 1 opens the dialogue
    answers: dict[str, StreamedAnswer]
    difference: Difference | None


@dataclass(slots=True)
class Conversation:
    dialogue: str
    user_turns: list[str]
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    error: str | None = None

    def next_messages(self) -> list[Message]:
        return [*self.messages, {"role": "user", "content": self.user_turns[len(self.turns)]}]

    def is_open(self, tokenizer: Tokenizer, max_context: int, max_tokens: int) -> bool:
        """Return whether another turn can be played. The length of its prompt is bounded from above, without the
        template: the tokens of the turn before, those of the new message, and markup."""
        if self.error is not None or len(self.turns) >= len(self.user_turns):
            return False
        history = 0
        if self.turns:
            if self.turns[-1].difference is not None:
                return False
            last = self.turns[-1].answers["prefix"]
            history = last.prompt_tokens + last.completion_tokens
        message = len(tokenizer.encode(self.user_turns[len(self.turns)], add_special_tokens=False).ids)
        return history + message + MARKUP_TOKENS + max_tokens <= max_context


def read_dialogues(data: Path, count: int, rounds: int) -> list[Conversation]:
    """Return `count` random dialogues of the file, with the first `rounds` turns of the user of each."""
    with gzip.open(data / "dialogues/topical_chat.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Conversation(row["id"], [t["content"] for t in row["turns"] if t["role"] == "user"][:rounds])
        for row in random.Random(0).sample(rows, count)
    ]


class Replay:
    """A player of conversations on both servers."""

    def __init__(self, servers: dict[str, ServerProcess], tokenizer: Tokenizer, run: Run) -> None:
        self._servers, self._tokenizer, self._advance = servers, tokenizer, run.advance
        self._clients = {mode: client_of(server.url) for mode, server in servers.items()}
        self._max_context = min(server.max_context for server in servers.values())
        self._max_tokens, self._at_once = run.arguments.max_tokens, run.arguments.at_once

    async def run(self, conversations: list[Conversation]) -> None:
        """Play all conversations, `at_once` of them at a time."""
        for mode in MODES:  # the first request of a process pays for what it sets up
            await self._ask(mode, [{"role": "user", "content": "Hello"}])
        waiting = iter(conversations)
        active: list[Conversation] = []
        step = 0
        while True:
            for conversation in active:
                if not self._is_open(conversation):
                    self._advance(len(conversation.user_turns) - len(conversation.turns))
            active = [c for c in active if self._is_open(c)]
            active += islice((c for c in waiting if self._is_open(c)), self._at_once - len(active))
            if not active:
                break
            await self._step(active, MODES if step % 2 else MODES[::-1])
            self._advance(len(active))
            step += 1
        for client in self._clients.values():
            await client.close()

    def _is_open(self, conversation: Conversation) -> bool:
        return conversation.is_open(self._tokenizer, self._max_context, self._max_tokens)

    async def _step(self, active: list[Conversation], modes: tuple[str, ...]) -> None:
        answers: dict[str, list[StreamedAnswer | BaseException]] = {}
        for mode in modes:
            requests = (self._ask(mode, c.next_messages()) for c in active)
            answers[mode] = await asyncio.gather(*requests, return_exceptions=True)
        for conversation, *pair in zip(active, *(answers[mode] for mode in MODES), strict=True):
            failed = [f"{m}: {a!r}" for m, a in zip(MODES, pair, strict=True) if isinstance(a, BaseException)]
            if failed:
                conversation.error = "; ".join(failed)
                continue
            prefix, recompute = (a for a in pair if isinstance(a, StreamedAnswer))
            difference = first_difference(expected=recompute, got=prefix)
            both = {"prefix": prefix, "recompute": recompute}
            conversation.messages = [*conversation.next_messages(), {"role": "assistant", "content": prefix.text}]
            conversation.turns.append(Turn(conversation.dialogue, len(conversation.turns) + 1, both, difference))

    async def _ask(self, mode: str, messages: list[Message]) -> StreamedAnswer:
        return await ask(
            self._clients[mode], self._servers[mode].model["id"], messages,
            max_tokens=self._max_tokens, temperature=0, logprobs=True, top_logprobs=2,
        )  # fmt: skip


def summarize(conversations: list[Conversation]) -> dict[str, Any]:
    """Return everything that is reported of the conversations, as plain values."""
    turns = [turn for c in conversations for turn in c.turns]
    history: dict[int, int] = defaultdict(int)
    cached: dict[int, int] = defaultdict(int)
    for conversation in conversations:
        for before, turn in zip(conversation.turns, conversation.turns[1:], strict=False):
            last = before.answers["prefix"]
            history[turn.index] += last.prompt_tokens + last.completion_tokens
            # New tokens that another dialogue happened to have at the same place are cached, but no history.
            cached[turn.index] += min(turn.answers["prefix"].cached_tokens, last.prompt_tokens + last.completion_tokens)
    by_turn = []
    for index in sorted({turn.index for turn in turns}):
        same = [turn for turn in turns if turn.index == index]
        row: dict[str, Any] = {
            "turn": index,
            "conversations": len(same),
            "prompt_tokens_p50": median(t.answers["prefix"].prompt_tokens for t in same),
            "history_tokens": history[index],
            "cached_tokens": cached[index],
        }
        for mode in MODES:
            row[f"{mode}_ttft_ms_p50"] = round(median(t.answers[mode].ttft_ms for t in same), 2)
        by_turn.append(row)
    differences = [
        {"dialogue": turn.dialogue, "turn": turn.index, **found.as_row()}
        for turn in turns
        if (found := turn.difference) is not None
    ]
    later_history = sum(history.values())
    return {
        "dialogues": len(conversations),
        "turns": len(turns),
        "generated_tokens": sum(t.answers["prefix"].completion_tokens for t in turns),
        "by_turn": by_turn,
        "cached_ratio": round(sum(cached.values()) / later_history, 5) if later_history else None,
        "differences": differences,
        "errors": [f"{c.dialogue}: {c.error}" for c in conversations if c.error is not None],
    }


def verdicts(summary: dict[str, Any]) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    excused = [d for d in summary["differences"] if d["excused"]]
    return {
        "no errors": not summary["errors"],
        "identical text": len(excused) == len(summary["differences"]),
        f"near-ties in at most {MAX_NEAR_TIES:.1%} of the turns": len(excused) <= MAX_NEAR_TIES * summary["turns"],
        f"at least {MIN_CACHED:.0%} of history tokens cached": (summary["cached_ratio"] or 0) >= MIN_CACHED,
    }


def show(console: Console, summary: dict[str, Any]) -> None:
    show_rows(console, "Time to first token by turn, p50, ms", summary["by_turn"])
    for entry in (*summary["differences"], *summary["errors"]):
        console.print(entry)
    console.print({name: summary[name] for name in ("dialogues", "turns", "generated_tokens", "cached_ratio")})


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    conversations = read_dialogues(arguments.data, arguments.dialogues, arguments.rounds)
    settings = {"model.source": str(arguments.model), "model.dtype": "float32"}
    with (
        serve("prefix", {**settings, "cache.mode": "prefix"}) as prefix,
        serve("recompute", {**settings, "cache.mode": "recompute"}) as recompute,
    ):
        tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
        replay = Replay({"prefix": prefix, "recompute": recompute}, tokenizer, run)
        run.expect(sum(len(conversation.user_turns) for conversation in conversations), "turns")
        asyncio.run(replay.run(conversations))
    summary = summarize(conversations)
    return {"model": prefix.model, "settings": settings, "held": verdicts(summary), **summary}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="directory with dialogues/topical_chat.jsonl.gz")
    parser.add_argument("--model", type=model_directory, default="bundled", help="bundled, smollm2, or a directory")
    parser.add_argument("--dialogues", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=8, help="conversations open at the same time")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("replay_dialogues", arguments.model),
    about=__doc__, measure=measure, show=show, options=options, rounds=10, rounds_help="turns of the user",
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
