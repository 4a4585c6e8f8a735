"""Prefill and decode speed of the engine beside vanilla transformers `generate`: same weights, same machine, one run.

    python -m benchmarks.speed.raw_speed [--rounds 5] [--context 1124]

Four processes hold the 125 M-shape random model in bf16: the engine as `reprise serve` starts it (its environment
included, its cache off, and without drafts, with which a step takes longer and makes more tokens), the same with
`model.exact` on (left out where that is refused), transformers as a user would start it, and transformers with the
engine's allocator settings, to tell what those alone are worth. They take turns, one works while the others wait. A
round measures, for 1, 4 and 16 streams of `--context` prompt tokens, the time until every stream has one new token
(prefill), and the mean of 32 decode steps of all streams together (TPOT). transformers' times are stamped inside one
`generate` of 33 tokens.
Medians over rounds, the spread beside them. The rate at which both cores read memory is measured too: the weights have
to be read once a decode step, so they bound TPOT from below.
"""

import json
import os
import random
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run, turned
from benchmarks.harness.measures import spread
from benchmarks.harness.result_files import ROOT
from benchmarks.harness.tables import show_rows
from reprise.app.settings.sources import load_settings
from reprise.engine.config import EngineConfig
from reprise.engine.messages import Submit
from reprise.engine.process.child import MALLOC, engine_environment

STREAMS = (1, 4, 16)
NEW_TOKENS = 33
EXACT = "reprise exact"
WORKER = "--worker"  # the first word of an arm's process
ARMS = ("reprise", EXACT, "transformers", "transformers+malloc")
Case = tuple[int, int]
"""Streams, tokens of context."""
Measure = Callable[[list[list[int]]], tuple[float, float]]
"""Prompts -> (seconds to all first tokens, seconds of a decode step)."""


def engine_config(model: str, **flags: str) -> EngineConfig:
    """Return the configuration of an engine without a cache. flags: settings of the section `model`, such as
    `exact`."""
    shared = {
        "model.source": model, "model.dtype": "bfloat16", "engine.device": "cpu", "cache.mode": "recompute",
        "scheduler.policy": "fcfs", "scheduler.max_seqs": str(max(STREAMS)), "scheduler.itl_target_ms": "0",
        "scheduler.draft_tokens": "0",
    }  # fmt: skip
    own = {f"model.{name}": value for name, value in flags.items()}
    return load_settings(flags=shared | own, environ={}, config=None).engine_config(bytes(32))


def engine_measure(engine: Any) -> Measure:
    """Return a function that measures prefill and decode steps on an engine that runs nothing else."""
    from benchmarks.harness.in_process import greedy

    def submit(prompts: list[list[int]], new_tokens: int) -> None:
        for index, prompt in enumerate(prompts):
            engine.accept(
                Submit(
                    request_id=str(index), session_id=str(index), tenant="", cache_salt="", token_ids=prompt,
                    num_choices=1, sampling=greedy(new_tokens),
                ),
                time.monotonic(),
            )  # fmt: skip

    def measure(prompts: list[list[int]]) -> tuple[float, float]:
        started = time.perf_counter()
        submit(prompts, 1)
        while engine.has_work():
            engine.step(time.monotonic())
        first_s = time.perf_counter() - started
        # Streams that were prefilled first must still run when the last one starts to decode.
        submit(prompts, 8 * NEW_TOKENS)
        steps: list[float] = []
        while len(steps) < NEW_TOKENS:
            before = time.perf_counter()
            if len(engine.step(time.monotonic())) == len(prompts):
                steps.append(time.perf_counter() - before)
        for index in range(len(prompts)):
            engine.abort(str(index))
        return first_s, sum(steps[1:]) / (NEW_TOKENS - 1)

    return measure


def transformers_arm(model: str) -> Measure:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation import StoppingCriteriaList

    vanilla = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def measure(prompts: list[list[int]]) -> tuple[float, float]:
        ids = torch.tensor(prompts)
        stamps: list[float] = []

        def stamp(token_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """A stopping criterion that never stops: called once a token."""
            stamps.append(time.perf_counter())
            return torch.zeros(len(token_ids), dtype=torch.bool)

        started = time.perf_counter()
        with torch.inference_mode():
            vanilla.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                do_sample=False, pad_token_id=0, stopping_criteria=StoppingCriteriaList([stamp]),
            )  # fmt: skip
        return stamps[0] - started, (stamps[-1] - stamps[0]) / (NEW_TOKENS - 1)

    return measure


def open_arm(arm: str, model: str) -> tuple[Measure, str]:
    """Open an arm in its worker process. Returns (function that measures prompts, "ready")."""
    if not arm.startswith("reprise"):
        return transformers_arm(model), "ready"
    # Here and not above: the process of vanilla transformers does not load our engine.
    from reprise.engine.build.engine import build_engine

    return engine_measure(build_engine(engine_config(model, exact="on" if arm == EXACT else "off"))), "ready"


