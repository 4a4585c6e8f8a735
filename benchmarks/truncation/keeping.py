"""What a full window drops, by scorer, and what recall brings back.

    python -m benchmarks.truncation.keeping --data DIR [--model smollm2] [--parts perplexity,names,ttft]

perplexity      of the text after a cut, by scorer, as a ratio to the oldest leaving.
names           given in the older half of the window and asked for after a cut, by scorer and with recall: the user
                asks for a message of the assistant once more. A question counts if it is answered with the whole
                window before it, and not without the dialogue that it is from.
ttft            of messages about text that was dropped, on servers with cache.recall and without.

Held, or the exit status is 1: attended answers 15 points more than oldest, and its perplexity is at most
0.5 % above oldest's; recall answers 70 % of the questions; TTFT with recall is at most 1.3 x.
The result is written after every part.
"""

import asyncio
import math
import random
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.harness.experiment import Experiment, Quick, Run
from benchmarks.harness.measures import interval
from benchmarks.harness.models import model_directory, name_of, result_name
from benchmarks.truncation import serving
from benchmarks.truncation.kept import KeptBench, cut, recall
from benchmarks.truncation.perplexity import DRAWS, TEXTS, draw_windows, read_text
from benchmarks.truncation.quality import rows_without
from benchmarks.truncation.retrieval import (
    Question,
    answer,
    find_questions,
    is_answerable,
    name_tokens,
)
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.policies.keep import BLOCK_SCORERS
from tools.bundled_model.corpus import TURN_END, TURN_START

