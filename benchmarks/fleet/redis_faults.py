"""The faults that befall the two Redis of a fleet: the directory, and the one with KV."""

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet.cuttable_proxy import CuttableProxy, Faults, cuttable_proxy
from benchmarks.harness.redis_server import RedisServer

REPLICAS = ("a", "b")
FLIPS_OF_A_BLOW = 100
KV_KEYS, HEADS, BEATEN = "r1:k:*", "r1:s:*", "r1:ma"


class Stores:
    """Both Redis of a fleet, and the proxies through which each of its processes reaches them. Methods block."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._servers: tuple[RedisServer, ...] = ()
        self.proxies: dict[str, tuple[CuttableProxy, CuttableProxy]] = {}  # process -> to the directory, to the KV
        self.directory: Any = None
        self.kv: Any = None
        self.flipped = self.cut_short = 0
        self._keepers: list[Any] = []  # connections that were there before the password
        self._rng = random.Random(0)

    def way(self, name: str, directory: RedisServer, kv: RedisServer) -> dict[str, Any]:
        """Return the settings with which the process `name` reaches both Redis through proxies of its own. It is the
        argument `settings_of` of `fleet_processes`."""
        if not self.proxies:
            self._servers, self.directory, self.kv = (directory, kv), directory.client(), kv.client()
        made = [self._stack.enter_context(cuttable_proxy(store.socket)) for store in (directory, kv)]
        self.proxies[name] = made[0], made[1]
        return {"fleet.redis_url": made[0].url, "cache.redis_url": made[1].url}

    def kill(self) -> None:
        for server in self._servers:
            server.stop()

    def start(self) -> None:
        """Start both Redis and wait until they answer."""
        import redis

        for server, client in zip(self._servers, (self.directory, self.kv), strict=True):
            server.start()
            while True:
                with suppress(redis.exceptions.ConnectionError):  # also while it loads its file
                    client.ping()
                    break
                time.sleep(0.02)

    def restart_empty(self) -> None:
        self.kill()
        for server in self._servers:
            shutil.rmtree(server.socket.parent / "appendonlydir", ignore_errors=True)
        self.start()

    def pause(self) -> None:
        for server in self._servers:
            server.pause()

    def resume(self) -> None:
        for server in self._servers:
            server.resume()

    def lock(self) -> None:
        self._keepers = [server.client(single_connection_client=True) for server in self._servers]
        for client in self._keepers:
            client.config_set("requirepass", "another")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")  # not this connection

    def unlock(self) -> None:
        for client in self._keepers:
            client.config_set("requirepass", "")
            client.close()

    def link(self, faults: Faults, *names: str) -> None:
        """Set the faults of the proxies of these processes, or of all processes if none is named."""
        for name in names or self.proxies:
            for proxy in self.proxies[name]:
                proxy.set(faults)

    def evict(self) -> None:
        self.kv.config_set("maxmemory-policy", "allkeys-lru")
        self.kv.config_set("maxmemory", max(2 << 20, self.kv.info("memory")["used_memory"] // 2))

    def keep_all(self) -> None:
        self.kv.config_set("maxmemory", 0)
        self.kv.config_set("maxmemory-policy", "noeviction")

    def flip_bits(self) -> None:
        """Flip random bits in random fields of the stored extents (blocks of KV in Redis)."""
        fields = [(key, name) for key in self.kv.scan_iter(KV_KEYS, count=1000) for name in self.kv.hkeys(key)]
        for (key, name), bits in Counter(self._rng.choices(fields, k=FLIPS_OF_A_BLOW) if fields else ()).items():
            value = bytearray(self.kv.hget(key, name) or b"")
            for _ in range(bits if value else 0):
                value[self._rng.randrange(len(value))] ^= 1 << self._rng.randrange(8)
                self.flipped += 1
            self.kv.hset(key, name, bytes(value))

    def cut_fields_short(self) -> None:
        for key in self.kv.scan_iter(KV_KEYS, count=1000):
            if names := self.kv.hkeys(key):
                name = self._rng.choice(names)
                value = self.kv.hget(key, name) or b""
                self.kv.hset(key, name, value[: len(value) // 2])
                self.cut_short += 1

    def heads(self) -> set[bytes]:
        """Return the keys of the directory's records that have a home and a head (by which another replica can take
        over the session's KV)."""
        keys = list(self.directory.scan_iter(HEADS, count=1000))
        with self.directory.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hmget(key, "home", "head")
            return {key for key, found in zip(keys, pipe.execute(), strict=True) if all(found)}

    def now_ms(self) -> float:
        """Return the time by the directory's clock."""
        seconds, micros = self.directory.time()
        return float(seconds * 1e3 + micros / 1e3)

    def all_have_beaten_since(self, when_ms: float) -> bool:
        return all((self.directory.zscore(BEATEN, name) or 0.0) > when_ms for name in REPLICAS)

    def fields_written(self) -> int:
        """Return how many fields of extents (blocks of KV) were written to Redis since it was started."""
        stats = self.kv.info("commandstats").get("cmdstat_hset", {"calls": 0})
        return int(stats["calls"]) - int(stats.get("failed_calls", 0))


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `begin` causes it, `again` is called repeatedly while it lasts, and `end` ends it; all three block and
    are called on a thread."""

    name: str
    begin: Callable[[], Any] = nothing
    end: Callable[[], Any] | None = nothing  # None: it is over when it has begun
    again: Callable[[], Any] = nothing  # strikes again and again until the end
    loses_heads: bool = False


def all_faults(stores: Stores) -> list[Fault]:
    def linked(name: str, wrong: Faults, *names: str) -> Fault:
        return Fault(name, lambda: stores.link(wrong, *names), lambda: stores.link(Faults(), *names))

    def full(name: str, client: Any) -> Fault:
        return Fault(name, lambda: client.config_set("maxmemory", 1), lambda: client.config_set("maxmemory", 0))

    return [
        Fault("killed", stores.kill, stores.start),
        Fault("stopped", stores.pause, stores.resume),
        Fault("directory flushed", stores.directory.flushall, None, loses_heads=True),
        Fault("KV flushed", stores.kv.flushall, None),
        full("directory full", stores.directory),
        full("KV full", stores.kv),
        linked("slow", Faults(delay_s=0.2)),
        linked("narrow", Faults(bytes_per_s=1e6)),
        linked("reset", Faults(reset_after=2000)),
        Fault("locked out", stores.lock, stores.unlock),
        Fault("bits flipped", again=stores.flip_bits),
        Fault("cut short", again=stores.cut_fields_short),
        Fault("evicting", stores.evict, stores.keep_all),
        Fault("empty restart", stores.restart_empty, None, loses_heads=True),
        linked("partition", Faults(is_hole=True), REPLICAS[0]),
    ]
