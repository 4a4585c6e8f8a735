"""Generates the answers to one request: tokens from the engine in, text out. Plain and streamed answers share it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from reprise.app.errors import (
    ApiError,
    cannot_be_shortened,
    engine_lost,
    internal_error,
    invalid_grammar,
    overloaded,
    stopping,
    with_target,
)
from reprise.app.schemas.fields import GenerationRequest
from reprise.app.tenancy.places import Ticket
from reprise.app.turn.answer import Answer, Delta
from reprise.app.turn.deadline import Deadline
from reprise.app.turn.observer import TurnObserver
from reprise.app.turn.ports import EnginePort, OutputSource, TurnHooks, codec_in_use
from reprise.app.turn.prepare import Prepared
from reprise.engine.messages import (
    ModelInfo,
    Output,
    Submit,
    TokensBySource,
    is_exact,
)
from reprise.engine.process.client import EngineLost


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that was admitted, with all that was decided about it before its prompt is made. `ticket` holds its
    places, one for each choice."""

    tenant: str
    arrived_s: float  # monotonic clock
    model: ModelInfo
    ticket: Ticket  # gives its places back
    deadline: Deadline
    service_tier: str  # the tier in which it is served
    weight: float  # share of the engine that it gets, against requests of weight 1
    ttft_target_ms: float | None  # its first token is wanted so soon after its arrival
    hooks: TurnHooks

    @property
    def target_left_s(self) -> float | None:
        """Seconds that are left of the target for its first token, at least 0; None if it has no target."""
        if self.ttft_target_ms is None:
            return None
        return max(0.0, self.arrived_s + self.ttft_target_ms / 1e3 - time.monotonic())


