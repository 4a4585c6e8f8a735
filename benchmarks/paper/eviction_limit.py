"""Measures how much of the gap between LRU and Belady a policy can close that knows of a session what ours does:
benchmarks/results/eviction_limit.json.

    python -m benchmarks.paper.eviction_limit --trace ../shared/data/traces/mooncake_conversation.jsonl.gz

Our model of returns is fitted to the first half of a trace, over and over, until it has learned what it can. Worlds are
drawn from it: first turns as recorded, in another order; when and whether a session comes back by the model's own
chances; what is added to the prompt and the length of the answer as in another recorded turn of the same index. There
nothing more can be known than the model knows, so whoever ranks sessions by these very chances does as well as anybody
can, but for luck. Beside it stands the policy as a server has it, which learns them as it goes. Twice the requests of
the half: those of the first half of a world warm up.

Then the trace itself, its second half scored. Where the gap lies: what each policy hits beyond a prompt's first block,
by whether the request goes on from where a session ended, for the first time or not, or forks off before its end, which
the worlds know nothing of. And what hindsight is worth: the chances fitted, over and over, to the very half that is
scored, and to the whole trace. That is no policy, and chooses none: it bounds what better learning could win.
"""

import os
import random
from argparse import ArgumentParser
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.tables import show_rows
from reprise.cache.returns.return_times import ReturnTimes
from reprise.cache.returns.survival import NUM_BINS, ReturnModel, bin_end_s, features
from reprise.loadgen.blocks.replay import BLOCK_TOKENS, SessionFinder, hit_blocks
from reprise.loadgen.workloads.traces import TraceRequest, read

_PASSES = 10  # over the half, to learn from
_LATER_TURNS = 3  # turns from this one on lend each other lengths
_LONGEST = 128_000  # tokens of a prompt
_LEAST_GAP_S = 0.05


class _Known(ReturnTimes):
    """Return times by a model that is there from the beginning."""

    def __init__(self, model: ReturnModel) -> None:
        super().__init__()
        self._model = model


