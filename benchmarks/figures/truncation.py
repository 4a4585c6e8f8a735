"""Shows what a conversation costs and loses when it outgrows the window: two pictures, and two sections of
docs/results/texts.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.figures.panels import panels, save_panels, table, titled
from benchmarks.harness.result_files import BLUE, GREY

RED = "#dc2626"
COLORS = {"AS": BLUE, "TT": GREY, "NKVT": RED}
SIMILAR = ("AS bf16", "AS hops")  # arms that differ from AS by what rounding does; the result file has them
LABELS = {
    "AS": "AS: saved KV, new positions",
    "TT": "TT: what stays is computed again",
    "NKVT": "NKVT: keys as they were",
}


def draw_times(result: dict[str, Any], out: Path) -> None:
    """Draw TTFT by turn of a conversation that keeps overflowing the window into `out`."""
    _draw(_turns, result["parts"]["endless"], (8.0, 3.8), out)


def draw_losses(result: dict[str, Any], out: Path) -> None:
    """Draw perplexity after a cut, of each text and in each way, into `out`."""
    _draw(_bars, result["parts"]["perplexity"], (6.0, 3.8), out)


def _draw(
    panel: Callable[[Axes, dict[str, Any]], None], part: dict[str, Any], size: tuple[float, float], out: Path
) -> None:
    figure, axes = panels(1, size)
    panel(axes[0], part)
    axes[0].legend(frameon=False, fontsize=8)
    save_panels(figure, axes, out)


def _turns(axis: Axes, endless: dict[str, Any]) -> None:
    for arm in ("TT", "AS"):
        rows = endless["by_turn"][arm]
        axis.plot([r["turn"] for r in rows], [r["ttft_ms"] for r in rows], color=COLORS[arm], lw=0.9, label=LABELS[arm])
        cuts = [r for r in rows if r["cut_tokens"] > 0]
        axis.plot([r["turn"] for r in cuts], [r["ttft_ms"] for r in cuts], "o", color=COLORS[arm], ms=3)
    axis.set(title="A conversation without end (dots: the window was full)", xlabel="turn", ylabel="TTFT, ms")
    axis.set_ylim(0, None)


def _bars(axis: Axes, perplexity: dict[str, Any]) -> None:
    texts = perplexity["texts"]
    for place, arm in enumerate(COLORS):
        ratios = [text["arms"][arm]["ratio_to_tt"] for text in texts.values()]
        ends = [text["arms"][arm]["ratio_to_tt_95"] for text in texts.values()]
        errors = [
            [r - e[0] for r, e in zip(ratios, ends, strict=True)],
            [e[1] - r for r, e in zip(ratios, ends, strict=True)],
        ]
        where = [index + 0.27 * (place - 1) for index in range(len(texts))]
        axis.bar(where, ratios, 0.25, yerr=errors, color=COLORS[arm], label=arm, error_kw={"lw": 0.8})
    axis.set_xticks(range(len(texts)), list(texts))
    axis.set(title="Perplexity after a cut", ylabel="of TT's")


def time_section(result: dict[str, Any], machine: str) -> list[str]:
    """Return the lines of the section on what a conversation costs that outgrows the window. machine: a line on where
    and when the result was measured."""
    parts = result["parts"]
    endless = parts["endless"]
    turns = [
        (LABELS[name], _spread(arm["normal_ttft_ms"]), _spread(arm["overflow_ttft_ms"]),
         f"{arm['overflow_ratio']:.2f}", arm["cuts"], f"{arm['overflow_computed_tokens']:.0f}")
        for name, arm in endless["summary"].items()
    ]  # fmt: skip
    shortened = [
        (model, f"{summary['arms']['client_shift']['prompt_tokens']['p50']:,.0f}",
         *(_spread(summary["arms"][arm]["ttft_ms"]) for arm in ("client_shift", "recompute")),
         f"{summary['ratio']:.2f}")
        for part, model in (("shortened", "SmolLM2-135M-Instruct"), ("shortened-125m", "125 M shape"))
        for summary in (parts[part]["summary"],)
    ]  # fmt: skip
    return titled(
        "Truncation: what it costs",
        "![TTFT by turn](truncation.png)",
        f"A conversation of {endless['summary']['AS']['turns']} turns with SmolLM2-135M-Instruct on a window of 1,024 "
        "tokens, the whole history sent each turn; TTFT in ms, medians (least to most).",
        table(" | ordinary turns | turns that overflow | ratio | cuts | tokens computed in a cut", turns),
        "The client drops its oldest exchange each turn:",
        table("model | prompt tokens | `client_shift`, ms | `recompute`, ms | ratio", shortened),
        machine,
    )


def text_section(result: dict[str, Any], machine: str) -> list[str]:
    """Return the lines of the section on what a conversation loses that outgrows the window. machine: as in
    `time_section`."""
    perplexity, names = (result["parts"][name] for name in ("perplexity", "retrieval"))
    interval = " ({:.3f} to {:.3f})"
    losses = [
        (text, *(f"{row['arms'][arm]['ppl']:.2f}"
                 + ("" if arm == "TT" else interval.format(*row["arms"][arm]["ratio_to_tt_95"])) for arm in LABELS))
        for text, row in perplexity["texts"].items()
    ]  # fmt: skip
    right = ", ".join(f"{name} {arm['accuracy']:.0%}" for name, arm in names["arms"].items() if name not in SIMILAR)
    return titled(
        "Truncation",
        "![Perplexity after a cut](truncation_text.png)",
        f"Perplexity of the {perplexity['scored_tokens']} tokens after a cut of a full window, "
        "float32; in brackets the 95 % interval of the ratio to TT's.",
        table(f"text | {' | '.join(LABELS.values())}", losses),
        f"{names['questions']} names given before the cut and asked for after it, of {names['candidates']} candidates "
        f"each: {right}.",
        machine,
    )


def _spread(values: dict[str, float]) -> str:
    return f"{values['p50']:.0f} ({values['min']:.0f} to {values['max']:.0f})"
