"""Simulates Redis as a store of KV shared by all replicas: a rate, a size, and uploads that use the time between
loads."""

import math
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Upload:
    owner: int
    tokens: int  # tokens of the context when all has arrived
    size: float  # bytes still to come


class SimulatedRedis:
    """All Redis servers for KV of a fleet, taken as one. Loads share its rate, and none is faster than its replica's
    link. Loads go first. Uploads use the time between loads, in order. An upload is dropped if those that wait would
    exceed what Redis takes in `backlog_s` seconds. The session that was used longest ago leaves first. Calls need not
    come in the order of their times: a load for an earlier time than the previous call's still waits for what was
    ordered before it."""

    def __init__(
        self,
        *,
        bytes_per_s: float,
        link_bytes_per_s: float,
        kv_bytes_per_token: float,
        capacity_bytes: float = math.inf,
        backlog_s: float = 10.0,
    ) -> None:
        self.link_bytes_per_s = link_bytes_per_s
        self.kv_bytes_per_token = kv_bytes_per_token
        self.loaded = self.uploaded = self.dropped = self.evicted = self.used = 0.0  # bytes
        self.bytes_per_s = bytes_per_s
        self._capacity = capacity_bytes
        self._backlog = backlog_s * bytes_per_s
        self._free_s = 0.0  # the time until then is taken or past
        self._held: OrderedDict[str, int] = OrderedDict()  # session -> tokens; used longest ago first
        self._uploads: OrderedDict[str, _Upload] = OrderedDict()
        self._waiting = 0.0  # bytes of them

    def found(self, session: str, now: float) -> int:
        self._pass(now)
        return self._held.get(session, 0)

    def wait_s(self, now: float) -> float:
        return max(0.0, self._free_s - now)

    def load(self, session: str, size: float, now: float) -> float:
        """Send `size` bytes of a session to a replica, after all loads ordered earlier. Returns the time at which all
        are sent."""
        self._pass(now)
        self._free_s = max(self._free_s, now) + size / self.bytes_per_s
        self.loaded += size
        if session in self._held:
            self._held.move_to_end(session)
        return self._free_s

    def save(self, session: str, num_tokens: int, owner: int, now: float) -> None:
        """Queue an upload of the part of a context that Redis lacks. num_tokens: length of the context. owner: the
        replica that has the context."""
        self._pass(now)
        before = self._uploads.get(session)
        size = max(0, num_tokens - self._held.get(session, 0)) * self.kv_bytes_per_token
        rest = before.size if before is not None else 0.0
        if self._waiting - rest + size > self._backlog:
            self.dropped += size
            return
        self._waiting += size - rest
        self._uploads[session] = _Upload(owner, num_tokens, size)

    def lose(self, owner: int, now: float) -> None:
        """Forget the uploads of a replica that is gone."""
        self._pass(now)
        for session in [session for session, upload in self._uploads.items() if upload.owner == owner]:
            self._waiting -= self._uploads.pop(session).size

    def _pass(self, until_s: float) -> None:
        """Let uploads run in the time until `until_s` that no load takes."""
        while self._uploads and self._free_s < until_s:
            session, upload = next(iter(self._uploads.items()))
            part = min(upload.size, (until_s - self._free_s) * self.bytes_per_s)
            self._free_s += part / self.bytes_per_s
            upload.size -= part
            self._waiting -= part
            self.uploaded += part
            if upload.size > 1.0:  # a byte more or less is rounding
                break
            self._waiting -= upload.size
            del self._uploads[session]
            self._keep(session, upload.tokens)
        if not self._uploads:
            self._waiting = 0.0
        self._free_s = max(self._free_s, until_s)

    def _keep(self, session: str, num_tokens: int) -> None:
        self.used += (num_tokens - self._held.pop(session, 0)) * self.kv_bytes_per_token
        self._held[session] = num_tokens
        while self.used > self._capacity:
            _, tokens = self._held.popitem(last=False)
            self.used -= tokens * self.kv_bytes_per_token
            self.evicted += tokens * self.kv_bytes_per_token

    def check(self) -> None:
        """Raise ValueError if the counts of stored or waiting bytes differ from the sums over sessions, or exceed their
        limits."""
        held = sum(self._held.values()) * self.kv_bytes_per_token
        waiting = sum(upload.size for upload in self._uploads.values())
        if abs(held - self.used) > 1e-6 * held + 1.0 or abs(waiting - self._waiting) > 1e-6 * waiting + 1024.0:
            raise ValueError(f"Redis: {self.used} bytes used, {held} held; {self._waiting} wait, {waiting} to upload")
        if self.used > self._capacity or waiting > self._backlog + 1024.0:
            raise ValueError(f"Redis: {self.used} bytes in {self._capacity}; {waiting} waiting of {self._backlog}")


class RedisLink:
    """One replica's access to the simulated Redis. Implements `reprise.loadgen.sim.remote.RemoteKV`."""

    def __init__(self, redis: SimulatedRedis, owner: int) -> None:
        self._redis = redis
        self._owner = owner
        self._free_s = 0.0

    def found(self, session: str, now: float) -> int:
        return self._redis.found(session, now)

    def wait_s(self, now: float) -> float:
        return max(0.0, self._free_s - now, self._redis.wait_s(now))

    @property
    def s_per_byte(self) -> float:
        """Seconds per byte of a load when no other load runs."""
        return 1 / min(self._redis.link_bytes_per_s, self._redis.bytes_per_s)

    def seconds(self, num_tokens: int) -> float:
        return num_tokens * self._redis.kv_bytes_per_token * self.s_per_byte

    def load(self, session: str, num_tokens: int, now: float) -> float:
        size = num_tokens * self._redis.kv_bytes_per_token
        self._free_s = max(self._free_s, now) + size / self._redis.link_bytes_per_s
        return max(self._free_s, self._redis.load(session, size, now))

    def save(self, session: str, num_tokens: int, now: float) -> None:
        self._redis.save(session, num_tokens, self._owner, now)
