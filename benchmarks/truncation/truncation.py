"""What a conversation costs and loses when it outgrows the window.

    python -m benchmarks.truncation.truncation --data DIR [--model smollm2] [--parts endless,perplexity,...]

endless         200 turns on a window of 1,024 tokens; the server truncates, with saved KV at new positions (AS) and by
                computing the kept text again (TT).
shortened       the client itself drops its oldest exchange each turn from turn 9 on: cache.client_shift against
                recompute; -125m: the same at about 1,650 tokens on the 125 M shape.
perplexity      of the text after a cut, AS, TT and NKVT (keys left as they were rotated).
retrieval       names given before a cut and asked for after it, the same.

Held, or the exit status is 1: every turn is served, a turn that overflows has at most 1.3 x the TTFT of one that does
not, and turns do not become dearer; a shortened history takes at most 0.4 x of a recompute; AS within 1 % of TT's
perplexity and NKVT at least 10 % behind it. The result is written after every part.
"""

import asyncio
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.make_model import SHAPES, make_model
from benchmarks.harness.models import model_directory, name_of, result_name
from benchmarks.truncation import perplexity as truncation_perplexity
from benchmarks.truncation import retrieval as truncation_retrieval
from benchmarks.truncation import serving
from benchmarks.truncation.quality import Bench
from reprise.cache.blocks.keys import BLOCK_TOKENS

PARTS = ("endless", "shortened", "shortened-125m", "perplexity", "retrieval")
WINDOW = 1024  # of every model but the 125 M shape
LARGE_WINDOW, LARGE_USER_TOKENS, SMALL_USER_TOKENS = 2048, 166, 60
MAX_OVERFLOW, MAX_LATE, MAX_SHIFTED, MAX_APART, MIN_NAIVE = 1.3, 1.3, 0.4, 0.01, 1.1
Advance = Callable[[], None]


def run_serving(part: str, arguments: Namespace, model: Path, advance: Advance) -> dict[str, Any]:
    endless, large = part == "endless", part == "shortened-125m"
    turns = arguments.turns if endless else serving.FIRST_SHORTENED - 1 + arguments.rounds
    tokens = 0 if endless else LARGE_USER_TOKENS if large else SMALL_USER_TOKENS
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    said = serving.user_turns(arguments.data, turns, tokens, tokenizer, arguments.seed)
    bias = serving.answer_bias(tokenizer, random_model=large)
    window = LARGE_WINDOW if large else WINDOW
    common: dict[str, str | int | float] = {"model.source": str(model), "model.max_context": window}

    def play(arms: Mapping[str, serving.Arm]) -> Awaitable[None]:
        return serving.converse(
            arms, said, max_tokens=arguments.max_tokens, session=part, advance=advance,
            shorten_from=None if endless else serving.FIRST_SHORTENED, logit_bias=bias,
        )  # fmt: skip

    pair = serving.ENDLESS if endless else serving.SHORTENED
    rows = asyncio.run(serving.run_pair(pair, common, play))
    summary = serving.summarize_endless(rows, arguments.max_tokens) if endless else serving.summarize_shortened(rows)
    common["model.source"] = "125 M" if large else name_of(model)
    return {"settings": {"common": common, **pair}, "summary": summary, "by_turn": rows}


def run_quality(part: str, arguments: Namespace, advance: Advance) -> dict[str, Any] | None:
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    bench = Bench(arguments.model, window=WINDOW, max_tokens=2 * WINDOW)
    if part == "retrieval":
        return truncation_retrieval.measure(
            bench, tokenizer, arguments.data, questions=arguments.questions, keep_first=BLOCK_TOKENS,
            seed=arguments.seed, advance=advance,
        )  # fmt: skip
    return truncation_perplexity.measure(
        bench, tokenizer, arguments.data, windows=arguments.windows, scored=arguments.scored, keep_first=BLOCK_TOKENS,
        seed=arguments.seed, advance=advance,
    )  # fmt: skip


def verdicts(parts: dict[str, Any]) -> dict[str, bool]:
    """What is held -> whether it holds, of the parts that were run."""
    held: dict[str, bool] = {}
    if (endless := parts.get("endless")) is not None:
        arms = endless["summary"]
        ours = arms["AS"]
        held["every turn is served"] = all(arm["served"] == arm["turns"] for arm in arms.values())
        held["truncated_tokens only grows"] = all(arm["only_grows"] for arm in arms.values())
        held[f"a turn that overflows takes at most {MAX_OVERFLOW} x"] = ours["overflow_ratio"] <= MAX_OVERFLOW
        held[f"late turns take at most {MAX_LATE} x of early ones"] = ours["late_ratio"] <= MAX_LATE
    for part in ("shortened", "shortened-125m"):
        if (found := parts.get(part)) is not None:
            held[f"{part}: at most {MAX_SHIFTED} x of a recompute"] = found["summary"]["ratio"] <= MAX_SHIFTED
    if (perplexity := parts.get("perplexity")) is not None:
        for text, row in perplexity["texts"].items():
            apart = max(abs(row["arms"][arm]["ratio_to_tt"] - 1) for arm in ("AS", "AS bf16", "AS hops"))
            held[f"{text}: AS within {MAX_APART:.0%} of TT"] = apart <= MAX_APART
            held[f"{text}: NKVT at least {MIN_NAIVE - 1:.0%} behind"] = row["arms"]["NKVT"]["ratio_to_tt"] >= MIN_NAIVE
    if (retrieval := parts.get("retrieval")) is not None:
        arms = retrieval["arms"]
        held["AS answers as much as TT, within 5 points"] = abs(arms["AS"]["accuracy"] - arms["TT"]["accuracy"]) <= 0.05
        held["NKVT answers less"] = arms["NKVT"]["accuracy"] < arms["AS"]["accuracy"]
    return held


