"""Measures what a conversation costs when it outgrows the window: real servers that differ in one setting, turn about.

    python -m benchmarks.speed.truncation --data DIR [--model smollm2] [--parts endless,shortened,...]

endless         200 turns on a window of 1,024 tokens; the server truncates: experiment.truncation_mode decoupled (saved
                KV at new positions, AS) and recompute (the kept text is computed again, TT).
shortened       the client itself drops its oldest exchange each turn from turn 9 on: cache.client_shift against
                cache.mode recompute; -125m: the same at about 1,650 tokens on the 125 M shape.
recall          messages that quote text which was dropped long before, with cache.recall and without. Not run by
                default; `benchmarks.texts keeping` measures what recall is worth.

Both servers of a pair hold the same conversation, each with its own answers; which one is asked first changes with
every turn. The client sends what it has of the history each turn, as chat clients do. What a cut changes in quality is
measured by `benchmarks.texts cuts`.

Held, or the exit status is 1: every turn is served, a turn that overflows has at most 1.3 x the TTFT of one that does
not, and turns do not become dearer; a shortened history takes at most 0.4 x of a recompute; TTFT with recall is at most
1.3 x. The result is written after every part.
"""

import asyncio
import random
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.harness.experiment import Experiment, Run, some_of
from benchmarks.harness.make_model import SHAPES, make_model
from benchmarks.harness.models import model_directory, name_of, result_name
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Message, StreamedAnswer, ask_stamped
from benchmarks.harness.tables import show_rows
from benchmarks.texts.reading import chats
from reprise.loadgen.measure.http import Http

Settings = Mapping[str, str | int | float]
Rows = Mapping[str, Sequence[dict[str, Any]]]
"""Arm -> a row for each turn."""
SILENCE_S = 120.0
SYSTEM: Message = {"role": "system", "content": "You are a friendly person who likes to chat."}
SHORTENED: dict[str, Settings] = {
    "client_shift": {"cache.client_shift": "true"},
    "recompute": {"cache.mode": "recompute"},
}
PARTS: dict[str, dict[str, Settings]] = {
    "endless": {
        "AS": {"cache.truncation": "auto", "experiment.truncation_mode": "decoupled"},
        "TT": {"cache.truncation": "auto", "experiment.truncation_mode": "recompute"},
    },
    "shortened": SHORTENED,
    "shortened-125m": SHORTENED,
    "recall": {"recall": {"cache.recall": "true"}, "off": {"cache.recall": "false"}},
}
FIRST_SHORTENED = 9  # the turn from which on the client drops exchanges
WINDOW, LARGE_WINDOW = 1024, 2048  # for every model but the 125 M shape, and for that
USER_TOKENS = {"endless": 0, "shortened": 60, "shortened-125m": 166, "recall": 60}  # 0: as recorded
TURNS_BEFORE_RECALL = 24
QUOTED_WORDS = 12  # words of an early message, in one that is about it
MAX_OVERFLOW, MAX_LATE, MAX_SHIFTED, MAX_RECALL = 1.3, 1.3, 0.4, 1.3


@dataclass(slots=True)
class Arm:
    """One server of a pair, and its side of the conversation."""

    server: ServerProcess
    http: Http
    messages: list[Message] = field(default_factory=lambda: [SYSTEM])
    answers: list[StreamedAnswer] = field(default_factory=list)

    async def ask(self, text: str, **parameters: Any) -> None:
        self.messages.append({"role": "user", "content": text})
        answer = await ask_stamped(self.http, self.server.model["id"], self.messages, temperature=0, **parameters)
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer)


