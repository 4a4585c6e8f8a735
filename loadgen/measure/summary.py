"""Summarizes a run's results: percentiles, throughput, goodput, hit rates and cost. Pure.

A distribution is `{count, mean, min, p50, p90, p95, p99, max}` of its values; an empty one has a count of 0 and nulls.
Latencies are measured from the time a request was due, so a late client counts.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from reprise.loadgen.measure.sender import TurnResult
from reprise.loadgen.percentile import percentile

TIERS = ("hbm", "dram", "disk", "redis", "computed")
SERVER_TIMES = ("ttft_ms", "queue_ms", "load_ms", "prefill_ms")
_SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
_INTERVALS = 60  # intervals of the timeline
# Five bounds per octave: bars about 15 % wide, from 0.1 ms to 100 s.
_BOUNDS_MS = [round(0.1 * 2 ** (step / 5), 4) for step in range(100)]


@dataclass(frozen=True, slots=True)
class Slo:
    """The latencies that a good answer must not exceed."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in dollars per hour. The defaults are AttentionStore's (§4.2) for a GPU, a GB of DRAM and a GB of SSD."""

    gpus: float = 1.0
    gpu: float = 5.0
    dram_gb: float = 0.0
    dram: float = 0.0088
    ssd_gb: float = 0.0
    ssd: float = 0.000082

    @property
    def per_hour(self) -> float:
        return self.gpus * self.gpu + self.dram_gb * self.dram + self.ssd_gb * self.ssd


def distribution(values: Iterable[float], digits: int = 3) -> dict[str, float | int | None]:
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, **dict.fromkeys(("mean", "min", *_SHARES, "max"))}
    found = {"mean": sum(ordered) / len(ordered), "min": ordered[0]}
    found |= {name: percentile(ordered, share) for name, share in _SHARES.items()}
    found["max"] = ordered[-1]
    return {"count": len(ordered), **{name: round(value, digits) for name, value in found.items()}}


def tokens_of(result: TurnResult) -> int:
    """Return the number of the answer's tokens, or, if the server does not report it, of the pieces it came in."""
    return result.completion_tokens or len(result.token_s)


def tpot_s(result: TurnResult) -> float | None:
    """Return the mean gap between tokens after the first, in seconds. A piece may hold several tokens."""
    later = tokens_of(result) - 1
    return (result.token_s[-1] - result.token_s[0]) / later if later > 0 and len(result.token_s) > 1 else None


def is_good(result: TurnResult, slo: Slo) -> bool:
    gap_s = tpot_s(result)
    ttft_s = result.ttft_s
    return result.error is None and ttft_s is not None and ttft_s <= slo.ttft_s and (gap_s or 0.0) <= slo.tpot_s


def summarize(results: Sequence[TurnResult], *, planned_turns: int, slo: Slo, prices: Prices) -> dict[str, Any]:
    """Summarize the results of requests that were sent after the warm-up. planned_turns: how many requests were to be
    sent."""
    ended = [result for result in results if not result.interrupted]
    good = [result for result in ended if result.error is None]
    began_s = min((result.due_s for result in results), default=0.0)
    seconds = max((result.done_s for result in results), default=0.0) - began_s
    answer = sum(tokens_of(r) for r in good)
    # unknown if it is unknown for any request
    prompt = sum(r.prompt_tokens for r in good) if all(r.prompt_tokens for r in good) else None
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
    kept = sum(is_good(result, slo) for result in ended)
    cost = prices.per_hour * seconds / 3600
    return {
        "requests": {
            "planned": planned_turns,
            "sent": len(results),
            "finished": len(good),
            "failed": len(ended) - len(good),
            "interrupted": len(results) - len(ended),
            "retries": sum(r.retries for r in results),
            "errors": dict(Counter(r.error_kind or "unknown" for r in ended if r.error is not None)),
        },
        "seconds": round(seconds, 3),
        **_latencies(good),
        "lateness_ms": distribution((r.sent_s - r.due_s) * 1e3 for r in results),
        "tokens": {"prompt": prompt, "answer": answer, "cached": sum(cached) if len(cached) == len(good) else None},
        "throughput": {
            "requests_per_s": _ratio(len(good), seconds),
            "prompt_tokens_per_s": _ratio(prompt, seconds) if prompt is not None else None,
            "answer_tokens_per_s": _ratio(answer, seconds),
            "prefill_tokens_per_s": _prefill_rate(good),
        },
        "goodput": {
            "ttft_slo_ms": slo.ttft_s * 1e3,
            "tpot_slo_ms": slo.tpot_s * 1e3,
            "share": _ratio(kept, len(ended)),
            "requests_per_s": _ratio(kept, seconds),
        },
        "hits": _hits(good),
        "server": _server(good),
        "cost": {
            "dollars_per_hour": round(prices.per_hour, 6),
            "dollars": round(cost, 6),
            "per_million_answer_tokens": _ratio(cost * 1e6, answer),
            "per_million_tokens": _ratio(cost * 1e6, prompt + answer) if prompt is not None else None,
        },
    }


