"""How the simulated figures are drawn: docs/paper/*.png, ours beside the paper's. Every function returns the lines of
markdown that show its picture."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.harness.result_files import BLUE, DOCS, GREY

FILES = DOCS / "paper"
COLOURS = (GREY, BLUE, "#93c5fd", "#f59e0b")
Points = Sequence[tuple[float, float]]


def beside(
    name: str, title: str, unit: str, labels: Sequence[str], ours: Sequence[float], paper: Sequence[float]
) -> list[str]:
    """Ours beside the paper's, a pair of bars for each label."""
    return bars(name, title, unit, labels, {"paper": paper, "simulated": ours})


def bars(
    name: str, title: str, unit: str, labels: Sequence[str], series: Mapping[str, Sequence[float | None]]
) -> list[str]:
    """A group of bars for each label, one of each series; None: it has none there."""

    def draw(axis: Any) -> None:
        width = 0.8 / len(series)
        for number, (what, values) in enumerate(series.items()):
            offset = (number - (len(series) - 1) / 2) * width
            drawn = [(place + offset, value) for place, value in enumerate(values) if value is not None]
            colour = COLOURS[number] if len(series) > 1 else BLUE
            axis.bar(*zip(*drawn, strict=True), 0.95 * width, color=colour, label=what)
        axis.set_xticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels], fontsize=8)
        axis.set_ylabel(unit)

    return _picture(name, title, draw)


def lines(name: str, title: str, axes: tuple[str, str], series: Mapping[str, Points], marked: Points = ()) -> list[str]:
    """A line for each series; marked: the paper's points."""

    def draw(axis: Any) -> None:
        for number, (what, points) in enumerate(series.items()):
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=COLOURS[number], label=what)
        if marked:
            axis.plot(*zip(*marked, strict=True), "x", color="black", label="paper")
        axis.set(xlabel=axes[0], ylabel=axes[1])
        axis.set_ylim(bottom=0)

    return _picture(name, title, draw)


def _picture(name: str, title: str, draw: Callable[[Any], None]) -> list[str]:
    figure, axis = plt.subplots(figsize=(6.4, 3.2))
    draw(axis)
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    FILES.mkdir(exist_ok=True)
    figure.savefig(FILES / f"{name}.png", dpi=110)
    plt.close(figure)
    return [f"![{title}](paper/{name}.png)", ""]
