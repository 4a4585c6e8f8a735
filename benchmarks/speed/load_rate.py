"""Measures how well `reprise load` keeps time: an offered rate against a stub, and its TTFT beside a real server's own.

    python -m benchmarks.speed.load_rate

First, 200 requests a second in the mean arrive as a Poisson process at a stub in a process of its own, each a
conversation of one turn that gets 16 tokens, for 30 seconds; the generator has one core, the stub another. Send-time
error is how much later than due (or earlier) a request was written to its socket by the client's clock, and how much
later than that it arrived by the stub's, which is the same clock, less the quickest way there.

Then conversations go to the bundled model, one request at a time, and every answer says when its first token was there
by the server's clock, counted from the request's arrival: the client's TTFT, from sending on, less the server's.

Held: the error p99 is below 5 ms, on both sides; no request fails; the TTFT's p50 is within 5 ms of the server's.
"""

import asyncio
import os
import random
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.result_files import ROOT
from benchmarks.harness.servers import serve
from reprise.loadgen.measure import load_run
from reprise.loadgen.measure.progress_line import ProgressLine, progress
from reprise.loadgen.measure.sender import Target, TurnResult
from reprise.loadgen.measure.sender import run as run_workload
from reprise.loadgen.measure.summary import Prices, Slo, distribution
from reprise.loadgen.workloads.synthetic import Distribution
from reprise.loadgen.workloads.workload import Conversation, Turn

MAX_ERROR_MS, MAX_DIFFERENCE_MS = 5.0, 5.0
PROMPT_TOKENS = 100
SLO = Slo(1.0, 0.1)


def open_loop(seed: int) -> load_run.Options:
    """Return what `execute` asks for: an open loop to its end."""
    return load_run.Options(
        source="synthetic", path="", conversations=0, rate=1.0, think="fixed:0", loop="open", concurrency=0, speed=1.0,
        scale=1.0, max_context=0, answer_tokens=0, system_tokens=0, seed=seed, duration_s=0.0, warmup_turns=0,
        warmup_s=0.0, timeout_s=30.0, retries=0, distribution=Distribution(), slo=SLO, prices=Prices(),
    )  # fmt: skip


