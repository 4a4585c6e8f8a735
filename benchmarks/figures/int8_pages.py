"""Shows what KV in HBM as int8 is worth: a picture and a section."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.figures.panels import save_panels, table, titled
from benchmarks.harness.result_files import BLUE, GREY

SHOWN = {"auto": ("bf16", GREY), "int8": ("int8", BLUE)}


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw the milliseconds of a token by context into `out`, one panel for each number of streams."""
    streams = sorted({row["streams"] for row in result["decoding"]})
    figure, axes = plt.subplots(1, len(streams), figsize=(8.4, 3.2))
    for axis, count in zip(axes, streams, strict=True):
        rows = [row for row in result["decoding"] if row["streams"] == count]
        for place, (arm, (label, color)) in enumerate(SHOWN.items()):
            at = [x + (place - 0.5) * 0.38 for x in range(len(rows))]
            bars = axis.bar(at, [row["ms"][arm] for row in rows], 0.36, color=color, label=f"{label} in HBM")
            axis.bar_label(bars, fmt="%.1f", fontsize=7)
        title = "one stream" if count == 1 else f"{count} streams"
        axis.set(title=title, ylabel="ms a token", xlabel="tokens of context", xticks=range(len(rows)))
        axis.set_xticklabels([f"{row['context']:,}" for row in rows])
    axes[0].legend(frameon=False, fontsize=8)
    save_panels(figure, axes, out)


def section(result: dict[str, Any], machine: str) -> list[str]:
    """Return the lines of the section of docs/results/speed.md about KV pages in int8. machine: a line on where and
    when the result was measured."""
    settings, answers, sizes = result["settings"], result["answers"], result["bytes_per_token"]
    rows = [("a token behind", row["streams"], row["context"], row) for row in result["decoding"]]
    rows += [("a prompt", 1, row["tokens"], row) for row in result["prompts"]]
    cells = [
        (what, streams, f"{tokens:,}", *(f"{row['ms'][arm]:.1f}" for arm in SHOWN),
         "{:.2f} ({:.2f} to {:.2f})".format(row["ratio"], *row["ratio_range"]))
        for what, streams, tokens, row in rows
    ]  # fmt: skip
    return titled(
        "KV in HBM as int8",
        "![milliseconds a token by context](int8.png)",
        f"{settings['model']}, {settings['rounds']} interleaved rounds, medians with the least and the greatest; "
        "a ratio is the median of the rounds' own. "
        f"A token takes {sizes['int8']:,} bytes of HBM instead of {sizes['auto']:,}. Over {answers['scored_tokens']:,} "
        f"tokens of books, chats and WikiText-2 answers diverge by {answers['kl']:.5f} nats a token, "
        f"{1 - answers['same_choice']:.2%} have another most likely token, and perplexity changes by "
        f"{answers['perplexity_change']:+.2%} ([KV in HBM as int8](int8.md)).",
        table(" | streams | tokens | bf16, ms | int8, ms | ratio", cells),
        machine,
    )