def table(title: str, *headings: str) -> Table:
    made = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        made.add_column(heading, justify="right" if place else "left")
    return made


def show_part(console: Console, part: str, found: dict[str, Any]) -> None:
    if part == "endless":
        shown = table(
            "TTFT of turns, ms: median (least to most)", "", "ordinary turns", "turns that overflow", "ratio", "cuts",
            "computed in a cut", "truncated tokens", "late / early turns",
        )  # fmt: skip
        for name, arm in found["summary"].items():
            shown.add_row(
                name, _spread(arm["normal_ttft_ms"]), _spread(arm["overflow_ttft_ms"]), f"{arm['overflow_ratio']:.2f}",
                str(arm["cuts"]), f"{arm['overflow_computed_tokens']:.0f}", str(arm["truncated_tokens"]),
                f"{arm['late_ratio']:.2f}",
            )  # fmt: skip
    elif part.startswith("shortened"):
        shown = table(f"{part}: the client drops its oldest exchange", "", "TTFT, ms", "prompt", "shifted", "computed")
        for name, arm in found["summary"]["arms"].items():
            columns = (arm[key] for key in ("ttft_ms", "prompt_tokens", "shifted_tokens", "computed_tokens"))
            shown.add_row(name, *map(_spread, columns))
        shown.caption = f"ratio {found['summary']['ratio']:.2f}"
    elif part == "perplexity":
        shown = table(
            "Perplexity after a cut, and its ratio to TT's (95 %)", "text", "windows", *truncation_arms(found)
        )
        for text, row in found["texts"].items():
            cells = [
                f"{arm['ppl']:.2f}\n{arm['ratio_to_tt']:.4f} ({arm['ratio_to_tt_95'][0]:.4f} to "
                f"{arm['ratio_to_tt_95'][1]:.4f})"
                for arm in row["arms"].values()
            ]
            shown.add_row(text, str(row["windows"]), *cells)
        if found["missing"]:
            shown.caption = f"missing in the data directory: {', '.join(found['missing'])}"
    else:
        shown = table(
            f"Names given before a cut: {found['questions']} questions, {found['candidates']} candidates",
            "", "right", "mean log-probability",
        )  # fmt: skip
        for name, arm in found["arms"].items():
            shown.add_row(name, f"{arm['accuracy']:.0%}", f"{arm['mean_logprob']:.2f}")
    console.print(shown)


def truncation_arms(found: dict[str, Any]) -> list[str]:
    return list(next(iter(found["texts"].values()))["arms"]) if found["texts"] else []


def _spread(values: dict[str, float]) -> str:
    return f"{values['p50']:,.1f} ({values['min']:,.1f} to {values['max']:,.1f})"


def total_of(part: str, arguments: Namespace) -> int:
    totals: dict[str, int] = {
        "endless": arguments.turns,
        "perplexity": arguments.windows * len(truncation_perplexity.TEXTS),
        "retrieval": arguments.questions,
    }
    rounds: int = arguments.rounds
    return totals.get(part, serving.FIRST_SHORTENED - 1 + rounds)


def measure(run: Run) -> dict[str, Any]:
    """The result is written after every part."""
    arguments = run.arguments
    parts: dict[str, Any] = {}

    def result() -> dict[str, Any]:
        return {"seed": arguments.seed, "held": verdicts(parts), "parts": parts}

    for part in arguments.parts:
        run.expect(total_of(part, arguments), part)
        if part in ("perplexity", "retrieval"):
            found = run_quality(part, arguments, run.advance)
        else:
            model = large_model(run) if part == "shortened-125m" else arguments.model
            found = run_serving(part, arguments, model, run.advance)
        if found is None:
            run.console.print(f"[yellow]{part}: its text is missing in {arguments.data}[/yellow]")
            continue
        parts[part] = found
        run.keep(result())
    return result()


def large_model(run: Run) -> Path:
    if run.arguments.model_125m is not None:
        return Path(run.arguments.model_125m)
    make_model(run.directory / "m125", SHAPES["125m"], seed=0)
    return run.directory / "m125"


def show(console: Console, result: dict[str, Any]) -> None:
    for part, found in result["parts"].items():
        show_part(console, part, found)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="directory with dialogues/, long_docs/ and text/")
    parser.add_argument("--parts", type=part_names, default=list(PARTS), help="which parts to run, comma-separated")
    parser.add_argument("--model", type=model_directory, default="bundled", help="bundled, smollm2, or a directory")
    parser.add_argument("--model-125m", type=Path, help="that model's directory; made in a temporary one if not given")
    parser.add_argument("--turns", type=int, default=200, help="of the endless conversation")
    parser.add_argument("--max-tokens", type=int, default=32, help="generated per turn")
    parser.add_argument("--windows", type=int, default=48, help="per text, for perplexity")
    parser.add_argument("--scored", type=int, default=384, help="tokens scored after a cut")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0, help="of the parts without a server; 0: torch's choice")
    parser.add_argument("--seed", type=int, default=0)


def part_names(text: str) -> list[str]:
    """For argparse. Raises argparse.ArgumentTypeError."""
    if unknown := set(text.split(",")) - set(PARTS):
        raise ArgumentTypeError(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return text.split(",")


def overflow_ratio(result: Result) -> float | None:
    return result["parts"]["endless"]["summary"]["AS"]["overflow_ratio"] if "endless" in result["parts"] else None


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("truncation", arguments.model),
    about=__doc__, measure=measure, show=show, options=options, rounds=20, rounds_help="turns with a shortened history",
    quick=Quick(
        options={"parts": ["endless"], "turns": 60},
        figures=[Figure("TTFT of a cut, x an ordinary turn's", overflow_ratio, 1.3)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
