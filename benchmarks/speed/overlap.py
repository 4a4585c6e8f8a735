"""How much of loading and saving KV hides behind computation (AttentionStore §4.3.2, Fig. 19 and 20).

    python -m benchmarks.speed.overlap

**Loading.** Jobs of a random 125 M-shape model, bf16, follow each other without a gap: each continues a conversation of
about 1,250 tokens that is on disk, with 100 or 20 new tokens and 20 decode steps, while the next one waits in line. The
disk is throttled to 0.15 and 0.4 GB/s. Compared are read buffers of 0, 2, 5 and all layers: so much of the next job's
KV may come while the present one runs. There is no DRAM tier, so nothing but the read buffer looks ahead. Share hidden:
1 - seconds that steps waited for layers / seconds that loading took.

**Saving.** Jobs with fresh prompts of 1,000 to 1,600 tokens and 20 decode steps, saved while later steps run, or before
the next step begins, or not at all. In float32: there a thread saves, while in bfloat16 on a CPU the kernels that
compute rows save them, and the first two ways are one. On this machine the link to DRAM is memory itself, far faster in
proportion than the paper's; so beside it stands a link throttled so far that saving costs about as much of a job as in
the paper.

Arms take turns, round by round. The engine runs in this process. Expected: at least 90 % hidden with 5 layers at
0.4 GB/s; a thread saved wherever something was saved, without which the comparison would be void.
"""

import random
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.in_process import InProcess, Turn, as_engine_process, config, kv_bytes_per_token, vocabulary_of

NEW_TOKENS = (100, 20)
DECODE_STEPS = 20
DISK_GBPS = (0.15, 0.4)
BUFFERS = (0, 2, 5, -1)  # layers; -1: all
MIN_HIDDEN = 0.9
TARGET_ARM = (0.4, 100, 5)  # GB/s, new tokens, layers
HISTORIES = (1000, 1500)
PROMPTS = (1000, 1600)
WAYS = ("asynchronous", "synchronous", "not saved")
STAGING_MIB = 10  # for what a job computes; too little to fetch a conversation into
BLOCK = 32
GIB = 1 << 30


def random_tokens(rng: random.Random, vocabulary: int, count: int) -> list[int]:
    return [rng.randrange(4, vocabulary) for _ in range(count)]