def user_turns(data: Path, count: int, tokens: int, tokenizer: Tokenizer, seed: int) -> list[str]:
    """Return `count` messages of a user from recorded chats (Topical-Chat). They are laid end to end and cut into
    pieces of `tokens` tokens; 0: they are as recorded."""
    recorded = list(chats(data))
    random.Random(seed).shuffle(recorded)
    said = [turn["content"].strip() for turns in recorded for turn in turns if turn["role"] == "user"]
    if not tokens:
        return said[:count]
    ids = tokenizer.encode(" ".join(said[: count * tokens // 4]), add_special_tokens=False).ids
    return [tokenizer.decode(ids[turn * tokens : (turn + 1) * tokens]).strip() for turn in range(count)]


def answer_bias(tokenizer: Tokenizer, *, random_model: bool) -> dict[str, int]:
    """Return a `logit_bias` with which answers are as long as allowed, and have the same number of tokens when the
    client sends them back. It keeps a trained model from writing markup, and a random model from writing anything but
    whole words."""
    if not random_model:
        return {str(token): -100 for token in tokenizer.get_added_tokens_decoder()}
    words = sorted(number for token, number in tokenizer.get_vocab().items() if token[0] == "Ġ" and token[1:].isalpha())
    return {str(number): 100 for number in words[:1000]}


async def converse(
    pair: Mapping[str, Settings],
    common: Settings,
    said: Sequence[str],
    *,
    shortens: bool,
    advance: Callable[[], None],
    **parameters: Any,
) -> dict[str, list[dict[str, Any]]]:
    """Play the same conversation on the servers of a pair. pair: name -> settings. common: settings of both. said: the
    user's messages. shortens: whether the client drops its oldest exchange before each later turn. parameters: of each
    request. Returns server -> a row for each turn. Raises what the client raises."""
    with ExitStack() as stack:
        arms: dict[str, Arm] = {}
        for name, settings in pair.items():
            server = stack.enter_context(serve(name.replace("_", "-").lower(), {**common, **settings}))
            arms[name] = Arm(server, Http(server.url, silence_s=SILENCE_S))
            stack.callback(arms[name].http.close)
            # The first request of a process pays for what it sets up.
            await ask_stamped(arms[name].http, server.model["id"], [{"role": "user", "content": "Hello"}], max_tokens=4)
        for turn, text in enumerate(said, 1):
            for name in list(arms)[:: 1 if turn % 2 else -1]:
                if shortens and turn >= FIRST_SHORTENED:
                    del arms[name].messages[1:3]
                await arms[name].ask(text, **parameters)
            advance()
        return {name: rows_of(arm.answers) for name, arm in arms.items()}


def rows_of(answers: Sequence[StreamedAnswer]) -> list[dict[str, Any]]:
    """Return a row for each turn. `cut_tokens`: how many tokens truncation dropped from the context in this turn."""
    rows, before = [], 0
    for turn, answer in enumerate(answers, 1):
        found = answer.x_cache
        truncated = int(found.get("truncated_tokens", 0))
        rows.append(
            {
                "turn": turn, "ttft_ms": round(answer.ttft_ms, 2), "prompt_tokens": answer.prompt_tokens,
                "computed_tokens": found.get("computed_tokens"), "truncated_tokens": truncated,
                "cut_tokens": truncated - before, "shifted_tokens": found.get("shifted_tokens", 0),
                "recalled_tokens": found.get("recalled_tokens", 0), "completion_tokens": answer.completion_tokens,
            }
        )  # fmt: skip
        before = truncated
    return rows


def spread(rows: Sequence[Mapping[str, float]], key: str = "ttft_ms") -> dict[str, float]:
    """Return the median, the least and the greatest value of a column."""
    values = [row[key] for row in rows]
    return {"p50": round(median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


def summarize_endless(turns: Rows, max_tokens: int) -> dict[str, Any]:
    """Compare, for each server, the TTFT of turns in which the window overflowed with that of turns in which it did
    not; of the latter, only those after the first overflow count. Also compare the last quarter of these with their
    first quarter. max_tokens: tokens of a complete answer. Raises ValueError if there are none of either kind."""
    out: dict[str, Any] = {}
    for name, rows in turns.items():
        cut = [row for row in rows if row["cut_tokens"] > 0]
        plain = [row for row in rows if cut and row["turn"] > cut[0]["turn"] and row["cut_tokens"] <= 0]
        if not plain:
            raise ValueError(f"{name}: {len(cut)} turns overflowed the window, and none did not after that")
        quarter = max(1, len(plain) // 4)
        early, late = spread(plain[:quarter])["p50"], spread(plain[-quarter:])["p50"]
        out[name] = {
            "turns": len(rows), "served": sum(row["completion_tokens"] == max_tokens for row in rows),
            "cuts": len(cut), "truncated_tokens": rows[-1]["truncated_tokens"],
            "only_grows": all(row["cut_tokens"] >= 0 for row in rows), "normal_ttft_ms": spread(plain),
            "overflow_ttft_ms": spread(cut), "overflow_computed_tokens": spread(cut, "computed_tokens")["p50"],
            "overflow_ratio": round(spread(cut)["p50"] / spread(plain)["p50"], 3), "late_ratio": round(late / early, 3),
        }  # fmt: skip
    return out


def summarize_shortened(turns: Rows) -> dict[str, Any]:
    """Return medians of the turns before which the client dropped an exchange, by server."""
    keys = ("prompt_tokens", "ttft_ms", "shifted_tokens", "computed_tokens")
    arms: dict[str, Any] = {}
    for name, rows in turns.items():
        dropped = [row for row in rows if row["turn"] >= FIRST_SHORTENED]
        arms[name] = {"turns": len(dropped)} | {key: spread(dropped, key) for key in keys}
    ours, theirs = (arms[name]["ttft_ms"]["p50"] for name in SHORTENED)
    return {"arms": arms, "ratio": round(ours / theirs, 3)}


def summarize_recall(rows: Rows, before: int) -> dict[str, Any]:
    """Return medians of the turns from number `before` on in which KV was recalled and no window overflowed. Raises
    ValueError if there are none."""
    turns = [
        turn for turn in range(before, len(rows["off"]))
        if rows["recall"][turn]["recalled_tokens"] and not any(rows[arm][turn]["cut_tokens"] for arm in rows)
    ]  # fmt: skip
    if not turns:
        raise ValueError("nothing was recalled; play more turns")
    ttft = {arm: median(found[turn]["ttft_ms"] for turn in turns) for arm, found in rows.items()}
    recalled = median(rows["recall"][turn]["recalled_tokens"] for turn in turns)
    ratio = round(ttft["recall"] / ttft["off"], 3)
    return {"turns": len(turns), "recalled_tokens": recalled, "ttft_ms": ttft, "ratio": ratio}


def run_part(part: str, run: Run) -> dict[str, Any]:
    """Play one part of the benchmark on its pair of servers, and return its result."""
    arguments, large = run.arguments, part == "shortened-125m"
    model = arguments.model
    if large:
        model = run.directory / "m125"
        make_model(model, SHAPES["125m"], seed=0)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    counts = {"endless": arguments.turns, "recall": TURNS_BEFORE_RECALL}
    count = counts.get(part, FIRST_SHORTENED - 1 + arguments.rounds)
    said = user_turns(arguments.data, count, USER_TOKENS[part], tokenizer, arguments.seed)
    if part == "recall":
        said += [f"You remember: {' '.join(text.split()[:QUOTED_WORDS])}" for text in said[1 : 1 + arguments.rounds]]
    run.expect(len(said), part)
    max_tokens = 16 if part == "recall" else arguments.max_tokens
    common: dict[str, str | int | float] = {"model.source": str(model)}
    common["model.max_context"] = LARGE_WINDOW if large else WINDOW
    rows = asyncio.run(
        converse(
            PARTS[part], common, said, shortens=part.startswith("shortened"), advance=run.advance, session_id=part,
            max_tokens=max_tokens, logit_bias=answer_bias(tokenizer, random_model=large),
        )
    )  # fmt: skip
    if part == "endless":
        summary = summarize_endless(rows, max_tokens)
    else:
        summary = summarize_recall(rows, count) if part == "recall" else summarize_shortened(rows)
    common["model.source"] = "125 M" if large else name_of(model)
    return {"settings": {"common": common, **PARTS[part]}, "summary": summary, "by_turn": rows}


def verdicts(parts: Mapping[str, Any]) -> dict[str, bool]:
    """Return claim -> whether it holds, for the parts that were run."""
    held: dict[str, bool] = {}
    for part, found in parts.items():
        summary = found["summary"]
        if part == "endless":
            ours = summary["AS"]
            held["every turn is served"] = all(arm["served"] == arm["turns"] for arm in summary.values())
            held["truncated_tokens only grows"] = all(arm["only_grows"] for arm in summary.values())
            held[f"a turn that overflows takes at most {MAX_OVERFLOW} x"] = ours["overflow_ratio"] <= MAX_OVERFLOW
            held[f"late turns take at most {MAX_LATE} x of early ones"] = ours["late_ratio"] <= MAX_LATE
        elif part == "recall":
            held[f"TTFT with recall at most {MAX_RECALL} x"] = summary["ratio"] <= MAX_RECALL
        else:
            held[f"{part}: at most {MAX_SHIFTED} x of a recompute"] = summary["ratio"] <= MAX_SHIFTED
    return held


def measure(run: Run) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for part in run.arguments.parts:
        parts[part] = run_part(part, run)
        run.keep({"seed": run.arguments.seed, "held": verdicts(parts), "parts": parts})
    return {"seed": run.arguments.seed, "held": verdicts(parts), "parts": parts}


def show(console: Console, result: dict[str, Any]) -> None:
    for part, found in result["parts"].items():
        summary = found["summary"]
        show_rows(console, part, summary if part == "endless" else summary.get("arms", {part: summary}))


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="directory with dialogues/")
    standing = [part for part in PARTS if part != "recall"]
    parser.add_argument("--parts", type=some_of(list(PARTS)), default=standing, help="comma-separated")
    parser.add_argument("--model", type=model_directory, default="bundled", help="bundled, smollm2, or a directory")
    parser.add_argument("--turns", type=int, default=200, help="of the endless conversation")
    parser.add_argument("--max-tokens", type=int, default=32, help="generated per turn")
    parser.add_argument("--seed", type=int, default=0)


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("truncation", arguments.model),
    about=__doc__, measure=measure, show=show, options=options, rounds=20, rounds_help="turns with a shortened history",
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
