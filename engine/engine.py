"""Engine: requests in, tokens out. One step schedules, plans, runs, samples and commits."""

import logging
import math
import time
from collections.abc import Container, Iterable

import msgspec
import torch

from cache.blocks.truncate import DoesNotFit
from cache.manager import CacheManager
from cache.moves import CapturePiece, CopyRows, Transferred
from cache.storage.first_touch import FirstTouch
from cache.transfer.capture import CaptureSink
from cache.transfer.transfer import Transfer
from engine.counters import Counters, collect
from engine.messages import (
    ModelInfo,
    Output,
    SessionReply,
    SessionRequest,
    Stats,
    Submit,
    Timings,
    TokenLogprob,
)
from engine.model.batch import BatchItem, BlockTables, build_batch
from engine.model.runner import ModelRunner
from engine.session_directory import SessionDirectory
from engine.step.arrival import Arrival
from engine.step.grammar import GrammarCompiler
from engine.step.held_moves import Moves
from engine.step.intake import Intake
from engine.step.running_choice import RunningChoice
from engine.step.sampler import BadLogits, Sampled, Sampler, token_logprobs
from engine.step.verify import Verifier
from scheduler.scheduler import Chunk, Scheduler

log = logging.getLogger(__name__)

_LOGPROB_ROWS = 64  # of a prompt at a time: 40 MB of a vocabulary of 150k, in fp32
_LOAD_WAIT_S = 0.005  # when there is nothing to do but wait for KV; new requests wait no longer than that


