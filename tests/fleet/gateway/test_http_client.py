"""Tests the connections to replicas against a server that breaks every rule."""

import asyncio

import pytest
import uvloop

from reprise.fleet.gateway import http_client
from reprise.fleet.gateway.http_client import Replica, ReplicaFailed
from tests.fleet.gateway.stub_replica import Asked, stub_replica

HEADERS = [(b"host", b"replica")]


async def ask(replica: Replica, body: bytes = b"", silence_s: float = 5.0):
    headers = [*HEADERS, (b"content-length", b"%d" % len(body))] if body else HEADERS
    return await replica.ask(b"POST" if body else b"GET", b"/x", headers, body, silence_s=silence_s)


async def read_all(connection) -> bytes:
    parts = []
    while data := await connection.read():
        parts.append(data)
    return b"".join(parts)


async def echo(asked: Asked) -> None:
    await asked.plain(asked.body)


async def test_asks_again_on_the_same_connection():
    async with stub_replica(echo) as server:
        replica = Replica(server.url)
        for body in (b"one", b"two" * 100_000):
            connection = await ask(replica, body)
            assert connection.status == 200
            assert (b"content-type", b"application/json") in connection.headers
            assert await read_all(connection) == body
            replica.give_back(connection)
        assert server.connections == 1
        replica.abort_all("the test ends")


async def test_reads_chunks_as_they_come():
    async def answer(asked: Asked) -> None:
        await asked.open_stream()
        for part in (b"a", b"b"):
            await asked.chunk(part, pause_s=0.05)
        await asked.send(b"3\r\nc", pause_s=0.05)
        await asked.send(b"de\r\n0\r\n\r")
        await asked.send(b"\n")

    async with stub_replica(answer) as server:
        replica = Replica(server.url)
        connection = await ask(replica)
        parts = []
        while data := await connection.read():
            parts.append(data)
        assert parts == [b"a", b"b", b"c", b"de"]
        assert connection.is_idle
        replica.give_back(connection)
        assert replica.under_way == 0
        replica.abort_all("the test ends")


async def test_a_connection_that_was_closed_for_its_age_is_replaced():
    async def answer(asked: Asked) -> None:
        await echo(asked)
        if len(server.asked) == 1:
            asked.writer.close()

    async with stub_replica(answer) as server:
        replica = Replica(server.url)
        for _ in range(2):
            connection = await ask(replica, b"x")
            assert await read_all(connection) == b"x"
            replica.give_back(connection)
        assert server.connections == 2
        replica.abort_all("the test ends")


async def test_a_request_that_a_kept_connection_swallows_is_sent_on_a_new_one():
    async def answer(asked: Asked) -> None:
        if len(server.asked) == 2:
            asked.cut()
        else:
            await echo(asked)

    async with stub_replica(answer) as server:
        replica = Replica(server.url)
        for _ in range(2):
            connection = await ask(replica, b"x")
            assert await read_all(connection) == b"x"
            replica.give_back(connection)
        assert (server.connections, len(server.asked)) == (2, 3)
        replica.abort_all("the test ends")


async def test_what_must_not_be_sent_twice_is_sent_on_a_new_connection():
    async with stub_replica(echo) as server:
        replica = Replica(server.url)
        for count in (1, 2):
            connection = await replica.ask(
                b"POST", b"/", [(b"host", b"x"), (b"content-length", b"1")], b"x", silence_s=5.0, is_repeatable=False
            )
            assert await read_all(connection) == b"x"
            replica.give_back(connection)
            assert server.connections == count
        replica.abort_all("the test ends")


async def test_nobody_listens():
    async with stub_replica(echo) as server:
        replica = Replica(server.url)
    with pytest.raises(ReplicaFailed) as caught:
        await ask(replica, b"x")
    assert not caught.value.was_asked


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (http_client.MAX_HEAD_BYTES + 1),
        b"HTTP/1.1 200 OK\r\ncontent-length: 5",
        b"",
    ],
)
async def test_what_is_no_answer_is_a_failure(data):
    async def answer(asked: Asked) -> None:
        await asked.send(data)
        asked.writer.close()

    async with stub_replica(answer) as server:
        with pytest.raises(ReplicaFailed) as caught:
            await ask(Replica(server.url), b"x")
        assert caught.value.was_asked


