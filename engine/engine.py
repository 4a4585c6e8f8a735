"""Engine: requests in, tokens out. One step schedules, plans, runs, samples and commits."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cache.manager import CacheManager
from cache.stats import PromptReport
from engine.batch import BatchItem, BlockTables, build_batch
from engine.messages import CacheReport, ModelInfo, Output, Stats, Submit, Timings, TokenLogprob
from engine.runner import ModelRunner
from engine.sampler import BadLogits, PenaltyState, Sampled, Sampler, SampleRow, choice_seed
from scheduler.scheduler import Chunk, QueueFull, Scheduler
from scheduler.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Choice:
    """A sequence and what the engine alone needs to know of it."""

    sequence: Sequence
    request_id: str  # the app's, shared by all choices of a request
    index: int
    seed: int
    penalties: PenaltyState | None
    end_ids: tuple[int, ...]
    report: PromptReport | None = None
    reported: bool = False


class Engine:
    """Single-threaded: `engine.process` calls it from its loop. `now` is a monotonic clock in seconds.

    Whatever goes wrong in a step, what was committed before it stays right: tokens are counted as computed only after
    the forward pass that wrote their KV has returned.
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        runner: ModelRunner,
        cache: CacheManager,
        scheduler: Scheduler,
        sampler: Sampler,
        tables: BlockTables,
        device: torch.device,
    ) -> None:
        self.model = model
        self._runner = runner
        self._cache = cache
        self._scheduler = scheduler
        self._sampler = sampler
        self._tables = tables
        self._device = device
        self._choices: dict[str, _Choice] = {}  # by the id of the sequence
        self._requests: dict[str, list[str]] = {}  # the app's request id -> its unfinished sequences
        self._steps = 0
        self._step_seconds = 0.0
        self._generated_tokens = 0
        self._aborted = 0

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Submit, now: float) -> list[Output]:
        """Queue every choice of a request. Returns error outputs for those that cannot be taken."""
        problem = self._problem(request)
        if problem is not None:
            code, message = problem
            return [_error(request.request_id, index, code, message) for index in range(request.num_choices)]
        refused = []
        for index in range(request.num_choices):
            try:
                self._add(request, index, now)
            except QueueFull as error:
                refused.append(_error(request.request_id, index, "overloaded", f"the queue is full: {error}"))
        return refused

    def _problem(self, request: Submit) -> tuple[str, str] | None:
        """(error code, message) of a request that can never run. The app validates first; this is the last line."""
        length = len(request.token_ids)
        if length == 0:
            return "invalid_prompt", "the prompt has no tokens"
        if length >= self.model.max_context:
            return (
                "context_length_exceeded",
                f"the prompt has {length} tokens; the context window of {self.model.max_context} holds the answer too",
            )
        if min(request.token_ids) < 0 or max(request.token_ids) >= self.model.vocab_size:
            return "invalid_prompt", f"token ids must be between 0 and {self.model.vocab_size - 1}"
        if request.request_id in self._requests:
            return "invalid_prompt", "this request id is in use"
        return None

    def _add(self, request: Submit, index: int, now: float) -> None:
        sampling = request.sampling
        sequence = Sequence(
            request_id=f"{request.request_id}/{index}",
            tenant=request.tenant,
            session_id=request.session_id,
            sampling=sampling,
            arrived_s=now,
            token_ids=list(request.token_ids),
            prompt_tokens=len(request.token_ids),
        )
        self._cache.open(
            sequence.request_id, request.tenant, request.cache_salt, request.session_id, sequence.token_ids
        )
        try:
            self._scheduler.add(sequence)
        except QueueFull:
            self._cache.close(sequence.request_id, 0, now)
            raise
        ends = () if sampling.ignore_eos else self.model.eos_token_ids
        self._choices[sequence.request_id] = _Choice(
            sequence=sequence,
            request_id=request.request_id,
            index=index,
            seed=choice_seed(sampling.seed, index),
            penalties=PenaltyState.of(sampling, request.token_ids),
            end_ids=(*ends, *sampling.stop_token_ids),
        )
        self._requests.setdefault(request.request_id, []).append(sequence.request_id)

    def abort(self, request_id: str) -> None:
        """The client is gone: every choice ends now, what it computed stays cached. Forgives unknown ids."""
        for sequence_id in list(self._requests.get(request_id, ())):
            choice = self._choices[sequence_id]
            self._close(choice, choice.sequence.computed_tokens)
            self._aborted += 1

    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None:
        """A stop string was found behind `keep_tokens` generated tokens. Forgives unknown ids: the choice may have
        ended by itself while the message was under way."""
        found = self._choices.get(f"{request_id}/{choice}")
        if found is not None:
            self._close(found, found.sequence.prompt_tokens + keep_tokens)

    def finish_all(self, now: float) -> list[Output]:
        """End everything with finish_reason `length`."""
        return [self._end(choice, "length", now) for choice in list(self._choices.values())]

    def fail_all(self, message: str) -> list[Output]:
        """End everything with an error. Nothing of the failed step is kept: half of it may have been written."""
        outputs = []
        for choice in list(self._choices.values()):
            outputs.append(_error(choice.request_id, choice.index, "internal_error", message))
            self._close(choice, 0)
        self._cache.take_moves()
        return outputs

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    # --- the step -----------------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[Output]:
        """One batch: schedule, carry out moves, forward, commit, sample. When it raises, call `fail_all`."""
        schedule = self._scheduler.schedule(now)
        for sequence in schedule.preempted:
            self._tables.drop(sequence.request_id)
        chunks = schedule.chunks
        if not chunks:
            return []
        for chunk in chunks:
            choice = self._choices[chunk.sequence.request_id]
            if choice.report is None:
                choice.report = self._cache.report(chunk.sequence.request_id)
                chunk.sequence.cached_tokens = choice.report.hbm_tokens
        started = time.monotonic()
        self._runner.move(self._cache.take_moves())
        items = [self._item(chunk) for chunk in chunks]
        logits = self._runner.forward(build_batch(items, self._tables, self._cache.page_size, self._device))
        for chunk in chunks:
            self._cache.commit(chunk.sequence.request_id, chunk.num_tokens)
            chunk.sequence.computed_tokens += chunk.num_tokens
        ready = [self._choices[item.request_id] for item in items if item.wants_logits]
        outputs = self._sample(ready, logits, now + (time.monotonic() - started)) if ready else []
        self._steps += 1
        self._step_seconds += time.monotonic() - started
        return outputs

    def _item(self, chunk: Chunk) -> BatchItem:
        sequence = chunk.sequence
        first = sequence.computed_tokens
        return BatchItem(
            request_id=sequence.request_id,
            token_ids=sequence.token_ids[first : first + chunk.num_tokens],
            first_row=first,
            pages=self._cache.context(sequence.request_id).pages,
            wants_logits=chunk.is_last,
        )

    def _sample(self, ready: list[_Choice], logits: torch.Tensor, now: float) -> list[Output]:
        outputs = []
        while ready:
            try:
                sampled = self._sampler.sample(logits, [_sample_row(choice) for choice in ready])
                break
            except BadLogits as error:
                bad = set(error.rows)
                for row in bad:
                    choice = ready[row]
                    message = "the model produced no valid distribution for the next token"
                    outputs.append(_error(choice.request_id, choice.index, "internal_error", message))
                    self._cache.distrust(choice.sequence.request_id)
                    self._close(choice, 0)
                keep = [row for row in range(len(ready)) if row not in bad]
                ready, logits = [ready[row] for row in keep], logits[keep]
        else:
            return outputs
        return outputs + [self._accept(choice, token, now) for choice, token in zip(ready, sampled, strict=True)]

    def _accept(self, choice: _Choice, sampled: Sampled, now: float) -> Output:
        """Append a sampled token; end the choice if that was its last."""
        sequence = choice.sequence
        sequence.token_ids.append(sampled.token_id)
        if choice.penalties is not None:
            choice.penalties.append(sampled.token_id)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        self._generated_tokens += 1
        reason = None
        if sampled.token_id in choice.end_ids and sequence.output_tokens > sequence.sampling.min_tokens:
            reason = "stop"
        elif (
            sequence.output_tokens >= sequence.sampling.max_tokens or len(sequence.token_ids) >= self.model.max_context
        ):
            reason = "length"
        logprobs = None if sampled.logprob is None else [sampled.logprob]
        if reason is not None:
            return self._end(choice, reason, now, [sampled.token_id], logprobs)
        return self._output(choice, [sampled.token_id], logprobs, now)

    # --- endings ------------------------------------------------------------------------------------------------------

    def _end(
        self,
        choice: _Choice,
        reason: str,
        now: float,
        token_ids: Iterable[int] = (),
        logprobs: list[TokenLogprob] | None = None,
    ) -> Output:
        timings = _timings(choice.sequence, now)
        self._close(choice, choice.sequence.computed_tokens)
        return self._output(choice, list(token_ids), logprobs, now, finish_reason=reason, timings=timings)

    def _close(self, choice: _Choice, num_tokens: int) -> None:
        """Leave every table; the session's context is the first `num_tokens` tokens, as far as they were computed."""
        sequence = choice.sequence
        self._scheduler.remove(sequence)
        self._cache.close(sequence.request_id, num_tokens, time.monotonic())
        self._tables.drop(sequence.request_id)
        del self._choices[sequence.request_id]
        remaining = self._requests[choice.request_id]
        remaining.remove(sequence.request_id)
        if not remaining:
            del self._requests[choice.request_id]

    def _output(
        self,
        choice: _Choice,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        now: float,
        *,
        finish_reason: str | None = None,
        timings: Timings | None = None,
    ) -> Output:
        report = None
        if not choice.reported and choice.report is not None:
            choice.reported = True
            report = _cache_report(choice.report)
            timings = timings or _timings(choice.sequence, now)
        return Output(
            request_id=choice.request_id,
            choice=choice.index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            report=report,
            timings=timings,
            error=None,
            error_code=None,
        )

    # --- housekeeping -------------------------------------------------------------------------------------------------

    def idle(self, now: float) -> None:
        """TTL sweep, and the invariant that must hold when nothing runs."""
        self._cache.sweep(now)
        if not self._choices and self._cache.num_leases:
            log.error("%d pages are pinned although nothing runs", self._cache.num_leases)

    def stats(self) -> Stats:
        pages, stats = self._cache.pages, self._cache.stats
        return Stats(
            running=len(self._scheduler.running),
            waiting=self._scheduler.num_waiting,
            sessions=self._cache.num_sessions,
            leases=self._cache.num_leases,
            hbm_pages_total=pages.num_pages,
            hbm_pages_free=pages.num_free,
            hbm_pages_cached=pages.num_cached,
            steps=self._steps,
            step_seconds=self._step_seconds,
            prompt_tokens=dict(stats.prompt_tokens),
            generated_tokens=self._generated_tokens,
            miss_tokens=dict(stats.miss_tokens),
            evicted_blocks=stats.evicted_blocks,
            preemptions=self._scheduler.preemptions,
            aborted=self._aborted,
        )


