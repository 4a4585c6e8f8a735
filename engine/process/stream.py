"""Streams the engine's outputs of one request to the app, in order and in bounded memory."""

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from reprise.engine.messages import Output, Submit


class EngineLost(Exception):
    """The engine process died while this request ran."""


class OutputStream(AsyncIterator[Output]):
    """The outputs of one request, all choices interleaved, for one consumer. It ends when every choice has finished, by
    a finish_reason or by `EngineClient.finish`. If the engine dies, it yields the outputs that had arrived, then raises
    EngineLost.

    If a consumer is slow, it finds the outputs of a choice merged into one, so that at most one per choice is kept.
    """

    def __init__(self, request: Submit, *, abort: Callable[[str], None]) -> None:
        self.request_id = request.request_id
        self._abort = abort
        self._open = {n for n in range(request.num_choices) if not request.resume or request.resume[n] is not None}
        self._pending: dict[int, Output] = {}  # choice -> what the consumer has not taken yet, oldest first
        self._lost: str | None = None
        self._changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, so that no further output can arrive. Outputs that have arrived may still be
        waiting to be read."""
        return not self._open

    def is_open(self, choice: int) -> bool:
        return choice in self._open

    async def __anext__(self) -> Output:
        while not self._pending:
            if self._lost is not None:
                raise EngineLost(self._lost)
            if not self._open:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._pending.pop(next(iter(self._pending)))

    async def aclose(self) -> None:
        """Abort the request unless it has ended, and drop outputs that were not read. Never waits."""
        if self._open:
            self._abort(self.request_id)
        self._pending.clear()

    def push(self, output: Output) -> None:
        """Hand an output to the consumer. Called by EngineClient; never waits."""
        if output.choice not in self._open:
            return  # it was on its way when the choice was finished
        earlier = self._pending.get(output.choice)
        if earlier is not None and earlier.progress is not None:
            earlier = None  # what is newer replaces it
        self._pending[output.choice] = output if earlier is None else _merge(earlier, output)
        if output.finish_reason is not None:
            self._open.discard(output.choice)
        self._changed.set()

    def finish(self, choice: int) -> None:
        """End a choice, and drop its outputs that were not read. Called by EngineClient."""
        self._open.discard(choice)
        self._pending.pop(choice, None)
        self._changed.set()

    def end(self, *, lost: str | None) -> None:
        """End every choice. lost: why the engine is lost; None: the request was aborted. Called by EngineClient."""
        self._lost = lost
        self._open.clear()
        self._changed.set()


def _merge(earlier: Output, later: Output) -> Output:
    """Return one output that stands for two of a choice. Reuses the lists of `earlier`, which the consumer has not
    seen."""
    earlier.token_ids.extend(later.token_ids)
    logprobs = earlier.logprobs
    if logprobs is None:
        logprobs = later.logprobs
    elif later.logprobs is not None:
        logprobs.extend(later.logprobs)
    report = earlier.report if later.report is None else later.report
    timings = earlier.timings if later.timings is None else later.timings
    return msgspec.structs.replace(
        later,
        token_ids=earlier.token_ids,
        logprobs=logprobs,
        report=report,
        timings=timings,
        prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs,
    )
