"""Keeps the choices that wait or run, with what the engine knows and tells the app of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from reprise.cache.stats import TokensBySource
from reprise.engine.messages import Output, Timings, TokenLogprob, error_output
from reprise.engine.step.grammar import Constraint
from reprise.engine.step.sampler import PenaltyState, SampleRow
from reprise.scheduler.sequence import Sequence


@dataclass(slots=True)
class RunningChoice:
    """A choice (one answer of a request) that waits or runs: its sequence, with what only the engine needs to know of
    it."""

    sequence: Sequence
    request_id: str  # the app's, shared by all choices of a request
    index: int
    seed: int
    penalties: PenaltyState | None
    end_ids: tuple[int, ...]
    may_truncate: bool
    is_first: bool = True  # first of its request's choices, with which clients go on
    is_over: bool = False  # it was said elsewhere: only its KV is computed
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None  # most likely tokens wanted beside each of the prompt's; None: no logprobs of it
    prompt_known: dict[int, TokenLogprob] = field(default_factory=dict)  # logprobs by place in the prompt
    report: TokensBySource | None = None
    reported: bool = False
    report_changed: bool = False  # whether it has changed since it was reported
    reads_in_part: bool = False  # whether it may read parts of its context, so that its KV is not what it could be
    selected_tokens: int = 0  # tokens of its answer that read a part of its context only
    load_wait_s: float = 0.0  # it waited for KV that was being loaded, in its steps and outside of them
    reuse_s: float = 0.0  # estimate of how long its cached tokens would have taken to compute
    saved_s: float = 0.0  # what of that was saved, as loads took their part; known with the first output
    wants_progress: bool = False  # its client wants to know how far its prompt is read
    has_run: bool = False
    void_s: float | None = None  # time at which a load made its rows void, until it runs again
    prediction: list[int] = field(default_factory=list)  # what the request expects as its answer
    draft: list[int] = field(default_factory=list)  # draft of the step under way, computed after its newest token
    accepted_predictions: int = 0  # tokens of its prediction that were drafted and right
    rejected_predictions: int = 0

    @property
    def is_stateless(self) -> bool:
        """Whether the choice's next token depends on the logits alone, and not also on the tokens generated before."""
        return self.penalties is None and self.constraint is None

    @property
    def has_said_all(self) -> bool:
        """Whether the choice's answer has reached its maximum length."""
        return self.sequence.output_tokens >= self.sequence.sampling.max_tokens

    @property
    def new_report(self) -> TokensBySource | None:
        """The report of where the prompt's KV was found, if the next output is the first to carry it; otherwise
        None."""
        return None if self.reported else self.report

    def append(self, token_id: int) -> None:
        """Add a generated token to the sequence, its penalties and its grammar."""
        self.sequence.token_ids.append(token_id)
        if self.penalties is not None:
            self.penalties.append(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)

    def sample_row(self, ahead: int = 0) -> SampleRow:
        """Return the sampling parameters for one of the choice's next tokens. ahead: 0 for the next token, n for the
        n-th after it, which a draft needs; above 0 only for a choice whose draws depend on no earlier token."""
        sequence = self.sequence
        return SampleRow(
            sampling=sequence.sampling,
            seed=self.seed,
            position=sequence.output_tokens + ahead,
            penalties=self.penalties,
            end_ids=self.end_ids,
            constraint=self.constraint,
        )

    def ends_with(self, token_id: int) -> bool:
        """Return whether `token_id`, which was sampled last, ends the answer: the answer's grammar is complete, or the
        token is in `end_ids` and comes after min_tokens others."""
        if self.constraint is not None and self.constraint.is_stopped:
            return True
        if self.constraint is not None and self.constraint.is_failed:
            return False  # the next draw says so: what there is of the answer does not follow the grammar
        return token_id in self.end_ids and self.sequence.output_tokens > self.sequence.sampling.min_tokens

    def prompt_rows(self, first: int, num_tokens: int) -> int:
        """Return how many leading rows of a chunk need logits, from which the logprobs of the prompt's tokens are made.
        first: index of the chunk's first row in the context."""
        if self.prompt_logprobs is None or self.reported:
            return 0
        return max(0, min(num_tokens, self.sequence.prompt_tokens - 1 - first))

    def begin_step(self, now: float) -> None:
        """Count how long the choice has waited for KV, now that a step runs it: from its admission to its first step,
        and from a step whose rows were void, because a load was late, to the next."""
        since_s = self.void_s if self.has_run else self.sequence.scheduled_s
        if since_s is not None:
            self.load_wait_s += max(0.0, now - since_s)
        self.has_run, self.void_s = True, None

    def take_prompt_logprobs(self) -> list[TokenLogprob] | None:
        """Return the logprobs of all the prompt's tokens but the first, and forget them; None if they were not asked
        for. Call it when they are complete."""
        if self.prompt_logprobs is None:
            return None
        known, self.prompt_known = self.prompt_known, {}
        return [known[place] for place in range(1, self.sequence.prompt_tokens)]

    def timings(self, now: float) -> Timings:
        """Return how the choice's time until `now` divides into queueing, loading, prefill and decoding."""
        sequence = self.sequence
        scheduled = now if sequence.scheduled_s is None else sequence.scheduled_s
        first = now if sequence.first_token_s is None else sequence.first_token_s
        return Timings(
            queue_ms=(scheduled - sequence.arrived_s) * 1e3,
            load_ms=self.load_wait_s * 1e3,
            prefill_ms=max(0.0, first - scheduled - self.load_wait_s) * 1e3,
            decode_ms=(now - first) * 1e3,
            saved_ms=self.saved_s * 1e3,
        )

    def output(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        now: float,
        finish_reason: str | None = None,
        timings: Timings | None = None,
    ) -> Output:
        """Return the message that carries tokens of the choice, or its end, to the app. The first output has the report
        of where the prompt's KV was found. The last one has the report again if that has changed."""
        prompt_logprobs = None
        if (report := self.new_report) is not None:
            self.reported = True
            self.saved_s = max(0.0, self.reuse_s - self.load_wait_s)
            if token_ids:
                prompt_logprobs = self.take_prompt_logprobs()
            timings = timings or self.timings(now)
        elif self.report is not None and finish_reason is not None:
            if self.selected_tokens:
                report = msgspec.structs.replace(self.report, selected_tokens=self.selected_tokens)
            elif self.report_changed:
                report = self.report
        return Output(
            request_id=self.request_id,
            choice=self.index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            report=report,
            timings=timings,
            error=None,
            error_code=None,
            prompt_logprobs=prompt_logprobs,
            accepted_predictions=0 if finish_reason is None else self.accepted_predictions,
            rejected_predictions=0 if finish_reason is None else self.rejected_predictions,
        )

    def failed(self, message: str, code: str = "internal_error") -> Output:
        """Return the message that ends the choice with an error. Without a code, the error is an internal one."""
        return error_output(self.request_id, self.index, code, message)


