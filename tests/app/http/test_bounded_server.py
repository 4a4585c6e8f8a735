"""Tests how a server ends whose lifespan is cancelled, as by a gateway's second signal or a server's third one."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.lifespan.on import LifespanOn

from reprise.app.http.bounded_server import EndsQuietly


@pytest.mark.parametrize("kind", ["plain", "fastapi"])
async def test_a_server_that_is_told_to_end_at_once_says_so_without_a_traceback(kind: str, caplog: Any) -> None:
    ended = []

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        try:
            await receive()
        finally:
            ended.append(True)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            ended.append(True)

    app = EndsQuietly(plain if kind == "plain" else FastAPI(lifespan=lifespan))
    config = uvicorn.Config(app, lifespan="on", log_config=None)
    config.load()
    running = LifespanOn(config)
    living = asyncio.create_task(running.main())
    await running.receive_queue.put({"type": "lifespan.startup"})
    await asyncio.wait_for(running.startup_event.wait(), 10)
    living.cancel()
    await asyncio.wait([living], timeout=10)
    assert ended == [True]
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in told] == ["told to end at once: what was under way is cut off"]
    assert not any(record.exc_info for record in told)