class Loading:
    """Conversations on disk, and arms that continue them."""

    def __init__(self, model: str, jobs: int, directory: Path) -> None:
        rng = random.Random(0)
        self._model, self._vocabulary = model, vocabulary_of(model)
        self._rounds = 0
        self._longest = HISTORIES[1] + max(NEW_TOKENS) + DECODE_STEPS + 2 * BLOCK
        self._settings: dict[str, str | int | float] = {
            "model.max_context": self._longest,
            "cache.hbm_tokens": 3 * self._longest,
            "cache.disk_gib": 2,
            "cache.disk_dir": str(directory),
        }
        low, high = HISTORIES
        lengths = [low + (high - low) * job // max(1, jobs - 1) for job in range(jobs)]
        self._histories = [random_tokens(rng, self._vocabulary, length) for length in lengths]
        engine = InProcess(config(model, self._settings))
        for job, history in enumerate(self._histories):
            engine.submit(f"history {job}", history, 1)
            engine.run()
            engine.settle()
        engine.close()

    def run(self, gbps: float, new_tokens: int, buffer: int) -> dict[str, float]:
        """One arm, on an engine of its own that has nothing in HBM."""
        self._rounds += 1
        engine = InProcess(
            config(
                self._model,
                {
                    **self._settings,
                    "experiment.staging_mib": STAGING_MIB,
                    "experiment.disk_gbps": gbps,
                    "experiment.read_buffer_layers": buffer,
                },
            )
        )
        rng = random.Random(self._rounds)
        try:
            # In front of the first job stands one without a history, so that each has somebody to hide behind.
            engine.submit("first", random_tokens(rng, self._vocabulary, new_tokens), DECODE_STEPS)
            jobs = [
                engine.submit(f"job {job}", [*history, *random_tokens(rng, self._vocabulary, new_tokens)], DECODE_STEPS)
                for job, history in enumerate(self._histories)
            ]
            engine.run()
            engine.settle()
            stats = engine.stats()
        finally:
            engine.close()
        return {
            "hidden": 1 - stats.load_wait_seconds / stats.load_seconds if stats.load_seconds else 0.0,
            "load_ms": stats.load_seconds * 1e3 / len(jobs),
            "wait_ms": stats.load_wait_seconds * 1e3 / len(jobs),
            "prefill_ms": median(_prefill_ms(job) for job in jobs),
            "loaded_gbps": stats.moved_bytes.get("disk_to_hbm", 0) / 1e9 / max(1e-9, stats.load_seconds),
            "reused": sum(job.cached for job in jobs) / sum(map(len, self._histories)),
        }


def _prefill_ms(job: Turn) -> float:
    """From its first step to its first token, loads included."""
    assert job.timings is not None
    return job.timings.load_ms + job.timings.prefill_ms


class Saving:
    """Arms that differ in when KV leaves HBM."""

    def __init__(self, model: str, jobs: int) -> None:
        self._model, self._jobs, self._vocabulary = model, jobs, vocabulary_of(model)
        self._seed = 0

    def run(self, way: str, prompt_tokens: int, gbps: float) -> dict[str, float]:
        """Seconds per job, and what of them a thread spent saving."""
        self._seed += 1
        longest = max(PROMPTS) + DECODE_STEPS + 2 * BLOCK
        everything = 4 * (self._jobs + 1) * longest * kv_bytes_per_token(self._model)  # float32, and room to spare
        engine = InProcess(
            config(
                self._model,
                {
                    "model.dtype": "float32",
                    "model.max_context": longest,
                    "cache.hbm_tokens": 4 * longest,
                    "experiment.sync_save": way == "synchronous",
                    "cache.dram_gib": 0 if way == "not saved" else everything / GIB,
                    "experiment.dram_gbps": gbps,
                },
            )
        )
        rng = random.Random(self._seed)
        try:
            prompts = [random_tokens(rng, self._vocabulary, prompt_tokens) for _ in range(self._jobs + 1)]
            turns = [engine.submit(f"{n}", prompt, DECODE_STEPS) for n, prompt in enumerate(prompts)]
            engine.run()
            engine.settle()
            stats = engine.stats()
        finally:
            engine.close()
        ends = [turn.done_s for turn in turns if turn.done_s is not None]
        return {
            "job_ms": (ends[-1] - ends[0]) * 1e3 / self._jobs,  # the first one pays for what an engine sets up
            "saving_ms": stats.moved_seconds.get("hbm_to_dram", 0.0) * 1e3 / len(turns),
        }


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """name -> median, least and most over rounds."""
    return {
        name: {
            "median": round(median(r[name] for r in rounds), 4),
            "min": round(min(r[name] for r in rounds), 4),
            "max": round(max(r[name] for r in rounds), 4),
        }
        for name in rounds[0]
    }


def saving_gains(saves: Mapping[tuple[int, float, str], Sequence[dict[str, float]]]) -> list[dict[str, Any]]:
    """For each prompt length and link: what asynchronous saving takes off a job, round by round, and the share of
    saving that it hides; None where saving costs less than runs differ by."""
    gains = []
    for tokens, gbps in sorted({(tokens, gbps) for tokens, gbps, _ in saves}):
        sync, done, never = ([r["job_ms"] for r in saves[tokens, gbps, way]] for way in
                             ("synchronous", "asynchronous", "not saved"))  # fmt: skip
        shorter = [1 - a / s for s, a in zip(sync, done, strict=True)]
        costs = [s - n for s, n in zip(sync, never, strict=True)]
        hidden = median(s - a for s, a in zip(sync, done, strict=True)) / median(costs) if min(costs) > 0 else None
        gains.append(
            {
                "prompt_tokens": tokens, "dram_gbps": gbps,
                "shorter_by": {"median": round(median(shorter), 4), "min": round(min(shorter), 4),
                               "max": round(max(shorter), 4)},
                "hidden": round(hidden, 4) if hidden is not None and 0 <= hidden <= 1 else None,
            }
        )  # fmt: skip
    return gains


def verdicts(loading: Sequence[dict[str, Any]], saving: Sequence[dict[str, Any]]) -> dict[str, bool]:
    gbps, _, layers = TARGET_ARM
    held = {
        f"at least {MIN_HIDDEN:.0%} of load time hidden with {layers} layers at {gbps} GB/s": arm["hidden"]["median"]
        >= MIN_HIDDEN
        for arm in loading
        if (arm["disk_gbps"], arm["new_tokens"], arm["read_buffer_layers"]) == TARGET_ARM
    }
    if saving:
        held["a thread saved wherever something was saved"] = all(
            arm["saving_ms"]["min"] > 0 for arm in saving if arm["way"] != "not saved"
        )
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="Loading from a throttled disk, back-to-back jobs", title_justify="left")
    for heading in ("GB/s", "new tokens", "read buffer", "hidden", "least to most", "load ms/job",
                    "waited ms/job", "prefill ms",
                    "history reused"):  # fmt: skip
        table.add_column(heading, justify="right")
    for arm in result["loading"]:
        hidden, buffer = arm["hidden"], arm["read_buffer_layers"]
        table.add_row(
            f"{arm['disk_gbps']}", str(arm["new_tokens"]), "all" if buffer < 0 else f"{buffer} layers",
            f"{hidden['median']:.1%}",
            f"{hidden['min']:.1%} to {hidden['max']:.1%}", f"{arm['load_ms']['median']:.1f}",
            f"{arm['wait_ms']['median']:.1f}", f"{arm['prefill_ms']['median']:.1f}", f"{arm['reused']['median']:.1%}",
        )  # fmt: skip
    console.print(table)
    table = Table(title=f"Saving: ms per job, {DECODE_STEPS} decode steps", title_justify="left")
    for heading in ("prompt", "link", *WAYS, "saving takes", "shorter by", "saving hidden"):
        table.add_column(heading, justify="right")
    for gain in result["saving_gains"]:
        key = (gain["prompt_tokens"], gain["dram_gbps"])
        arms = {a["way"]: a for a in result["saving"] if (a["prompt_tokens"], a["dram_gbps"]) == key}
        table.add_row(
            str(key[0]), f"{key[1]} GB/s" if key[1] else "memory",
            *(f"{arms[way]['job_ms']['median']:.0f}" for way in WAYS),
            f"{arms['synchronous']['saving_ms']['median']:.1f}",
            "{median:.1%} ({min:.1%} to {max:.1%})".format(**gain["shorter_by"]),
            "below the noise" if gain["hidden"] is None else f"{gain['hidden']:.0%}",
        )  # fmt: skip
    console.print(table)


