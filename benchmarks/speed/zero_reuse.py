"""What a cache costs that nobody profits from: engine CPU time per token, `attentionstore` against `recompute`.

    python -m benchmarks.speed.zero_reuse [--starts 4] [--rounds 50] [--codec transform]

Every prompt is new, from its first token on: random words, 300 to 900 tokens, and an answer of 32 to 64. Nothing is
ever found in a cache, but everything is saved to DRAM and written to disk. For the bundled model and for the random
125 M shape, two servers differ in `cache.mode` alone. They take turns round by round, only one works at a time, and
all get the same prompts in a round. Small HBM, so that blocks leave it all the time. A third server, `no-disk`, saves
to DRAM only: what it costs less is what writing files costs; it takes part in every fourth round. What they save to is
in memory when the rounds begin. With `--codec` those that save do so through a codec, which is calibrated at their
start; what it costs to code for the disk counts like all else.

CPU seconds are user and system time of the engine process, all of its threads, to the nanosecond; they are read when
the server has written all it wants to. A round's cost is divided by the tokens that went through the model. Held: the
median over the rounds of attentionstore / recompute is at most 1.03. A round is one request, so that both of a pair
meet the same machine; there are many, and the servers take turns in being first. The interval says how sure the median
is. Where a process happens to lie in memory is worth some per cent, so the servers are started anew several times, and
the medians of the starts are reported as well.
"""

import asyncio
import platform
import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.measures import interval
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import client_of
from benchmarks.speed.hierarchy import WORDS
from reprise.loadgen.percentile import percentile
from reprise.model.directories import BUNDLED

ARMS: dict[str, dict[str, str | int]] = {
    "attentionstore": {"cache.mode": "attentionstore"},
    "recompute": {"cache.mode": "recompute"},
    "no-disk": {"cache.mode": "attentionstore", "cache.disk_gib": 0},
}
STORING, COMPUTING = "attentionstore", "recompute"  # the two that are held against each other
LIMIT = 1.03
SETTLE_S, QUIET_S = 20.0, 0.2
SETTINGS: dict[str, str | int | float] = {"cache.dram_gib": 0.25, "cache.disk_gib": 4}
HBM_TOKENS = 4096
MODELS = ("bundled", "125m")
RARELY = {"no-disk": 4}  # arms that take part in every so manieth round
CALM_S = 15.0  # after a start: until memory is there, in large pages; two servers need 12
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Cost:
    """What one round on one server took."""

    model: str
    arm: str
    start: int  # of the servers
    round: int
    cpu_s: float
    tokens: int  # that went through the model
    cached_tokens: int

    @property
    def ms_per_token(self) -> float:
        return self.cpu_s * 1e3 / self.tokens


@dataclass(frozen=True, slots=True)
class Request:
    """A salt of its own keeps even the template's first tokens from being found."""

    text: str
    salt: str
    max_tokens: int


def request_of(rng: random.Random) -> Request:
    """New from the first token on, and 300 to 900 tokens long: a word is about one."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(280, 800)))
    return Request(text, f"{rng.getrandbits(64):x}", rng.randint(32, 64))


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of all its threads, dead ones too."""
    if platform.system() == "Linux":
        # The clock that clock_getcpuclockid(3) names; /proc counts in hundredths of a second, 2 % of a round.
        return time.clock_gettime((~process.pid << 3) | 2)
    times = process.cpu_times()
    return float(times.user + times.system)


def settle(server: ServerProcess) -> None:
    """Until the engine has had nothing under way for a while. Raises TimeoutError."""
    end = time.monotonic() + SETTLE_S
    quiet_since = None
    while True:
        metrics = server.metrics()
        busy = metrics["reprise_in_flight_transfers"] or metrics["reprise_running_requests"]
        now = time.monotonic()
        quiet_since = None if busy else quiet_since or now
        if quiet_since is not None and now - quiet_since > QUIET_S:
            return
        if now > end:
            raise TimeoutError(f"{server.name!r} does not come to rest")
        time.sleep(0.05)


async def complete(server: ServerProcess, request: Request) -> tuple[int, int]:
    """Returns (tokens that went through the model, tokens found in a cache)."""
    async with client_of(server.url) as client:
        answer = await client.chat.completions.create(
            model=server.model["id"], messages=[{"role": "user", "content": request.text}],
            max_tokens=request.max_tokens, temperature=0,
            extra_body={"ignore_eos": True, "cache_salt": request.salt},
        )  # fmt: skip
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    # The last token is sampled and never goes through the model.
    return usage.prompt_tokens + usage.completion_tokens - 1, usage.prompt_tokens_details.cached_tokens or 0


