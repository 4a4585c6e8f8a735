"""Runs work for the fleet in the background."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class Background:
    """A set of tasks that are kept until they end, and whose failures are logged. One per replica, on its event
    loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, *, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the tasks to end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work for the fleet failed", exc_info=error)
