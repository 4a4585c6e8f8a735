"""Examines the Redis servers that the settings name, for `reprise doctor`. Changes nothing there."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprise.app.cli.finding import Finding, Level
from reprise.app.settings.settings import GIB, Settings

if TYPE_CHECKING:
    from redis import Redis

REDIS_TIMEOUT_S = 2.0
BOOKS, KV = "Redis", "KV in Redis"  # subjects of findings: responses, conversations and the directory; KV


@dataclass(frozen=True, slots=True)
class _Server:
    took_ms: float  # time that Redis took to answer
    run_id: str  # the same for two URLs of one server
    policy: str  # what leaves when its memory is full
    maxmemory: int  # bytes; 0: no bound


def look_at_redis(settings: Settings) -> Iterator[Finding]:
    """Yield for each Redis server whether it answers and is set up for what it is to store. KV and responses need
    different settings."""
    books_url = settings.responses_redis_url
    kv_urls = [url for url in settings.cache.redis_url.split(",") if url] if settings.cache.redis_gib else []
    if not (books_url or kv_urls):
        yield Finding(BOOKS, Level.NOTE, "not used")
        return
    try:
        import redis
    except ModuleNotFoundError:
        setting = "fleet.redis_url" if settings.fleet.redis_url else "cache.redis_url"
        yield Finding(BOOKS, Level.FAIL, f"{setting} is set and its client missing", "pip install redis")
        return

    def ask(url: str) -> "_Server | Exception":
        timeouts = {"socket_timeout": REDIS_TIMEOUT_S, "socket_connect_timeout": REDIS_TIMEOUT_S}
        try:
            with redis.Redis.from_url(url, **timeouts) as client:
                return _asked(client)
        except (redis.RedisError, ValueError) as error:
            return error

    books = ask(books_url)
    yield _books(settings, books)
    for url in kv_urls:
        yield _kv(settings, ask(url), books)


def _asked(client: "Redis") -> _Server:
    start_s = time.perf_counter()
    client.ping()
    took_ms = (time.perf_counter() - start_s) * 1e3
    info = client.info()
    maxmemory = int(info.get("maxmemory", 0))
    return _Server(took_ms, str(info.get("run_id", "")), str(info.get("maxmemory_policy", "")), maxmemory)


def _books(settings: Settings, found: "_Server | Exception") -> Finding:
    setting = "fleet.redis_url" if settings.fleet.redis_url else "cache.redis_url"
    if isinstance(found, Exception):
        lost = "no turn is entered in the directory and no response" if settings.fleet.redis_url else "no response is"
        advice = f"start it, or mend {setting}; until then {lost} remembered"
        return Finding(BOOKS, Level.WARN, f"does not answer: {type(found).__name__}", advice)
    if settings.fleet.redis_url and found.policy not in ("noeviction", ""):
        advice = "set maxmemory-policy noeviction: else conversations may lose their entries in the directory"
        return Finding(BOOKS, Level.WARN, f"maxmemory-policy is {found.policy}", advice)
    return Finding(BOOKS, Level.OK, f"answers in {found.took_ms:.1f} ms")


def _kv(settings: Settings, found: "_Server | Exception", books: "_Server | Exception") -> Finding:
    budget = settings.cache.redis_gib * GIB
    if isinstance(found, Exception):
        advice = "start it, or mend cache.redis_url; until then this server has the KV of its own tiers alone"
        return Finding(KV, Level.WARN, f"does not answer: {type(found).__name__}", advice)
    if isinstance(books, _Server) and found.run_id and found.run_id == books.run_id:
        what = "the fleet's directory" if settings.fleet.redis_url else "responses and conversations"
        advice = "give KV a Redis of its own: a look-up beside moving KV waits for milliseconds"
        if found.policy.startswith("allkeys"):
            advice += f", and {found.policy} may drop {what} for it"
        return Finding(KV, Level.WARN, f"is in one Redis with {what}", advice)
    if 0 < found.maxmemory < budget:
        advice = "lower cache.redis_gib, or give that Redis more: else it chooses by itself what leaves"
        return Finding(KV, Level.WARN, f"maxmemory is {found.maxmemory / GIB:.2g} GiB", advice)
    if found.policy == "noeviction" and found.maxmemory:
        advice = "set maxmemory-policy allkeys-lru, so that it takes KV also when remains of uploads fill it"
        return Finding(KV, Level.WARN, "maxmemory-policy is noeviction", advice)
    return Finding(KV, Level.OK, f"answers in {found.took_ms:.1f} ms")
