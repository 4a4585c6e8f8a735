"""What `benchmarks.scheduling.compare` concludes from its legs."""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.measures import mean_of, ratio, rounded
from benchmarks.scheduling.legs import TIERS, Leg
from reprise.loadgen.percentile import percentile

DEFAULT = "car-hidden"  # the order in which a server starts requests if nobody asks for another
POLICIES = (DEFAULT, "priority", "fcfs")
CONTROL = "fcfs-again"  # another server of the same policy: what two of them differ by is no policy's merit
ARMS = (*POLICIES, CONTROL)
COMPARED = ((DEFAULT, "priority"), (DEFAULT, "fcfs"), (CONTROL, "fcfs"))
MIN_HIDDEN = 0.95
NEAR_SATURATION, BELOW = 0.8, 1.05  # most TTFT p95 in units of FCFS
PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def describe(legs: Sequence[Leg]) -> dict[str, Any]:
    """Figures of one server at one rate."""
    samples = [sample for leg in legs for sample in leg.samples]
    ttft_ms = [s.ttft_s * 1e3 for s in samples if s.ttft_s is not None]
    gaps_ms = [gap * 1e3 for s in samples for gap in s.gaps_s]
    counts: Counter[str] = Counter()
    for leg in legs:
        counts.update(leg.counts)
    loads = {name: counts[f"loads {name}"] for name in ("finished", "hidden", "exposed")}
    loads["uncounted"] = max(0, sum(s.loaded for s in samples) - sum(loads.values()))
    load_s, wait_s = sum(leg.load_s for leg in legs), sum(leg.load_wait_s for leg in legs)
    seconds = sum(leg.seconds for leg in legs)
    waits_ms = {c: [s.queue_s * 1e3 for s in samples if s.tier_class == c] for c in (1, 2, 3)}
    return {
        "turns": len(samples),
        "failed": sum(s.ttft_s is None for s in samples),
        "errors": dict(Counter(s.error for s in samples if s.error)),
        "ttft_ms": {
            "mean": rounded(mean_of(ttft_ms)),
            **{name: rounded(percentile(ttft_ms, p)) for name, p in PERCENTILES.items()},
        },
        "itl_ms": {name: rounded(percentile(gaps_ms, p)) for name, p in PERCENTILES.items()},
        "max_wait_ms_by_class": {str(c): rounded(max(waits, default=0.0)) for c, waits in waits_ms.items()},
        "turns_by_class": {str(c): len(waits) for c, waits in waits_ms.items()},
        "prompt_tokens": {tier: sum(s.tokens.get(tier, 0) for s in samples) for tier in TIERS},
        "computed_tokens": dict(sum((Counter(s.missed) for s in samples), Counter[str]())),
        "loads": loads,
        "loads_hidden": rounded(hidden_share(loads), 4),
        "load_time_hidden": rounded(1 - wait_s / load_s, 4) if load_s else None,
        "link_busy": rounded(load_s / seconds, 4),
        "goodput": rounded(sum(s.is_good for s in samples) / seconds, 3),
        "strict_goodput": rounded(sum(s.is_strictly_good for s in samples) / seconds, 3),
        "throughput": rounded(len(ttft_ms) / seconds, 3),
        "offered_rate": rounded(mean_of([leg.rate for leg in legs]), 3),
        "pace": [rounded(leg.pace, 3) for leg in legs],
        "overtakes": counts["overtakes"],
        "preemptions": counts["preemptions"],
        "fair_preemptions": counts["fair_preemptions"],
        "timer": {name.split()[1]: n for name, n in counts.items() if name.startswith("timer ")},
    }


def hidden_share(loads: dict[str, int]) -> float | None:
    total = sum(loads.values())
    return (loads["finished"] + loads["hidden"]) / total if total else None


