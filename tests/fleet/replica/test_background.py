"""Tests that work beside requests is kept to its end, and that its failure is told in the log alone."""

import asyncio

import pytest

from reprise.fleet.replica.background import Background


async def test_what_fails_is_logged_and_what_is_cancelled_is_not(caplog):
    async def fail() -> None:
        raise RuntimeError("no such luck")

    background = Background()
    failing, cancelled = background.spawn(fail()), background.spawn(asyncio.sleep(60))
    cancelled.cancel()
    await background.finish(timeout_s=30)
    with pytest.raises(RuntimeError):
        await failing
    assert [record.message for record in caplog.records] == ["work for the fleet failed"]
    assert "no such luck" in caplog.text


async def test_it_waits_for_what_is_under_way_but_not_for_ever():
    background, may_end = Background(), asyncio.Event()
    await background.finish(timeout_s=0)  # nothing is under way
    task = background.spawn(may_end.wait())
    await background.finish(timeout_s=0.01)
    assert not task.done()
    asyncio.get_running_loop().call_later(0.01, may_end.set)
    await background.finish(timeout_s=30)
    assert task.done()
