"""Runs a real engine without its process: takes requests, runs single steps, and checks all accounts after each."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from reprise.cache.blocks.rows import PARKED
from reprise.engine.config import EngineConfig
from reprise.engine.engine import Engine
from reprise.engine.messages import (
    Output,
    Submit,
    Timings,
    TokenLogprob,
    TokensBySource,
)
from reprise.engine.step.choices import RunningChoices
from reprise.engine.step.compute import StepCompute
from reprise.engine.step.ports import DraftMaker
from reprise.scheduler.scheduler import Scheduler
from tests.conftest import greedy
from tests.engine import scripted_engine
from tests.engine.models import vanilla_logits
from tests.engine.ready_models import engine_of

_SECTIONS = ("model", "cache", "scheduler", "experiment")


def changed(base: EngineConfig, **changes: Any) -> EngineConfig:
    """`base` with some values replaced by their names alone, whatever section they are in: max_seqs, dram_bytes. A name
    that two sections have is said with its section: cache_policy, scheduler_policy."""
    sections = {name: msgspec.structs.asdict(getattr(base, name)) for name in _SECTIONS}
    top = {name: changes.pop(name) for name in msgspec.structs.asdict(base).keys() & changes.keys() - {*_SECTIONS}}
    for given, value in changes.items():
        places = [
            (section, name)
            for section, fields in sections.items()
            if (name := given.removeprefix(f"{section}_")) in fields
        ]
        if len(places) != 1:
            raise TypeError(f"{given} is in {len(places)} sections of the config")
        section, name = places[0]
        sections[section][name] = value
    return msgspec.convert({**msgspec.structs.asdict(base), **sections, **top}, EngineConfig)


CONFIG = changed(
    scripted_engine.config(),
    hbm_tokens=2048,
    ttl_s=3600.0,
    max_sessions=100,
    max_queued=64,
    truncation="disabled",
    draft_tokens=0,  # how many there are hangs on how long steps take; tests of drafts ask for them
)


def config(model: Path, **changes: Any) -> EngineConfig:
    """fp32 on one thread, 64 pages, 8 sequences at once, nothing truncated, and what `changes` says."""
    return changed(CONFIG, source=str(model), **changes)


@dataclass
class Answer:
    """All that was said about one choice."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    report: TokensBySource | None = None
    timings: list[Timings | None] = field(default_factory=list)  # timings of each output
    error: str | None = None
    error_code: str | None = None

    @property
    def text(self) -> list[int]:
        """Prompt and answer: the history of a next turn."""
        return self.prompt + self.token_ids

    @property
    def cached(self) -> int:
        assert self.report is not None
        return self.report.hbm_tokens + self.report.dram_tokens + self.report.disk_tokens

    def take(self, output: Output) -> None:
        assert self.finish_reason is None, "said something behind its end"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "said twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.timings.append(output.timings)
        if output.report is not None:
            before = self.report.truncated_tokens if self.report is not None else -1
            is_new = output.report.truncated_tokens > before or output.report.selected_tokens
            assert is_new, "a second report, and nothing was truncated or left out since"
            self.report = output.report
        self.finish_reason, self.error, self.error_code = output.finish_reason, output.error, output.error_code


