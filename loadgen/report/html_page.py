"""Renders results as one self-contained HTML file, without external scripts, fonts or pictures."""

from collections.abc import Sequence
from html import escape
from typing import Any

from reprise.loadgen.measure.summary import TIERS
from reprise.loadgen.report import tables
from reprise.loadgen.report.svg import Axis, Series, lines, stacked

_MOST_POINTS = 1500
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #d9dee5; --paper: #fff; --card: #f7f8fa;
  --s0: #2563eb; --s1: #d97706; --s2: #059669; --s3: #c026d3; --s4: #6b7280; --s5: #dc2626; --s6: #0891b2;
  --s7: #65a30d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa5b3; --line: #333b47; --paper: #12161c;
  --card: #191f27; --s0: #60a5fa; --s1: #fbbf24; --s2: #34d399; --s3: #e879f9; --s4: #9ca3af; --s5: #f87171;
  --s6: #22d3ee; --s7: #a3e635; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 78rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.soft, figcaption small { color: var(--soft); } p.warn { color: var(--s5); }
code { overflow-wrap: anywhere; font-size: .85rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; } .card span { color: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; }
figcaption { font-weight: 600; margin-bottom: .25rem; } figcaption small { font-weight: 400; }
svg.plot { width: 100%; height: auto; display: block; }
.grid { stroke: var(--line); stroke-width: 1; } .tick { fill: var(--soft); font-size: 11px; }
.label { fill: var(--soft); font-size: 12px; } .line { fill: none; stroke: var(--c); stroke-width: 2; }
.dashed { stroke-dasharray: 5 4; } .dot, .bar { fill: var(--c); } .dots circle { fill: var(--c); fill-opacity: .45; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
.s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .s6 { --c: var(--s6); } .s7 { --c: var(--s7); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; list-style: none; margin: .4rem 0 0; padding: 0;
  font-size: .85rem; } .legend svg { margin-right: .35rem; vertical-align: middle; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.words { text-align: left; white-space: normal; }
"""


def render(names: Sequence[str], documents: Sequence[dict[str, Any]]) -> str:
    """Render one run, or several side by side. names: of the runs."""
    alone = len(documents) == 1
    title = f"reprise load: {' · '.join(names)}"
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [_heading(name, document) for name, document in zip(names, documents, strict=True)]
    parts += [f'<p class="warn">{escape(line)}</p>' for line in (tables.differences(documents) if not alone else ())]
    if alone and not documents[0]["finished"]:
        parts.append('<p class="warn">This run was stopped before its end.</p>')
    if alone:
        parts.append(_cards(documents[0]))
    parts.append(f'<div class="plots">{"".join(_plots(names, documents))}</div>')
    if alone:
        parts += [_latencies(documents[0]), _facts(documents[0])]
    else:
        parts.append(_comparison(names, documents))
    parts += [_commands(names, documents)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _plots(names: Sequence[str], documents: Sequence[dict[str, Any]]) -> list[str]:
    ms = Axis("ms")
    plots = [
        _figure("Time to first token", "share of requests", lines(
            "Distribution of TTFT", Axis("TTFT, ms", log=True), Axis("share of requests", most=1.0),
            [Series(name, _cumulative(_counted(document, "ttft_ms")), place)
             for place, (name, document) in enumerate(zip(names, documents, strict=True))])),
        _figure("TTFT by turn", "p50, and p95 dashed", lines(
            "TTFT by turn", Axis("turn", from_zero=False, tight=True), ms,
            [series for place, (name, document) in enumerate(zip(names, documents, strict=True))
             for series in _by_turn(name, document, place)])),
        _figure("Gaps between tokens", "share of gaps", lines(
            "Distribution of ITL", Axis("ITL, ms", log=True), Axis("share of gaps", most=1.0),
            [Series(name, _cumulative_histogram(document["itl_histogram"]), place)
             for place, (name, document) in enumerate(zip(names, documents, strict=True))])),
        _figure("From a cache, by turn", "share of the prompt's tokens", _hits(names, documents)),
        _figure("Requests at once", "over the run", lines(
            "Requests at once over the run", Axis("s", tight=True), Axis("requests"),
            [Series(name, _over_time(document, "running"), place)
             for place, (name, document) in enumerate(zip(names, documents, strict=True))])),
        _figure("Answers", "pieces received a second", lines(
            "Throughput over the run", Axis("s", tight=True), Axis("pieces/s"),
            [Series(name, _over_time(document, "pieces_per_s"), place)
             for place, (name, document) in enumerate(zip(names, documents, strict=True))])),
        _figure("TTFT over the run", "a dot a request, by when it was due", lines(
            "TTFT over the run", Axis("s", tight=True), Axis("TTFT, ms", log=True),
            [Series(name, _thinned([(row["due_s"], row["ttft_ms"]) for row in document["requests"]
                                    if row["ttft_ms"] is not None]), place, "points")
             for place, (name, document) in enumerate(zip(names, documents, strict=True))])),
    ]  # fmt: skip
    if len(documents) > 1:
        plots.append(_figure("Prefill throughput", "prompt tokens by the time that they took", stacked(
            "Prefill throughput", Axis(""), Axis("tokens/s"), names,
            [(name, [(document["summary"]["throughput"]["prefill_tokens_per_s"] or 0.0) * (other == place)
                     for other in range(len(names))])
             for place, (name, document) in enumerate(zip(names, documents, strict=True))])))  # fmt: skip
    elif any(row["failed"] for row in documents[0]["timeline"]):
        plots.append(_figure("Failed requests", "over the run", stacked(
            "Failed requests over the run", Axis("s", tight=True), Axis("requests"), ["failed"],
            [(f"{row['from_s']:.0f}", [float(row["failed"])]) for row in documents[0]["timeline"]])))  # fmt: skip
    return plots


def _by_turn(name: str, document: dict[str, Any], place: int) -> list[Series]:
    rows = [row for row in document["by_turn"] if row["ttft_ms"]["count"]]
    p50, p95 = ([(row["turn"], row["ttft_ms"][p]) for row in rows] for p in ("p50", "p95"))
    return [Series(f"{name} p50", p50, place), Series(f"{name} p95", p95, place, "dashed")]


def _hits(names: Sequence[str], documents: Sequence[dict[str, Any]]) -> str:
    """Plot hits by tier if the only run reports them, else as one line per run."""
    share = Axis("share", most=1.0)
    rows = [row for row in documents[0]["by_turn"] if row["hits"]["by_tier"]]
    if len(documents) == 1 and rows:
        bars = [(str(row["turn"]), [row["hits"]["by_tier"][tier] or 0.0 for tier in TIERS]) for row in rows]
        return stacked("Prompt tokens by tier and turn", Axis("turn"), share, TIERS, bars)
    return lines(
        "Prompt tokens from a cache by turn", Axis("turn", from_zero=False, tight=True), share,
        [Series(name, [(row["turn"], row["hits"]["tokens"]) for row in document["by_turn"]
                       if row["hits"]["tokens"] is not None], place)
         for place, (name, document) in enumerate(zip(names, documents, strict=True))],
    )  # fmt: skip


def _counted(document: dict[str, Any], name: str) -> list[float]:
    return sorted(row[name] for row in document["requests"] if row["counts"] and row[name] is not None)


def _cumulative(ordered: Sequence[float]) -> list[tuple[float, float]]:
    return _thinned([(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)], 300)


def _cumulative_histogram(histogram: dict[str, Any]) -> list[tuple[float, float]]:
    total, below, points = sum(histogram["counts"]), 0, []
    for bound, count in zip(histogram["bounds_ms"], histogram["counts"], strict=True):
        below += count
        points.append((bound * 2**0.2, below / total))  # a bar ends at the next bound
    return points


def _over_time(document: dict[str, Any], name: str) -> list[tuple[float, float]]:
    return [(row["from_s"], row[name]) for row in document["timeline"]]


def _thinned(points: list[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """Keep every n-th point, and the last."""
    step = -(-len(points) // most) or 1
    return points[::step] + (points[-1:] if points and (len(points) - 1) % step else [])


def _heading(name: str, document: dict[str, Any]) -> str:
    server, workload, options = document["server"], document["workload"], document["options"]
    return (
        f'<p class="soft"><b>{escape(name)}</b>: {escape(str(server["model"]))} at {escape(str(server["url"]))}, '
        f"{document['started']}; {workload['conversations']:,} conversations, {workload['turns']:,} turns "
        f"({escape(options['source'])}, {escape(options['loop'])} loop, seed {options['seed']}, "
        f"workload {workload['digest']})</p>"
    )


def _cards(document: dict[str, Any]) -> str:
    summary = document["summary"]
    cards = [
        ("TTFT p50", tables.number(summary["ttft_ms"]["p50"]) + " ms"),
        ("TTFT p95", tables.number(summary["ttft_ms"]["p95"]) + " ms"),
        ("TPOT p50", tables.number(summary["tpot_ms"]["p50"]) + " ms"),
        ("requests/s", tables.number(summary["throughput"]["requests_per_s"])),
        ("answer tokens/s", tables.number(summary["throughput"]["answer_tokens_per_s"])),
        ("within the SLO", tables.share(summary["goodput"]["share"])),
        ("from a cache", tables.share(summary["hits"]["tokens"])),
        ("failed", f"{summary['requests']['failed']:,}"),
    ]
    items = "".join(f'<div class="card"><span>{label}</span><b>{escape(text)}</b></div>' for label, text in cards)
    return f'<div class="cards">{items}</div>'


def _figure(title: str, note: str, plot: str) -> str:
    return f"<figure><figcaption>{escape(title)} <small>{escape(note)}</small></figcaption>{plot}</figure>"


def _latencies(document: dict[str, Any]) -> str:
    percentiles = ("count", "mean", "p50", "p90", "p95", "p99", "max")
    head = "".join(f"<th>{p}</th>" for p in percentiles)
    summary = document["summary"]
    rows = [("TTFT", summary["ttft_ms"]), ("ITL", summary["itl_ms"]), ("TPOT", summary["tpot_ms"]),
            ("E2E", summary["e2e_ms"]), ("sent late", summary["lateness_ms"])]  # fmt: skip
    rows += [(f"TTFT, turn {row['turn']}", row["ttft_ms"]) for row in document["by_turn"]]
    body = "".join(
        f"<tr><td>{label}</td>{''.join(f'<td>{tables.number(values[p])}</td>' for p in percentiles)}</tr>"
        for label, values in rows
    )
    return f'<h2>Latency, ms</h2><div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div>'


def _facts(document: dict[str, Any]) -> str:
    body = "".join(
        f'<tr><td>{escape(label)}</td><td class="words">{escape(text)}</td></tr>'
        for label, text in tables.facts(document)
    )
    return f"<h2>The run</h2><table>{body}</table>"


def _comparison(names: Sequence[str], documents: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><td>{escape(label)}</td>{''.join(f'<td>{tables.number(v)}</td>' for v in values)}</tr>"
        for label, values in tables.comparison(documents)
    )
    return f'<h2>Side by side</h2><div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div>'


def _commands(names: Sequence[str], documents: Sequence[dict[str, Any]]) -> str:
    body = "".join(
        f'<tr><td>{escape(name)}</td><td class="words"><code>{escape(" ".join(document["command"]))}</code></td></tr>'
        for name, document in zip(names, documents, strict=True)
    )
    return f"<h2>Again</h2><table>{body}</table>"
