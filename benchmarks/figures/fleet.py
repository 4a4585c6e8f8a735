"""The sections of docs/results.md about fleets of real processes."""

from collections.abc import Callable, Mapping
from typing import Any

Result = dict[str, Any]


def fleet_sections(load: Callable[[str], Result | None], footer: Callable[[Result], str]) -> list[str]:
    """Sections about the results that are there."""
    lines: list[str] = []
    for name, (title, body) in SECTIONS.items():
        if (result := load(name)) is not None:
            held = "; ".join(f"{what}: {'yes' if holds else 'NO'}" for what, holds in result["held"].items())
            lines += [f"## {title}", "", *body(result), "", held + ".", "", footer(result), ""]
    return lines


def table(rows: Mapping[str, str]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in rows.items())]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def moves(result: Result) -> list[str]:
    lines = [
        f"{result['replicas']} replicas of a random 125 M-shape model (float32). Every turn goes to one that never saw",
        "its conversation, and asked of two servers: one keeps conversations on disk alone, one reuses nothing. "
        "The first turns are left out.",
        "",
        "| | turns | history, tokens | from HBM / disk / Redis | TTFT p50 (p95), ms |",
        "|---|---|---|---|---|",
    ]
    for arm, found in result["arms"].items():
        shares = " / ".join(percent(found["history_from"][tier]) for tier in ("hbm", "disk", "redis"))
        ttft = f"{found['ttft_ms']['p50']:.0f} ({found['ttft_ms']['p95']:.0f})"
        lines.append(f"| {arm} | {found['turns']} | >= {found['history_tokens_min']:,} | {shares} | {ttft} |")
    return lines


def kills(result: Result) -> list[str]:
    pause_s = result["pause_s"]
    causes = ", ".join(f"{count} by a {cause}" for cause, count in result["causes"].items())
    return table(
        {
            "kills": ", ".join(f"{what}: {count}" for what, count in result["kills"].items()),
            "answers; streams broken": f"{sum(result['answers'].values())}; {result['streams_broken']}",
            "errors that clients saw": f"{len(result['errors'])}",
            "texts unlike the undisturbed server's": causes or "none",
            "pause p50 / p95": f"{pause_s['p50']:.2f} s / {pause_s['p95']:.2f} s",
            "TTFT p50 of a turn that an operator moved": f"{result['moved_ttft_s']:.2f} s",
            "history cached in the turns after a kill": percent(result["history_cached"]),
            "the same, where the last answer had just ended": (
                f"{percent(result['history_cached_after_an_end'])} in {result['turns_after_an_end']}"
                if result["turns_after_an_end"]
                else "none"
            ),
        }
    )


def homes(result: Result) -> list[str]:
    simulated_ms = result["simulated"]["ttft_ms"]
    return table(
        {
            "flat out": f"{result['turns_per_s']:.1f} turns/s",
            **{
                f"{which}: returning turns at home": f"{percent(share['at_home'])} of {share['turns']}"
                for which, share in result["homes"].items()
            },
            "TTFT p50 at half load, simulated": f"{result['ttft_ms']['half']:.0f} ms, {simulated_ms:.0f} ms",
        }
    )


def roll(result: Result) -> list[str]:
    lines = ["| | turns | TTFT p50 / p95, ms | history cached |", "|---|---|---|---|"]
    for part in ("steady", "rolling"):
        found = result[part]
        ttft = "{p50:.0f} / {p95:.0f}".format(**found["ttft_ms"])
        lines.append(f"| {part} | {found['turns']} | {ttft} | {percent(found['history_cached'])} |")
    return lines


def branches(result: Result) -> list[str]:
    return table(
        {
            "turns": f"{result['turns']}",
            "errors; unlike one server": f"{len(result['errors'])}; {len(result['differences'])}",
            "history cached": percent(result["history_cached"]),
        }
    )


def delete(result: Result) -> list[str]:
    return table({"sessions": f"{len(result['sessions'])}", "longest deletion": f"{result['seconds_most']:.2f} s"})


SECTIONS: Mapping[str, tuple[str, Callable[[Result], list[str]]]] = {
    "fleet_moves": ("Conversations that change their server every turn", moves),
    "fleet_kills": ("Servers killed in the middle of answers", kills),
    "fleet_homes": ("Turns that come home, behind two gateways", homes),
    "fleet_roll": ("Servers replaced under load", roll),
    "fleet_branches": ("One session on two servers at once", branches),
    "fleet_delete": ("A session deleted on three servers", delete),
}
