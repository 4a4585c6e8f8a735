"""One answer, or n of them: tokens from the engine in, what they say out. Plain and streamed answers share it."""

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from app.conversations.transcripts import PreparedPrompt
from app.errors import (
    ApiError,
    cannot_be_shortened,
    engine_lost,
    internal_error,
    invalid_grammar,
    overloaded,
)
from app.observe.metrics import Metrics
from app.tenancy.places import Ticket
from app.text.answer_parser import AnswerParser, AnswerParts, Call
from app.text.tokenizer import ChatTokenizer
from app.turn.deadline import Deadline
from engine.messages import (
    CacheReport,
    ModelInfo,
    Output,
    SamplingParams,
    SessionReply,
    SessionRequest,
    Stats,
    Submit,
    Timings,
    TokenLogprob,
)
from engine.process.client import EngineLost


class OutputSource(Protocol):
    """Of all choices of a request, interleaved; `engine.process.client.OutputStream`."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    async def aclose(self) -> None: ...


class EnginePort(Protocol):
    """The part of `engine.process.client.EngineClient` that the app uses; the tests have a scripted one."""

    @property
    def state(self) -> str: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def model(self) -> ModelInfo | None: ...
    @property
    def stats(self) -> Stats | None: ...
    @property
    def restarts(self) -> int: ...

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def wait_ready(self) -> None: ...
    async def submit(self, request: Submit) -> OutputSource: ...
    async def sessions(self, request: SessionRequest, *, timeout_s: float) -> SessionReply: ...
    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None: ...
    def finish_all(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice has to say next."""

    choice: int
    parts: AnswerParts
    logprobs: list[dict[str, Any]] | None  # None: not asked for
    finish_reason: str | None


