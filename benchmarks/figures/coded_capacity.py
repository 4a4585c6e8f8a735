"""Shows what coded KV hits in the bytes of raw KV: a picture and its section of docs/results.md."""

from pathlib import Path
from typing import Any

from benchmarks.figures.panels import bars, held, panels, save_panels, table
from benchmarks.harness.result_files import BLUE, GREY

_COLOURS = (GREY, BLUE, "#93c5fd")


def draw(result: dict[str, Any], out: Path) -> None:
    """A group of bars for each policy and room, a bar for each form of KV."""
    rows = result["rows"]
    groups = list(dict.fromkeys((row["policy"], row["capacity_tokens"]) for row in rows))
    kinds = list(dict.fromkeys(row["kv"] for row in rows))
    hits = {(row["policy"], row["capacity_tokens"], row["kv"]): 100 * row["block_hit_rate"] for row in rows}
    figure, (axis,) = panels(1, (7.4, 3.4))
    bars(axis, {kind: [hits[*group, kind] for group in groups] for kind in kinds}, _COLOURS, "%.0f")
    axis.set_xticks(range(len(groups)), [f"{policy}\n{capacity / 1e6:g} M" for policy, capacity in groups])
    axis.set(ylabel="blocks hit, %", title="the bytes of so many raw tokens, filled with raw or with coded KV")
    axis.legend(frameon=False, fontsize=8)
    save_panels(figure, (axis,), out)


def section(result: dict[str, Any], machine: str) -> list[str]:
    disks = list(result["rows"][0]["load_ms"])
    rows = (
        [row["policy"], f"{row['capacity_tokens']:,}", row["kv"], f"{row['ratio']:.2f}", f"{row['block_hit_rate']:.4f}",
         *(f"{row['load_ms'][disk]:.0f}" for disk in disks)]
        for row in result["rows"]
    )  # fmt: skip
    loads = " | ".join(f"load from {disk}, ms" for disk in disks)
    return [
        "## Coded KV in the bytes of raw KV",
        "",
        "![blocks hit in equal bytes](coded_capacity.png)",
        "",
        f"{result['trace']}, second half of {result['requests']:,} requests: blocks hit in a tier of the bytes that so "
        "many tokens of raw KV take, and the mean time to read and decode on one core what a request that hits hits, "
        "if its KV were SmolLM2's. A fast disk pays for capacity with time, a slow one gains both.",
        "",
        *table(f"policy | room, raw tokens | KV | times smaller | blocks hit | {loads}", rows),
        "",
        held(result),
        "",
        machine,
        "",
    ]