def arms_of(round_: int) -> list[str]:
    """In the order in which they have their turns: of two, each is before the other equally often."""
    arms = [arm for arm in ARMS if round_ % RARELY.get(arm, 1) == 0]
    return arms[:: 1 if round_ // 4 % 2 == round_ % 2 else -1]


async def one_round(model: str, start: int, round_: int, servers: Mapping[str, ServerProcess]) -> list[Cost]:
    """Serve the same request on all servers that take part."""
    costs = []
    for arm in arms_of(round_):
        server = servers[arm]
        engine = server.engine
        before = cpu_seconds(engine)
        tokens, cached = await complete(server, request_of(random.Random(f"{model}/{start}/{round_}")))
        settle(server)
        costs.append(Cost(model, arm, start, round_, round(cpu_seconds(engine) - before, 4), tokens, cached))
    return costs


def resampled_median(values: Sequence[float], rng: random.Random) -> float:
    return median(rng.choices(values, k=len(values)))


def summarize(costs: list[Cost]) -> list[dict[str, Any]]:
    """Per model. The first round of each start warms up and does not count."""
    rows = []
    for model in dict.fromkeys(cost.model for cost in costs):
        counted = {((c.start, c.round), c.arm): c for c in costs if c.model == model and c.round > 0}
        rounds = sorted({round_ for round_, _ in counted})
        starts = sorted({start for start, _ in rounds})
        arms = [arm for arm in ARMS if any(arm == other for _, other in counted)]
        per_token = {arm: {r: counted[r, arm].ms_per_token for r in rounds if (r, arm) in counted} for arm in arms}
        if not rounds:
            continue
        ratios = [cost / per_token[COMPUTING][r] for r, cost in per_token[STORING].items()]
        row: dict[str, Any] = {"model": model, "rounds": len(rounds), "ratio_p50": round(median(ratios), 4)}
        by_start = [[ratio for (of, _), ratio in zip(rounds, ratios, strict=True) if of == start] for start in starts]
        row["ratio_p50_by_start"] = [round(median(of_start), 4) for of_start in by_start]
        low, high = interval(partial(resampled_median, ratios), RESAMPLES)
        row |= {"ratio_p25": round(percentile(ratios, 0.25), 4), "ratio_p75": round(percentile(ratios, 0.75), 4)}
        row |= {"ratio_p50_low": round(low, 4), "ratio_p50_high": round(high, 4)}
        for arm in arms:
            row[f"{arm}_cpu_ms_per_token_p50"] = round(median(per_token[arm].values()), 4)
            row[f"{arm}_cached_tokens"] = sum(counted[r, arm].cached_tokens for r in per_token[arm])
        for arm in set(arms) - {STORING, COMPUTING}:
            others = [cost / per_token[COMPUTING][r] for r, cost in per_token[arm].items()]
            row[f"{arm}_ratio_p50"] = round(median(others), 4)
        row["tokens_per_round_p50"] = median(counted[r, STORING].tokens for r in rounds)
        rows.append(row)
    return rows


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """What is held -> whether it holds."""
    held = {f"{row['model']}: at most {LIMIT} x the CPU time": row["ratio_p50"] <= LIMIT for row in rows}
    held["nothing was reused"] = not any(row.get(f"{arm}_cached_tokens") for row in rows for arm in ARMS)
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="Engine CPU time per token without any reuse, ms, p50", title_justify="left")
    for heading in ("model", "rounds", *ARMS, "ratio", "95 % interval", "quartiles", "of each start", "without disk"):
        table.add_column(heading, justify="right")
    for row in result["summary"]:
        table.add_row(
            row["model"], str(row["rounds"]), *(f"{row[f'{arm}_cpu_ms_per_token_p50']:.3f}" for arm in ARMS),
            f"{row['ratio_p50']:.3f}", f"{row['ratio_p50_low']:.3f} - {row['ratio_p50_high']:.3f}",
            f"{row['ratio_p25']:.3f} - {row['ratio_p75']:.3f}",
            " ".join(f"{ratio:.3f}" for ratio in row["ratio_p50_by_start"]), f"{row['no-disk_ratio_p50']:.3f}",
        )  # fmt: skip
    console.print(table)


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    costs: list[Cost] = []

    def result() -> dict[str, Any]:
        rows = summarize(costs)
        return {
            "settings": SETTINGS, "codec": arguments.codec, "hbm_tokens": HBM_TOKENS, "rarely": RARELY,
            "held": verdicts(rows), "summary": rows,
            "rounds": [asdict(cost) for cost in costs],
        }  # fmt: skip

    for model in [arguments.only] if arguments.only else MODELS:
        source = BUNDLED if model == "bundled" else run.random_model()
        own = {**SETTINGS, "model.source": str(source), "cache.hbm_tokens": HBM_TOKENS, "cache.codec": arguments.codec}
        for start in range(arguments.starts):
            with ExitStack() as running:
                servers = {
                    arm: running.enter_context(serve(f"{model}-{arm}", {**own, **differs}))
                    for arm, differs in ARMS.items()
                }
                label = f"rounds of {model}, start {start + 1} of {arguments.starts}"
                time.sleep(CALM_S)
                for round_ in run.track(range(arguments.rounds + 1), label):
                    costs += asyncio.run(one_round(model, start, round_, servers))
        run.keep(result())
    return result()


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", choices=MODELS, help="measure one of the two models")
    parser.add_argument("--starts", type=int, default=4, help="of the servers of a model")
    parser.add_argument("--codec", choices=("raw", "transform"), default="raw", help="of KV below HBM")


def result_name(arguments: Namespace) -> str:
    return "zero_reuse" if arguments.codec == "raw" else f"zero_reuse_{arguments.codec}"


EXPERIMENT = Experiment(
    name=result_name, about=__doc__, measure=measure, show=show, options=options, rounds=50,
    rounds_help="of a start, that count; one more warms up", takes_model=True,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
