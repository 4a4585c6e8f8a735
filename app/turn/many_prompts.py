"""Joins several generations into one: a text completion of many prompts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from reprise.app.turn.answer import Delta
from reprise.app.turn.generation import Generation

_Item = Delta | Exception | None


class ManyPrompts(AsyncIterator[Delta]):
    """An iterator over the deltas of several generations, with their choices numbered consecutively. It raises the
    first error of any of them. Close it afterwards, also if it was not iterated to its end: `aclose` ends all
    generations."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.generations = generations
        self._items: asyncio.Queue[_Item] = asyncio.Queue(maxsize=2 * len(generations))
        self._running: list[asyncio.Task[None]] = []
        self._unfinished = len(generations)
        self._upcoming: asyncio.Task[_Item] | None = None

    async def wait_first(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the first delta of any prompt, so that an error before it can still be answered
        with a status. Raises what a generation has raised by then."""
        self._start()
        self._upcoming = asyncio.create_task(self._items.get())
        done, _ = await asyncio.wait({self._upcoming}, timeout=timeout_s)
        for task in done:
            if isinstance(item := task.result(), Exception):
                raise item

    async def __anext__(self) -> Delta:
        self._start()
        while self._unfinished:
            task, self._upcoming = self._upcoming, None
            item = await (self._items.get() if task is None else task)
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._unfinished -= 1
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close all generations. Idempotent."""
        tasks = [*self._running, *([self._upcoming] if self._upcoming is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for generation in self.generations:
            await generation.aclose()

    def _start(self) -> None:
        if not self._running:
            first = 0
            for generation in self.generations:
                self._running.append(asyncio.create_task(self._pump(generation, first)))
                first += len(generation.choices)

    async def _pump(self, generation: Generation, first: int) -> None:
        try:
            async for delta in generation:
                await self._items.put(replace(delta, choice=first + delta.choice))
            await self._items.put(None)
        except Exception as error:  # `__anext__` raises it, where it can be answered
            await self._items.put(error)
