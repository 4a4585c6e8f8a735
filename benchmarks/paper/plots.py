"""Draws the simulated figures: docs/paper/*.png, ours beside the paper's. Every function returns the lines of
markdown that show its picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.figures import panels
from benchmarks.harness.result_files import BLUE, DOCS, GREY

FILES = DOCS / "paper"
COLOURS = (GREY, BLUE, "#93c5fd", "#f59e0b")
Points = Sequence[tuple[float, float]]


def bars(
    name: str, title: str, unit: str, labels: Sequence[str], series: Mapping[str, Sequence[float | None]]
) -> list[str]:
    """Draw a group of bars for each label, with a bar of each series; None: no bar."""
    figure, (axis,) = panels.panels(1, (6.4, 3.2))
    panels.bars(axis, series, COLOURS if len(series) > 1 else (BLUE,))
    axis.set_xticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels], fontsize=8)
    axis.set_ylabel(unit)
    return _picture(name, title, figure, axis)


def lines(name: str, title: str, axes: tuple[str, str], series: Mapping[str, Points], marked: Points = ()) -> list[str]:
    """Draw a line for each series, and the paper's points (`marked`). axes: labels of x and y."""
    figure, (axis,) = panels.panels(1, (6.4, 3.2))
    for number, (what, points) in enumerate(series.items()):
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=COLOURS[number], label=what)
    if marked:
        axis.plot(*zip(*marked, strict=True), "x", color="black", label="paper")
    axis.set(xlabel=axes[0], ylabel=axes[1], ylim=(0, None))
    return _picture(name, title, figure, axis)


def _picture(name: str, title: str, figure: Any, axis: Any) -> list[str]:
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    FILES.mkdir(exist_ok=True)
    panels.save_panels(figure, (axis,), FILES / f"{name}.png", dpi=110)
    return [f"![{title}](paper/{name}.png)", ""]
