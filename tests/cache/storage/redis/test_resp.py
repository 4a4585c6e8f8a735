"""Tests the connection to Redis against a real server, and against one that answers wrongly, slowly or not at all."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprise.cache.storage.redis.resp import RedisAddress, RedisConnection, RedisFailed, RedisRefusal
from tests.cache.storage.redis.redis_server import OwnRedis, ScriptedServer, answering, redis_server
from tests.example_counts import examples

__all__ = ["redis_server"]

Scripted = Callable[..., RedisConnection]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Scripted]:
    """Connects to a server that answers with these bytes."""
    servers: list[ScriptedServer] = []

    def connect(reply: bytes, *, deadline_s: float = 5.0, **how: float) -> RedisConnection:
        servers.append(ScriptedServer(tmp_path, answering(reply, **how)))  # type: ignore[arg-type]
        return RedisConnection(RedisAddress.parse(servers[-1].url), deadline_s=deadline_s)

    yield connect
    for server in servers:
        server.close()


# --- addresses --------------------------------------------------------------------------------------------------------


def test_addresses_are_read_as_redis_py_reads_them() -> None:
    tcp = RedisAddress.parse("redis://me:p%40ss@box:7000/3")
    assert (tcp.host, tcp.port, tcp.database, tcp.username, tcp.password) == ("box", 7000, 3, "me", "p@ss")
    assert (tcp.is_tls, str(tcp)) == (False, "box:7000/3")
    unix = RedisAddress.parse("unix:///run/redis.sock?db=2")
    assert (unix.path, unix.database, str(unix)) == ("/run/redis.sock", 2, "/run/redis.sock/2")
    tls = RedisAddress.parse("rediss://:secret@box?ssl_cert_reqs=none")
    assert (tls.is_tls, tls.is_verified, tls.port, tls.password) == (True, False, 6379, "secret")
    assert "secret" not in str(tls)


@pytest.mark.parametrize("url", ["http://box", "unix://", "redis://box/zero", "redis://box:port"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"begins with|path of a socket|number|[Pp]ort"):
        RedisAddress.parse(url)


# --- a real server ----------------------------------------------------------------------------------------------------


def test_values_go_out_of_pieces_and_come_into_pieces(redis_server: OwnRedis) -> None:
    connection = redis_server.connection()
    value = os.urandom(3_000_000)
    view = memoryview(value)
    connection.send((b"HSET", b"key", b"0", [view[:7], view[7:1_000_000], view[1_000_000:]]), (b"HLEN", b"key"))
    assert [connection.read(), connection.read()] == [1, 1]
    assert connection.unanswered == 0
    got = bytearray(len(value))
    whole = memoryview(got)
    connection.send(*[(b"HGET", b"key", b"0")] * 3)
    for cut in (0, 1, 2_999_999):
        whole[:] = bytes(len(value))
        assert connection.read_into([whole[:cut], whole[cut:]])
        assert got == value
    assert connection.call(b"PING") == b"PONG"


def test_small_replies_of_every_kind(redis_server: OwnRedis) -> None:
    connection = redis_server.connection()
    assert connection.call(b"GET", b"none") is None
    assert connection.call(b"SET", b"a", b"") == b"OK"
    assert connection.call(b"GET", b"a") == b""
    assert connection.call(b"EVAL", b"return {1, 'two', {3}, false}", b"0") == [1, b"two", [3], None]
    connection.send((b"HGET", b"none", b"0"), (b"HGET", b"a", b"0"), (b"PING",))
    assert connection.read_into([memoryview(bytearray(4))]) is False
    with pytest.raises(RedisRefusal, match="WRONGTYPE"):
        connection.read_into([memoryview(bytearray(4))])
    assert connection.read() == b"PONG"
    with pytest.raises(RedisRefusal, match="unknown command") as refused:
        connection.call(b"NONSENSE")
    assert not refused.value.is_full
    assert connection.call(b"PING") == b"PONG"


def test_a_full_server_says_so(redis_server: OwnRedis) -> None:
    redis_server.call(b"SET", b"a", bytes(2_000_000))
    redis_server.call(b"CONFIG", b"SET", b"maxmemory", b"1mb")
    with pytest.raises(RedisRefusal) as refused:
        redis_server.call(b"SET", b"b", bytes(1000))
    assert refused.value.is_full


def test_a_value_of_another_length_closes_the_connection(redis_server: OwnRedis) -> None:
    connection = redis_server.connection()
    connection.call(b"SET", b"a", b"12345678")
    for size, reason in ((7, "format"), (9, "short_read")):
        connection.send((b"GET", b"a"))
        with pytest.raises(RedisFailed) as failed:
            connection.read_into([memoryview(bytearray(size))])
        assert failed.value.reason == reason
        assert not connection.is_open
    assert connection.call(b"GET", b"a") == b"12345678"  # over a new one


def test_passwords_and_databases(redis_server: OwnRedis) -> None:
    redis_server.call(b"CONFIG", b"SET", b"requirepass", b"secret")
    right = RedisConnection(
        RedisAddress.parse(redis_server.url.replace("unix://", "unix://:secret@") + "?db=3"), deadline_s=30
    )
    right.call(b"SET", b"a", b"there")
    assert b"db3:keys=1" in bytes(right.call(b"INFO", b"keyspace"))  # type: ignore[call-overload]
    wrong = RedisConnection(RedisAddress.parse(redis_server.url.replace("unix://", "unix://:guess@")), deadline_s=30)
    with pytest.raises(RedisFailed, match="refuses us") as failed:
        wrong.call(b"PING")
    assert "guess" not in str(failed.value)
    assert not wrong.is_open


def test_a_server_that_is_stopped_or_gone_costs_no_more_than_the_deadline(redis_server: OwnRedis) -> None:
    connection = redis_server.connection(deadline_s=0.3)
    connection.call(b"SET", b"a", bytes(1000))
    redis_server.pause()
    started = time.monotonic()
    with pytest.raises(RedisFailed) as failed:
        connection.call(b"GET", b"a")
    redis_server.resume()
    assert failed.value.reason == "deadline"
    assert 0.3 <= time.monotonic() - started < 30
    assert connection.call(b"GET", b"a") == bytes(1000)
    redis_server.stop()
    with pytest.raises(RedisFailed) as failed:
        connection.call(b"GET", b"a")
    assert failed.value.reason == "io"
    redis_server.start()
    assert connection.call(b"GET", b"a") is None


# --- a server that answers wrongly ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"$8\r\n1234", "io"),  # cut off
        (b"$8\r\n12345678", "io"),  # cut off before the end of the line
        (b"$8\r\n12345678xx\r\n", "format"),  # longer than it said
        (b"$9\r\n123456789\r\n", "format"),
        (b"$7\r\n1234567\r\n", "short_read"),
        (b"$99999999999\r\n", "format"),
        (b"$999999999999999999999999999999\r\n", "format"),
        (b":8\r\n", "format"),
        (b"*1\r\n$8\r\n12345678\r\n", "format"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "format"),
        (b"$8.5\r\n", "format"),
        (b"\r\n", "format"),
        (b"x" * 100_000, "format"),  # a line without an end
        (b"", "io"),
    ],
)
def test_what_is_not_the_value_asked_for_closes_the_connection(scripted: Scripted, reply: bytes, reason: str) -> None:
    connection = scripted(reply)
    connection.send((b"HGET", b"key", b"0"))
    with pytest.raises(RedisFailed) as failed:
        connection.read_into([memoryview(bytearray(8))])
    assert failed.value.reason == reason
    assert not connection.is_open


@pytest.mark.parametrize(
    "reply",
    [
        b"$2000000\r\n",
        b"*5000\r\n",
        b"*1\r\n" * 1000 + b":1\r\n",
        b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
        b"*2\r\n" + 2 * (b"*4000\r\n" + 4000 * b":1\r\n"),
        b"*3\r\n" + 3 * (b"$400000\r\n" + bytes(400_000) + b"\r\n"),
        b"*3000\r\n$-9000000\r\n" + 2999 * (b"+" + 1000 * b"x" + b"\r\n"),
        b"_\r\n",
    ],
    ids=["value", "array", "deep", "deeper", "arrays together", "values together", "lines together", "kind"],
)
def test_no_reply_takes_more_memory_than_was_allowed_for(scripted: Scripted, reply: bytes) -> None:
    connection = scripted(reply)
    with pytest.raises(RedisFailed) as failed:
        connection.call(b"GET", b"key")
    assert failed.value.reason == "format"
    assert not connection.is_open


def test_a_reply_that_trickles_is_cut_off_by_the_deadline(scripted: Scripted) -> None:
    connection = scripted(b"$10000\r\n" + bytes(10_002), deadline_s=0.3, chunk=10, pause_s=0.02)
    connection.send((b"HGET", b"key", b"0"))
    started = time.monotonic()
    with pytest.raises(RedisFailed) as failed:
        connection.read_into([memoryview(bytearray(10_000))])
    assert failed.value.reason == "deadline"
    assert time.monotonic() - started < 30


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_values_arrive_whole_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
    chunk = data.draw(st.integers(1, 40))
    reply = b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values) + b"+OK\r\n"
    server = ScriptedServer(tmp_path_factory.mktemp("s"), answering(reply, chunk=chunk))
    connection = RedisConnection(RedisAddress.parse(server.url), deadline_s=30)
    connection.send(*[(b"GET", b"key")] * (len(values) + 1))
    for value in values:
        got = memoryview(bytearray(len(value)))
        cut = data.draw(st.integers(0, len(value)))
        assert connection.read_into([got[:cut], got[cut:]])
        assert bytes(got) == value
    assert connection.read() == b"OK"
    server.close()
