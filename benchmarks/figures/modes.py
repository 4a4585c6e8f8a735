"""Shows servers of equal memory under conversations that arrive by Poisson: a section of docs/results/tiers.md."""

from typing import Any

from benchmarks.figures.panels import table, titled

SERVERS = {
    "attentionstore": "HBM, DRAM and disk",
    "fcfs": "the same, first come, first served",
    "prefix": "cache in HBM alone",
    "recompute": "no cache",
}


def section(result: dict[str, Any], machine: str) -> list[str]:
    """Return the section's lines. machine: a line on where and when the result was measured."""
    arms = result["arms"]
    workload = arms["attentionstore"]["workload"]
    rows = [(f"`{name}`: {what}", *_times(arms[name])) for name, what in SERVERS.items()]
    return titled(
        "The same memory, under load",
        f"A random 125 M-shape model (bf16). {workload['conversations']} conversations with {workload['turns']} turns "
        f"of at most {result['most_tokens']:,} tokens arrive as a Poisson process, in {result['rounds']} rounds, each "
        "to every server in turn. All servers have memory for the KV of three conversations of the largest size; "
        "`attentionstore` and `fcfs` have one of them in HBM, the rest in DRAM, and a disk. Where fewer requests a "
        "second are answered, the load is more than the server carries. Times are TTFT of turns with a history, in ms.",
        table("server | p50 | mean | p95 | p50 of each round | answered a second | history reused", rows),
        machine,
    )


def _times(arm: dict[str, Any]) -> tuple[str, ...]:
    later, summary = arm["later_ttft_ms"], arm["summary"]
    return (
        *(f"{later[name]:,.0f}" for name in ("p50", "mean", "p95")),
        ", ".join(f"{value:,.0f}" for value in arm["later_ttft_p50_ms_by_round"]),
        f"{summary['throughput']['requests_per_s']:.2f}",
        f"{summary['hits']['tokens_of_later_turns']:.0%}",
    )
