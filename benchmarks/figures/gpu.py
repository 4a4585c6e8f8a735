"""What decoding takes on a GPU, with and without graphs and beside transformers: a picture for docs/gpu.md."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.figures.panels import save_panels
from benchmarks.harness.result_files import BLUE, GREY

STREAMS, CONTEXT = (1, 8, 32), 1024
TITLES = {"1b": "1.5 G parameters", "8b": "8 G parameters"}


def draw(result: dict[str, Any], out: Path) -> None:
    """Milliseconds for a token of each stream, one panel per model."""
    figure, axes = plt.subplots(1, len(TITLES), figsize=(9.6, 3.4))
    for axis, (shape, title) in zip(axes, TITLES.items(), strict=True):
        turns, baseline = result["shapes"][shape]["turns"], result["shapes"][shape]["baseline"]
        rows = {
            "transformers' generate": ([baseline[f"{n} x {CONTEXT}"]["ms a token"] for n in STREAMS], "lightgrey"),
            "without graphs": ([turns[f"decode {n} x {CONTEXT}, eager"]["ms a step"] for n in STREAMS], GREY),
            "with graphs": ([turns[f"decode {n} x {CONTEXT}"]["ms a step"] for n in STREAMS], BLUE),
        }
        for place, (label, (values, color)) in enumerate(rows.items()):
            bars = axis.bar([x + (place - 1) * 0.27 for x in range(len(STREAMS))], values, 0.25, color=color)
            bars.set_label(label)
            axis.bar_label(bars, fmt="%.1f", fontsize=7)
        axis.set(title=title, ylabel="ms a token", xticks=range(len(STREAMS)), xticklabels=STREAMS, xlabel="streams")
    axes[0].legend(frameon=False, fontsize=8)
    save_panels(figure, axes, out)
