"""Shows conversations that overflow HBM: a picture and a section."""

from pathlib import Path
from typing import Any

from benchmarks.figures.panels import panels, save_panels, table, titled
from benchmarks.harness.result_files import BLUE, GREY

LIGHT = "#93c5fd"
Result = dict[str, Any]


HIERARCHY_ARMS = {
    "recompute": (GREY, "-", "no cache"),
    "prefix": (GREY, "--", "cache in HBM alone"),
    "disk": (LIGHT, "-", "HBM and disk"),
    "attentionstore": (BLUE, "-", "HBM, DRAM and disk"),
    "ample": ("black", ":", "all in HBM"),
}
"""Arm -> its line's color, its style and what it is."""


def draw(result: Result, out: Path) -> None:
    """Draw the time to first token by turn into `out`, a line for each server. HBM holds a quarter of the
    conversations."""
    figure, (axis,) = panels(1, (7.6, 3.8))
    for arm, (color, style, label) in HIERARCHY_ARMS.items():
        by_turn = result["arms"].get(arm, {}).get("by_turn")
        if not by_turn:
            continue
        turns = sorted(map(int, by_turn))
        values = [by_turn[str(turn)]["ttft_ms"]["p50"] for turn in turns]
        axis.plot(turns, values, style, marker="o", color=color, label=f"{label} ({values[-1]:.0f} ms)")
    axis.set(xlabel="turn of the conversation", ylabel="time to first token, p50, ms", xticks=turns, ylim=(0, None))
    axis.legend(frameon=False, fontsize=8, title=f"turn {turns[-1]}")
    save_panels(figure, (axis,), out)


def section(result: Result, machine: str) -> list[str]:
    turns = [str(turn) for turn in range(1, result["workload"]["turns"] + 1)]
    each = " | ".join(f"turn {turn}" for turn in turns)
    heads = f"server | {each} | turns 2 on (p90) | history reused | from HBM / DRAM / disk, tokens"
    rows = [
        [f"`{arm}`", *(f"{values['by_turn'][turn]['ttft_ms']['p50']:.0f}" for turn in turns), *_later(values["later"])]
        for arm, values in result["arms"].items()
        if values["later"] is not None
    ]
    for arm, values in result["after_restart"].items():
        what = "after a restart" if arm == "attentionstore" else "the same turn"
        rows.append([f"`{arm}`, {what}", *[""] * len(turns), *_later(values)])
    ratios = "; ".join(
        f"{name} {ratio['of_medians']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}, {ratio['pairs']} pairs)"
        for name, ratio in result["ratios"][turns[-1]].items()
        if name.startswith("attentionstore/")
    )
    return titled(
        "Conversations that overflow HBM",
        "![Time to first token by turn](hierarchy.png)",
        "Eight conversations in rotation on a random 125 M-shape model (bf16): a first prompt of 1,000 tokens, then "
        f"about {result['workload']['turn_tokens']} new ones a turn, answers of {result['workload']['answer_tokens']}; "
        "HBM holds 2 of them, DRAM 3 (`disk`: none), the rest is on disk; with `ample` all are in HBM. TTFT p50 in ms, "
        "servers turn about in one run.",
        table(heads, rows),
        f"Turn {turns[-1]}, ratio of medians (least to most of the pairs): {ratios}",
        machine,
    )


def _later(values: Result) -> list[str]:
    reused, tokens = values["reused_of_history"], values["tokens"]
    return [
        f"{values['ttft_ms']['p50']:.0f} ({values['ttft_ms']['p90']:.0f})",
        "-" if reused is None else f"{reused:.1%}",
        " / ".join(f"{tokens[tier]:,}" for tier in ("hbm", "dram", "disk")),
    ]