@pytest.mark.parametrize("data", [b"zz\r\n", b"3\r\nabcd\r\n", b"5\r\nab"])
async def test_a_body_that_breaks_off_is_a_failure(data):
    async def answer(asked: Asked) -> None:
        await asked.open_stream()
        await asked.chunk(b"good", pause_s=0.05)
        await asked.send(data)
        asked.cut()

    async with stub_replica(answer) as server:
        replica = Replica(server.url)
        connection = await ask(replica)
        assert await connection.read() == b"good"
        with pytest.raises(ReplicaFailed):
            await read_all(connection)
        replica.give_back(connection)
        assert replica.under_way == 0


@pytest.mark.parametrize("begins", [False, True])
async def test_silence_is_a_failure(begins):
    async def answer(asked: Asked) -> None:
        if begins:
            await asked.open_stream()
        await asked.was_left.wait()

    async with stub_replica(answer) as server:
        replica = Replica(server.url)
        loop = asyncio.get_running_loop()

        async def sweep() -> None:
            while True:
                await asyncio.sleep(0.02)
                replica.sweep(loop.time())

        sweeper = asyncio.create_task(sweep())
        try:
            with pytest.raises(ReplicaFailed, match="sent nothing for"):
                await (await ask(replica, silence_s=0.1)).read()
        finally:
            sweeper.cancel()
        await asyncio.wait_for(server.asked[0].was_left.wait(), 30)


async def test_a_client_that_does_not_read_stops_the_replica():
    sent = 0

    async def answer(asked: Asked) -> None:
        nonlocal sent
        await asked.open_stream()
        for _ in range(400):
            await asked.chunk(b"x" * 65_536)
            sent += 65_536
        await asked.end_stream()

    async with stub_replica(answer) as server:
        replica = Replica(server.url)
        connection = await ask(replica, silence_s=0.05)
        before = -1
        while before != sent:  # ends when the sockets' buffers are full
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 400 * 65_536
        assert connection._unread_bytes < 2 * http_client.MAX_UNREAD_BYTES
        replica.sweep(asyncio.get_running_loop().time())  # it is not the replica that is silent
        assert len(await read_all(connection)) == 400 * 65_536
        replica.give_back(connection)
        replica.abort_all("the test ends")


async def test_giving_back_an_answer_that_goes_on_ends_it():
    async def answer(asked: Asked) -> None:
        await asked.open_stream()
        await asked.chunk(b"x")
        await asked.was_left.wait()

    async with stub_replica(answer) as server:
        replica = Replica(server.url)
        connection = await ask(replica)
        assert await connection.read() == b"x"
        replica.give_back(connection)
        await asyncio.wait_for(server.asked[0].was_left.wait(), 30)


async def test_giving_up_a_replica_ends_all_its_answers():
    async def answer(asked: Asked) -> None:
        await asked.open_stream()
        await asked.was_left.wait()

    async with stub_replica(answer) as server:
        replica = Replica(server.url)
        connections = [await ask(replica) for _ in range(3)]
        reading = [asyncio.create_task(connection.read()) for connection in connections]
        await asyncio.sleep(0.01)
        replica.abort_all("it is gone")
        for task in reading:
            with pytest.raises(ReplicaFailed, match="it is gone"):
                await task


def test_works_on_uvloop():

    async def asks() -> None:
        async with stub_replica(echo) as server:
            replica = Replica(server.url)
            for _ in range(2):
                connection = await ask(replica, b"x" * 100_000)
                assert await read_all(connection) == b"x" * 100_000
                replica.give_back(connection)
            assert server.connections == 1
            await server.stop()
            with pytest.raises(ReplicaFailed):
                await ask(replica, b"x")

    uvloop.run(asks())


@pytest.mark.parametrize("url", ["ftp://x", "nonsense", "http://", ""])
def test_refuses_what_is_no_url(url):
    with pytest.raises(ValueError, match="URL"):
        Replica(url)
