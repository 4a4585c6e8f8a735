"""Decoding on CPU with weights packed and not, beside llama.cpp and transformers: a picture and a section."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.figures.panels import save_panels
from benchmarks.harness.result_files import BLUE, GREY

OURS = ("bf16", "q8", "q4", "gguf")
SHOWN = {
    "transformers": "lightgrey",
    "bf16": "#9bbfe0",
    "q8": "#6f9fd0",
    "q4": "#4a84c4",
    "gguf": BLUE,
    "llama.cpp": GREY,
}


def draw(result: dict[str, Any], out: Path) -> None:
    """Milliseconds of a step by streams and context, one panel for each number of streams."""
    streams = sorted({row["streams"] for row in result["rows"]})
    figure, axes = plt.subplots(1, len(streams), figsize=(9.6, 3.4))
    for axis, count in zip(axes, streams, strict=True):
        rows = [row for row in result["rows"] if row["streams"] == count]
        arms = [arm for arm in SHOWN if arm in rows[0]["arms"]]
        for place, arm in enumerate(arms):
            values = [row["arms"][arm]["tpot_ms"]["median"] for row in rows]
            at = [x + (place - len(arms) / 2 + 0.5) * 0.14 for x in range(len(rows))]
            bars = axis.bar(at, values, 0.13, color=SHOWN[arm], label=arm)
            axis.bar_label(bars, fmt="%.1f", fontsize=6)
        axis.set(title=f"{count} stream{'s' * (count > 1)}", ylabel="ms a step", xlabel="tokens of context")
        axis.set(xticks=range(len(rows)), xticklabels=[f"{row['context']:,}" for row in rows])
    axes[0].legend(frameon=False, fontsize=7, ncols=2, loc="upper left")
    save_panels(figure, axes, out)


def table(result: dict[str, Any]) -> list[str]:
    """TPOT with its spread, and the share of memory's speed of our arms; then prefill."""
    arms = list(result["rows"][0]["arms"])
    lines = ["| TPOT, ms | " + " | ".join(arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for row in result["rows"]:
        cells = []
        for arm in arms:
            found = row["arms"][arm]
            share = f", {found['share_of_memory_speed']:.0%}" if arm in OURS else ""
            cells.append("{median:.1f} ({min:.1f} to {max:.1f})".format(**found["tpot_ms"]) + share)
        lines.append(f"| {row['streams']} x {row['context']:,} | " + " | ".join(cells) + " |")
    lines += ["", "| prefill, tokens/s | " + " | ".join(arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for row in result["rows"]:
        if row["context"] >= 1000:
            cells = [f"{row['arms'][arm]['prefill_tokens_per_s']['median']:,.0f}" for arm in arms]
            lines.append(f"| {row['streams']} x {row['context']:,} | " + " | ".join(cells) + " |")
    return lines


def section(result: dict[str, Any], machine: str) -> list[str]:
    """For docs/results.md."""
    held = "; ".join(f"{what}: {'yes' if value else 'NO'}" for what, value in result["held"].items())
    return [
        "## Packed weights on CPU, beside llama.cpp",
        "",
        "![TPOT by streams and context](packed.png)",
        "",
        f"SmolLM2-135M-Instruct; `gguf` and llama.cpp read {result['settings']['file']}. Streams x tokens of context, "
        "medians of interleaved rounds (least to most); percentages: what a step has to read at the rate of memory "
        f"({result['memory_read_gb_s']} GB/s), over what it takes.",
        "",
        *table(result),
        "",
        held + ".",
        "",
        machine,
        "",
    ]
