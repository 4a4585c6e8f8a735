import asyncio

import pytest

from app.live import Watcher


@pytest.mark.parametrize("steps", range(5))
async def test_who_leaves_as_news_come_is_gone(steps: int):
    watcher = Watcher("local", sees_all=True, on_close=lambda _: None)
    waiting = asyncio.create_task(watcher.wait(10.0))
    await asyncio.sleep(0)
    watcher.hear({})
    for _ in range(steps):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