class Generation(AsyncIterator[Delta]):
    """A request on which the engine works. Iterate it to the end, or close it: `aclose` aborts what is unfinished.

    Raises ApiError when the engine refuses, fails or dies.
    """

    def __init__(
        self,
        *,
        admitted: Admitted,
        prepared: Prepared,
        submit: Submit,
        choices: list[Answer],
        engine: EnginePort,
        outputs: OutputSource,
        observer: TurnObserver,
        on_close: Callable[["Generation"], None],
    ) -> None:
        """Set up. outputs: the engine's answer to `submit`, which was made from `prepared`. on_close: called once, at
        the end."""
        self.hooks = admitted.hooks
        begun = self.hooks.begin(submit, keep_s=prepared.request.keep_s)
        self.request_id, self.created, self.paid_tokens = begun.request_id, begun.created, begun.paid_tokens
        self.tenant = admitted.tenant
        self.model = admitted.model
        self.sampling = submit.sampling
        is_raw = admitted.model.lossy_codec and is_exact(submit.cache_salt)
        self.codec = "raw" if is_raw else codec_in_use(admitted.model, engine.stats)
        """The codec that KV of this conversation may go through; raw: none."""
        is_condemned = engine.stats is not None and engine.stats.codec_condemned
        self.selector = "none" if is_exact(submit.cache_salt) or is_condemned else admitted.model.selector
        self.prompt = prepared.prompt
        self.token_ids = prepared.token_ids  # the prompt's, and those of an answer's beginning that the client gave
        self.arrived_s = admitted.arrived_s
        self.service_tier = admitted.service_tier
        self.ttft_target_ms = admitted.ttft_target_ms
        self.limit_headers = admitted.ticket.headers
        self.choices = choices
        self.response_ids: list[str] = []  # stored responses, which later requests may go on with
        self.closed = asyncio.Event()  # set when what was generated is recorded, or is in line to be
        self.is_handed_over = False
        self._closed = False
        self._deadline = admitted.deadline
        self._ticket = admitted.ticket
        self._prepared = prepared
        self._engine = engine
        self._outputs = outputs
        self._observer = observer
        self._on_close = on_close
        self._engine_id = submit.request_id
        self._open = {n for n in range(len(choices)) if not submit.resume or submit.resume[n] is not None}
        self._upcoming: asyncio.Task[Delta | None] | None = None

    @property
    def session_id(self) -> str:
        return self.prompt.session_id

    @property
    def request(self) -> GenerationRequest:
        return self._prepared.request

    @property
    def generations(self) -> Sequence["Generation"]:
        return (self,)

    @property
    def report(self) -> TokensBySource | None:
        """The report of where the prompt's KV came from. It is that of the first choice that has one: this choice
        loaded or computed the prompt, and the others found it in HBM."""
        return next((choice.report for choice in self.choices if choice.report is not None), None)

    @property
    def made_target(self) -> bool | None:
        """Whether the first choice's first token came within the turn's target; None if the turn has no target, or no
        token yet."""
        first_token_s = self.choices[0].first_token_s
        if self.ttft_target_ms is None or first_token_s is None:
            return None
        return (first_token_s - self.arrived_s) * 1e3 <= self.ttft_target_ms

    def replayed(self) -> None:
        """Record in the transcripts the choices that had already ended on the server where the turn began. To be called
        after their tokens were replayed into this generation."""
        for choice in self.choices:
            if choice.index not in self._open:
                self._end_record(choice)

    async def wait_first(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the first delta, so that an error before it can still be answered with a
        status."""
        self._upcoming = asyncio.create_task(self._next())
        done, _ = await asyncio.wait({self._upcoming}, timeout=timeout_s)
        for task in done:
            task.result()  # raises the error that is to be the answer; a delta stays for `__anext__`

    async def __anext__(self) -> Delta:
        if self._upcoming is not None:
            task, self._upcoming = self._upcoming, None
            delta = await task
        else:
            delta = await self._next()
        if delta is None:
            await self.hooks.end(self)
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        """End the generation: abort what the engine has not finished, and record what it has generated. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._upcoming is not None:
                self._upcoming.cancel()
                await asyncio.gather(self._upcoming, return_exceptions=True)
            await self._outputs.aclose()
            for index in sorted(self._open):
                self.choices[index].flush()
                self._end_record(self.choices[index])
            await self.hooks.end(self)
        finally:
            self._open.clear()
            self._ticket.leave()
            self._observer.closed(self)
            self._on_close(self)
            self.closed.set()

    async def hand_over(self) -> None:
        """Stop generating, so that another server of the fleet continues the answer. The next delta is an error that
        tells the gateway to do so."""
        self.is_handed_over = True
        await self._outputs.aclose()

    def may_have_said(self, content: str) -> bool:
        """Return whether the text of a choice begins with `content`, so that it may be the answer that a client has
        interrupted and now sends back."""
        return any(choice.content.startswith(content) for choice in self.choices)

    async def _next(self) -> Delta | None:
        try:
            async with self._deadline.limit():
                return await self._next_delta()
        except TimeoutError:
            raise self._failed(self._deadline.error(retry_after_s=self._ticket.retry_after_s)) from None

    async def _next_delta(self) -> Delta | None:
        """Return the next delta, or None at the end. Raises TimeoutError past the deadline even if it never had to
        wait; a wait is cancelled by the deadline."""
        while self._open:
            if self._deadline.is_over:
                raise TimeoutError
            try:
                output = await anext(self._outputs)
            except StopAsyncIteration:
                # Otherwise the engine forgot a choice.
                raise self._failed(stopping() if self.is_handed_over else internal_error()) from None
            except EngineLost:
                raise self._failed(engine_lost()) from None
            choice = self.choices[output.choice]
            if choice.index not in self._open:
                continue
            if output.progress is not None:
                return Delta.of_progress(choice.index, output.progress)
            self._note(choice, output)
            if output.finish_reason == "error":
                raise self._failed(self._refusal(output))
            delta = choice.push(output)
            if choice.finish_reason is not None:
                self._end(choice, by_engine=output.finish_reason is not None)
            if delta is not None:
                return delta
        return None

    def _note(self, choice: Answer, output: Output) -> None:
        choice.note(output)
        if output.prompt_logprobs is not None:
            choice.note_prompt(output.prompt_logprobs, self.token_ids)
        if not output.token_ids:
            return
        now = time.monotonic()
        if choice.first_token_s is None:
            choice.first_token_s = now
            self._observer.first_token(self, choice)
        else:
            assert choice.last_token_s is not None
            self._observer.gap(self, (now - choice.last_token_s) / len(output.token_ids))
        choice.last_token_s = now

    def _end(self, choice: Answer, *, by_engine: bool) -> None:
        self._open.discard(choice.index)
        if choice.stopped_by_string and not by_engine:
            self._engine.finish(self._engine_id, choice.index, choice.kept_tokens)
        self._end_record(choice)
        self._observer.ended(self, choice)

    def _end_record(self, choice: Answer) -> None:
        if choice.token_ids:
            self._prepared.record(choice)

    def _failed(self, error: ApiError) -> ApiError:
        self._observer.failed(self, error)
        error.headers = self._ticket.headers | error.headers
        return error

    def _refusal(self, output: Output) -> ApiError:
        match output.error_code:
            case "context_length_exceeded":
                # Without truncation nothing is sent to the engine that is longer than the window.
                kept = "what has to stay, the system prompt (or keep_first_tokens) and your newest message, is"
                return cannot_be_shortened(self.model.max_context, kept)
            case "invalid_grammar":
                return invalid_grammar(output.error or "", self._prepared.grammar_param)
            case "overloaded":
                return with_target(overloaded(self._ticket.retry_after_s), self.ttft_target_ms)
            case _:
                return internal_error()