def measure(run: Run) -> dict[str, Any]:
    arguments, model = run.arguments, str(run.random_model())
    loads: dict[tuple[float, int, int], list[dict[str, float]]] = {
        (g, n, b): [] for g in DISK_GBPS for n in NEW_TOKENS for b in arguments.buffers
    }
    saves: dict[tuple[int, float, str], list[dict[str, float]]] = {
        (p, g, w): [] for p in arguments.prompts for g in (0.0, arguments.slow_link) for w in WAYS
    }
    loading = Loading(model, arguments.jobs, run.directory / "state") if arguments.rounds else None
    for _, order in run.rounds(list(loads), arguments.rounds, "loading, round"):
        for arm in order:
            assert loading is not None
            loads[arm].append(loading.run(*arm))
    saving = Saving(model, arguments.saving_jobs)
    for _, order_of_saves in run.rounds(list(saves), arguments.saving_rounds, "saving, round"):
        for prompt_tokens, gbps, way in order_of_saves:
            saves[prompt_tokens, gbps, way].append(saving.run(way, prompt_tokens, gbps))
    loaded = [
        {"disk_gbps": gbps, "new_tokens": new_tokens, "read_buffer_layers": buffer, **medians(rounds)}
        for (gbps, new_tokens, buffer), rounds in loads.items()
        if rounds
    ]
    saved = [
        {"prompt_tokens": prompt, "dram_gbps": gbps, "way": way, **medians(rounds)}
        for (prompt, gbps, way), rounds in saves.items()
        if rounds
    ]
    return {
        "settings": {
            "rounds": arguments.rounds, "jobs": arguments.jobs, "history_tokens": HISTORIES, "new_tokens": NEW_TOKENS,
            "decode_steps": DECODE_STEPS, "saving_rounds": arguments.saving_rounds,
            "saving_jobs": arguments.saving_jobs, "slow_link_gbps": arguments.slow_link,
        },
        "held": verdicts(loaded, saved), "loading": loaded, "saving": saved,
        "saving_gains": saving_gains(saves) if saved else [],
    }  # fmt: skip


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=10, help="back to back, per arm and round")
    parser.add_argument(
        "--buffers", type=int, nargs="+", choices=BUFFERS, default=list(BUFFERS), help="layers; -1: all"
    )
    parser.add_argument("--saving-rounds", type=int, default=5)
    parser.add_argument("--saving-jobs", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS), help="prompt lengths to save")
    parser.add_argument("--slow-link", type=float, default=0.1, help="GB/s of the link that stands in for the paper's")


def hidden_in_target_arm(result: Result) -> float | None:
    """The share of load time that is hidden in the arm that is held."""
    keys = ("disk_gbps", "new_tokens", "read_buffer_layers")
    found = [arm["hidden"]["median"] for arm in result["loading"] if tuple(arm[key] for key in keys) == TARGET_ARM]
    return found[0] if found else None


EXPERIMENT = Experiment(
    name="overlap", about=__doc__, measure=measure, show=show, options=options, rounds=2, takes_model=True,
    quick=Quick(
        options={"rounds": 1, "jobs": 4, "buffers": [5], "saving_rounds": 0},
        figures=[Figure("load time hidden", hidden_in_target_arm, 1.1, more_is_better=True)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