@contextmanager
def stub(core: int | None, tokens: int, gap_ms: float) -> Iterator[str]:
    """A stub's URL; the stub runs on `core`."""
    command = [sys.executable, "-m", "benchmarks.harness.stub_server", "--tokens", str(tokens), "--gap-ms", str(gap_ms)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait(timeout=10)


def arrivals(rate: float, seconds: float, tokens: int, seed: int) -> list[Conversation]:
    rng = random.Random(seed)
    due_s = 0.0
    found: list[Conversation] = []
    while (due_s := due_s + rng.expovariate(rate)) < seconds:
        found.append(Conversation(f"c{len(found)}", "", due_s, (Turn(PROMPT_TOKENS, tokens, 0.0),)))
    return found


def offered(rate: float, seconds: float, tokens: int, gap_ms: float, seed: int, console: Console) -> dict[str, Any]:
    """Offer a rate to a stub, with the progress drawn as a user has it."""
    before = os.sched_getaffinity(0)
    own = min(before)
    others = [core for core in range(os.cpu_count() or 1) if core != own]
    workload = arrivals(rate, seconds, tokens, seed)
    live = ProgressLine(SLO)
    with stub(others[0] if others else None, tokens, gap_ms) as url, progress(console, live) as bars:
        os.sched_setaffinity(0, {own})
        bar = bars.add_task("", total=len(workload))

        def on_result(result: TurnResult) -> None:
            live.on_result(result)
            bars.advance(bar)

        target = Target(url, "stub", {}, {})
        cpu_s, clock_s = os.times().user + os.times().system, os.times().elapsed
        # The stub's stamps are of the machine's clock; the run's are counted from its beginning.
        results, _ = load_run.execute(open_loop(seed), workload, target, on_sent=live.on_sent, on_result=on_result)
        spent_s, took_s = os.times().user + os.times().system - cpu_s, os.times().elapsed - clock_s
        os.sched_setaffinity(0, before)
    good = [result for result in results if result.error is None]
    began_s = sorted(r.extra["timings"]["arrived_s"] - r.sent_s for r in good)[0]
    errors = [abs(result.sent_s - result.due_s) * 1e3 for result in results]
    arrived = [(r.extra["timings"]["arrived_s"] - began_s - r.due_s) * 1e3 for r in good]
    last_s = max(result.sent_s for result in results) if results else 0.0
    return {
        "offered_per_s": rate, "seconds": seconds, "requests": len(workload), "failed": len(workload) - len(good),
        "sent_per_s": round(len(results) / last_s, 2), "tokens_per_s": round(len(good) * tokens / took_s, 1),
        "generator_cpu": round(spent_s / took_s, 3), "cores_of_the_generator": 1, "stub_on_its_own_core": bool(others),
        "send_error_ms": distribution(errors), "arrival_error_ms": distribution(arrived),
    }  # fmt: skip


def beside_the_server(conversations: int, turns: int) -> dict[str, Any]:
    """TTFT of the client, from sending on, and of the server, one request at a time."""
    with serve("load-rate", {}) as server:
        target = Target(server.url, server.model["id"], {}, {"temperature": 0, "ignore_eos": True})
        workload = [Conversation(f"c{n}", "", 0.0, (Turn(40, 16, 0.0),) * turns) for n in range(conversations)]
        results = asyncio.run(
            run_workload(target, workload, seed=1, timeout_s=60, loop="sequential", concurrency=conversations)
        )  # fmt: skip
    good = [r for r in results if r.error is None]
    mine = [(r.token_s[0] - r.sent_s) * 1e3 for r in good]
    theirs = [r.extra["timings"]["ttft_ms"] for r in good]
    return {
        "requests": len(results), "failed": len(results) - len(good), "client_ttft_ms": distribution(mine),
        "server_ttft_ms": distribution(theirs),
        "difference_ms": distribution(a - b for a, b in zip(mine, theirs, strict=True)),
    }  # fmt: skip


def verdicts(rate: dict[str, Any], server: dict[str, Any]) -> dict[str, bool]:
    """Return each line that is held to, and whether it holds."""

    def within(value: float | None, most: float) -> bool:
        return value is not None and abs(value) < most

    apart = (server["client_ttft_ms"]["p50"] or 1e9) - (server["server_ttft_ms"]["p50"] or 0.0)
    return {
        f"send-time error p99 below {MAX_ERROR_MS:g} ms": within(rate["send_error_ms"]["p99"], MAX_ERROR_MS),
        f"by the stub's clock, p99 below {MAX_ERROR_MS:g} ms": within(rate["arrival_error_ms"]["p99"], MAX_ERROR_MS),
        "every request is answered": not rate["failed"] and not server["failed"],
        f"TTFT p50 within {MAX_DIFFERENCE_MS:g} ms of the server's": within(apart, MAX_DIFFERENCE_MS),
    }


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    rate = offered(200.0, arguments.seconds, 16, 20.0, 1, run.console)
    server = beside_the_server(arguments.conversations, 4)
    return {"held": verdicts(rate, server), "rate": rate, "server": server}


def show(console: Console, result: dict[str, Any]) -> None:
    console.print_json(data={"rate": result["rate"], "server": result["server"]})


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--conversations", type=int, default=20, help="to the real server, of 4 turns")


EXPERIMENT = Experiment(
    name="load_rate", about=__doc__, measure=measure, show=show, options=options,
    quick=Quick(
        options={"seconds": 8.0, "conversations": 4},
        figures=[Figure("generator's share of a core", lambda result: result["rate"]["generator_cpu"], 1.4)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
