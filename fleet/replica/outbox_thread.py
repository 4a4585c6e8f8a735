"""Runs the outbox on a thread of its own: two calls at once would share one transaction."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from reprise.fleet.keys import SessionName
from reprise.fleet.outbox import Outbox, Unsent

T = TypeVar("T")


class OutboxThread:
    """An object that makes calls of `reprise.fleet.outbox.Outbox` for the event loop: on one thread, in the order in
    which they come."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outbox")

    @property
    def waiting(self) -> int:
        """Number of sessions in the outbox, whose last turn the directory has not been told of."""
        return self._outbox.waiting

    @property
    def dropped(self) -> int:
        """Number of entries of the outbox that were dropped because it had no room for them."""
        return self._outbox.dropped

    async def put(self, entry: Unsent) -> None:
        await self._run(self._outbox.put, entry)

    async def first(self, count: int) -> list[Unsent]:
        return await self._run(self._outbox.first, count)

    async def remove(self, name: SessionName) -> None:
        await self._run(self._outbox.remove, name.tenant, name.session_id, name.salt)

    async def forget(self, tenant: str, session_id: str) -> None:
        await self._run(self._outbox.forget, tenant, session_id)

    async def close(self) -> None:
        await self._run(self._outbox.close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[..., T], *values: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *values)