def by_turn(results: Sequence[TurnResult]) -> list[dict[str, Any]]:
    """Summarize by turn of the conversation; 1 is the first."""
    turns: dict[int, list[TurnResult]] = defaultdict(list)
    for result in results:
        if not result.interrupted:
            turns[result.turn].append(result)
    rows = []
    for turn, some in sorted(turns.items()):
        good = [result for result in some if result.error is None]
        rows.append(
            {
                "turn": turn + 1,
                "requests": len(some),
                "failed": len(some) - len(good),
                "prompt_tokens": distribution(r.prompt_tokens for r in good if r.prompt_tokens),
                **_latencies(good),
                "hits": _hits(good),
            }
        )
    return rows


def timeline(results: Sequence[TurnResult]) -> list[dict[str, Any]]:
    """Count, for equal intervals of the run, the requests that were due, finished and failed, those that ran, and the
    pieces of answers that arrived."""
    end_s = max((result.done_s for result in results), default=0.0)
    width_s = end_s / _INTERVALS
    if width_s <= 0:
        return []
    due: list[list[TurnResult]] = [[] for _ in range(_INTERVALS)]
    ended, failed, tokens = Counter[int](), Counter[int](), Counter[int]()
    running = [0.0] * _INTERVALS
    for result in results:
        due[_place(result.due_s, width_s)].append(result)
        if not result.interrupted:
            (ended if result.error is None else failed)[_place(result.done_s, width_s)] += 1
        for stamp_s in result.token_s:
            tokens[_place(stamp_s, width_s)] += 1
        for place in range(_place(result.sent_s, width_s), _place(result.done_s, width_s) + 1):
            begins_s = place * width_s
            running[place] += min(result.done_s, begins_s + width_s) - max(result.sent_s, begins_s)
    rows = []
    for place, some in enumerate(due):
        ttft_ms = [r.ttft_s * 1e3 for r in some if r.ttft_s is not None]
        rows.append(
            {
                "from_s": round(place * width_s, 3),
                "due": len(some),
                "finished": ended[place],
                "failed": failed[place],
                "running": round(running[place] / width_s, 3),
                "pieces_per_s": round(tokens[place] / width_s, 3),
                "ttft_p50_ms": _rounded(percentile(ttft_ms, 0.5)),
                "ttft_p95_ms": _rounded(percentile(ttft_ms, 0.95)),
            }
        )
    return rows


def histogram(values_ms: Iterable[float]) -> dict[str, list[float] | list[int]]:
    """Count values: `counts[i]` is the number of values from `bounds_ms[i]` to below the next bound; the first also
    counts smaller ones."""
    counts = [0] * len(_BOUNDS_MS)
    for value in values_ms:
        counts[max(0, bisect_right(_BOUNDS_MS, value) - 1)] += 1
    used = [place for place, count in enumerate(counts) if count]
    first, last = (used[0], used[-1] + 1) if used else (0, 0)
    return {"bounds_ms": _BOUNDS_MS[first:last], "counts": counts[first:last]}


def request_row(result: TurnResult, *, counts: bool, token_times: bool) -> dict[str, Any]:
    """Return one request's entry in the result file."""
    gap_s, ttft_s = tpot_s(result), result.ttft_s
    cache, timings = _tokens_by_tier(result), _timings(result)
    row: dict[str, Any] = {
        "session": result.session_id,
        "turn": result.turn + 1,
        "counts": counts,
        "due_s": round(result.due_s, 6),
        "sent_s": round(result.sent_s, 6),
        "ttft_ms": None if ttft_s is None else round(ttft_s * 1e3, 3),
        "tpot_ms": None if gap_s is None else round(gap_s * 1e3, 3),
        "itl_max_ms": _rounded(max(result.gaps_s, default=math.nan) * 1e3),
        "e2e_ms": round((result.done_s - result.due_s) * 1e3, 3),
        "prompt_tokens": result.prompt_tokens,
        "answer_tokens": tokens_of(result),
        "cached_tokens": result.cached_tokens,
        "finish_reason": result.finish_reason,
        "error_kind": result.error_kind,
        "error": result.error,
        "retries": result.retries,
    }
    if cache:
        row["tiers"] = cache
    if timings:
        row["server"] = {name: timings.get(name) for name in SERVER_TIMES}
    if token_times:
        row["token_s"] = [round(stamp_s, 6) for stamp_s in result.token_s]
    return row


