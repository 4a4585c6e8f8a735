"""Calls the Redis of a fleet's directory. Every call has a deadline, and after repeated failures Redis is not called
for a second, so that a stopped Redis is the same as none."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from reprise.app.conversations.breaker import Breaker, State

MOST_FAILURES, PAUSE_S = 3, 1.0  # after so many failures in a row, Redis is not asked for so long
MAX_CONNECTIONS = 64
CLOSE_S = 1.0  # longest wait for connections to close
UNHURRIED_S = 1.0  # least deadline of a call that no request waits for: on a busy machine a beat is late, not gone
_SCRIPTS = Path(__file__).parent / "scripts"

log = logging.getLogger(__name__)
T = TypeVar("T")


class DirectoryUnavailable(Exception):
    """Redis does not answer in time, refuses, or sends an invalid reply. Go on without the directory."""


class DirectoryFull(DirectoryUnavailable):
    """Redis has no memory left for more."""


class DirectoryRedis:
    """The connection of a Directory to Redis. One per process, on its event loop. Replies are bounded while they are
    read (`reprise.app.conversations.redis_reply`)."""

    def __init__(self, url: str, *, deadline_s: float) -> None:
        """Set up; the first call connects. Raises ValueError for an invalid address, ImportError without redis'
        client."""
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import OutOfMemoryError, ResponseError

        from reprise.app.conversations.redis_reply import CLIENT_FAILURES, BoundedParser

        self.on_answer: Callable[[float], None] = lambda seconds: None  # told how long each question took
        self.unhurried_s = max(deadline_s, UNHURRIED_S)
        self._deadline_s = deadline_s
        self._failures = CLIENT_FAILURES
        self._full, self._refused = OutOfMemoryError, ResponseError
        self._breaker = Breaker(failures=MOST_FAILURES, pause_s=PAUSE_S)
        self._is_away = False
        self.client: Any = Redis(  # its annotations promise text where bytes come
            connection_pool=BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=deadline_s,
                socket_timeout=self.unhurried_s,  # every call has a deadline of its own
                socket_connect_timeout=self.unhurried_s,
                retry=Retry(NoBackoff(), 1),  # for a connection that has gone stale
                protocol=2,
                parser_class=BoundedParser,
            )
        )
        common = (_SCRIPTS / "common.lua").read_text(encoding="utf-8")
        self._scripts = {
            path.stem: self.client.register_script(common + path.read_text(encoding="utf-8"))
            for path in sorted(_SCRIPTS.glob("*.lua"))
            if path.stem != "common"
        }

    @property
    def state(self) -> State:
        """The state of the circuit breaker; Redis is called while it is closed."""
        return self._breaker.state(time.monotonic())

    @property
    def failures(self) -> int:
        return self._breaker.failures

    async def close(self) -> None:
        """Close the connections. A Redis that is away must not keep the program from ending, so those that cannot be
        closed in time are left to the end of the process."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.client.aclose()
                await self.client.connection_pool.disconnect()
        except self._failures as error:
            log.info("connections to Redis were left open, as it is away: %s: %.200s", type(error).__name__, error)

    async def run(self, script: str, *values: Any, deadline_s: float | None = None) -> list[Any]:
        """Run the script of this name in scripts/ and return its reply. values: its arguments. deadline_s: as in `ask`.
        Raises DirectoryUnavailable, also for a reply that is not a list."""
        answer = await self.ask(self._scripts[script](args=values), deadline_s=deadline_s)
        if not isinstance(answer, list) or not answer:
            raise DirectoryUnavailable(f"no reply to {script}")
        return answer

    async def ask(self, call: Awaitable[T], *, deadline_s: float | None = None) -> T:
        """Await a reply of Redis. deadline_s: how long to wait; None: the deadline of this object. Only calls that no
        request waits for give one: while the circuit breaker is open, they still try Redis from time to time, and all
        other calls fail at once. Raises DirectoryUnavailable."""
        may_ask = self.state == "closed" if deadline_s is None else self._breaker.allows(time.monotonic())
        if not may_ask:
            if asyncio.iscoroutine(call):
                call.close()
            raise DirectoryUnavailable("Redis has not answered lately")
        asked_s = time.monotonic()
        task = asyncio.current_task()
        cancelled = 0 if task is None else task.cancelling()
        try:
            async with asyncio.timeout(deadline_s or self._deadline_s):
                answer = await call
        except self._full as error:
            self._breaker.succeeded()  # it answers; what makes room still works
            self._tell(error)
            raise DirectoryFull(str(error)) from None
        except self._failures as error:
            if isinstance(error, self._refused):  # it answers; one damaged record does not cut all others off
                self._breaker.succeeded()
            else:
                self._breaker.failed(time.monotonic())
            self._tell(error)
            raise DirectoryUnavailable(f"{type(error).__name__}: {error}") from None
        finally:
            self.on_answer(took_s := time.monotonic() - asked_s)
        if took_s <= self._deadline_s:  # a later answer is one that no request would have waited for
            self._breaker.succeeded()
        self._is_away = False
        # Redis' client sends by asyncio.wait_for, which loses a cancellation in Python 3.11.
        if task is not None and task.cancelling() > cancelled:
            raise asyncio.CancelledError
        return answer

    def _tell(self, error: BaseException) -> None:
        if not self._is_away:
            log.error("the directory of the fleet does not answer: %s: %.200s", type(error).__name__, error)
        self._is_away = True