def work(opened: Callable[[], tuple[Measure, str]]) -> None:
    """Run a worker. First write the line that `opened` returns. Then answer each line on stdin, which has prompts, with
    a line of measured seconds."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    measure, says = opened()
    answers.write(f"{says}\n")
    for line in sys.stdin:
        answers.write(json.dumps(measure(json.loads(line))) + "\n")


class Worker:
    """A worker process for one arm. It gets lines of prompts and answers each with a line of seconds. Raises
    RuntimeError if it does not start."""

    def __init__(self, arm: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.says = self._read()  # about itself, once it is ready
        if not self.says:
            raise RuntimeError(f"{arm} did not start")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def measure(self, prompts: list[list[int]]) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        first_s, step_s = json.loads(self._read())
        return first_s, step_s

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


Samples = dict[str, dict[Case, list[tuple[float, float]]]]
"""Arm -> case -> (seconds to all first tokens, seconds of a decode step), a round each."""


def sample(run: Run, workers: Mapping[str, Worker], cases: Sequence[Case], model: Path) -> tuple[Samples, list[float]]:
    """Measure all cases on the workers in turn, then close the workers. Returns (what they measured, GB/s of memory
    reads in each round). The workers' times in the first round only warm up."""
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rng, arms, rates = random.Random(0), tuple(workers), list[float]()
    samples: Samples = {arm: {case: [] for case in cases} for arm in arms}
    try:
        for round_ in run.track(range(-1, run.arguments.rounds), "rounds"):
            for streams, context in cases:
                prompts = [[rng.randrange(vocabulary) for _ in range(context)] for _ in range(streams)]
                for arm in turned(arms, round_):
                    found = workers[arm].measure(prompts)
                    if round_ >= 0:
                        samples[arm][streams, context].append(found)
            rates.append(read_rate())
    finally:
        for worker in workers.values():
            worker.close()
    return samples, rates


def measure(run: Run) -> dict[str, Any]:
    context, model = run.arguments.context, run.random_model()
    workers = start(run.arguments.arms, str(model))
    samples, rates = sample(run, workers, [(streams, context) for streams in run.arguments.streams], model)
    figures: dict[str, dict[str, list[float]]] = {arm: {} for arm in workers}
    for arm, by_case in samples.items():
        for (streams, _), found in by_case.items():
            figures[arm][f"prefill_tok_s@{streams}"] = [streams * context / first_s for first_s, _ in found]
            figures[arm][f"tpot_ms@{streams}"] = [step_s * 1e3 for _, step_s in found]
    return {
        "context": context,
        "memory_read_gb_s": median(rates),
        "arms": {arm: {name: spread(v, 2) for name, v in values.items()} for arm, values in figures.items()},
        "ratios": {
            against: {
                name: round(median(figures["reprise"][name]) / median(figures[against][name]), 3)
                for name in figures["reprise"]
            }
            for against in workers
            if against != "reprise" and "reprise" in workers
        },
    }


def _start_one(arm: str, model: str) -> Worker:
    base = {k: v for k, v in os.environ.items() if k not in MALLOC}
    environments = {
        "reprise": engine_environment(engine_config(model), base),
        EXACT: engine_environment(engine_config(model), base),
        "transformers": base,
        "transformers+malloc": {**base, **MALLOC},
    }
    words = [sys.executable, "-m", "benchmarks.speed.raw_speed", WORKER, arm, model]
    return Worker(arm, words, environments[arm])


def start(arms: Sequence[str], model: str) -> dict[str, Worker]:
    """Start a worker for each arm. The arm EXACT is left out if it does not start here."""
    workers = {}
    for arm in arms:
        try:
            workers[arm] = _start_one(arm, model)
        except RuntimeError:
            if arm != EXACT:
                raise
    return workers


def read_rate() -> float:
    """Return the GB/s at which all cores together read 800 MB, the best of a few tries. No decode step can read
    faster."""
    import torch

    data = torch.ones(100_000_000, dtype=torch.int64)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - started)
    return round(data.nbytes / best / 1e9, 1)


def show(console: Console, result: dict[str, Any]) -> None:
    for arm, values in result["arms"].items():
        show_rows(console, f"{arm}, bf16", values)
    show_rows(console, "reprise in units of the others", result["ratios"])
    console.print(f"memory read by all cores: {result['memory_read_gb_s']} GB/s")


def over_transformers(name: str) -> Callable[[Result], float | None]:
    return lambda result: result["ratios"]["transformers"][name]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--context", type=int, default=1124, help="prompt tokens of every stream")
    parser.add_argument("--streams", type=int, nargs="+", choices=STREAMS, default=list(STREAMS))


EXPERIMENT = Experiment(
    name="raw_speed", about=__doc__, measure=measure, show=show, options=options, rounds=5, arms=ARMS, takes_model=True,
    quick=Quick(
        options={"rounds": 1, "streams": [1, 4], "arms": ["reprise", "transformers"]},
        figures=[
            Figure("prefill of 4, x transformers", over_transformers("prefill_tok_s@4"), 1.3, more_is_better=True),
            Figure("TPOT of 1, x transformers", over_transformers("tpot_ms@1"), 1.3),
            Figure("TPOT of 4, x transformers", over_transformers("tpot_ms@4"), 1.3),
        ],
    ),
)  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(partial(open_arm, *sys.argv[2:]))
    else:
        raise SystemExit(EXPERIMENT.main())
