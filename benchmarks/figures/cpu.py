"""Decoding on CPU with weights packed and not, beside transformers: a picture and a section."""

from pathlib import Path
from typing import Any

from benchmarks.figures.panels import bars, held, panels, save_panels, table, titled
from benchmarks.harness.result_files import BLUE

OURS = ("bf16", "q8", "q4", "gguf")
SHOWN = {
    "transformers": "lightgrey",
    "bf16": "#9bbfe0",
    "q8": "#6f9fd0",
    "q4": "#4a84c4",
    "gguf": BLUE,
}


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw the milliseconds of a decode step by context and arm into `out`, one panel for each number of streams."""
    streams = sorted({row["streams"] for row in result["rows"]})
    figure, axes = panels(len(streams), (4.8, 3.4))
    for axis, count in zip(axes, streams, strict=True):
        rows = [row for row in result["rows"] if row["streams"] == count]
        times = {
            arm: [row["arms"][arm]["tpot_ms"]["median"] for row in rows] for arm in SHOWN if arm in rows[0]["arms"]
        }
        bars(axis, times, [SHOWN[arm] for arm in times], "%.1f")
        axis.set(title=f"{count} stream{'s' * (count > 1)}", ylabel="ms a step", xlabel="tokens of context")
        axis.set(xticks=range(len(rows)), xticklabels=[f"{row['context']:,}" for row in rows])
    axes[0].legend(frameon=False, fontsize=7, ncols=2, loc="upper left")
    save_panels(figure, axes, out)


def _tables(result: dict[str, Any]) -> list[str]:
    """TPOT with its spread, and the share of memory's speed of our arms; then prefill."""
    arms = list(result["rows"][0]["arms"])
    tpot, prefill = [], []
    for row in result["rows"]:
        cells = [f"{row['streams']} x {row['context']:,}"]
        for arm in arms:
            found = row["arms"][arm]
            share = f", {found['share_of_memory_speed']:.0%}" if arm in OURS else ""
            cells.append("{median:.1f} ({min:.1f} to {max:.1f})".format(**found["tpot_ms"]) + share)
        tpot.append(cells)
        if row["context"] >= 1000:
            rates = (f"{row['arms'][arm]['prefill_tokens_per_s']['median']:,.0f}" for arm in arms)
            prefill.append([cells[0], *rates])
    heads = " | ".join(arms)
    return [*table(f"TPOT, ms | {heads}", tpot), "", *table(f"prefill, tokens/s | {heads}", prefill)]


def section(result: dict[str, Any], machine: str) -> list[str]:
    """Return the lines of the section of docs/results/speed.md about packed weights on CPU. machine: a line on where
    and when the result was measured."""
    return titled(
        "Packed weights on CPU",
        "![TPOT by streams and context](packed.png)",
        "SmolLM2-135M-Instruct. Streams x tokens of context, medians of interleaved rounds (least to most); "
        "percentages: what a step has to read at the rate of memory "
        f"({result['memory_read_gb_s']} GB/s), over what it takes.",
        _tables(result),
        held(result),
        machine,
    )