class Engine:
    """Single-threaded: `engine.process.loop` calls it from its loop. `now` is a monotonic clock in seconds.

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
        transfer: Transfer,
        first_touch: FirstTouch,
        sink: CaptureSink | None,
        directory: SessionDirectory,
        verifier: Verifier | None,
        grammars: GrammarCompiler,
        truncation: str,
        close_timeout_s: float,
    ) -> None:
        self.model = model
        self._runner = runner
        self._cache = cache
        self._scheduler = scheduler
        self._sampler = sampler
        self._tables = tables
        self._device = device
        self._transfer = transfer
        self._moves = Moves(transfer)
        self._first_touch = first_touch
        self._sink = sink
        self._directory = directory
        self._verifier = verifier
        self._intake = Intake(
            model=model,
            cache=cache,
            scheduler=scheduler,
            grammars=grammars,
            truncation=truncation,
            is_known=lambda request_id: request_id in self._requests,
            add=self._add,
        )
        self._close_timeout_s = close_timeout_s
        self._choices: dict[str, RunningChoice] = {}  # by the id of the sequence
        self._requests: dict[str, list[str]] = {}  # the app's request id -> its unfinished sequences
        self._counters = Counters()
        self._replies: list[SessionReply] = []
        self._changes = 0  # of the requests that the cache knows, when was looked last
        self._seals_may_wait = False

    # --- requests -----------------------------------------------------------------------------------------------------

    def accept(self, request: Submit, now: float) -> list[Output]:
        """Queue every choice of a request, as soon as its grammar is compiled if it has one. Returns error outputs for
        those that cannot be taken."""
        return self._intake.open_request(request, now)

    def _add(self, choice: RunningChoice) -> None:
        sequence_id = choice.sequence.request_id
        self._choices[sequence_id] = choice
        self._requests.setdefault(choice.request_id, []).append(sequence_id)

    def abort(self, request_id: str) -> None:
        """The client is gone: every choice ends now, what it computed stays cached. Forgives unknown ids."""
        self._intake.cancel(request_id)
        for sequence_id in list(self._requests.get(request_id, ())):
            choice = self._choices[sequence_id]
            self._close(choice, choice.sequence.computed_tokens)
            self._counters.aborted += 1

    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None:
        """A stop string was found behind `keep_tokens` generated tokens. Forgives unknown ids: the choice may have
        ended by itself while the message was under way."""
        found = self._choices.get(f"{request_id}/{choice}")
        if found is not None:
            sequence = found.sequence
            self._scheduler.completed(sequence)
            self._close(found, max(0, sequence.prompt_tokens + keep_tokens - sequence.dropped_tokens))

    def finish_all(self, now: float) -> list[Output]:
        """End everything with finish_reason `length`."""
        refused = self._intake.queue_uncompiled(now)
        # Of those queued just now, nothing is drawn any more.
        return refused + [self._end(choice, "length", now) for choice in list(self._choices.values())]

    def fail_all(self, message: str) -> list[Output]:
        """End everything with an error. Nothing of the failed step is kept: half of it may have been written."""
        outputs = self._intake.fail_uncompiled(message)
        for choice in list(self._choices.values()):
            outputs.append(choice.failed(message))
            self._close(choice, 0)
        self._moves.carry_out([move for move in self._cache.take_moves() if not isinstance(move, CopyRows)])
        return outputs

    def has_work(self) -> bool:
        return self._scheduler.has_work() or self._intake.num_pending > 0

    def is_moving(self) -> bool:
        return self._cache.in_flight > 0

    # --- the step -----------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[SessionReply]:
        """Hear what the transfers have done, and order what comes next. Called in every turn of the loop, work or not.
        Returns answers to session requests that have become ready."""
        self._order_what_comes_next(now)
        if not self.has_work():
            # What a turn has left may have been saved at once: then it is written while nobody waits, instead of beside
            # the next request, with which the loop would hear of it.
            self._order_what_comes_next(now)
        self._replies += [SessionReply(request_id=waiter, sessions=[]) for waiter in self._cache.take_deleted()]
        for waiter in self._cache.take_undeleted():
            self._replies.append(SessionReply(request_id=waiter, sessions=[], error_code="undeleted"))
        replies, self._replies = self._replies, []
        return replies

    def _order_what_comes_next(self, now: float) -> None:
        changes, self._changes = self._changes, self._cache.changes
        # Not when a turn came or ended, nor while one waits: what is sealed late may leave HBM late only.
        self._seals_may_wait = (
            changes == self._changes
            and not self._scheduler.num_waiting
            and self._cache.is_roomy(len(self._scheduler.running))
        )
        self._moves.carry_out(seals_may_wait=self._seals_may_wait)
        self._hear(now)
        self._requeue_failed()
        self._cache.plan(self._scheduler.upcoming(), self._scheduler.num_starting, now)
        # Copies inside HBM belong to a step; between steps there are none.
        self._moves.carry_out(self._cache.take_moves(), seals_may_wait=self._seals_may_wait)

    def _hear(self, now: float) -> None:
        for event in self._transfer.poll():
            if isinstance(event, Transferred) and event.direction.endswith("to_hbm"):
                self._counters.load_seconds += event.seconds
            self._cache.on_event(event, now)

    def _requeue_failed(self) -> set[str]:
        """Sequences whose load has failed start anew with what is left of their history. Returns their ids."""
        failed = set(self._cache.take_failed())
        for sequence_id in failed:
            self._restart(self._choices[sequence_id])
        return failed

    def _restart(self, choice: RunningChoice) -> None:
        """What a sequence has computed is void: it is admitted anew."""
        sequence_id = choice.sequence.request_id
        self._cache.void(sequence_id)
        self._scheduler.requeue(choice.sequence)
        self._tables.drop(sequence_id)
        if not choice.reported:
            choice.report = None

    def step(self, now: float) -> list[Output]:
        """One batch: schedule, carry out moves, forward, commit, sample. When it raises, call `fail_all`."""
        called = time.monotonic()
        refused = self._intake.queue_compiled(now)
        schedule = self._scheduler.schedule(now)
        for sequence in schedule.preempted:
            self._tables.drop(sequence.request_id)
        chunks = schedule.chunks
        self._moves.carry_out(
            self._cache.take_moves(),
            {chunk.sequence.request_id for chunk in chunks},
            seals_may_wait=self._seals_may_wait and not schedule.preempted,
        )
        if not chunks:
            self._transfer.wait(_LOAD_WAIT_S)  # everything that could run waits for its KV
            return refused
        for chunk in chunks:
            choice = self._choices[chunk.sequence.request_id]
            choice.begin_step(now)
            if choice.report is None:
                choice.report = self._cache.report(chunk.sequence.request_id)
                chunk.sequence.cached_tokens = choice.report.cached_tokens
        started = time.monotonic()
        items = [self._item(chunk) for chunk in chunks]
        logits, arrival, pieces = self._forward(items, chunks)
        waited_s = arrival.waited_s
        logits = self._note_prompts(items, logits)
        self._hear(now)
        failed = self._requeue_failed()
        for sequence_id in arrival.late - failed:
            # It goes on when the load has ended, in whatever way; until then its pages may still be written to.
            self._restart(self._choices[sequence_id])
        failed |= arrival.late
        for sequence_id in failed:
            self._choices[sequence_id].load_wait_s += waited_s
            self._choices[sequence_id].void_s = now + (time.monotonic() - called)
        if pieces is None or failed:
            pieces = self._capture(chunks, failed)
        captured = self._sink.end() if self._sink is not None else None
        self._moves.hold(self._cache.take_moves(), captured, pieces)
        for chunk in chunks:
            if chunk.sequence.request_id not in failed:
                self._cache.commit(chunk.sequence.request_id, chunk.num_tokens)
                chunk.sequence.computed_tokens += chunk.num_tokens
                self._choices[chunk.sequence.request_id].load_wait_s += waited_s
        ready = [self._choices[item.request_id] for item in items if item.wants_logits]
        if failed:
            keep = [row for row, choice in enumerate(ready) if choice.sequence.request_id not in failed]
            ready, logits = [ready[row] for row in keep], logits[keep]
        if self._verifier is not None:
            ready, logits = self._verify(ready, logits)
        outputs = self._sample(ready, logits, now + (time.monotonic() - called)) if ready else []
        self._counters.steps += 1
        seconds = time.monotonic() - started
        self._counters.step_seconds += seconds
        self._cache.rates.computed(sum(chunk.num_tokens for chunk in chunks), seconds - waited_s)
        self._scheduler.ran(seconds, waited_s)
        return refused + outputs

    def _capture(self, chunks: list[Chunk], failed: Container[str]) -> list[CapturePiece]:
        """Where the rows of a step are to be saved, but for requests that have failed."""
        pieces: list[CapturePiece] = []
        batch_row = 0
        for chunk in chunks:
            if chunk.sequence.request_id not in failed:
                pieces += self._cache.capture(chunk.sequence.request_id, chunk.num_tokens, batch_row)
            batch_row += chunk.num_tokens
        return pieces

    def _forward(
        self, items: list[BatchItem], chunks: list[Chunk]
    ) -> tuple[torch.Tensor, Arrival, list[CapturePiece] | None]:
        """The logits, how the KV arrived that was on its way, and where rows are saved to if that is decided by now."""
        batch = build_batch(items, self._tables, self._cache.page_size, self._device)
        jobs = {i.request_id: job for i in items if (job := self._cache.context(i.request_id).job) is not None}
        arrival = Arrival(
            self._transfer, jobs, patience_s=self._cache.patience_s, has_bystanders=len(jobs) < len(items)
        )
        if self._sink is not None:
            self._sink.begin()
        if self._sink is None or jobs or not self._runner.saves_rows:
            return self._runner.forward(batch, arrival if jobs else None), arrival, None
        # What stands on nothing under way is written to its slots by the kernels that compute it.
        pieces = self._capture(chunks, ())
        saved = self._transfer.places(pieces, batch.token_ids.shape[0])
        return self._runner.forward(batch, None, saved), arrival, pieces

    def _note_prompts(self, items: list[BatchItem], logits: torch.Tensor) -> torch.Tensor:
        """Keep what was asked for of prompts. Returns the rows to draw from, one per item that wants logits."""
        if not any(item.prompt_rows for item in items):
            return logits
        row, drawn = 0, []
        for item in items:
            if item.prompt_rows:
                choice = self._choices[item.request_id]
                assert choice.prompt_logprobs is not None
                place = item.first_row + 1
                for start in range(0, item.prompt_rows, _LOGPROB_ROWS):
                    count = min(_LOGPROB_ROWS, item.prompt_rows - start)
                    tokens = choice.sequence.token_ids[place + start : place + start + count]
                    found = token_logprobs(
                        logits[row + start : row + start + count], tokens, [choice.prompt_logprobs] * count
                    )
                    choice.prompt_known.update(enumerate(found, place + start))
                row += item.prompt_rows
            if item.wants_logits:
                drawn.append(row)
                row += 1
        return logits[drawn]

    def _verify(self, ready: list[RunningChoice], logits: torch.Tensor) -> tuple[list[RunningChoice], torch.Tensor]:
        """Before a first token is drawn from what was loaded: see whether a recompute agrees. Returns those that may
        go on; the others start anew, without it."""
        assert self._verifier is not None
        keep = []
        for row, choice in enumerate(ready):
            report, sequence = choice.report, choice.sequence
            tiers: list[str] = []
            # Behind a cut a recompute is another text.
            if report is not None and not (choice.reported or sequence.output_tokens or report.truncated_tokens):
                loaded = {"dram": report.dram_tokens, "disk": report.disk_tokens}
                tiers = [tier for tier, tokens in loaded.items() if tokens]
            if not tiers or self._verifier.agrees(sequence.token_ids, logits[row]):
                keep.append(row)
                continue
            log.error("a recompute disagrees with what came from %s: not used any more", " and ".join(tiers))
            for tier in tiers:
                self._cache.lower.quarantine(tier)
            self._cache.distrust(sequence.request_id)
            self._restart(choice)
        return [ready[row] for row in keep], logits[keep]

    def _item(self, chunk: Chunk) -> BatchItem:
        sequence = chunk.sequence
        first = sequence.computed_tokens
        return BatchItem(
            request_id=sequence.request_id,
            token_ids=sequence.token_ids[first : first + chunk.num_tokens],
            first_row=first,
            pages=self._cache.context(sequence.request_id).pages,
            wants_logits=chunk.is_last,
            prompt_rows=self._choices[sequence.request_id].prompt_rows(first, chunk.num_tokens),
        )

    def _sample(self, ready: list[RunningChoice], logits: torch.Tensor, now: float) -> list[Output]:
        outputs = []
        while ready:
            try:
                sampled = self._sampler.sample(logits, [choice.sample_row() for choice in ready])
                break
            except BadLogits as error:
                bad = set(error.rows)
                for row in bad:
                    choice = ready[row]
                    if choice.constraint is not None and choice.constraint.is_failed:
                        outputs.append(choice.failed("it has become too costly to follow", "invalid_grammar"))
                        self._close(choice, choice.sequence.computed_tokens)
                        continue
                    message = "the model produced no valid distribution for the next token"
                    outputs.append(choice.failed(message))
                    self._cache.distrust(choice.sequence.request_id)
                    self._close(choice, 0)
                keep = [row for row in range(len(ready)) if row not in bad]
                ready, logits = [ready[row] for row in keep], logits[keep]
        else:
            return outputs
        return outputs + [self._accept(choice, token, now) for choice, token in zip(ready, sampled, strict=True)]

    def _accept(self, choice: RunningChoice, sampled: Sampled, now: float) -> Output:
        """Append a sampled token; end the choice if that was its last."""
        sequence = choice.sequence
        sequence.token_ids.append(sampled.token_id)
        if choice.penalties is not None:
            choice.penalties.append(sampled.token_id)
        if choice.constraint is not None:
            choice.constraint.accept(sampled.token_id)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        self._counters.generated_tokens += 1
        reason = None
        if choice.ends_with(sampled.token_id):
            reason = "stop"
        elif sequence.output_tokens >= sequence.sampling.max_tokens or (
            len(sequence.token_ids) >= self.model.max_context and not self._truncate(choice)
        ):
            reason = "length"
        logprobs = None if sampled.logprob is None else [sampled.logprob]
        if reason is not None:
            return self._end(choice, reason, now, [sampled.token_id], logprobs)
        return self._output(choice, [sampled.token_id], logprobs, now)

    def _truncate(self, choice: RunningChoice) -> bool:
        """The window is full in the middle of an answer: go on with less history, if that is allowed and possible."""
        sequence = choice.sequence
        if not choice.may_truncate:
            return False
        # What is saved was never rotated: what stays of the history is better had from there.
        self._moves.carry_out()
        self._hear(time.monotonic())
        try:
            dropped = self._cache.truncate(sequence.request_id)
        except DoesNotFit:
            return False
        sequence.dropped_tokens += dropped
        if choice.report is not None:  # said again with the last output
            truncated = choice.report.truncated_tokens + dropped
            choice.report = msgspec.structs.replace(choice.report, truncated_tokens=truncated)
        self._scheduler.requeue(sequence)
        self._tables.drop(sequence.request_id)
        return True

    # --- endings ------------------------------------------------------------------------------------------------------

    def _end(
        self,
        choice: RunningChoice,
        reason: str,
        now: float,
        token_ids: Iterable[int] = (),
        logprobs: list[TokenLogprob] | None = None,
    ) -> Output:
        timings = choice.timings(now)
        self._scheduler.completed(choice.sequence)
        self._close(choice, choice.sequence.computed_tokens)
        return self._output(choice, list(token_ids), logprobs, now, finish_reason=reason, timings=timings)

    def _close(self, choice: RunningChoice, num_tokens: int) -> None:
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
        choice: RunningChoice,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        now: float,
        *,
        finish_reason: str | None = None,
        timings: Timings | None = None,
    ) -> Output:
        report = prompt_logprobs = None
        if choice.report is not None and not choice.reported:
            choice.reported = True
            if token_ids:
                prompt_logprobs = choice.take_prompt_logprobs()
            self._cache.stats.count_prompt(choice.report)
            report = choice.report
            timings = timings or choice.timings(now)
        elif choice.report is not None and finish_reason is not None and choice.sequence.dropped_tokens:
            report = choice.report
        return choice.output(token_ids, logprobs, finish_reason, report, timings, prompt_logprobs)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def sessions(self, request: SessionRequest, now: float) -> list[SessionReply]:
        """Answer what is asked about sessions; a deletion is answered by `poll` when the bytes are gone."""
        reply = self._directory.apply(request, now)
        return [] if reply is None else [reply]

    # --- housekeeping -------------------------------------------------------------------------------------------------

    def idle(self, now: float) -> None:
        """TTL sweep, memory for what comes, and the invariant that must hold when nothing runs."""
        self._cache.sweep(now)
        pages = self._cache.pages
        self._first_touch.go_on(self._cache.lower.slots.reached, pages.reached, lambda: bool(self._choices))
        pages.ready = self._first_touch.pages_ready
        if not self._choices and self._cache.num_leases and not self._cache.in_flight:
            log.error("%d pages are pinned although nothing runs", self._cache.num_leases)

    def close(self) -> None:
        """Let what was computed reach the disk, within a deadline. Nothing else may be called afterwards."""
        end = time.monotonic() + self._close_timeout_s
        for choice in list(self._choices.values()):
            self._close(choice, choice.sequence.computed_tokens)
        self._intake.close()
        self._cache.lower.extents.go_on(math.inf)  # the next process would find what the disk would not delete
        self.poll(time.monotonic())
        while self._cache.in_flight and time.monotonic() < end:
            self._transfer.wait(0.05)
            self.poll(time.monotonic())
        self._transfer.close(max(0.0, end - time.monotonic()))

    def stats(self) -> Stats:
        return collect(
            self._counters,
            scheduler=self._scheduler,
            cache=self._cache,
            transfer=self._transfer,
            verifier=self._verifier,
        )