class _Frozen(ReturnModel):
    """Has learned what it knows."""

    def __init__(self, model: ReturnModel) -> None:
        self.__dict__.update(model.__dict__)

    def learn(self, known: tuple[int, ...], gap_s: float | None, age_bin: int, returned: bool) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recording that worlds are drawn from."""

    model: ReturnModel
    first: list[TraceRequest]  # first turns of sessions, and what is too short to be known again
    later: dict[int, list[tuple[int, int]]]  # turn -> of turns of this index: tokens added to the prompt, answers
    span_s: float


def fit(requests: list[TraceRequest], passes: int) -> Recorded:
    """The model after so many passes, and the turns of the requests."""
    model = ReturnModel()
    for _ in range(passes):
        hit_blocks(requests, "lru", BLOCK_TOKENS, _Known(model))
    finder, last, turns = SessionFinder(), dict[int, TraceRequest](), defaultdict[int, int](int)
    first: list[TraceRequest] = []
    later: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for request in requests:
        session = finder.find(request.block_names[: request.prompt_tokens // BLOCK_TOKENS])
        if session is None or session not in last:
            first.append(request)
        else:
            turns[session] += 1
            before = last[session]
            grown = request.prompt_tokens - before.prompt_tokens - before.answer_tokens
            later[min(turns[session], _LATER_TURNS)].append((grown, request.answer_tokens))
        if session is not None:
            last[session] = request
    return Recorded(model, first, dict(later), requests[-1].at_s)


def world(recorded: Recorded, seed: int) -> list[TraceRequest]:
    """Requests of twice the recorded time, in their order."""
    rng, found, end_s = random.Random(seed), [], 2 * recorded.span_s
    blocks = iter(range(1, 1 << 62))
    for _ in range(2 * len(recorded.first)):
        opening = rng.choice(recorded.first)
        at_s, prompt, answer = rng.uniform(0.0, end_s), opening.prompt_tokens, opening.answer_tokens
        names: tuple[int, ...] = (0,)  # all begin alike
        turn, gap_s, grown = 0, None, None
        while at_s < end_s:
            names = (*names, *(next(blocks) for _ in range(-(-prompt // BLOCK_TOKENS) - len(names))))
            found.append(TraceRequest(at_s, prompt, answer, "", names))
            if prompt < 2 * BLOCK_TOKENS:
                break  # as in the trace: not known again
            known = features(turn=turn, prompt_tokens=prompt, grown_tokens=grown, answer_tokens=answer)
            gap_s = _gap(recorded.model.hazards(known, gap_s, 0), rng)
            if gap_s is None:
                break
            turn += 1
            grown, next_answer = rng.choice(recorded.later[min(turn, _LATER_TURNS)])
            names = names[: prompt // BLOCK_TOKENS]  # the last one is filled under another name
            at_s, prompt = at_s + gap_s, min(_LONGEST, max(prompt + 1, prompt + answer + grown))
            answer = next_answer
    return sorted(found, key=lambda request: request.at_s)


def _gap(hazards: list[float], rng: random.Random) -> float | None:
    """None: it never comes."""
    for age_bin, hazard in enumerate(hazards):
        if rng.random() < hazard:
            start_s = bin_end_s(age_bin - 1) if age_bin else 0.0
            return rng.uniform(max(_LEAST_GAP_S, start_s), bin_end_s(age_bin))
    return None


def closed(requests: list[TraceRequest], half: int, capacity_tokens: int, models: Mapping[str, ReturnModel | None]
           ) -> dict[str, float]:  # fmt: skip
    """Shares of the gap between LRU and Belady from the request `half` on, by who ranks: the policy as a server has it
    (None), or with the chances of a model that learns no more."""

    def hits(policy: str, model: ReturnModel | None = None) -> int:
        returns = None if model is None else _Known(_Frozen(model))
        return sum(hit_blocks(requests, policy, capacity_tokens, returns)[half:])

    least, most = hits("lru"), hits("belady")
    return {name: round((hits("default", model) - least) / (most - least), 4) for name, model in models.items()}


def closed_in_world(recorded: Recorded, seed: int, capacity_tokens: int) -> dict[str, float]:
    requests = world(recorded, seed)
    half = bisect([request.at_s for request in requests], recorded.span_s)
    return closed(requests, half, capacity_tokens, {"learned": None, "known": recorded.model})


def kinds(requests: list[TraceRequest]) -> list[str]:
    """Return how each request goes on from what was asked before it."""
    finder, seen, turns, found = SessionFinder(), set[int](), defaultdict[int, int](int), []
    for request in requests:
        session = finder.find(request.block_names[: request.prompt_tokens // BLOCK_TOKENS])
        if session is None:
            found.append("short")
        else:
            turns[session] += 1
            if turns[session] > 1:
                found.append("first return" if turns[session] == 2 else "later return")
            else:
                found.append("fork" if seen.issuperset(request.block_names[:2]) else "new")
        seen.update(request.block_names)
    return found


def accounts(requests: list[TraceRequest], capacity_tokens: int) -> dict[str, dict[str, float]]:
    """Shares of all blocks of the second half that are hit beyond the first block of a prompt, by kind of request and
    policy; `requests` counts them."""
    half, kind = len(requests) // 2, kinds(requests)
    hits = {policy: hit_blocks(requests, policy, capacity_tokens) for policy in ("lru", "default", "belady")}
    blocks = sum(len(request.block_names) for request in requests[half:])
    found: dict[str, dict[str, float]] = {}
    for name in sorted(set(kind[half:])):
        places = [place for place in range(half, len(requests)) if kind[place] == name]
        shares = {
            policy: round(sum(max(0, those[place] - 1) for place in places) / blocks, 4)
            for policy, those in hits.items()
        }
        found[name] = {"requests": len(places), **shares}
    return found


def hindsight(requests: list[TraceRequest], capacity_tokens: int) -> dict[str, float]:
    """Shares of the gap on the second half, by what the chances were fitted to."""
    half = len(requests) // 2
    fitted = {"the half scored": fit(requests[half:], _PASSES).model, "all": fit(requests, _PASSES).model}
    return closed(requests, half, capacity_tokens, {"on the way": None, **fitted})


def measure(run: Run) -> dict[str, Any]:
    words = run.arguments
    requests = read(words.trace)
    recorded = fit(requests[: len(requests) // 2], _PASSES)
    capacities = words.capacities
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = {
            (capacity, seed): pool.submit(closed_in_world, recorded, seed, capacity)
            for capacity in capacities
            for seed in range(words.worlds)
        }
        lies = {capacity: pool.submit(accounts, requests, capacity) for capacity in capacities}
        known = {capacity: pool.submit(hindsight, requests, capacity) for capacity in capacities}
        for (capacity, seed), job in run.track(list(jobs.items()), "worlds"):
            rows.append({"capacity_tokens": capacity, "seed": seed, **job.result()})
    means = []
    for capacity in sorted({row["capacity_tokens"] for row in rows}):
        for name in ("learned", "known"):
            found = [row[name] for row in rows if row["capacity_tokens"] == capacity]
            mean, spread = fmean(found), stdev(found) if len(found) > 1 else 0.0
            means.append({"capacity_tokens": capacity, "who": name, "mean": round(mean, 4), "sd": round(spread, 4)})
    halves = [
        {"capacity_tokens": capacity, "fitted_to": known[capacity].result(), "hits": lies[capacity].result()}
        for capacity in capacities
    ]
    return {"bins": NUM_BINS, "means": means, "second_half": halves, "worlds": rows}


def show(console: Console, result: dict[str, Any]) -> None:
    show_rows(console, "Shares of the gap between LRU and Belady, by who ranks", result["means"])
    for half in result["second_half"]:
        console.print(half)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument(
        "--capacities", type=lambda text: [int(word) for word in text.split(",")], default=[1_000_000, 2_000_000],
        help="tokens, comma-separated",
    )  # fmt: skip


EXPERIMENT = Experiment(name="eviction_limit", about=__doc__, measure=measure, show=show, options=options)

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
