"""Shows the hit rates of policies on a trace at several capacities, as JSON, table and picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from reprise.cache.policies import POLICIES
from reprise.loadgen.blocks.replay import BLOCK_TOKENS, CEILINGS, HitRate, hit_rate
from reprise.loadgen.codec import CodedKV
from reprise.loadgen.workloads import traces

KNOWN = ("default", *POLICIES, *CEILINGS)


def simulate(
    path: Path,
    *,
    capacities: Sequence[int],
    policies: Sequence[str],
    score_from: float,
    codec: CodedKV,
    progress: Callable[[str, int], None],
) -> dict[str, Any]:
    """Simulate every policy at every capacity, in tokens of raw KV. score_from: the share of the requests, from the
    first one, that only fill the tier and are not counted. progress: called with a policy's name and a capacity before
    each run. Raises ValueError for unknown policies and unreadable traces, OSError."""
    unknown = [policy for policy in policies if policy not in KNOWN]
    if unknown:
        raise ValueError(f"no policy {', '.join(unknown)}; there are {', '.join(KNOWN)}")
    if min(capacities) < BLOCK_TOKENS:
        raise ValueError(f"a capacity is at least one block, {BLOCK_TOKENS} tokens")
    requests = traces.read(path)
    if not any(request.block_names for request in requests):
        raise ValueError(f"{path} names no blocks: nothing is known of what its prompts share")
    first = int(score_from * len(requests))
    if first == len(requests):
        raise ValueError(f"of {len(requests):,} requests none is left to be scored")
    results = []
    for policy in policies:
        for capacity in capacities:
            progress(policy, capacity)
            results.append(_row(hit_rate(requests, policy, capacity, first, codec), capacity))
    return {
        "trace": path.name,
        "requests": len(requests),
        "scored_from_request": first,
        "block_tokens": BLOCK_TOKENS,
        "codec_ratio": codec.ratio,
        "policies": results,
    }


def _row(rate: HitRate, capacity: int) -> dict[str, Any]:
    return {
        "policy": rate.policy,
        "capacity_tokens": capacity,
        "block_hit_rate": round(rate.block_hit_rate, 5),
        "token_hit_rate": round(rate.token_hit_rate, 5),
        "blocks": rate.blocks,
        "hit_blocks": rate.hit_blocks,
    }


def table(result: dict[str, Any]) -> Table:
    """Build a table of hit rates (the share of all requests' blocks that were hits), a row per policy and a column per
    capacity."""
    rates = {(row["policy"], row["capacity_tokens"]): row["block_hit_rate"] for row in result["policies"]}
    policies, capacities = list(dict.fromkeys(p for p, _ in rates)), list(dict.fromkeys(c for _, c in rates))
    headings = [f"{capacity / 1e6:g} M" for capacity in capacities]
    shown = Table("policy", *headings, title=_title(result), caption=_caption(result))
    for policy in policies:
        shown.add_row(policy, *(f"{rates[policy, capacity]:.4f}" for capacity in capacities))
    return shown


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw the hit rate over the capacity, one line per policy, into the picture file `out`. Raises ImportError without
    matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row["policy"] for row in result["policies"]):
        rows = [row for row in result["policies"] if row["policy"] == policy]
        style = {"belady": "--", "unbounded": ":"}.get(policy, "-")
        axes.plot(
            [row["capacity_tokens"] / 1e6 for row in rows], [100 * row["block_hit_rate"] for row in rows],
            style, marker="o", markersize=3, label=policy,
        )  # fmt: skip
    axes.set(xlabel="capacity, million tokens", ylabel="blocks hit, %", title=_title(result), xscale="log")
    capacities = sorted({row["capacity_tokens"] / 1e6 for row in result["policies"]})
    axes.set_xticks(capacities, [f"{capacity:g}" for capacity in capacities])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)


def _caption(result: dict[str, Any]) -> str:
    ratio = result["codec_ratio"]
    coded = f" of raw KV, in whose bytes the tier holds blocks {ratio:g} times smaller" if ratio > 1 else ""
    return f"Shares of blocks hit, by capacity in tokens{coded}."


def _title(result: dict[str, Any]) -> str:
    first = result["scored_from_request"]
    return f"{result['trace']}: {result['requests']:,} requests" + (f", scored from {first:,}" if first else "")