def ratios(arms: dict[str, Any], legs: Sequence[Leg], share: float) -> dict[str, Any]:
    """TTFT of the default order in units of the others', and of the control in units of its like, of all turns and
    round by round. Arrivals are the same in a round, and differ from round to round: `p95_median`, of the rounds'
    ratios, is what is judged."""
    found: dict[str, Any] = {}
    for one, other in COMPARED:
        if str(share) not in arms.get(one, {}) or str(share) not in arms.get(other, {}):
            continue
        mine, theirs = arms[one][str(share)]["ttft_ms"], arms[other][str(share)]["ttft_ms"]
        played = [{leg.round_ for leg in legs if (leg.policy, leg.share) == (p, share)} for p in (one, other)]
        rounds = sorted(played[0] & played[1])
        by_round = [
            {p: describe([leg for leg in legs if (leg.policy, leg.share, leg.round_) == (p, share, r)]) for p in
             (one, other)}
            for r in rounds
        ]  # fmt: skip
        by_round_p95 = [ratio(b[one]["ttft_ms"]["p95"], b[other]["ttft_ms"]["p95"]) for b in by_round]
        known = [value for value in by_round_p95 if value is not None]
        found[f"{one}/{other}"] = {
            **{name: ratio(mine[name], theirs[name]) for name in ("mean", *PERCENTILES)},
            "p95_by_round": by_round_p95,
            "p95_median": round(median(known), 4) if known else None,
        }
    return found


def summarize(legs: Sequence[Leg]) -> dict[str, Any]:
    shares = sorted({leg.share for leg in legs})
    arms = {
        policy: {
            str(share): describe(some)
            for share in shares
            if (some := [leg for leg in legs if (leg.policy, leg.share) == (policy, share)])
        }
        for policy in ARMS
    }
    return {"arms": arms, "ratios": {str(share): ratios(arms, legs, share) for share in shares}}


def verdicts(summary: dict[str, Any]) -> dict[str, bool]:
    """What is held -> whether it holds. A turn that failed holds nothing."""
    held: dict[str, bool] = {}
    mine = summary["arms"][DEFAULT]
    if mine:
        loads: Counter[str] = Counter()
        for values in mine.values():
            loads.update(values["loads"])
        share = hidden_share(loads)
        is_hidden = share is not None and share >= MIN_HIDDEN
        held[f"{DEFAULT}: at least {MIN_HIDDEN:.0%} of loads finished or hidden"] = is_hidden
        failed = sum(values["failed"] for arm in summary["arms"].values() for values in arm.values())
        held["every turn is answered"] = failed == 0
    last = max(summary["ratios"], key=float, default=None)
    for share, found in summary["ratios"].items():
        if (p95 := found.get(f"{DEFAULT}/fcfs", {}).get("p95_median")) is not None:
            most = NEAR_SATURATION if share == last else BELOW
            held[f"{float(share):.0%} of the service rate: TTFT p95 at most {most} x fcfs, median of rounds"] = (
                p95 <= most
            )
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    calibration = result["calibration"]
    console.print(
        f"new tokens of a turn: {calibration['prefill_s'] * 1e3:.0f} ms; its history from the disk at "
        f"{calibration['disk_gbps']:.3f} GB/s: {calibration['load_s'] * 1e3:.0f} ms; "
        f"service rate {calibration['service_rate']:.2f} turns/s"
    )
    table = Table(title="Turns by arrival rate and scheduler", title_justify="left")
    for heading in ("rate", "policy", "TTFT mean", "p50", "p95", "p99 ms", "max wait ms by class", "loads in time",
                    "link busy", "ITL p99", "goodput", "strict", "failed"):  # fmt: skip
        table.add_column(heading, justify="right")
    for share in result["ratios"]:
        for policy, arm in result["arms"].items():
            if (v := arm.get(share)) is None:
                continue
            hidden = "-" if v["loads_hidden"] is None else f"{v['loads_hidden']:.1%}"
            waits = " / ".join(f"{ms:.0f}" for ms in v["max_wait_ms_by_class"].values())
            loads = f"{hidden} of {sum(v['loads'].values())}"
            table.add_row(
                f"{float(share):.0%}", policy, *(f"{ms or 0:.0f}" for ms in v["ttft_ms"].values()), waits,
                loads, f"{v['link_busy'] or 0:.0%}", f"{v['itl_ms']['p99'] or 0:.0f}", f"{v['goodput']:.2f}",
                f"{v['strict_goodput']:.2f}", str(v["failed"]),
            )  # fmt: skip
    console.print(table)
    for share, found in result["ratios"].items():
        for name, values in found.items():
            numbers = ", ".join(f"{p} {values[p]}" for p in ("mean", *PERCENTILES))
            console.print(f"{float(share):.0%}, {name}: {numbers}; p95 by round {values['p95_by_round']}")
