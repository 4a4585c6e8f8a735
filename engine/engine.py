"""Engine: requests in, tokens out. One step schedules, moves, computes, settles and draws."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from torch import Tensor

from reprise.cache.blocks.truncate import DoesNotFit
from reprise.cache.manager import CacheManager
from reprise.cache.moves import CopyRows, Transferred
from reprise.cache.storage.first_touch import FirstTouch
from reprise.cache.transfer.transfer import Transfer
from reprise.engine.counters import Counters, collect
from reprise.engine.messages import (
    Adopt,
    Head,
    ModelInfo,
    Output,
    SessionReply,
    SessionRequest,
    Stats,
    Submit,
    Timings,
    TokenLogprob,
)
from reprise.engine.session_directory import SessionDirectory
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.engine.step.compute import Computed, StepClock, StepCompute
from reprise.engine.step.held_moves import HeldMoves
from reprise.engine.step.intake import Intake
from reprise.engine.step.ports import DraftMaker
from reprise.engine.step.sampler import BadLogits, Sampled, Sampler
from reprise.engine.step.verify import Verifier
from reprise.kernels.device_errors import is_sticky, lacks_memory
from reprise.scheduler.budgets.budget import StepWork
from reprise.scheduler.schedule import Schedule
from reprise.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

_LOAD_WAIT_S = 0.005  # when there is nothing to do but wait for KV; new requests wait no longer than that
_CLOSE_TIMEOUT_S = 8.0  # for what was computed to reach the disk


class Engine:
    """Single-threaded: `reprise.engine.process.loop` calls it from its loop. `now` is a monotonic clock in seconds.

    Whatever goes wrong in a step, what was committed before it stays right: tokens are counted as computed only after
    the forward pass that writes their KV was launched, and whatever reads that KV comes behind it. Where a device fails
    behind the host's back, it fails for good, and the engine ends (`is_fatal`).
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        cache: CacheManager,
        scheduler: Scheduler,
        transfer: Transfer,
        choices: RunningChoices,
        intake: Intake,
        compute: StepCompute,
        verifier: Verifier | None,
        directory: SessionDirectory,
        first_touch: FirstTouch,
        drafter: DraftMaker | None,
    ) -> None:
        """intake: adds to `choices`. verifier: None if nothing that was loaded is to be recomputed. drafter:
        None if nothing is drafted."""
        self.model = model
        self._cache = cache
        self._scheduler = scheduler
        self._transfer = transfer
        self._choices = choices
        self._intake = intake
        self._compute = compute
        self._verifier = verifier
        self._directory = directory
        self._first_touch = first_touch
        self._drafter = drafter
        self._moves = HeldMoves(transfer, seals_may_wait=self._seals_may_wait)
        self._sampler = Sampler()
        self._counters = Counters()
        self._changes = 0  # of the requests that the cache knows, as of the last look
        self._is_steady = False  # none of them has come, ended or given way lately
        self._under_way: tuple[Computed, StepWork] | None = None  # a step that drew nothing, and may not be over

    # --- requests -----------------------------------------------------------------------------------------------------

    def accept(self, request: Submit, now: float) -> list[Output]:
        """Queue every choice of a request, as soon as its grammar is compiled if it has one. Returns error outputs for
        those that cannot be taken."""
        return self._intake.open_request(request, now)

    def abort(self, request_id: str) -> None:
        """The client is gone: every choice ends now, what it computed stays cached. Forgives unknown ids."""
        self._intake.cancel(request_id)
        for choice in self._choices.of_request(request_id):
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
        return refused + [self._end(choice, "length", now) for choice in self._choices]

    @staticmethod
    def is_fatal(error: Exception) -> bool:
        """Whether a device has failed for good, see `reprise.kernels.device_errors`. Running out of memory passes."""
        return is_sticky(error)

    def fail_all(self, message: str) -> list[Output]:
        """End everything with an error. Nothing of the failed step is kept: half of it may have been written."""
        outputs = self._intake.fail_uncompiled(message)
        for choice in self._choices:
            outputs.append(choice.failed(message))
            self._close(choice, 0)
        self._moves.carry_out_all([move for move in self._cache.take_moves() if not isinstance(move, CopyRows)])
        return outputs

    def has_work(self) -> bool:
        return self._scheduler.has_work() or bool(self._intake.held)

    @property
    def bell(self) -> int:
        """A file descriptor that can be read when something has ended that `poll` should hear of."""
        return self._transfer.bell

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
        return self._directory.take_replies()

    def _order_what_comes_next(self, now: float) -> None:
        changes, self._changes = self._changes, self._cache.changes
        self._is_steady = changes == self._changes
        self._moves.carry_out()
        self._hear(now)
        self._requeue_failed()
        self._cache.plan(self._scheduler.upcoming(), self._scheduler.num_starting, now)
        # Copies inside HBM belong to a step; between steps there are none.
        self._moves.carry_out(self._cache.take_moves())

    def _seals_may_wait(self) -> bool:
        """Not when a turn came or ended, nor while one waits: what is sealed late may leave HBM late only."""
        scheduler = self._scheduler
        return self._is_steady and not scheduler.num_waiting and self._cache.is_roomy(len(scheduler.running))

    def _hear(self, now: float) -> None:
        for event in self._transfer.poll():
            if isinstance(event, Transferred) and event.direction.endswith("to_hbm"):
                self._counters.load_seconds += event.seconds
            self._cache.on_event(event, now)

    def _requeue_failed(self) -> set[str]:
        """Sequences whose load has failed start anew with what is left of their history. Returns their ids."""
        failed = set(self._cache.requests.take_failed())
        for sequence_id in failed:
            self._restart(self._choices[sequence_id])
        return failed

    def _restart(self, choice: RunningChoice) -> None:
        """What a sequence has computed is void: it is admitted anew."""
        sequence_id = choice.sequence.request_id
        self._note_dropped(choice, self._cache.requests.void(sequence_id))
        self._scheduler.requeue(choice.sequence)
        self._compute.tables.drop(sequence_id)
        if not choice.reported:
            choice.report = None

    def step(self, now: float) -> list[Output]:
        """Run one batch. When it raises, call `fail_all`."""
        clock = StepClock(now)
        refused = self._intake.queue_compiled(now) if self._intake.held else []
        if self._cache.parking.hopeless:
            refused += self._fail_hopeless()
        schedule = self._schedule(now)
        self._move(schedule)
        if not schedule.chunks:
            self._transfer.wait(_LOAD_WAIT_S)  # everything that could run waits for its KV
            return refused
        clock.begin_computing()
        drafts = {} if self._drafter is None else self._drafter.propose(schedule.chunks, self._choices)
        computed = self._run(schedule, drafts)
        if computed is None:
            return refused
        self._learn_before()
        self._settle(computed, clock)
        self._close_over(computed)
        outputs = self._draw(computed, clock.now())
        if computed.done.is_done:
            seconds = clock.computing_s()
            self._learn(computed, seconds)
            self._scheduler.ran(seconds, computed.waited_s)
        else:
            self._under_way = computed, schedule.work
        return refused + outputs

    def _schedule(self, now: float) -> Schedule:
        """Decide who runs, and how many tokens of each. Tell first-time runners where their KV was found."""
        schedule = self._scheduler.schedule(now)
        for sequence in schedule.preempted:
            self._compute.tables.drop(sequence.request_id)
        for chunk in schedule.chunks:
            choice = self._choices[chunk.sequence.request_id]
            choice.begin_step(now)
            if choice.report is None:
                choice.report = self._cache.requests.report(chunk.sequence.request_id)
                chunk.sequence.cached_tokens = choice.report.cached_tokens
        return schedule

    def _move(self, schedule: Schedule) -> None:
        """Order what the step needs, and what was held back until now."""
        if schedule.preempted:
            self._is_steady = False
        running = {chunk.sequence.request_id for chunk in schedule.chunks}
        self._moves.carry_out(self._cache.take_moves(), running)

    def _settle(self, computed: Computed, clock: StepClock) -> None:
        """Count what was computed and have it saved. Those whose KV did not come, or was not right, start anew."""
        failed = self._restart_failed(computed, clock)
        captured, pieces = self._compute.capture(computed, failed)
        self._moves.hold(self._cache.take_moves(), captured, pieces)
        for chunk in computed.chunks:
            if chunk.sequence.request_id not in failed:
                self._cache.requests.commit(chunk.sequence.request_id, chunk.num_tokens)
                if (shares := computed.attention.get(chunk.sequence.request_id)) is not None:
                    self._cache.requests.attended(chunk.sequence.request_id, shares)
                chunk.sequence.computed_tokens += chunk.num_tokens
                self._choices[chunk.sequence.request_id].load_wait_s += computed.waited_s
        computed.drop(failed)
        if self._verifier is not None:
            contradicted = set()
            for choice in self._verifier.disagreeing(computed.ready, computed.first_logits):
                self._restart(choice)
                contradicted.add(choice.sequence.request_id)
            computed.drop(contradicted)

    def _restart_failed(self, computed: Computed, clock: StepClock) -> set[str]:
        """Hear of the loads, and have everybody start anew whose has failed or was too late. Returns their ids."""
        self._hear(clock.called)
        failed = self._requeue_failed()
        for sequence_id in computed.late - failed:
            # It goes on when the load has ended, in whatever way; until then its pages may still be written to.
            self._restart(self._choices[sequence_id])
        failed |= computed.late
        for sequence_id in failed:
            self._choices[sequence_id].load_wait_s += computed.waited_s
            self._choices[sequence_id].void_s = clock.now()
        return failed

    def _run(self, schedule: Schedule, drafts: dict[str, list[int]]) -> Computed | None:
        """Return None if the device had no memory for it: then it is tried again in smaller steps. Raises where these
        are of no use."""
        try:
            return self._compute.run(schedule.chunks, self._choices, drafts)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            problem = error.with_traceback(None)  # whose frames hold what was computed so far
        for chunk in schedule.chunks:
            self._choices[chunk.sequence.request_id].draft = []
        self._compute.free_memory()
        if not self._scheduler.halve_steps(schedule):
            raise problem
        log.warning("steps have at most half as many tokens from now on: %s", problem)
        return None

    def _learn_before(self) -> None:
        """Learn what the step before took, if it was not over when it returned."""
        if self._under_way is not None:
            (computed, work), self._under_way = self._under_way, None
            seconds = computed.done.seconds_since(computed.begun)
            self._learn(computed, seconds)
            self._scheduler.ran_before(work, seconds - computed.waited_s)

    def _learn(self, computed: Computed, seconds: float) -> None:
        """What the step took, for those who expect what the next ones take."""
        self._counters.steps += 1
        self._counters.step_seconds += seconds
        if not computed.reads_parked:
            self._cache.rates.computed(computed.num_tokens, seconds - computed.waited_s)
        if self._drafter is not None and computed.only_decodes and not computed.waited_s:
            self._drafter.stepped(computed.num_tokens, seconds)

    def _draw(self, computed: Computed, now: float) -> list[Output]:
        """A token for everybody who is ready, and more where a draft was right. A choice whose logits are no
        distribution ends."""
        outputs: list[Output] = []
        while computed.ready:
            # What it has said before decides about a token of a stateful choice, so it draws one after the other.
            firsts = computed.first_rows
            wanted = [
                (place, ahead)
                for place, choice in enumerate(computed.ready)
                for ahead in range(1 + (len(choice.draft) if choice.is_stateless else 0))
            ]
            logits = computed.logits
            if len(wanted) < len(logits):
                logits = logits[[firsts[place] + ahead for place, ahead in wanted]]
            try:
                drawn = self._sampler.sample(
                    logits, [computed.ready[place].sample_row(ahead) for place, ahead in wanted]
                )
            except BadLogits as error:
                outputs += self._without_unusable(computed, [wanted[row] for row in error.rows])
                continue
            by_choice: list[list[Sampled]] = [[] for _ in computed.ready]
            for (place, _), sampled in zip(wanted, drawn, strict=True):
                by_choice[place].append(sampled)
            for choice, first, tokens in zip(computed.ready, firsts, by_choice, strict=True):
                later = computed.logits[first + 1 : first + 1 + len(choice.draft)]
                outputs.append(self._accept(choice, self._drawn(choice, tokens, later), computed, now))
            break
        return outputs

    def _without_unusable(self, computed: Computed, bad: Sequence[tuple[int, int]]) -> list[Output]:
        """End the choices whose next token cannot be drawn; of a draft, only what is before such a token counts. bad:
        (place among the ready ones, place among its rows)."""
        ended = [computed.ready[place] for place, ahead in bad if ahead == 0]
        outputs = [self._end_unusable(choice) for choice in ended]
        computed.drop({choice.sequence.request_id for choice in ended})
        if any(ahead for _, ahead in bad):
            computed.forget_drafts()
        return outputs

    def _drawn(self, choice: RunningChoice, tokens: Sequence[Sampled], later: Tensor) -> Iterator[Sampled]:
        """The tokens of a choice, each drawn when it is asked for if those before it decide about it. tokens: drawn
        already. later: logits of the rows of its draft."""
        yield from tokens
        if choice.is_stateless:
            return
        for row in range(len(later)):
            try:
                yield self._sampler.sample(later[row : row + 1], [choice.sample_row()])[0]
            except BadLogits:
                return  # the next step will say so

    def _accept(self, choice: RunningChoice, drawn: Iterator[Sampled], computed: Computed, now: float) -> Output:
        """Append sampled tokens as far as its draft was right, and the first that it did not have; end the choice if
        that was its last."""
        sequence, expected = choice.sequence, iter(choice.draft)
        taken: list[Sampled] = []
        is_over = False
        for sampled in drawn:
            taken.append(sampled)
            self._append(choice, sampled.token_id)
            is_over = choice.ends_with(sampled.token_id)
            if is_over or next(expected, None) != sampled.token_id:
                break
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        accepted = len(taken) - 1
        if self._drafter is not None and choice.draft:
            self._drafter.judge(choice, accepted)
        if accepted:
            self._compute.capture_accepted(computed, sequence.request_id, accepted)
            self._cache.requests.commit(sequence.request_id, accepted)
            sequence.computed_tokens += accepted
        reason = None
        if is_over:
            reason = "stop"
        elif sequence.output_tokens >= sequence.sampling.max_tokens or (
            len(sequence.token_ids) >= self.model.max_context and not self._truncate(choice)
        ):
            reason = "length"
        token_ids = [sampled.token_id for sampled in taken]
        found = [sampled.logprob for sampled in taken if sampled.logprob is not None]
        logprobs = found or None
        if reason is not None:
            return self._end(choice, reason, now, token_ids, logprobs)
        return self._output(choice, token_ids, logprobs, now)

    def _append(self, choice: RunningChoice, token_id: int) -> None:
        choice.sequence.token_ids.append(token_id)
        if choice.penalties is not None:
            choice.penalties.append(token_id)
        if choice.constraint is not None:
            choice.constraint.accept(token_id)
        self._counters.generated_tokens += 1

    def _truncate(self, choice: RunningChoice) -> bool:
        """The window is full in the middle of an answer: go on with less history, if that is allowed and possible."""
        sequence = choice.sequence
        if not choice.may_truncate:
            return False
        # What is saved was never rotated: what stays of the history is better had from there.
        self._moves.carry_out_all()
        self._hear(time.monotonic())
        try:
            dropped = self._cache.requests.truncate(sequence.request_id)
        except DoesNotFit:
            return False
        self._note_dropped(choice, dropped)
        self._scheduler.requeue(sequence)
        self._compute.tables.drop(sequence.request_id)
        return True

    @staticmethod
    def _note_dropped(choice: RunningChoice, num_tokens: int) -> None:
        """Count tokens that have left a running choice's context."""
        if not num_tokens:
            return
        choice.sequence.dropped_tokens += num_tokens
        if choice.report is not None:  # said again with the last output
            truncated = choice.report.truncated_tokens + num_tokens
            choice.report = msgspec.structs.replace(choice.report, truncated_tokens=truncated)
            choice.report_changed = choice.reported

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

    def _close_over(self, computed: Computed) -> None:
        """Close the choices of which the KV alone was wanted, now that it is there."""
        over = [choice for choice in computed.ready if choice.is_over]
        if not over:
            return
        computed.drop({choice.sequence.request_id for choice in over})
        for choice in over:
            if choice.report is not None:
                self._cache.stats.count_prompt(choice.report)
            self._close(choice, choice.sequence.computed_tokens)

    def _end_unusable(self, choice: RunningChoice) -> Output:
        """No token can be drawn for it: its grammar has failed, or its logits are no numbers."""
        if choice.constraint is not None and choice.constraint.is_failed:
            self._close(choice, choice.sequence.computed_tokens)
            return choice.failed("it has become too costly to follow", "invalid_grammar")
        self._cache.requests.distrust(choice.sequence.request_id)
        self._close(choice, 0)
        return choice.failed("the model produced no valid distribution for the next token")

    def _fail_hopeless(self) -> list[Output]:
        """End those whose contexts are larger than HBM and that DRAM has had no room for, for long."""
        outputs = []
        for sequence_id in self._cache.parking.take_hopeless():
            choice = self._choices.get(sequence_id)
            if choice is not None:
                outputs.append(choice.failed("DRAM has no room for a context that is larger than HBM", "overloaded"))
                self._close(choice, choice.sequence.computed_tokens)
        return outputs

    def _close(self, choice: RunningChoice, num_tokens: int) -> None:
        """Leave every table; the session's context is the first `num_tokens` tokens, as far as they were computed, of a
        request's first choice."""
        sequence = choice.sequence
        self._scheduler.remove(sequence)
        self._cache.requests.close(sequence.request_id, num_tokens, time.monotonic(), goes_on=choice.is_first)
        self._compute.tables.drop(sequence.request_id)
        self._choices.remove(choice)
        if self._drafter is not None:
            self._drafter.forget(sequence.request_id)

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
        elif choice.report is not None and choice.selected_tokens and finish_reason is not None:
            report = msgspec.structs.replace(choice.report, selected_tokens=choice.selected_tokens)
        elif choice.report_changed and finish_reason is not None:
            report = choice.report
        return choice.output(token_ids, logprobs, finish_reason, report, timings, prompt_logprobs)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def sessions(self, request: SessionRequest, now: float) -> list[SessionReply]:
        """Answer what is asked about sessions; a deletion is answered by `poll` when the bytes are gone."""
        reply = self._directory.apply(request, now)
        return [] if reply is None else [reply]

    def adopt(self, request: Adopt, now: float) -> list[SessionReply]:
        """Take over a session of another replica; answered by `poll` when the headers of its extents have come."""
        reply = self._directory.adopt(request, now)
        return [] if reply is None else [reply]

    def take_heads(self) -> list[Head]:
        """Return the heads of sessions that have changed since the last call."""
        return self._directory.take_heads()

    # --- housekeeping -------------------------------------------------------------------------------------------------

    def idle(self, now: float) -> None:
        """TTL sweep, memory for what comes, and the invariant that must hold when nothing runs."""
        self._cache.sessions.sweep(now)
        self._first_touch.go_on(*self._cache.reached, lambda: bool(self._choices))
        self._cache.pages_are_ready(self._first_touch.pages_ready)
        if not self._choices and self._cache.num_leases and not self._cache.in_flight:
            log.error("%d pages are pinned although nothing runs", self._cache.num_leases)

    def close(self) -> None:
        """Let what was computed reach the disk, within a deadline. Nothing else may be called afterwards."""
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        for choice in self._choices:
            self._close(choice, choice.sequence.computed_tokens)
        self._intake.close()
        self._cache.sessions.deletions.retry()  # the next process would find what the disk would not delete
        self.poll(time.monotonic())
        while self._cache.in_flight and time.monotonic() < end:
            self._transfer.wait(0.05)
            self.poll(time.monotonic())
        self._transfer.close(max(0.0, end - time.monotonic()))
        if self._compute.runner.weights is not None:
            self._compute.runner.weights.close()

    def stats(self) -> Stats:
        return collect(
            self._counters,
            scheduler=self._scheduler,
            cache=self._cache,
            transfer=self._transfer,
            verifier=self._verifier,
            weights=self._compute.runner.weights,
            drafted_tokens={} if self._drafter is None else self._drafter.counts,
            eager_decode_steps=self._compute.eager_decode_steps,
        )
