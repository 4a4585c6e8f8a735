"""Shows what drafts from the past are worth: a picture and a section."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures.panels import bars, panels, save_panels, table, titled
from benchmarks.harness.result_files import BLUE, GREY

SHOWN = {"off": GREY, "on": BLUE}


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw the tokens a second by kind of answer, with drafts and without, into `out`; one panel for each number of
    conversations at once."""
    streams = sorted({row["streams"] for row in result["rows"]})
    figure, axes = panels(len(streams), (4.8, 3.6))
    for axis, count in zip(axes, streams, strict=True):
        rows = [row for row in result["rows"] if row["streams"] == count]
        rates = {f"drafts {arm}": [row["tokens_per_s"][arm] for row in rows] for arm in SHOWN}
        bars(axis, rates, list(SHOWN.values()), "%.0f")
        labels = [f"{row['kind']}\n{row['repeated']:.0%} repeated".replace(" of a ", "\nof a ") for row in rows]
        axis.set(title=f"{count} at once", ylabel="tokens a second", xticks=range(len(rows)))
        axis.set_xticklabels(labels, fontsize=6)
    axes[0].legend(frameon=False, fontsize=8)
    save_panels(figure, axes, out)


def _rows(result: dict[str, Any]) -> Iterator[list[object]]:
    """Tokens a second without and with, and their ratio with its spread."""
    for row in result["rows"]:
        rates, (least, most) = row["tokens_per_s"], row["ratio_range"]
        yield [row["kind"], row["streams"], f"{row['repeated']:.0%}", f"{rates['off']:.1f}", f"{rates['on']:.1f}",
               f"{row['ratio']:.2f} ({least:.2f} to {most:.2f})"]  # fmt: skip


def section(result: dict[str, Any], machine: str) -> list[str]:
    """Return the lines of the section of docs/results/speed.md about drafts. machine: a line on where and when the
    result was measured."""
    settings = result["settings"]
    return titled(
        "Drafts from the past",
        "![tokens a second with drafts and without](drafts.png)",
        f"{settings['model']}, tokens decoded a second, medians of {settings['rounds']} rounds with "
        "the least and the greatest. Answers are given, so both arms say the same; `repeated` is the share of an "
        "answer's tokens that end four which stand in its prompt or prediction ([drafts](drafts.md)).",
        table("answers | at once | repeated | off | on | ratio", _rows(result)),
        machine,
    )
