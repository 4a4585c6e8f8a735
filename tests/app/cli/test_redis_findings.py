"""Tests what `reprise doctor` says of real Redis servers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reprise.app.cli.finding import Finding
from reprise.app.cli.redis_findings import look_at_redis
from reprise.app.settings.settings import Settings
from tests.redis_servers import RedisServer, redis_server


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("b")) as server:
        yield server


def look(*, fleet: str = "", **cache: Any) -> list[tuple[str, str]]:
    return [(finding.subject, finding.level.value) for finding in findings(fleet=fleet, **cache)]


def findings(*, fleet: str = "", **cache: Any) -> list[Finding]:
    return list(look_at_redis(Settings.model_validate({"cache": cache, "fleet": {"redis_url": fleet}})))


def kv(directory: Path, *options: str, **cache: Any) -> Finding:
    """Return what is said of a server with these options that keeps KV beside another one for the rest."""
    with redis_server(directory, *options) as books_and_kv:
        return findings(fleet=cache.pop("fleet"), redis_url=books_and_kv.url, redis_gib=0.01, **cache)[-1]


def test_servers_that_are_not_named_are_not_asked(books: RedisServer) -> None:
    assert look() == [("Redis", "note")]
    assert look(redis_url=books.url) == [("Redis", "ok")]  # responses alone
    assert look(fleet=books.url) == [("Redis", "ok")]


def test_kv_beside_the_rest_in_one_server_is_warned_of(books: RedisServer) -> None:
    for named in ({"fleet": books.url}, {}):
        _, found = findings(redis_url=books.url, redis_gib=0.01, **named)
        assert (found.subject, found.level) == ("KV in Redis", "warn")
        assert found.found.startswith("is in one Redis with")
        assert "a Redis of its own" in found.advice


@pytest.mark.parametrize(
    ("options", "level", "says"),
    [
        (("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"), "ok", "answers in"),
        ((), "ok", "answers in"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "noeviction"), "warn", "maxmemory-policy is noeviction"),
        (("--maxmemory", "5mb", "--maxmemory-policy", "allkeys-lru"), "warn", "maxmemory is 0.0049 GiB"),
    ],
)
def test_a_server_for_kv_is_examined(
    books: RedisServer, tmp_path: Path, options: tuple[str, ...], level: str, says: str
) -> None:
    found = kv(tmp_path, *options, fleet=books.url)
    assert (found.subject, found.level, found.found[: len(says)]) == ("KV in Redis", level, says)


def test_a_directory_that_forgets_is_warned_of(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory-policy", "allkeys-lru") as server:
        (found,) = findings(fleet=server.url)
        assert (found.level, found.found) == ("warn", "maxmemory-policy is allkeys-lru")
        assert look(redis_url=server.url) == [("Redis", "ok")]  # responses may leave


def test_servers_that_do_not_answer_are_named(books: RedisServer, tmp_path: Path) -> None:
    gone = f"unix://{tmp_path}/gone.sock"
    assert look(fleet=gone, redis_url=books.url, redis_gib=1.0) == [("Redis", "warn"), ("KV in Redis", "ok")]
    assert look(fleet=books.url, redis_url=f"{gone},{books.url}", redis_gib=1.0) == [
        ("Redis", "ok"),
        ("KV in Redis", "warn"),
        ("KV in Redis", "warn"),
    ]
    lost = findings(fleet=books.url, redis_url=gone, redis_gib=1.0)[-1]
    assert "until then this server has the KV of its own tiers alone" in lost.advice