PARTS = ("perplexity", "names", "ttft")
WINDOW = 1024
HISTORY = WINDOW - 2 * BLOCK_TOKENS  # tokens before the message that does not fit
RESERVE = 4 * BLOCK_TOKENS  # for that message and its answer
SYSTEM = BLOCK_TOKENS  # leading tokens that stay
OLDER_HALF = (SYSTEM, SYSTEM + WINDOW // 2)  # where the names lie: what `oldest` drops
RECALL = "oldest, recall"
BETTER, MAX_ABOVE, MIN_RECALL, MAX_TTFT = 0.15, 0.005, 0.7, 1.3
TTFT_ARMS: dict[str, serving.Settings] = {"recall": {"cache.recall": "true"}, "off": {"cache.recall": "false"}}
QUOTED_WORDS = 12  # of an early message, in one that is about it


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a dialogue that was said long before, and the user's message in which it is asked again."""

    question: Question
    asked: list[int]


def asked_again(question: Question, tokenizer: Tokenizer, opening: Sequence[int]) -> Asked | None:
    """Have the user ask for the assistant's message once more, in its own words up to the name. opening: the tokens
    with which the assistant's messages begin. None if that is too long."""
    words = tokenizer.decode(question.message[len(opening) :]).strip()
    text = f"{TURN_START}user\nPlease tell me once more: {words}{TURN_END}\n"
    asked = tokenizer.encode(text, add_special_tokens=False).ids
    return Asked(question, asked) if len(asked) + len(question.message) < RESERVE else None


def ask(bench: KeptBench, asked: Asked, ids: list[int], other: list[int]) -> dict[str, bool] | None:
    """Return arm -> whether the right name comes first; None if the question does not count. ids: the text before the
    message, with the dialogue in its older half; other: the same without it."""
    then = Question([], [*asked.asked, *asked.question.message], asked.question.candidates)
    bench.read(other)
    guessed = answer(bench, then)[0]
    read = bench.read(ids)
    if guessed or not answer(bench, then)[0]:
        return None
    right = {}
    cuts = {
        scorer: cut(read, scorer, asked.asked, window=WINDOW, reserve=RESERVE, keep_first=SYSTEM)
        for scorer in BLOCK_SCORERS
    }
    cuts[RECALL] = recall(ids, cuts["oldest"], asked.asked, window=WINDOW, keep_first=SYSTEM)
    for arm, dropped in cuts.items():
        bench.place("AS", read.saved, rows_without(len(ids), dropped))
        right[arm] = answer(bench, then)[0]
    return right


def measure_names(
    bench: KeptBench, tokenizer: Tokenizer, arguments: Namespace, advance: Callable[[], None]
) -> dict[str, Any] | None:
    """Share of right answers by arm; None where the dialogues are missing."""
    dialogues = read_text(arguments.data, "schema_guided", tokenizer)
    if dialogues is None:
        return None
    rng = random.Random(arguments.seed)
    names = name_tokens(tokenizer, {token for ids in dialogues for token in ids})
    answering = tokenizer.encode("assistant", add_special_tokens=False).ids[0]
    opening = tokenizer.encode(TURN_START, add_special_tokens=False).ids[0]
    begins = tokenizer.encode(f"{TURN_START}assistant\n", add_special_tokens=False).ids
    questions = find_questions(dialogues, names, opening, answering, rng)
    found = [asked for question in questions if (asked := asked_again(question, tokenizer, begins)) is not None]
    rng.shuffle(found)
    text = [token for ids in dialogues for token in ids]
    answers: dict[str, list[bool]] = defaultdict(list)
    tried = 0
    for asked in found:
        if len(answers["oldest"]) >= arguments.questions:
            break
        tried += 1
        if not is_answerable(bench, asked.question):
            continue
        start = rng.randrange(len(text) - HISTORY)
        other = text[start : start + HISTORY]
        said = asked.question.history
        place = rng.randrange(OLDER_HALF[0], OLDER_HALF[1] - len(said) + 1)
        ids = [*other[:place], *said, *other[place + len(said) :]]
        right = ask(bench, asked, ids, other)
        if right is not None:
            for arm, is_right in right.items():
                answers[arm].append(is_right)
            advance()
    if not answers:
        raise ValueError("this model answers none of the questions")
    return {
        "questions": len(answers["oldest"]),
        "tried": tried,
        "arms": {arm: sum(right) / len(right) for arm, right in answers.items()},
    }


def measure_perplexity(
    bench: KeptBench, tokenizer: Tokenizer, arguments: Namespace, advance: Callable[[], None]
) -> dict[str, Any]:
    """Ratio of each scorer's perplexity to oldest's, by text, with its 95 % interval over windows."""
    out: dict[str, Any] = {"scored_tokens": arguments.scored, "texts": {}, "missing": []}
    for name in TEXTS:
        found = read_text(arguments.data, name, tokenizer)
        if found is None:
            out["missing"].append(name)
            continue
        losses: dict[str, list[float]] = {scorer: [] for scorer in BLOCK_SCORERS}
        for ids in draw_windows(found, WINDOW + arguments.scored + 1, arguments.windows, arguments.seed):
            read = bench.read(ids[:WINDOW])
            following, targets = ids[WINDOW:-1], torch.tensor(ids[WINDOW + 1 :])
            for scorer, known in losses.items():
                cuts = cut(read, scorer, (), window=WINDOW, reserve=arguments.scored, keep_first=SYSTEM)
                bench.place("AS", read.saved, rows_without(WINDOW, cuts))
                known.append(-float(bench.go_on(following).gather(1, targets[:, None]).mean()))
            advance()
        out["texts"][name] = {scorer: ratio_to(losses["oldest"], known) for scorer, known in losses.items()}
    return out


def ratio_to(oldest: Sequence[float], losses: Sequence[float]) -> dict[str, Any]:
    apart = [mine - theirs for mine, theirs in zip(losses, oldest, strict=True)]
    low, high = interval(lambda rng: _mean(rng.choices(apart, k=len(apart))), DRAWS)
    return {
        "ppl": math.exp(_mean(losses)),
        "ratio_to_oldest": math.exp(_mean(apart)),
        "ratio_to_oldest_95": (math.exp(low), math.exp(high)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def measure_ttft(arguments: Namespace, advance: Callable[[], None]) -> dict[str, Any]:
    """TTFT of messages that quote what was said long before, once the window has overflowed."""
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    first = serving.user_turns(arguments.data, arguments.turns, 60, tokenizer, arguments.seed)
    quotes = [f"You remember: {' '.join(text.split()[:QUOTED_WORDS])}" for text in first[1 : 1 + arguments.rounds]]
    common: dict[str, str | int | float] = {"model.source": str(arguments.model), "model.max_context": WINDOW}
    bias = serving.answer_bias(tokenizer, random_model=False)

    def play(arms: Mapping[str, serving.Arm]) -> Awaitable[None]:
        return serving.converse(
            arms,
            [*first, *quotes],
            max_tokens=16,
            session="recall",
            advance=advance,
            shorten_from=None,
            logit_bias=bias,
        )

    rows = asyncio.run(serving.run_pair(TTFT_ARMS, common, play))
    common["model.source"] = name_of(arguments.model)
    return {"settings": {"common": common, **TTFT_ARMS}, "summary": summarize_ttft(rows, len(first)), "by_turn": rows}


def summarize_ttft(rows: Mapping[str, Sequence[dict[str, Any]]], before: int) -> dict[str, Any]:
    """TTFT of the turns after the first `before` in which the first server has recalled something and no window
    overflowed. Raises ValueError if there is none."""
    turns = [
        turn for turn in range(before, len(rows["off"]))
        if rows["recall"][turn]["recalled_tokens"] and not any(rows[arm][turn]["cut_tokens"] for arm in rows)
    ]  # fmt: skip
    if not turns:
        raise ValueError("nothing was recalled; play more turns")
    ttft = {arm: median(rows[arm][turn]["ttft_ms"] for turn in turns) for arm in rows}
    recalled = median(rows["recall"][turn]["recalled_tokens"] for turn in turns)
    ratio = round(ttft["recall"] / ttft["off"], 3)
    return {"turns": len(turns), "recalled_tokens": recalled, "ttft_ms": ttft, "ratio": ratio}


def verdicts(parts: Mapping[str, Any]) -> dict[str, bool]:
    """What is held -> whether it holds, of the parts that were run."""
    held: dict[str, bool] = {}
    if (names := parts.get("names")) is not None:
        arms = names["arms"]
        best = "attended"
        held[f"{best} answers {BETTER:.0%} of the questions more than oldest"] = arms[best] - arms["oldest"] >= BETTER
        held[f"recall answers {MIN_RECALL:.0%} of the questions"] = arms[RECALL] >= MIN_RECALL
        if (perplexity := parts.get("perplexity")) is not None:
            for text, scorers in perplexity["texts"].items():
                above = scorers[best]["ratio_to_oldest"] - 1
                held[f"{text}: the perplexity of {best} at most {MAX_ABOVE:.1%} above oldest's"] = above <= MAX_ABOVE
    if (ttft := parts.get("ttft")) is not None:
        held[f"TTFT with recall at most {MAX_TTFT} x"] = ttft["summary"]["ratio"] <= MAX_TTFT
    return held


def run_part(part: str, run: Run) -> dict[str, Any] | None:
    arguments = run.arguments
    if part == "ttft":
        run.expect(arguments.turns + arguments.rounds, part)
        return measure_ttft(arguments, run.advance)
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    bench = KeptBench(arguments.model, window=WINDOW, max_tokens=2 * WINDOW)
    if part == "names":
        run.expect(arguments.questions, part)
        return measure_names(bench, tokenizer, arguments, run.advance)
    run.expect(arguments.windows * len(TEXTS), part)
    return measure_perplexity(bench, tokenizer, arguments, run.advance)


def measure(run: Run) -> dict[str, Any]:
    parts: dict[str, Any] = {}

    def result() -> dict[str, Any]:
        return {"seed": run.arguments.seed, "window": WINDOW, "held": verdicts(parts), "parts": parts}

    for part in run.arguments.parts:
        found = run_part(part, run)
        if found is None:
            run.console.print(f"[yellow]{part}: its text is missing in {run.arguments.data}[/yellow]")
            continue
        parts[part] = found
        run.keep(result())
    return result()


def show(console: Console, result: dict[str, Any]) -> None:
    parts = result["parts"]
    if (perplexity := parts.get("perplexity")) is not None:
        table = Table(
            "text", *BLOCK_SCORERS, title="Perplexity after a cut, as a ratio to oldest's", title_justify="left"
        )
        for text, scorers in perplexity["texts"].items():
            table.add_row(text, *[f"{scorers[scorer]['ratio_to_oldest']:.4f}" for scorer in BLOCK_SCORERS])
        console.print(table)
    if (names := parts.get("names")) is not None:
        table = Table(
            "", "right", title=f"Names in the older half: {names['questions']} questions", title_justify="left"
        )
        for arm, share in names["arms"].items():
            table.add_row(arm, f"{share:.0%}")
        console.print(table)
    if (ttft := parts.get("ttft")) is not None:
        summary = ttft["summary"]
        console.print(
            f"TTFT of {summary['turns']} messages, some {summary['recalled_tokens']:.0f} tokens recalled: "
            f"{summary['ttft_ms']['recall']:.1f} ms, without {summary['ttft_ms']['off']:.1f} ms, ratio "
            f"{summary['ratio']:.2f}"
        )


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="directory with dialogues/, long_docs/ and text/")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="comma-separated")
    parser.add_argument("--model", type=model_directory, default="bundled", help="bundled, smollm2, or a directory")
    parser.add_argument("--windows", type=int, default=48, help="per text, for perplexity")
    parser.add_argument("--scored", type=int, default=384, help="tokens scored after a cut")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--turns", type=int, default=24, help="of the conversation before something is asked for")
    parser.add_argument("--threads", type=int, default=0, help="of the parts without a server; 0: torch's choice")
    parser.add_argument("--seed", type=int, default=0)


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("keeping", arguments.model),
    about=__doc__, measure=measure, show=show, options=options, rounds=12, rounds_help="messages about old text",
    quick=Quick(options={"windows": 2, "questions": 6, "rounds": 4}, holds=False),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
