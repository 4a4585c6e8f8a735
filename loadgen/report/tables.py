"""Prints results on a terminal: one run, or several side by side."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")
_TURNS = 12  # rows in the table by turn


def show(console: Console, document: dict[str, Any]) -> None:
    summary = document["summary"]
    table = Table(title="Latency, ms", title_justify="left")
    for heading in ("", "count", *_PERCENTILES):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = {"TTFT": "ttft_ms", "ITL": "itl_ms", "TPOT": "tpot_ms", "E2E": "e2e_ms", "sent late": "lateness_ms"}
    for label, name in rows.items():
        values = summary[name]
        table.add_row(label, f"{values['count']:,}", *(number(values[p]) for p in _PERCENTILES))
    console.print(table)
    console.print(_by_turn(document))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in facts(document):
        table.add_row(label, value)
    console.print(table)


def compare(console: Console, names: Sequence[str], documents: Sequence[dict[str, Any]]) -> None:
    """Print one column per run, with ratios to the first."""
    table = Table(title="Side by side", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify="right")
    for label, values in comparison(documents):
        first = values[0]
        cells = [number(first)]
        for value in values[1:]:
            ratio = f" ({value / first:.2f} ×)" if first and value is not None else ""
            cells.append(number(value) + ratio)
        table.add_row(label, *cells)
    console.print(table)
    for line in differences(documents):
        console.print(f"[yellow]{line}[/yellow]")


def comparison(documents: Sequence[dict[str, Any]]) -> list[tuple[str, list[float | None]]]:
    """Return (label, its value in every run) for each figure."""
    rows: list[tuple[str, list[float | None]]] = []
    summaries = [document["summary"] for document in documents]
    for label, name in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms")):
        rows += [(f"{label} {p}, ms", [s[name][p] for s in summaries]) for p in ("p50", "p95", "p99")]
    rows += [
        ("requests/s", [s["throughput"]["requests_per_s"] for s in summaries]),
        ("prompt tokens/s", [s["throughput"]["prompt_tokens_per_s"] for s in summaries]),
        ("prefill tokens/s", [s["throughput"]["prefill_tokens_per_s"] for s in summaries]),
        ("answer tokens/s", [s["throughput"]["answer_tokens_per_s"] for s in summaries]),
        ("good requests, %", [_percent(s["goodput"]["share"]) for s in summaries]),
        ("tokens from a cache, %", [_percent(s["hits"]["tokens"]) for s in summaries]),
        ("$ per million tokens", [s["cost"]["per_million_tokens"] for s in summaries]),
        ("failed", [s["requests"]["failed"] for s in summaries]),
    ]
    return rows


def differences(documents: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences that say why these runs cannot be compared; none if they can."""
    found = []
    if len({document["workload"]["digest"] for document in documents}) > 1:
        found.append("these runs did not send the same workload")
    options = [document["options"] for document in documents]
    names = [name for name in options[0] if any(other.get(name) != options[0][name] for other in options[1:])]
    if names:
        found.append(f"these options differ: {', '.join(names)}")
    if not all(document["finished"] for document in documents):
        found.append("not every run was let to its end")
    return found


def facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value as text) for each figure of a run that is a single value, such as throughput or goodput."""
    summary = document["summary"]
    requests, rates, good, hits = (summary[name] for name in ("requests", "throughput", "goodput", "hits"))
    # results of earlier versions have no such count
    stopped = f"{requests['interrupted']:,} interrupted, " if requests.get("interrupted") else ""
    rows = [
        ("requests", f"{requests['finished']:,} of {requests['planned']:,} finished, {requests['failed']:,} failed, "
                     f"{stopped}in {summary['seconds']:,.1f} s"),
        ("errors", ", ".join(f"{kind} {count:,}" for kind, count in requests["errors"].items()) or "none"),
        ("throughput", f"{number(rates['requests_per_s'])} requests/s, {number(rates['prompt_tokens_per_s'])} prompt "
                       f"and {number(rates['answer_tokens_per_s'])} answer tokens/s"),
        ("prefill", f"{number(rates['prefill_tokens_per_s'])} prompt tokens a second of it"),
        ("goodput", f"{number(good['requests_per_s'])} requests/s ({share(good['share'])}) with TTFT ≤ "
                    f"{good['ttft_slo_ms']:,.0f} and TPOT ≤ {good['tpot_slo_ms']:,.0f} ms"),
        ("from a cache", f"{share(hits['tokens'])} of the prompt tokens; from the second turn on "
                         f"{share(hits['tokens_of_later_turns'])}"),
    ]  # fmt: skip
    if hits["by_tier"]:
        rows.append(("by tier", ", ".join(f"{tier} {share(part)}" for tier, part in hits["by_tier"].items())))
    if server := summary["server"]:
        gap = server["ttft_difference_ms"]
        rows.append(("server's TTFT", f"p50 {number(server['ttft_ms']['p50'])} ms; the client's is later by p50 "
                                      f"{number(gap['p50'])}, p99 {number(gap['p99'])} ms"))  # fmt: skip
    cost = summary["cost"]
    rows.append(("cost", f"${number(cost['per_million_tokens'])} per million tokens, "
                         f"${number(cost['per_million_answer_tokens'])} per million of answers, "
                         f"at ${cost['dollars_per_hour']:,.2f} an hour"))  # fmt: skip
    return rows


def number(value: float | None) -> str:
    """Format a number with at least three digits; integers in full."""
    if value is None:
        return "–"
    if isinstance(value, int) or value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3}f}"


def _by_turn(document: dict[str, Any]) -> Table:
    table = Table(title="By turn, ms and medians", title_justify="left")
    for heading in ("turn", "sent", "prompt", "TTFT p50", "p95", "p99", "TPOT", "cached", "failed"):
        table.add_column(heading, justify="right")
    for row in document["by_turn"][:_TURNS]:
        ttft = row["ttft_ms"]
        table.add_row(
            str(row["turn"]), f"{row['requests']:,}", number(row["prompt_tokens"]["p50"]), number(ttft["p50"]),
            number(ttft["p95"]), number(ttft["p99"]), number(row["tpot_ms"]["p50"]), share(row["hits"]["tokens"]),
            str(row["failed"]),
        )  # fmt: skip
    if (more := len(document["by_turn"]) - _TURNS) > 0:
        table.add_row("…", *[""] * 7, f"{more} more")
    return table


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
