"""The sections of docs/results.md about fleets of real processes."""

from typing import Any

from benchmarks.figures.panels import held, table, titled

Result = dict[str, Any]


def two_columns(*rows: tuple[str, object]) -> list[str]:
    return table(" | ", rows)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def moves(result: Result, machine: str) -> list[str]:
    headings = " | turns | history, tokens | from HBM / disk / Redis | TTFT p50 (p95), ms"
    rows = [
        (
            arm, found["turns"], f">= {found['history_tokens_min']:,}",
            " / ".join(percent(found["history_from"][tier]) for tier in ("hbm", "disk", "redis")),
            f"{found['ttft_ms']['p50']:.0f} ({found['ttft_ms']['p95']:.0f})",
        )
        for arm, found in result["arms"].items()
    ]  # fmt: skip
    return titled(
        "Conversations that change their server every turn",
        f"{result['replicas']} replicas of a random 125 M-shape model (float32). Every turn goes to one that never saw "
        "its conversation, and asked of two servers: one keeps conversations on disk alone, one reuses nothing. "
        "The first turns are left out.",
        table(headings, rows),
        held(result),
        machine,
    )


def kills(result: Result, machine: str) -> list[str]:
    pause_s, ended = result["pause_s"], result["turns_after_an_end"]
    figures = two_columns(
        ("kills", ", ".join(f"{what}: {count}" for what, count in result["kills"].items())),
        ("answers; streams broken", f"{sum(result['answers'].values())}; {result['streams_broken']}"),
        ("errors that clients saw", str(len(result["errors"]))),
        ("texts unlike the undisturbed server's",
         ", ".join(f"{count} by a {cause}" for cause, count in result["causes"].items()) or "none"),
        ("pause p50 / p95", f"{pause_s['p50']:.2f} s / {pause_s['p95']:.2f} s"),
        ("TTFT p50 of a turn that an operator moved", f"{result['moved_ttft_s']:.2f} s"),
        ("history cached in the turns after a kill", percent(result["history_cached"])),
        ("the same, where the last answer had just ended",
         f"{percent(result['history_cached_after_an_end'])} in {ended}" if ended else "none"),
    )  # fmt: skip
    return titled("Servers killed in the middle of answers", figures, held(result), machine)


def homes(result: Result, machine: str) -> list[str]:
    at_home = {which: f"{percent(one['at_home'])} of {one['turns']}" for which, one in result["homes"].items()}
    figures = two_columns(
        ("flat out", f"{result['turns_per_s']:.1f} turns/s"),
        *((f"{which}: returning turns at home", share) for which, share in at_home.items()),
        ("TTFT p50 at half load", f"{result['ttft_ms']['half']:.0f} ms"),
    )
    return titled("Turns that come home, behind two gateways", figures, held(result), machine)
