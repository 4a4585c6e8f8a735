"""Conversations that outgrow the window, on real servers that differ in one setting, turn about.

`endless`   the server truncates: experiment.truncation_mode decoupled (saved KV at new positions) and recompute (the
            kept text is computed again).
`shortened` the client drops its oldest exchange each turn from turn 9 on: cache.client_shift, and cache.mode
            recompute.

Both servers of a pair hold the same conversation, each with its own answers; which one is asked first changes with
every turn. The client sends what it has of the history each turn, as chat clients do.
"""

import gzip
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Message, StreamedAnswer, ask_stamped
from reprise.loadgen.measure.http import Http

Settings = Mapping[str, str | int | float]
SILENCE_S = 120.0
SYSTEM: Message = {"role": "system", "content": "You are a friendly person who likes to chat."}
ENDLESS: dict[str, Settings] = {
    "AS": {"cache.truncation": "auto", "experiment.truncation_mode": "decoupled"},
    "TT": {"cache.truncation": "auto", "experiment.truncation_mode": "recompute"},
}
SHORTENED: dict[str, Settings] = {
    "client_shift": {"cache.client_shift": "true"},
    "recompute": {"cache.mode": "recompute"},
}
FIRST_SHORTENED = 9  # the turn from which on the client drops exchanges
SENTENCES = (
    "Hi, how are you today?", "Do you like music?", "I watched a good movie last night.", "What do you do for fun?",
    "Did you see the football game?", "My favorite book is about the sea.", "Do you think it will rain tomorrow?",
    "I have never heard of that.", "How many people live there?", "She plays the guitar in a band.",
    "Have you ever been to Japan?", "My dog likes to run on the beach.",
)  # fmt: skip


@dataclass(slots=True)
class Arm:
    """One server and its side of the conversation."""

    server: ServerProcess
    http: Http
    messages: list[Message] = field(default_factory=lambda: [SYSTEM])
    answers: list[StreamedAnswer] = field(default_factory=list)


