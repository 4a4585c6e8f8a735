"""Shows what decoding takes on a GPU, with and without graphs and beside transformers: a picture for docs/gpu.md."""

from pathlib import Path
from typing import Any

from benchmarks.figures.panels import bars, panels, save_panels
from benchmarks.harness.result_files import BLUE, GREY

STREAMS, CONTEXT = (1, 8, 32), 1024
TITLES = {"1b": "1.5 G parameters", "8b": "8 G parameters"}


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw the milliseconds of a token by number of streams into `out`, one panel for each model."""
    figure, axes = panels(len(TITLES), (4.8, 3.4))
    for axis, (shape, title) in zip(axes, TITLES.items(), strict=True):
        turns, baseline = result["shapes"][shape]["turns"], result["shapes"][shape]["baseline"]
        rows = {
            "transformers' generate": [baseline[f"{n} x {CONTEXT}"]["ms a token"] for n in STREAMS],
            "without graphs": [turns[f"decode {n} x {CONTEXT}, eager"]["ms a step"] for n in STREAMS],
            "with graphs": [turns[f"decode {n} x {CONTEXT}"]["ms a step"] for n in STREAMS],
        }
        bars(axis, rows, ("lightgrey", GREY, BLUE), "%.1f")
        axis.set(title=title, ylabel="ms a token", xticks=range(len(STREAMS)), xticklabels=STREAMS, xlabel="streams")
    axes[0].legend(frameon=False, fontsize=8)
    save_panels(figure, axes, out)
