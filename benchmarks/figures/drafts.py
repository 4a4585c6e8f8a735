"""What drafts from the past are worth: a picture and a section."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.figures.panels import save_panels
from benchmarks.harness.result_files import BLUE, GREY

SHOWN = {"off": GREY, "on": BLUE}


def draw(result: dict[str, Any], out: Path) -> None:
    """Tokens a second by kind of answer, one panel for each number of conversations at once."""
    streams = sorted({row["streams"] for row in result["rows"]})
    figure, axes = plt.subplots(1, len(streams), figsize=(9.6, 3.6))
    for axis, count in zip(axes, streams, strict=True):
        rows = [row for row in result["rows"] if row["streams"] == count]
        for place, (arm, color) in enumerate(SHOWN.items()):
            values = [row["tokens_per_s"][arm] for row in rows]
            at = [x + (place - 0.5) * 0.38 for x in range(len(rows))]
            bars = axis.bar(at, values, 0.36, color=color, label=f"drafts {arm}")
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
        labels = [f"{row['kind']}\n{row['repeated']:.0%} repeated".replace(" of a ", "\nof a ") for row in rows]
        axis.set(title=f"{count} at once", ylabel="tokens a second", xticks=range(len(rows)))
        axis.set_xticklabels(labels, fontsize=6)
    axes[0].legend(frameon=False, fontsize=8)
    save_panels(figure, axes, out)


def table(result: dict[str, Any]) -> list[str]:
    """Tokens a second without and with, and their ratio with its spread."""
    lines = ["| answers | at once | repeated | off | on | ratio |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        rates, (least, most) = row["tokens_per_s"], row["ratio_range"]
        lines.append(
            f"| {row['kind']} | {row['streams']} | {row['repeated']:.0%} | {rates['off']:.1f} | {rates['on']:.1f} | "
            f"{row['ratio']:.2f} ({least:.2f} to {most:.2f}) |"
        )
    return lines


def section(result: dict[str, Any], machine: str) -> list[str]:
    """For docs/results.md."""
    settings = result["settings"]
    return [
        "## Drafts from the past",
        "",
        "![tokens a second with drafts and without](drafts.png)",
        "",
        f"{settings['model']}, tokens decoded a second, medians of {settings['rounds']} rounds with "
        "the least and the greatest. Answers are given, so both arms say the same; `repeated` is the share of an "
        "answer's tokens that end four which stand in its prompt or prediction ([drafts](drafts.md)).",
        "",
        *table(result),
        "",
        machine,
        "",
    ]