class Answer:
    """The text side of one choice: tokens in, text and logprobs that are safe to show out."""

    def __init__(
        self,
        *,
        index: int,
        tokenizer: ChatTokenizer,
        stops: tuple[str, ...],
        min_tokens: int,
        parser: AnswerParser,
        shows_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""  # all of it, whatever it says
        self.finish_reason: str | None = None
        self.report: CacheReport | None = None
        self.timings: Timings | None = None
        self.prompt_logprobs: list[dict[str, Any]] | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        self._finder = tokenizer.stop_finder(stops)
        self._shows_stop = shows_stop
        self._min_tokens = min_tokens
        self._parser = parser
        self._unsearched = 0  # characters of the first `min_tokens` tokens, in which no stop string counts
        self._logprobs: deque[dict[str, Any]] = deque()  # of the tokens whose text is not shown yet
        self._shown_logprobs = 0

    @property
    def content(self) -> str:
        """Of the text, what is said to the user."""
        return self._parser.content

    @property
    def reasoning(self) -> str:
        return self._parser.reasoning

    @property
    def reasoning_tokens(self) -> int:
        """Of an answer that is over: tokens of its thought, with the tags around it."""
        if not self._parser.thought_chars:
            return 0
        return min(len(self.token_ids), bisect_right(self.text_ends, self._parser.thought_chars))

    @property
    def calls(self) -> list[Call]:
        return self._parser.calls

    @property
    def text_ends(self) -> list[int]:
        """Per token, the number of characters complete behind it; goes beyond `text` where a stop string cut it."""
        return self._detokenizer.text_ends

    @property
    def stopped_by_string(self) -> bool:
        return self._finder.hit

    @property
    def stop_string(self) -> str:
        return self._finder.found

    @property
    def kept_tokens(self) -> int:
        """Leading tokens all of whose text is in the answer."""
        return tokens_within(self.text_ends, len(self.text)) if self._finder.hit else len(self.token_ids)

    def push(self, output: Output) -> Delta | None:
        """None while there is nothing to show. Tokens behind a stop string are dropped."""
        shown_before = len(self.text)
        for position, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            if output.logprobs is not None:
                self._logprobs.append(self._logprob(token_id, output.logprobs[position]))
            self._show(self._detokenizer.push(token_id))
            if self._finder.hit:
                self.text += self._finder.found if self._shows_stop else ""
                break
        if self._finder.hit:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self._flush_text()
        logprobs = self._shown() if output.logprobs is not None else None
        parts = self._parser.push(self.text[shown_before:])
        if self.finish_reason is not None:
            parts.add(self._parser.flush())
            if self.calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        if not parts and not logprobs and self.finish_reason is None:
            return None
        return Delta(self.index, parts, logprobs, self.finish_reason)

    def flush(self) -> None:
        """Nothing more will come: what was held back belongs to the answer."""
        shown_before = len(self.text)
        self._flush_text()
        self._parser.push(self.text[shown_before:])
        self._parser.flush()

    def note_prompt(self, values: list[TokenLogprob], token_ids: list[int]) -> None:
        """Log-probabilities of the prompt's tokens behind the first."""
        self.prompt_logprobs = [
            self._logprob(token_id, value) for token_id, value in zip(token_ids[1:], values, strict=True)
        ]

    def _flush_text(self) -> None:
        self._show(self._detokenizer.flush())
        if not self._finder.hit:
            self.text += self._finder.flush()

    def _show(self, piece: str) -> None:
        if len(self.token_ids) <= self._min_tokens:
            self._unsearched += len(piece)
            self.text += piece
        elif not self._finder.hit:
            self.text += self._finder.push(piece)

    def token_entry(self, token_id: int, logprob: float | None = None) -> dict[str, Any]:
        """A token as it is said; without a logprob where nothing stands before it."""
        text, raw = self._tokenizer.token_text(token_id)
        # JSON has no infinity; OpenAI reports a token outside the distribution as -9999.
        value = None if logprob is None else max(logprob, -9999.0)
        return {"token": text, "logprob": value, "bytes": list(raw)}

    def _logprob(self, token_id: int, value: TokenLogprob) -> dict[str, Any]:
        top = [self.token_entry(*pair) for pair in value.top]
        return {**self.token_entry(token_id, value.logprob), "top_logprobs": top}

    def _shown(self) -> list[dict[str, Any]]:
        """The logprobs that became due: those of tokens whose text is out."""
        due = self.kept_tokens if self.finish_reason else bisect_right(self.text_ends, len(self.text))
        count = max(0, due - self._shown_logprobs)
        self._shown_logprobs += count
        return [self._logprobs.popleft() for _ in range(count)]


def tokens_within(text_ends: list[int], end: int) -> int:
    """How many leading tokens lie wholly in the first `end` characters.

    A token that added no text may hold the first bytes of a character that is cut off: at the end it does not count.
    """
    complete = text_ends[bisect_right(text_ends, end) - 1] if text_ends and text_ends[0] <= end else 0
    return bisect_left(text_ends, complete) + 1 if complete else 0


class Generation(AsyncIterator[Delta]):
    """A request that the engine works on. Iterate it to the end, or close it: `aclose` aborts what is unfinished.

    Raises ApiError when the engine refuses, fails or dies.
    """

    def __init__(
        self,
        *,
        request_id: str,
        model: ModelInfo,
        engine: EnginePort,
        outputs: OutputSource,
        metrics: Metrics,
        prompt: PreparedPrompt,
        token_ids: list[int],
        sampling: SamplingParams,
        choices: list[Answer],
        record: Callable[[Answer], None],
        arrived_s: float,
        deadline: Deadline,
        ticket: Ticket,
        service_tier: str,
        grammar_param: str,
        on_first_token: Callable[["Generation", Answer], None],
        on_close: Callable[["Generation"], None],
    ) -> None:
        self.request_id = request_id
        self.created = int(time.time())
        self.model = model
        self.sampling = sampling
        self.prompt = prompt
        self.token_ids = token_ids  # of the prompt, and of the answer's beginning where the client gave one
        self.arrived_s = arrived_s
        self.service_tier = service_tier
        self.limit_headers = ticket.headers
        self.choices = choices
        self._closed = False
        self._deadline = deadline
        self._ticket = ticket
        self._on_first_token = on_first_token
        self._on_close = on_close
        self._grammar_param = grammar_param  # the field that says what the answer must be
        self._engine = engine
        self._outputs = outputs
        self._record = record
        self._metrics = metrics
        self.closed = asyncio.Event()  # what was generated is recorded, or soon will be: before whatever follows
        self._open = set(range(len(choices)))
        self._upcoming: asyncio.Task[Delta | None] | None = None

    @property
    def report(self) -> CacheReport | None:
        """Of the first choice that has one: it paid for the prompt, its siblings found it cached."""
        return next((choice.report for choice in self.choices if choice.report is not None), None)

    async def wait_first(self, timeout_s: float) -> None:
        """Wait a while for the first delta, so that what goes wrong before it can still be answered with a status."""
        self._upcoming = asyncio.create_task(self._next())
        done, _ = await asyncio.wait({self._upcoming}, timeout=timeout_s)
        for task in done:
            task.result()  # raises what the answer to the request is; a delta stays where it is

    async def __anext__(self) -> Delta:
        if self._upcoming is not None:
            task, self._upcoming = self._upcoming, None
            delta = await task
        else:
            delta = await self._next()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        """Idempotent. What was generated so far is recorded."""
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
        finally:
            self._open.clear()
            self._ticket.leave()
            self._metrics.e2e.observe(time.monotonic() - self.arrived_s)
            self._on_close(self)
            self.closed.set()

    def may_have_said(self, content: str) -> bool:
        """Whether one of its answers, as far as they have come, begins so."""
        return any(choice.content.startswith(content) for choice in self.choices)

    async def _next(self) -> Delta | None:
        try:
            async with self._deadline.limit():
                return await self._next_delta()
        except TimeoutError:
            raise self._failed(self._deadline.error(retry_after_s=self._ticket.retry_after_s)) from None

    async def _next_delta(self) -> Delta | None:
        """Raises TimeoutError past the deadline also where it never had to wait; cancelled there by the deadline."""
        while self._open:
            if self._deadline.is_over:
                raise TimeoutError
            try:
                output = await anext(self._outputs)
            except StopAsyncIteration:
                raise self._failed(internal_error()) from None  # the engine forgot a choice
            except EngineLost:
                raise self._failed(engine_lost()) from None
            choice = self.choices[output.choice]
            if choice.index not in self._open:
                continue
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
        choice.report = output.report or choice.report
        choice.timings = output.timings or choice.timings
        if output.prompt_logprobs is not None:
            choice.note_prompt(output.prompt_logprobs, self.token_ids)
        if not output.token_ids:
            return
        now = time.monotonic()
        if choice.first_token_s is None:
            choice.first_token_s = now
            self._metrics.first_token(choice, now - self.arrived_s)
            self._on_first_token(self, choice)
        else:
            assert choice.last_token_s is not None
            self._metrics.itl.observe((now - choice.last_token_s) / len(output.token_ids))
        choice.last_token_s = now

    def _end(self, choice: Answer, *, by_engine: bool) -> None:
        self._open.discard(choice.index)
        if choice.stopped_by_string and not by_engine:
            self._engine.finish(self.request_id, choice.index, choice.kept_tokens)
        self._end_record(choice)
        self._metrics.choice_done(choice)

    def _end_record(self, choice: Answer) -> None:
        if choice.token_ids:
            self._record(choice)

    def _failed(self, error: ApiError) -> ApiError:
        self._metrics.failures.labels(error.code).inc()
        error.headers = self._ticket.headers | error.headers
        return error

    def _refusal(self, output: Output) -> ApiError:
        match output.error_code:
            case "context_length_exceeded":
                # Without truncation nothing is sent to the engine that is longer than the window.
                kept = "what has to stay, the system prompt (or keep_first_tokens) and your newest message, is"
                return cannot_be_shortened(self.model.max_context, kept)
            case "invalid_grammar":
                return invalid_grammar(output.error or "", self._grammar_param)
            case "overloaded":
                return overloaded(self._ticket.retry_after_s)
            case _:
                return internal_error()