def user_turns(data: Path | None, count: int, tokens: int, tokenizer: Tokenizer, seed: int) -> list[str]:
    """What the user says: recorded turns of Topical-Chat in one go, joined or cut to about `tokens` tokens each (0: as
    recorded); made-up small talk where the recordings are missing."""
    rng = random.Random(seed)
    file = data / "dialogues" / "topical_chat.jsonl.gz" if data is not None else None
    said: list[str] = []
    if file is not None and file.exists():
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        rng.shuffle(rows)
        said = [turn["content"].strip() for row in rows for turn in row["turns"] if turn["role"] == "user"]
    while len(said) < count * max(1, tokens // 4):
        said.append(" ".join(rng.sample(SENTENCES, 3)))
    if not tokens:
        return said[:count]
    ids = tokenizer.encode(" ".join(said[: count * tokens // 4]), add_special_tokens=False).ids
    return [tokenizer.decode(ids[turn * tokens : (turn + 1) * tokens]).strip() for turn in range(count)]


def answer_bias(tokenizer: Tokenizer, *, random_model: bool) -> dict[str, int]:
    """`logit_bias` that makes answers as long as allowed, of text that has as many tokens when the client sends it
    again: the bundled model must not write markup, and the random one whole words only."""
    if not random_model:
        return {str(token): -100 for token in tokenizer.get_added_tokens_decoder()}
    words = sorted(number for token, number in tokenizer.get_vocab().items() if token[0] == "Ġ" and token[1:].isalpha())
    return {str(number): 100 for number in words[:1000]}


async def converse(
    arms: Mapping[str, Arm],
    said: Sequence[str],
    *,
    max_tokens: int,
    logit_bias: dict[str, int],
    shorten_from: int | None,
    session: str,
    advance: Callable[[], None],
) -> None:
    """Play the conversation on all servers. `shorten_from`: the turn (from 1) before which the client first drops its
    oldest exchange. Raises what the client raises."""
    for arm in arms.values():  # the first request of a process pays for what it sets up
        await ask_stamped(arm.http, arm.server.model["id"], [{"role": "user", "content": "Hello"}], max_tokens=4)
    for turn, text in enumerate(said, 1):
        for name in list(arms)[:: 1 if turn % 2 else -1]:
            arm = arms[name]
            if shorten_from is not None and turn >= shorten_from:
                del arm.messages[1:3]
            arm.messages.append({"role": "user", "content": text})
            answer = await ask_stamped(
                arm.http, arm.server.model["id"], arm.messages, max_tokens=max_tokens, temperature=0,
                logit_bias=logit_bias, session_id=session,
            )  # fmt: skip
            arm.messages.append({"role": "assistant", "content": answer.text})
            arm.answers.append(answer)
        advance()


async def run_pair(
    pair: Mapping[str, Settings],
    common: Settings,
    play: Callable[[Mapping[str, Arm]], Awaitable[None]],
) -> dict[str, list[dict[str, Any]]]:
    """Start the servers of a pair, play, and take down per server and turn what came back."""
    with ExitStack() as stack:
        arms = {}
        for name, settings in pair.items():
            server = stack.enter_context(serve(name.replace("_", "-").lower(), {**common, **settings}))
            arms[name] = Arm(server, Http(server.url, silence_s=SILENCE_S))
        try:
            await play(arms)
        finally:
            for arm in arms.values():
                arm.http.close()
        return {name: turns_of(arm.answers) for name, arm in arms.items()}


def turns_of(answers: Sequence[StreamedAnswer]) -> list[dict[str, Any]]:
    """A row per turn; `cut_tokens` is what left the context in this turn."""
    rows, before = [], 0
    for turn, answer in enumerate(answers, 1):
        truncated = int(answer.x_cache.get("truncated_tokens", 0))
        rows.append(
            {
                "turn": turn,
                "ttft_ms": round(answer.ttft_ms, 2),
                "prompt_tokens": answer.prompt_tokens,
                "computed_tokens": answer.x_cache.get("computed_tokens"),
                "truncated_tokens": truncated,
                "cut_tokens": truncated - before,
                "shifted_tokens": answer.x_cache.get("shifted_tokens", 0),
                "recalled_tokens": answer.x_cache.get("recalled_tokens", 0),
                "completion_tokens": answer.completion_tokens,
                "server": {key: answer.timings.get(key) for key in ("queue_ms", "load_ms", "prefill_ms", "ttft_ms")},
            }
        )
        before = truncated
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


def summarize_endless(turns: Mapping[str, Sequence[dict[str, Any]]], max_tokens: int) -> dict[str, Any]:
    """TTFT of turns that cut against those after the first cut that do not, and whether the price of a turn grows:
    the last quarter of the ordinary turns against the first one of them. Raises ValueError if nothing overflowed."""
    out: dict[str, Any] = {}
    for name, rows in turns.items():
        cut = [row for row in rows if row["cut_tokens"] > 0]
        if not cut:
            raise ValueError(f"{name}: no turn overflowed the window; play more turns")
        plain = [row for row in rows if row["turn"] > cut[0]["turn"] and row["cut_tokens"] <= 0]
        if not plain:
            raise ValueError(f"{name}: every turn overflowed the window; the turns are too long for it")
        quarter = max(1, len(plain) // 4)
        out[name] = {
            "turns": len(rows),
            "served": sum(row["completion_tokens"] == max_tokens for row in rows),
            "cuts": len(cut),
            "truncated_tokens": rows[-1]["truncated_tokens"],
            "only_grows": all(row["cut_tokens"] >= 0 for row in rows),
            "normal_ttft_ms": spread([row["ttft_ms"] for row in plain]),
            "overflow_ttft_ms": spread([row["ttft_ms"] for row in cut]),
            "overflow_computed_tokens": median(row["computed_tokens"] for row in cut),
            "overflow_ratio": round(_p50(cut) / _p50(plain), 3),
            "late_ratio": round(_p50(plain[-quarter:]) / _p50(plain[:quarter]), 3),
        }
    return out


def summarize_shortened(turns: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """TTFT of the turns in front of which the client dropped an exchange. Raises ValueError if there are none."""
    out: dict[str, Any] = {}
    for name, rows in turns.items():
        dropped = [row for row in rows if row["turn"] >= FIRST_SHORTENED]
        if not dropped:
            raise ValueError(f"at least {FIRST_SHORTENED} turns are needed")
        out[name] = {
            "turns": len(dropped),
            "prompt_tokens": spread([row["prompt_tokens"] for row in dropped]),
            "ttft_ms": spread([row["ttft_ms"] for row in dropped]),
            "shifted_tokens": spread([row["shifted_tokens"] for row in dropped]),
            "computed_tokens": spread([row["computed_tokens"] for row in dropped]),
        }
    ours, theirs = (out[name]["ttft_ms"]["p50"] for name in SHORTENED)
    return {"arms": out, "ratio": round(ours / theirs, 3)}


def _p50(rows: Sequence[dict[str, Any]]) -> float:
    return float(median(row["ttft_ms"] for row in rows))