def _sample_row(choice: _Choice) -> SampleRow:
    sequence = choice.sequence
    return SampleRow(
        sampling=sequence.sampling,
        seed=choice.seed,
        position=sequence.output_tokens,
        penalties=choice.penalties,
        end_ids=choice.end_ids,
    )


def _timings(sequence: Sequence, now: float) -> Timings:
    scheduled = now if sequence.scheduled_s is None else sequence.scheduled_s
    first = now if sequence.first_token_s is None else sequence.first_token_s
    return Timings(
        queue_ms=(scheduled - sequence.arrived_s) * 1e3,
        load_ms=0.0,
        prefill_ms=(first - scheduled) * 1e3,
        decode_ms=(now - first) * 1e3,
    )


def _cache_report(report: PromptReport) -> CacheReport:
    return CacheReport(
        prompt_tokens=report.prompt_tokens,
        history_tokens=report.history_tokens,
        hbm_tokens=report.hbm_tokens,
        dram_tokens=0,
        disk_tokens=0,
        redis_tokens=0,
        computed_tokens=report.computed_tokens,
        truncated_tokens=0,
        shifted_tokens=0,
        miss_reasons=report.miss_reasons,
    )


def _error(request_id: str, choice: int, code: str, message: str) -> Output:
    return Output(
        request_id=request_id,
        choice=choice,
        token_ids=[],
        logprobs=None,
        finish_reason="error",
        report=None,
        timings=None,
        error=message,
        error_code=code,
    )