class Driver:
    """An engine and every answer it gave. Time is counted in steps."""

    def __init__(self, model: Path, **changes: Any) -> None:
        self.engine: Engine = engine_of(config(model, **changes))
        self.cache = self.engine._cache
        self.answers: dict[tuple[str, int], Answer] = {}
        self.now = 0.0

    @property
    def compute(self) -> StepCompute:
        return self.engine._step._compute

    @property
    def choices(self) -> RunningChoices:
        return self.engine._requests.choices

    @property
    def scheduler(self) -> Scheduler:
        return self.engine._step._scheduler

    @property
    def drafter(self) -> DraftMaker | None:
        return self.engine._step._drafter

    @property
    def model(self) -> Any:
        return self.compute.runner.model

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        *,
        session: str | None = None,
        choices: int = 1,
        tenant: str = "t",
        salt: str = "",
        keep_first_tokens: int = 0,
        message_starts: tuple[int, ...] = (),
        important: tuple[tuple[int, int], ...] = (),
        begun_tokens: int = 0,
        truncation: str = "",
        grammar: str = "",
        prompt_logprobs: int | None = None,
        resume: list[list[int] | None] | None = None,
        over: list[int] | None = None,
        prediction: Sequence[int] = (),
        target_s: float | None = None,
        progress: bool = False,
        **sampling: Any,
    ) -> Answer:
        """Queue a request, greedy unless told otherwise. Returns the first choice's answer, filled as it goes."""
        for index in range(choices):
            self.answers[request_id, index] = Answer(list(prompt))
        self._take(
            self.engine.accept(
                Submit(
                    request_id=request_id,
                    session_id=request_id if session is None else session,
                    tenant=tenant,
                    cache_salt=salt,
                    token_ids=list(prompt),
                    num_choices=choices,
                    sampling=greedy(**sampling),
                    truncation=truncation,
                    keep_first_tokens=keep_first_tokens,
                    message_starts=message_starts,
                    important=important,
                    begun_tokens=begun_tokens,
                    grammar=grammar,
                    prompt_logprobs=prompt_logprobs,
                    resume=resume or [],
                    over=over,
                    prediction=list(prediction),
                    target_s=target_s,
                    progress=progress,
                ),
                self.now,
            )
        )
        return self.answers[request_id, 0]

    def ask(self, request_id: str, prompt: list[int], **options: Any) -> Answer:
        """A request from its beginning to its end."""
        answer = self.submit(request_id, prompt, **options)
        self.run()
        return answer

    def step(self) -> list[Output]:
        self.now += 1.0
        self.engine.poll(self.now)
        outputs = self.engine.step(self.now)
        self._take(outputs)
        self.check()
        return outputs

    def run(self, max_steps: int = 30_000) -> None:
        """Step until there is nothing left to do. Steps that only wait for a slow link are over at once: many may
        come."""
        for _ in range(max_steps):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work(), "the engine does not come to an end"
        self.settle()
        assert self.engine.stats().leases == 0

    def settle(self) -> None:
        """Step until every save, load and write has ended, and what a busy disk refused was written at a later try."""
        end = time.monotonic() + 30
        self.engine.poll(self.now)
        while self.cache.in_flight or self.cache.tiers.writes._dirty.sessions:
            assert time.monotonic() < end, "the transfers do not come to an end"
            if not self.cache.in_flight:
                self.now += 1.0
            self.engine._transfer.wait(0.01)
            self.engine.poll(self.now)
        self.check()

    def forget_hbm(self) -> None:
        """Let every block leave HBM that nobody runs on."""
        for row in self.cache.tiers.table:
            if row.page is not None:
                self.cache.tiers.hbm.leave(row)

    def close(self) -> None:
        """Close the engine as a process does that leaves in order."""
        self.engine.close()

    def step_and_fail(self) -> None:
        """Fail the requests as the engine's loop does when a step raises."""
        try:
            self.step()
        except Exception as error:
            self._take(self.engine.fail_all(str(error)))
            self.check()
        else:
            raise AssertionError("nothing failed")

    def finish_all(self) -> None:
        self._take(self.engine.finish_all(self.now))
        self.check()

    def state(self, request_id: str) -> str:
        """waiting | prefilling | decoding, of the first choice."""
        sequence = self.choices[f"{request_id}/0"].sequence
        if sequence.state == "waiting":
            return "waiting"
        return "decoding" if sequence.first_token_s is not None else "prefilling"

    def check(self) -> None:
        """Every page is what the tables say it is, and the gauges count them so."""
        pages = self.cache.tiers.pages
        running = [page for context in self.cache._running.values() for page in context.rows.pages if page != PARKED]
        running += [block.page for load in self.cache._loads.under_way.values() for block in load.blocks]
        running += [page for held, _ in self.cache.tiers.dram.saves._sources.values() for page in held]
        resident = {row.page for row in self.cache.tiers.table if row.page is not None}
        pinned = set(running)
        assert all(pages.pins(page) == running.count(page) for page in range(pages.num_pages))
        free = set(range(pages.num_pages)) - pinned - resident
        assert {page for page in range(pages.num_pages) if pages.is_free(page)} == free
        stats = self.engine.stats()
        assert (stats.leases, stats.hbm_pages_free, stats.hbm_pages_cached) == (
            len(pinned),
            len(free),
            len(resident - pinned),
        )
        assert stats.leases + stats.hbm_pages_free + stats.hbm_pages_cached == stats.hbm_pages_total
        choices = self.choices
        unfinished = sum(len(choices.of_request(request_id)) for request_id in {c.request_id for c in choices})
        assert stats.running + stats.waiting == unfinished == len(choices) == len(self.cache._running)
        assert set(self.compute.tables._rows) <= {s.request_id for s in self.scheduler.running}

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.answers[output.request_id, output.choice].take(output)


def greedy_tokens(vanilla: Any, text: list[int], prompt_tokens: int) -> list[int]:
    """Return what transformers would have said after every prefix of `text` from the prompt on: equal to the tokens
    that stand there if, and only if, `text` is a greedy answer."""
    tokens: list[int] = vanilla_logits(vanilla, text[:-1])[prompt_tokens - 1 :].argmax(-1).tolist()
    return tokens


def assert_greedy(vanilla: Any, answer: Answer) -> None:
    assert answer.error is None, answer.error
    assert answer.token_ids
    assert answer.token_ids == greedy_tokens(vanilla, answer.text, len(answer.prompt))


def generate(vanilla: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own loop, with its own cache."""
    with torch.inference_mode():
        ids = vanilla.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
        )  # fmt: skip
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens
