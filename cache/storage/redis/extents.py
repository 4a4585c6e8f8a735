"""Implements the Redis tier: extents in one or several Redis servers, so that other servers can load them too.

An extent has the header that its file on disk has, and is named by a keyed hash of that header. So a name promises the
contents: a server that loads it checks the header against the name and every segment against the header. The segments'
bytes follow each other layer by layer, without gaps, cut into fields of FIELD_BYTES.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

from reprise.cache.blocks.keys import typed_fields
from reprise.cache.storage.errors import BlockMissing, Reason, TierFailed, TierFull
from reprise.cache.storage.extent_format import (
    MAX_HEADER_BYTES,
    ExtentForm,
    ExtentHeader,
    decode_header,
    encode_header,
)
from reprise.cache.storage.rare_log import RareLog
from reprise.cache.storage.redis.resp import RedisAddress, RedisConnection, RedisFailed, RedisRefusal, Reply
from reprise.cache.storage.redis.scripts import DELETE, DROP, PUBLISH, RENEW, SIZES

FIELD_BYTES = (5 << 18) - 64
"""Bytes of a field: a little less than a size class of jemalloc, since powers of two cost a quarter more memory.
Smaller fields are slower; larger ones keep Redis busy for longer at a time."""
NAME_BYTES = 16
MAX_CACHED_HEADER_BYTES = 32 << 20
_MAX_IDLE_CONNECTIONS = 8  # connections kept to one server
_MAX_FAILURES = 3  # failures in a row, after which a server is left alone
_PAUSE_S = 1.0  # time for which a failing server is left alone; then one call tries
_UNFINISHED_TTL_S = 600  # time to live of an extent without a header
_FIELDS_AHEAD = 4  # fields sent before the first reply is read
_EXTENTS_PER_RENEWAL = 256  # extents renewed by one call, which takes Redis about a millisecond


class _Breaker:
    """A circuit breaker that spares callers the deadline of a server that does not answer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._until_s = 0.0

    def check(self) -> None:
        """Raise RedisFailed while no call is to be made to a server, because it has failed several times in a row and a
        pause has not passed yet."""
        with self._lock:
            if self._failures < _MAX_FAILURES:
                return
            now = time.monotonic()
            if now < self._until_s:
                raise RedisFailed("Redis has failed several times and is left alone", reason="io")
            self._until_s = now + _PAUSE_S  # this caller tries, the others wait for what comes of it

    def note(self, *, has_failed: bool) -> None:
        with self._lock:
            self._failures = self._failures + 1 if has_failed else 0
            if self._failures >= _MAX_FAILURES:
                self._until_s = time.monotonic() + _PAUSE_S


class _Server:
    """A Redis server, with its idle connections and its breaker. Thread-safe."""

    def __init__(self, address: RedisAddress, deadline_s: float) -> None:
        self.address = address
        self._deadline_s = deadline_s
        self._breaker = _Breaker()
        self._idle: deque[RedisConnection] = deque(maxlen=_MAX_IDLE_CONNECTIONS)

    @contextmanager
    def lease(self) -> Iterator[RedisConnection]:
        """Lend a connection until the end of the `with` block. It is reused by the next call if all its replies were
        read. Raises RedisFailed."""
        self._breaker.check()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = RedisConnection(self.address, deadline_s=self._deadline_s)
        try:
            yield connection
        except RedisFailed:
            self._breaker.note(has_failed=True)
            raise
        else:
            self._breaker.note(has_failed=False)
        finally:
            if connection.is_open and not connection.unanswered and len(self._idle) < _MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class RedisExtents:
    """The Redis tier: stores, reads and deletes extents. Thread-safe; every step of a call has a deadline."""

    name = "redis"

    def __init__(
        self,
        *,
        urls: Sequence[str],
        form: ExtentForm,
        capacity_bytes: int,
        ttl_s: float,
        deadline_s: float,
    ) -> None:
        """Set up, without connecting. urls: all servers, among which extents are spread by their names. capacity_bytes:
        most bytes of all extents on one server, from all writers; 0: whatever Redis allows. ttl_s: how long an unused
        extent stays. Raises ValueError for an invalid URL."""
        if not urls:
            raise ValueError("at least one Redis URL")
        self._servers = [_Server(RedisAddress.parse(url), deadline_s) for url in urls]
        self._form = form
        self._capacity_bytes, self._ttl = capacity_bytes, b"%d" % max(1, int(ttl_s))
        self._prefix = b"r1:k:%b:" % blake2b(form.fingerprint, digest_size=8).hexdigest().encode()
        self._log = RareLog()
        self._lock = threading.Lock()  # guards what follows
        self._headers: OrderedDict[bytes, tuple[ExtentHeader, int]] = (
            OrderedDict()
        )  # headers by name; least recently used first
        self._header_bytes = 0

    # --- names --------------------------------------------------------------------------------------------------------

    def name_of(self, header: ExtentHeader) -> bytes:
        """Return the name of an extent: NAME_BYTES that cannot be made without the key."""
        return self._named(encode_header(header, self._form.key), header.extent_id)

    def _named(self, encoded: bytes, extent_id: int) -> bytes:
        name = blake2b(encoded, key=self._form.key, digest_size=NAME_BYTES, person=b"redis").digest()
        if self._form.sizes.coded is None:
            return name
        # The last bit says what the id's says (`reprise.cache.blocks.stored.is_coded`).
        return name[:-1] + bytes([name[-1] & 0xFE | extent_id & 1])

    def key_of(self, name: bytes) -> bytes:
        """Return the Redis key of an extent."""
        return self._prefix + name.hex().encode()

    def server_of(self, name: bytes) -> _Server:
        """Return the server on which an extent lies: the one with the highest hash of both (rendezvous hashing). So
        adding or removing a server moves only its own share."""
        if len(self._servers) == 1:
            return self._servers[0]
        return max(
            self._servers, key=lambda server: blake2b(name + str(server.address).encode(), digest_size=8).digest()
        )

    def _session_key(self, tenant: str, session_id: str) -> bytes:
        """Return the Redis key of the set of a session's extents, which are deleted together."""
        fields = typed_fields(tenant, session_id)
        digest = blake2b(fields, key=self._form.key, digest_size=NAME_BYTES, person=b"session")
        return b"r1:ks:" + digest.hexdigest().encode()

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, header: ExtentHeader, layers: Iterable[Sequence[memoryview]], next_use_s: float) -> bytes:
        """Store an extent and return its name. If Redis has it already, only its life is extended, and `layers` are not
        read. layers: for each layer, the bytes of its blocks in order, in any number of pieces, which must not change
        until the next layer is asked for. next_use_s: when it is expected to be used, in Unix time. Raises TierFull,
        TierFailed, and whatever `layers` raises."""
        encoded = encode_header(header, self._form.key)
        name = self._named(encoded, header.extent_id)
        server, key = self.server_of(name), self.key_of(name)
        try:
            with server.lease() as connection:
                if self._renew(connection, [key], next_use_s) == [1]:
                    return name
                num_fields = size = 0
                for field in cut_fields(layers):
                    connection.send((b"HSET", key, b"%d" % num_fields, field))
                    if not num_fields:
                        connection.send((b"EXPIRE", key, b"%d" % _UNFINISHED_TTL_S))
                    num_fields, size = num_fields + 1, size + sum(map(len, field))
                    while connection.unanswered > _FIELDS_AHEAD:
                        _checked(connection.read())
                while connection.unanswered:
                    _checked(connection.read())
                numbers = (b"%d" % num_fields, encoded, b"%d" % (size + len(encoded)), self._ttl)
                bounds = (b"%d" % int(next_use_s), b"%d" % self._capacity_bytes)
                keys = (key, self._session_key(header.session.tenant, header.session.session_id))
                outcome = connection.call(b"EVAL", PUBLISH.encode(), b"2", *keys, *numbers, *bounds)
        except RedisRefusal as refusal:
            if refusal.is_full:
                raise TierFull(f"Redis: {refusal}") from refusal
            raise TierFailed(f"Redis refuses an extent: {refusal}", reason="io") from refusal
        except RedisFailed as error:
            raise TierFailed(f"Redis: {error}", reason=error.reason) from error
        if outcome == b"full":
            raise TierFull("all that Redis keeps is expected back sooner")
        if outcome != b"stored":
            raise TierFailed("Redis has lost a part of an extent while it was written", reason="missing")
        self._remember(name, header, len(encoded))
        return name

    def renew(self, names: Sequence[bytes], next_use_s: float) -> list[bytes]:
        """Keep extents for another time to live. next_use_s: when they are expected to be used, in Unix time. Returns
        the names of those that Redis has. Raises TierFailed."""
        there: list[bytes] = []
        for server, mine in self._by_server(names):
            with self._asking(server) as connection:
                found: list[object] = []
                for start in range(0, len(mine), _EXTENTS_PER_RENEWAL):
                    keys = [self.key_of(name) for name in mine[start : start + _EXTENTS_PER_RENEWAL]]
                    found += self._renew(connection, keys, next_use_s)
            there += [name for name, is_there in zip(mine, found, strict=True) if is_there == 1]
        return there

    def _renew(self, connection: RedisConnection, keys: Sequence[bytes], next_use_s: float) -> list[object]:
        numbers = (self._ttl, b"%d" % int(next_use_s))
        found = connection.call(b"EVAL", RENEW.encode(), b"%d" % len(keys), *keys, *numbers)
        if not isinstance(found, list) or len(found) != len(keys):
            raise RedisFailed("Redis answers a script with something else", reason="format")
        return found

    def used_bytes(self) -> int:
        """Return the bytes of all extents on all servers, from all writers, as recorded in Redis. An extent that Redis
        has evicted by itself counts until a later write finds it gone. Raises TierFailed."""
        total = 0
        for server in self._servers:
            with self._asking(server) as connection:
                found = connection.call(b"HGET", SIZES, b"")
                total += int(found) if isinstance(found, bytes) and found.isdigit() else 0
        return total

    def drop(self, names: Sequence[bytes]) -> None:
        """Delete damaged extents from Redis, so that no server tries them again. Raises TierFailed."""
        for server, mine in self._by_server(names):
            with self._asking(server) as connection:
                connection.call(b"EVAL", DROP.encode(), b"%d" % len(mine), *map(self.key_of, mine))

    def delete_session(self, tenant: str, session_id: str) -> None:
        """Delete all extents of the sessions of this id, with any salt and of any model, whichever server wrote them.
        Raises TierFailed."""
        for server in self._servers:
            with self._asking(server) as connection:
                connection.call(b"EVAL", DELETE.encode(), b"1", self._session_key(tenant, session_id))

    @contextmanager
    def _asking(self, server: _Server) -> Iterator[RedisConnection]:
        """Lend a connection for a short question. Raises TierFailed."""
        try:
            with server.lease() as connection:
                yield connection
        except RedisRefusal as refusal:
            raise TierFailed(f"Redis: {refusal}", reason="io") from refusal
        except RedisFailed as error:
            raise TierFailed(f"Redis: {error}", reason=error.reason) from error

    def _by_server(self, names: Sequence[bytes]) -> list[tuple[_Server, list[bytes]]]:
        by_server: dict[int, tuple[_Server, list[bytes]]] = {}
        for name in names:
            server = self.server_of(name)
            by_server.setdefault(id(server), (server, []))[1].append(name)
        return list(by_server.values())

    # --- reading ------------------------------------------------------------------------------------------------------

    def headers(self, names: Sequence[bytes]) -> tuple[dict[bytes, ExtentHeader], dict[bytes, BlockMissing]]:
        """Read the headers of extents, all of one server at once. Returns the intact headers by name, and by name the
        reason why others cannot be used."""
        found: dict[bytes, ExtentHeader] = {}
        missing: dict[bytes, BlockMissing] = {}
        unknown = []
        for name in names:
            if (header := self._remembered(name)) is not None:
                found[name] = header
            else:
                unknown.append(name)
        for server, mine in self._by_server(unknown):
            try:
                with server.lease() as connection:
                    connection.send(*((b"HGET", self.key_of(name), b"h") for name in mine))
                    for name in mine:
                        reply = connection.read(max_bytes=MAX_HEADER_BYTES)
                        try:
                            found[name] = self._decoded(name, reply)
                        except BlockMissing as error:
                            missing[name] = error
            except RedisFailed as error:
                failed = BlockMissing(f"Redis: {error}", reason=error.reason)
                missing.update((name, failed) for name in mine if name not in found and name not in missing)
        return found, missing

    def _decoded(self, name: bytes, reply: Reply) -> ExtentHeader:
        """Return the header in a reply of Redis. Raises BlockMissing."""
        extent = name.hex()
        if reply is None:
            raise BlockMissing(f"extent {extent} is not in Redis", reason="missing", extent_id=name)
        if not isinstance(reply, bytes):
            reason: Reason = "io" if isinstance(reply, RedisRefusal) else "format"
            raise BlockMissing(f"extent {extent}: {reply}", reason=reason, extent_id=name)
        if self._named(reply, name[-1]) != name:
            self.tell_damage(name, "its header was altered")
            raise BlockMissing(f"the header of extent {extent} was altered", reason="checksum", extent_id=name)
        header = decode_header(reply, self._form.key)
        if header.fingerprint != self._form.fingerprint:
            raise BlockMissing(f"extent {extent} is another model's", reason="fingerprint", extent_id=name)
        sizes = self._form.sizes.of(header.extent_id)
        if header.segment_bytes != sizes or self._form.sizes.of(name) != sizes:
            raise BlockMissing(f"extent {extent} has another layout", reason="format", extent_id=name)
        self._remember(name, header, len(reply))
        return header

    def tell_damage(self, name: bytes, what: str) -> None:
        """Log that an extent is not what was stored."""
        self._log.warn("damage", "extent %s in Redis: %s", name.hex(), what)

    def _remembered(self, name: bytes) -> ExtentHeader | None:
        with self._lock:
            known = self._headers.get(name)
            if known is None:
                return None
            self._headers.move_to_end(name)
            return known[0]

    def _remember(self, name: bytes, header: ExtentHeader, size: int) -> None:
        with self._lock:
            if name in self._headers:
                return
            self._headers[name] = header, size
            self._header_bytes += size
            while self._header_bytes > MAX_CACHED_HEADER_BYTES:
                _, (_, dropped) = self._headers.popitem(last=False)
                self._header_bytes -= dropped

    def close(self) -> None:
        """Close the idle connections."""
        for server in self._servers:
            server.close()


def cut_fields(layers: Iterable[Sequence[memoryview]]) -> Iterator[list[memoryview]]:
    """Cut bytes that are given layer by layer into fields of FIELD_BYTES, the last one shorter. A field's pieces are
    valid until the next field is asked for. Only the remainder of a layer is copied."""
    kept = memoryview(bytearray(FIELD_BYTES))
    filled = 0
    for pieces in layers:
        whole: list[memoryview] = []
        gathered = 0
        for piece in pieces:
            while len(piece):
                taken = min(len(piece), FIELD_BYTES - filled - gathered)
                whole.append(piece[:taken])
                gathered, piece = gathered + taken, piece[taken:]
                if filled + gathered == FIELD_BYTES:
                    yield [kept[:filled], *whole] if filled else whole
                    filled, whole, gathered = 0, [], 0
        for piece in whole:
            kept[filled : filled + len(piece)] = piece
            filled += len(piece)
    if filled:
        yield [kept[:filled]]


def _checked(reply: Reply) -> None:
    if isinstance(reply, RedisRefusal):
        raise reply
