"""The finish of pictures that stand in the documents, and the tables and verdicts of their sections."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def panels(number: int = 1, size: tuple[float, float] = (5.2, 3.8)) -> tuple[Any, Sequence[Any]]:
    """Return (figure, its panels), the panels side by side. size: inches of each panel."""
    figure, axes = plt.subplots(1, number, figsize=(size[0] * number, size[1]), squeeze=False)
    return figure, axes[0]


def save_panels(figure: Any, axes: Sequence[Any], out: Path, dpi: int = 130) -> None:
    """Write a figure into `out` without the panels' upper and right frame, and free its memory."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=dpi)
    plt.close(figure)


def bars(axis: Any, series: Mapping[str, Sequence[float | None]], colors: Sequence[str], shown: str = "") -> None:
    """Draw a group of bars for each place on the axis, with a bar of each series. series: label -> value at each place;
    None: no bar. shown: format of the values above the bars; empty: none are shown."""
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        offset = (number - (len(series) - 1) / 2) * width
        drawn = [(place + offset, value) for place, value in enumerate(values) if value is not None]
        drawn_bars = axis.bar(*zip(*drawn, strict=True), 0.95 * width, color=colors[number], label=label)
        if shown:
            axis.bar_label(drawn_bars, fmt=shown, fontsize=7)


def table(headings: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table. headings: the first line, without its outer bars."""
    lines = [f"| {headings.lstrip()} |", "|---" * (headings.count("|") + 1) + "|"]
    return [*lines, *(f"| {' | '.join(map(str, cells))} |" for cells in rows)]


def titled(title: str, *parts: str | list[str], level: int = 2) -> list[str]:
    """Return the lines of a section: its title and its parts, each with an empty line after it."""
    return [line for part in (f"{'#' * level} {title}", *parts) for line in (*_lines(part), "")]


def _lines(part: str | list[str]) -> list[str]:
    return [part] if isinstance(part, str) else part


def held(result: dict[str, Any]) -> str:
    """Return a sentence on how many of its aims a result meets. It names those that are missed."""
    aims: Mapping[str, bool] = result["held"]
    missed = [what for what, value in aims.items() if not value]
    if not missed:
        return f"All {len(aims)} aims are met."
    return f"{len(aims) - len(missed)} of {len(aims)} aims are met. Missed: {'; '.join(missed)}."


def with_error(row: dict[str, Any]) -> str:
    """Return a row's KL divergence with its standard error, as text."""
    return f"{row['kl']:.5f} ± {row['kl_error']:.5f}"


def perplexity(row: dict[str, Any], digits: int = 2) -> str:
    """Return a row's change of perplexity with its standard error, as text."""
    return f"{row['perplexity_change']:+.{digits}%} ± {row['perplexity_error']:.{digits}%}"
