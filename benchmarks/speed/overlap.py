"""Measures how much of loading KV is hidden by computation (AttentionStore §4.3.2, Fig. 19).

    python -m benchmarks.speed.overlap

Jobs of a random 125 M-shape model, bf16, follow each other without a gap: each continues a conversation of
about 1,250 tokens that is on disk, with 100 or 20 new tokens and 20 decode steps, while the next one waits in line. The
disk is throttled to 0.15 and 0.4 GB/s. Compared are read buffers of 0, 2, 5 and all layers: so much of the next job's
KV may come while the present one runs. There is no DRAM tier, so nothing but the read buffer looks ahead. Share hidden:
1 - seconds that steps waited for layers / seconds that loading took.

Arms take turns, round by round. The engine runs in this process. Expected: at least 90 % hidden with 5 layers at
0.4 GB/s.
"""

import random
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.in_process import InProcess, Turn, as_engine_process, config, random_tokens
from benchmarks.harness.measures import spread
from benchmarks.harness.tables import show_rows
from reprise.engine.messages import Stats

NEW_TOKENS = (100, 20)
DECODE_STEPS = 20
DISK_GBPS = (0.15, 0.4)
BUFFERS = (0, 2, 5, -1)  # layers; -1: all
MIN_HIDDEN = 0.9
TARGET_ARM = (0.4, 100, 5)  # GB/s, new tokens, layers
HISTORIES = (1000, 1500)
STAGING_MIB = 10  # for what a job computes; too little to fetch a conversation into
BLOCK = 32
Settings = dict[str, str | int | float]


def play(model: str, settings: Settings, prompts: Sequence[list[int]]) -> tuple[list[Turn], Stats]:
    """Have jobs done back to back, on an engine of their own."""
    with InProcess(config(model, settings)) as engine:
        turns = [engine.submit(f"job {number}", prompt, DECODE_STEPS) for number, prompt in enumerate(prompts)]
        engine.run()
        engine.settle()
        return turns, engine.stats()


class Loading:
    """Conversations on disk, and arms that continue them."""

    def __init__(self, model: str, jobs: int, directory: Path) -> None:
        self._rng, self._model = random.Random(0), model
        longest = HISTORIES[1] + max(NEW_TOKENS) + DECODE_STEPS + 2 * BLOCK
        self._settings: Settings = {
            "model.max_context": longest, "cache.hbm_tokens": 3 * longest, "cache.disk_gib": 2,
            "cache.disk_dir": str(directory),
        }  # fmt: skip
        low, high = HISTORIES
        lengths = [low + (high - low) * job // max(1, jobs - 1) for job in range(jobs)]
        self._histories = [random_tokens(self._rng, model, length) for length in lengths]
        with InProcess(config(model, self._settings)) as engine:
            for job, history in enumerate(self._histories):
                engine.ask(f"history {job}", history, 1)

    def run(self, gbps: float, new_tokens: int, buffer: int) -> dict[str, float]:
        """Play one arm, with nothing in HBM. The first job has no history, so that each load has a job before it
        that can hide it."""
        settings = {"experiment.disk_gbps": gbps, "experiment.read_buffer_layers": buffer}
        prompts = [[*ids, *random_tokens(self._rng, self._model, new_tokens)] for ids in ([], *self._histories)]
        (_, *jobs), stats = play(
            self._model, {**self._settings, "experiment.staging_mib": STAGING_MIB, **settings}, prompts
        )
        return {
            "hidden": 1 - stats.load_wait_seconds / stats.load_seconds if stats.load_seconds else 0.0,
            "load_ms": stats.load_seconds * 1e3 / len(jobs), "wait_ms": stats.load_wait_seconds * 1e3 / len(jobs),
            "prefill_ms": median(job.prefill_ms for job in jobs),
            "loaded_gbps": stats.moved_bytes.get("disk_to_hbm", 0) / 1e9 / max(1e-9, stats.load_seconds),
            "reused": sum(job.cached for job in jobs) / sum(map(len, self._histories)),
        }  # fmt: skip


def verdicts(loading: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Judge what was measured."""
    gbps, _, layers = TARGET_ARM
    what = f"at least {MIN_HIDDEN:.0%} of load time hidden with {layers} layers at {gbps} GB/s"
    return {} if (hidden := hidden_in_target_arm({"loading": loading})) is None else {what: hidden >= MIN_HIDDEN}


def hidden_in_target_arm(result: Result) -> float | None:
    """Return the share of load time that is hidden in the arm that is held; None if it was not measured."""
    keys = ("disk_gbps", "new_tokens", "read_buffer_layers")
    found = [arm["hidden"]["median"] for arm in result["loading"] if tuple(arm[key] for key in keys) == TARGET_ARM]
    return found[0] if found else None


def show(console: Console, result: dict[str, Any]) -> None:
    show_rows(console, "loading", result["loading"])


def measure(run: Run) -> dict[str, Any]:
    arguments, model = run.arguments, str(run.random_model())
    loads: dict[tuple[float, int, int], list[dict[str, float]]] = {
        (g, n, b): [] for g in DISK_GBPS for n in NEW_TOKENS for b in arguments.buffers
    }
    loading = Loading(model, arguments.jobs, run.directory / "state")
    for _, order in run.rounds(list(loads), arguments.rounds):
        for arm in order:
            loads[arm].append(loading.run(*arm))
    loaded = [
        {"disk_gbps": gbps, "new_tokens": new_tokens, "read_buffer_layers": buffer} | spreads(rounds)
        for (gbps, new_tokens, buffer), rounds in loads.items()
    ]
    return {
        "settings": {
            "rounds": arguments.rounds, "jobs": arguments.jobs, "history_tokens": HISTORIES, "new_tokens": NEW_TOKENS,
            "decode_steps": DECODE_STEPS,
        },
        "held": verdicts(loaded), "loading": loaded,
    }  # fmt: skip


def spreads(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return name -> median, least and most over rounds."""
    return {name: spread([row[name] for row in rounds]) for name in rounds[0]}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=10, help="back to back, per arm and round")
    parser.add_argument("--buffers", type=int, nargs="+", choices=BUFFERS, default=list(BUFFERS), help="-1: all layers")


EXPERIMENT = Experiment(
    name="overlap", about=__doc__, measure=measure, show=show, options=options, rounds=2, takes_model=True,
    quick=Quick(
        options={"rounds": 1, "jobs": 4, "buffers": [5]},
        figures=[Figure("load time hidden", hidden_in_target_arm, 1.1, more_is_better=True)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
