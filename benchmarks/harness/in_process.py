"""An engine in this process, driven turn by turn: for measurements that need its clock and its counters, not HTTP."""

import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from benchmarks.harness.experiment import Run
from reprise.app.settings.sources import load_settings
from reprise.engine.build.engine import build_engine
from reprise.engine.config import EngineConfig
from reprise.engine.messages import (
    Output,
    Stats,
    Submit,
    Timings,
    TokensBySource,
)
from reprise.engine.process.child import MALLOC, SPIN, engine_environment
from reprise.engine.step.compute import StepCompute
from reprise.scheduler.sequence import SamplingParams

SETTLE_S = 60.0


class TurnFailed(Exception):
    """The engine refused a turn or did not come to an end."""


def config(model: str, settings: Mapping[str, str | int | float]) -> EngineConfig:
    """An engine for one conversation turn at a time, all tiers but HBM off and no step bound by time, and what
    `settings` ("cache.mode" -> value) say."""
    flags = {
        "model.source": model, "model.dtype": "bfloat16", "engine.device": "cpu", "cache.dram_gib": 0,
        "cache.disk_gib": 0, "cache.disk_min_free_gib": 0, "scheduler.policy": "fcfs", "scheduler.max_seqs": 1,
        "scheduler.itl_target_ms": 0, **settings,
    }  # fmt: skip
    texts = {name: str(value) for name, value in flags.items()}
    return load_settings(flags=texts, environ={}, config=None).engine_config(bytes(32))


def as_engine_process() -> None:
    """Start this program again in the environment that a server's engine process has, unless that was done."""
    environment = engine_environment(config("bundled", {}), os.environ)
    if any(name in environment and name not in os.environ for name in (*MALLOC, *SPIN)):
        os.execve(sys.executable, sys.orig_argv, environment)


def greedy(new_tokens: int) -> SamplingParams:
    """Exactly so many tokens, the most likely ones."""
    return SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        seed=0,
        max_tokens=new_tokens,
        min_tokens=0,
        stop_token_ids=(),
        ignore_eos=True,
        logprobs=None,
    )


@dataclass(slots=True)
class Turn:
    """A request and what came back."""

    prompt: list[int]
    submitted_s: float
    token_ids: list[int] = field(default_factory=list)
    report: TokensBySource | None = None
    timings: Timings | None = None
    first_s: float | None = None  # when the first token was there
    done_s: float | None = None
    times_s: list[float] = field(default_factory=list)  # when each token was there

    @property
    def text(self) -> list[int]:
        """Prompt and answer: what the next turn begins with."""
        return self.prompt + self.token_ids

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        assert self.report is not None
        return self.report.prompt_tokens - self.report.computed_tokens

    @property
    def ttft_ms(self) -> float:
        """The time from its submission to its first token."""
        assert self.first_s is not None
        return (self.first_s - self.submitted_s) * 1e3

    @property
    def prefill_ms(self) -> float:
        """The time from its first step to its first token, loads included."""
        assert self.timings is not None
        return self.timings.load_ms + self.timings.prefill_ms


class InProcess:
    """One engine, and the turns it was asked for. Single-threaded; leave it with `close`, or as a context manager."""

    def __init__(self, engine_config: EngineConfig) -> None:
        self.engine = build_engine(engine_config)
        self._turns: dict[str, Turn] = {}
        self.drawn_tokens = 0  # tokens of all turns

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def compute(self) -> StepCompute:
        """Return what runs the model, for those who measure inside of a step."""
        return self.engine._step._compute

    def share_weights(self, other: "InProcess") -> None:
        """Compute with another engine's, of the same model: what differs between the two is not where those lie."""
        self.compute.runner.model = other.compute.runner.model

    def submit(
        self,
        session: str,
        prompt: Sequence[int],
        new_tokens: int,
        prediction: Sequence[int] = (),
        sampling: SamplingParams | None = None,
    ) -> Turn:
        """Queue a turn. prediction: of its answer; sampling: None: `greedy`. Raises TurnFailed."""
        now = time.monotonic()
        request = f"{session}/{len(self._turns)}"
        turn = self._turns[request] = Turn(list(prompt), now)
        refused = self.engine.accept(
            Submit(
                request_id=request,
                session_id=session,
                tenant="",
                cache_salt="",
                token_ids=turn.prompt,
                num_choices=1,
                sampling=greedy(new_tokens) if sampling is None else sampling,
                prediction=list(prediction),
            ),
            now,
        )
        self._take(refused)
        return turn

    def step(self) -> None:
        """Step once, as the engine's own loop does."""
        now = time.monotonic()
        self.engine.poll(now)
        self._take(self.engine.step(now))

    def run(self) -> None:
        """Step until every turn has its answer. Saves and writes may go on."""
        while self.engine.has_work():
            self.step()

    def ask(self, session: str, prompt: Sequence[int], new_tokens: int) -> Turn:
        """Have one turn answered, and wait until nothing moves between the tiers."""
        turn = self.submit(session, prompt, new_tokens)
        self.run()
        self.settle()
        return turn

    def settle(self) -> None:
        """Wait until nothing moves between the tiers. Raises TurnFailed when that takes longer than a minute."""
        deadline = time.monotonic() + SETTLE_S
        quiet = 0
        while quiet < 3:  # what has ended may have been waited for by something else
            if time.monotonic() > deadline:
                raise TurnFailed("the tiers do not come to rest")
            self.engine.poll(time.monotonic())
            if self.engine.stats().in_flight:
                quiet = 0
                time.sleep(0.002)
            else:
                quiet += 1

    def stats(self) -> Stats:
        return self.engine.stats()

    def close(self) -> None:
        """Close as a server does that ends in order: what was computed reaches the disk."""
        self.engine.close()

    def _take(self, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            if output.error is not None:
                raise TurnFailed(f"{output.request_id}: {output.error}")
            turn = self._turns[output.request_id]
            if output.token_ids and turn.first_s is None:
                turn.first_s = now
            turn.token_ids += output.token_ids
            self.drawn_tokens += len(output.token_ids)
            turn.times_s += [now] * len(output.token_ids)
            turn.report = output.report or turn.report
            turn.timings = output.timings or turn.timings
            if output.finish_reason is not None:
                turn.done_s = now


class Player(Protocol):
    """An arm that takes turns with others."""

    def go_on(self) -> None:
        """Do what a round asks for."""

    def result(self) -> dict[str, Any]:
        """Close the engine, and tell what was measured."""


def take_turns(run: Run, players: Mapping[str, Player]) -> dict[str, dict[str, Any]]:
    """Let the arms go on in turn, `--rounds` times, so that a busy neighbour meets them all. Returns their results."""
    for _, order in run.rounds(tuple(players), run.arguments.rounds):
        for name in order:
            players[name].go_on()
    return {name: player.result() for name, player in players.items()}


def random_tokens(rng: random.Random, model: str, count: int) -> list[int]:
    """Draw tokens that a text may have."""
    vocabulary = vocabulary_of(model)
    return [rng.randrange(4, vocabulary) for _ in range(count)]


def vocabulary_of(model: str) -> int:
    return int(msgspec.json.decode((Path(model) / "config.json").read_bytes())["vocab_size"])
