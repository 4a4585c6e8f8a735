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
    """The engine has refused a turn, or the tiers have not come to rest in time."""


def config(model: str, settings: Mapping[str, str | int | float]) -> EngineConfig:
    """Return the configuration of an engine for one turn at a time, without tiers below HBM and without a time limit on
    steps. settings: "cache.mode" -> value; they take precedence over these defaults."""
    flags = {
        "model.source": model, "model.dtype": "bfloat16", "engine.device": "cpu", "cache.dram_gib": 0,
        "cache.disk_gib": 0, "cache.disk_min_free_gib": 0, "scheduler.policy": "fcfs", "scheduler.max_seqs": 1,
        "scheduler.itl_target_ms": 0, **settings,
    }  # fmt: skip
    texts = {name: str(value) for name, value in flags.items()}
    return load_settings(flags=texts, environ={}, config=None).engine_config(bytes(32))


def as_engine_process() -> None:
    """Start this program again with the environment variables of a server's engine process, unless it has them
    already."""
    environment = engine_environment(config("bundled", {}), os.environ)
    if any(name in environment and name not in os.environ for name in (*MALLOC, *SPIN)):
        os.execve(sys.executable, sys.orig_argv, environment)


def greedy(new_tokens: int) -> SamplingParams:
    """Return sampling parameters for exactly `new_tokens` tokens, each the likeliest."""
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
    """A request and its answer, with times."""

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
        """The tokens of prompt and answer, with which the next turn's prompt begins."""
        return self.prompt + self.token_ids

    @property
    def cached(self) -> int:
        """Number of prompt tokens whose KV was not computed."""
        assert self.report is not None
        return self.report.prompt_tokens - self.report.computed_tokens

    @property
    def ttft_ms(self) -> float:
        """The milliseconds from submitting the turn to its first token."""
        assert self.first_s is not None
        return (self.first_s - self.submitted_s) * 1e3

    @property
    def prefill_ms(self) -> float:
        """The milliseconds from the turn's first step to its first token, with the time of loads."""
        assert self.timings is not None
        return self.timings.load_ms + self.timings.prefill_ms


class InProcess:
    """An engine in this process, and the turns that were submitted to it. Single-threaded. Close it with `close`, or
    use it as a context manager."""

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
        """The part of the engine that runs the model, for measurements inside of a step."""
        return self.engine._step._compute

    def share_weights(self, other: "InProcess") -> None:
        """Use the weights of another engine with the same model, so that the two engines do not differ by the memory in
        which their weights lie."""
        self.compute.runner.model = other.compute.runner.model

    def submit(
        self,
        session: str,
        prompt: Sequence[int],
        new_tokens: int,
        prediction: Sequence[int] = (),
        sampling: SamplingParams | None = None,
    ) -> Turn:
        """Queue a turn. prediction: tokens that its answer is expected to repeat. sampling: None for `greedy`. Raises
        TurnFailed."""
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
        """Run one round of the engine's loop: poll, then step."""
        now = time.monotonic()
        self.engine.poll(now)
        self._take(self.engine.step(now))

    def run(self) -> None:
        """Step until every turn has its answer. Saves and writes of KV may still be under way then."""
        while self.engine.has_work():
            self.step()

    def ask(self, session: str, prompt: Sequence[int], new_tokens: int) -> Turn:
        """Run one turn to its end, and wait until no KV moves between the tiers. Returns the turn."""
        turn = self.submit(session, prompt, new_tokens)
        self.run()
        self.settle()
        return turn

    def settle(self) -> None:
        """Wait until no KV moves between the tiers. Raises TurnFailed if that takes longer than a minute."""
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
        """Close the engine like a server that is told to end: KV that was computed is written to disk first."""
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
    """An arm of a benchmark, which takes turns with the other arms."""

    def go_on(self) -> None:
        """Do the work of one round."""

    def result(self) -> dict[str, Any]:
        """Close the engine. Returns what was measured."""


def take_turns(run: Run, players: Mapping[str, Player]) -> dict[str, dict[str, Any]]:
    """Run `--rounds` rounds, in each of which every arm does its work, so that other load on the machine affects all
    arms. Returns their results."""
    for _, order in run.rounds(tuple(players), run.arguments.rounds):
        for name in order:
            players[name].go_on()
    return {name: player.result() for name, player in players.items()}


def random_tokens(rng: random.Random, model: str, count: int) -> list[int]:
    """Return `count` random token ids of the model, from 4 on, because the lowest ids are special tokens."""
    vocabulary = vocabulary_of(model)
    return [rng.randrange(4, vocabulary) for _ in range(count)]


def vocabulary_of(model: str) -> int:
    return int(msgspec.json.decode((Path(model) / "config.json").read_bytes())["vocab_size"])