def _latencies(good: Sequence[TurnResult]) -> dict[str, Any]:
    return {
        "ttft_ms": distribution(r.ttft_s * 1e3 for r in good if r.ttft_s is not None),
        "itl_ms": distribution(gap * 1e3 for r in good for gap in r.gaps_s),
        "tpot_ms": distribution(gap * 1e3 for r in good if (gap := tpot_s(r)) is not None),
        "e2e_ms": distribution((r.done_s - r.due_s) * 1e3 for r in good),
    }


def _hits(good: Sequence[TurnResult]) -> dict[str, Any]:
    """Return hit rates as shares of all prompt tokens, and as shares of the prompt tokens of turns after a
    conversation's first. Only answers that report hits count; null if none does."""
    told = [(r, r.cached_tokens) for r in good if r.cached_tokens is not None and r.cached_tokens <= r.prompt_tokens]
    later = [(r, cached) for r, cached in told if r.turn > 0]
    reports = [_tokens_by_tier(r) for r in good]
    tokens = {tier: sum(report.get(tier, 0) for report in reports) for tier in TIERS}
    whole = sum(tokens.values())
    return {
        "tokens": _ratio(sum(cached for _, cached in told), sum(r.prompt_tokens for r, _ in told)),
        "tokens_of_later_turns": _ratio(sum(cached for _, cached in later), sum(r.prompt_tokens for r, _ in later)),
        "later_turns": _ratio(sum(cached > 0 for _, cached in later), len(later)),
        "by_tier": {tier: _ratio(count, whole) for tier, count in tokens.items()} if whole else None,
    }


def _server(good: Sequence[TurnResult]) -> dict[str, Any] | None:
    """Summarize the server's own times, and how much later the client sees the first token."""
    timed = [(r, timings) for r in good if (timings := _timings(r))]
    if not timed:
        return None
    found: dict[str, Any] = {
        name: distribution(timings[name] for _, timings in timed if timings.get(name) is not None)
        for name in SERVER_TIMES
    }
    found["ttft_difference_ms"] = distribution(
        (r.token_s[0] - r.sent_s) * 1e3 - timings["ttft_ms"]
        for r, timings in timed
        if r.token_s and timings.get("ttft_ms") is not None
    )
    return found


def _tokens_by_tier(result: TurnResult) -> dict[str, int]:
    """Return cached tokens by tier; empty if the server does not report them in this form."""
    said = result.extra.get("x_cache") or {}
    found = {tier: said.get(f"{tier}_tokens", 0) for tier in TIERS}
    return found if said and all(type(count) is int and count >= 0 for count in found.values()) else {}


def _timings(result: TurnResult) -> dict[str, float]:
    """Return the server's own times, as far as they are numbers."""
    said = result.extra.get("timings") or {}
    return {
        name: said[name]
        for name in SERVER_TIMES
        if isinstance(said.get(name), int | float) and math.isfinite(said[name])
    }


def _prefill_rate(good: Sequence[TurnResult]) -> float | None:
    """Return prompt tokens per second of the time they took: the server's prefill and load times if reported, else the
    TTFT."""
    tokens, seconds = 0, 0.0
    for result in good:
        timings = _timings(result)
        if not result.prompt_tokens:
            continue
        if "prefill_ms" in timings:
            seconds += (timings["prefill_ms"] + timings.get("load_ms", 0.0)) / 1e3
        elif result.ttft_s is not None:
            seconds += result.ttft_s
        else:
            continue
        tokens += result.prompt_tokens
    return _ratio(tokens, seconds)


def _ratio(over: float, under: float) -> float | None:
    return round(over / under, 6) if under > 0 else None


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def _place(when_s: float, width_s: float) -> int:
    return min(_INTERVALS - 1, max(0, int(when_s / width_s)))