class RunningChoices:
    """A table of every choice that runs or waits, by the id of its sequence and by the app's request. Used in the
    engine's loop."""

    def __init__(self) -> None:
        self._by_sequence: dict[str, RunningChoice] = {}
        self._sequences: dict[str, list[str]] = {}  # the app's request id -> its unfinished sequences
        self.watched: dict[str, None] = {}
        """The ids, in order of arrival, of sequences that have not ended and whose clients want to know of their
        progress. Read only."""

    def __getitem__(self, sequence_id: str) -> RunningChoice:
        return self._by_sequence[sequence_id]

    def __len__(self) -> int:
        return len(self._by_sequence)

    def __iter__(self) -> Iterator[RunningChoice]:
        """Iterate over a copy, because choices may be removed meanwhile."""
        return iter(list(self._by_sequence.values()))

    def get(self, sequence_id: str) -> RunningChoice | None:
        return self._by_sequence.get(sequence_id)

    def of_request(self, request_id: str) -> list[RunningChoice]:
        """Return the unfinished choices of a request; none if it is not known."""
        return [self._by_sequence[sequence_id] for sequence_id in self._sequences.get(request_id, ())]

    def add(self, choice: RunningChoice) -> None:
        sequence_id = choice.sequence.request_id
        self._by_sequence[sequence_id] = choice
        self._sequences.setdefault(choice.request_id, []).append(sequence_id)
        if choice.wants_progress:
            self.watched[sequence_id] = None

    def remove(self, choice: RunningChoice) -> None:
        sequence_id = choice.sequence.request_id
        del self._by_sequence[sequence_id]
        self.watched.pop(sequence_id, None)
        remaining = self._sequences[choice.request_id]
        remaining.remove(sequence_id)
        if not remaining:
            del self._sequences[choice.request_id]
