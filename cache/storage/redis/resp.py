"""Talks to Redis about large values: sends them from the memory they are in and receives them into the caller's memory.

A client library makes a Python object of every value it receives, with the GIL held. Here the bytes go between a socket
and the caller's memory, and the GIL is released while they do. Every step has a deadline, and no reply makes this
process take more memory than the caller has asked for.
"""

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from reprise.cache.storage.errors import Reason

Part = bytes | memoryview
Reply = object
"""None, an int, bytes, a RedisRefusal, or a list of these."""

MAX_REPLY_BYTES = 1 << 20  # most for all values in a reply of `read`, unless the caller allows more
_BUFFER_BYTES = 16 << 10  # a status line, an error or a length must fit
_SOCKET_BYTES = 4 << 20  # asked of the kernel, which may give less
_MAX_PARTS = 256  # most parts in one system call
_MAX_DEPTH, _MAX_ITEMS = 4, 4096  # deepest nesting, and most items, of all arrays in a reply
_PORT = 6379


class RedisFailed(Exception):
    """Redis cannot be reached, has not answered in time, or has sent an invalid answer. The connection is closed, and
    the next call makes another."""

    def __init__(self, message: str, *, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class WrongLength(RedisFailed):
    """A value has another length than the memory into which it was to be received."""


class RedisRefusal(Exception):
    """Redis has answered a command with an error. The connection can still be used."""

    @property
    def is_full(self) -> bool:
        """Whether the error means that Redis has no memory left."""
        return str(self).startswith("OOM")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """The address of a Redis server, and the user and password for it."""

    host: str  # empty: `path` counts
    port: int
    path: str  # path of a unix socket
    username: str
    password: str
    database: int
    is_tls: bool
    ca_file: str  # certificates to trust; empty: the system's
    is_verified: bool

    @classmethod
    def parse(cls, url: str) -> "RedisAddress":
        """Parse a URL in the forms that redis-py takes: redis://USER:PASSWORD@HOST:PORT/DB, rediss://... with
        ?ssl_ca_certs=FILE or ?ssl_cert_reqs=none, or unix://USER:PASSWORD@/PATH?db=DB. Raises ValueError."""
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if parts.scheme not in {"redis", "rediss", "unix"}:
            raise ValueError("a Redis URL begins with redis://, rediss:// or unix://")
        is_unix = parts.scheme == "unix"
        if is_unix and not parts.path:
            raise ValueError("a unix:// URL needs the path of a socket")
        database = query.get("db", "" if is_unix else parts.path.strip("/")) or "0"
        if not database.isdecimal():
            raise ValueError(f"a database is a number, not {database!r}")
        return cls(
            host="" if is_unix else parts.hostname or "localhost",
            port=parts.port or _PORT,
            path=unquote(parts.path) if is_unix else "",
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            database=int(database),
            is_tls=parts.scheme == "rediss",
            ca_file=query.get("ssl_ca_certs", ""),
            is_verified=query.get("ssl_cert_reqs", "required") != "none",
        )

    def __str__(self) -> str:
        """Name the server without its password."""
        where = self.path or f"{self.host}:{self.port}"
        return f"{where}/{self.database}" if self.database else where


@dataclass(slots=True)
class _Allowed:
    """The number of bytes and items that the rest of Redis' reply may still have."""

    size_bytes: int
    items: int = _MAX_ITEMS


class RedisConnection:
    """One connection to Redis, made by the first command and used by one thread at a time. Commands may be sent before
    the replies to earlier ones were read; replies come in the order of the commands. Every method but `close` raises
    RedisFailed, after which the connection is closed and unanswered commands are lost."""

    def __init__(self, address: RedisAddress, *, deadline_s: float) -> None:
        """Set up, without connecting. deadline_s: the longest that one call of a method may take."""
        self._address, self._deadline_s = address, deadline_s
        self._socket: socket.socket | None = None
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0  # what was received and not read yet
        self.unanswered = 0
        """Number of commands sent whose reply was not read. Read only."""

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def close(self) -> None:
        """Close the connection. A later command makes another. Idempotent."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket, self.unanswered, self._start, self._end = None, 0, 0, 0

    # --- out ----------------------------------------------------------------------------------------------------------

    def send(self, *commands: Sequence[Part | Sequence[Part]]) -> None:
        """Send commands. Each command is a sequence of arguments; each argument is bytes, or several pieces that form
        one argument."""
        until = time.monotonic() + self._deadline_s
        try:
            if self._socket is None:
                self._connect(until)
            self._send(commands, until)
        except RedisFailed:
            self.close()
            raise
        except OSError as error:
            raise self._failed(error) from error

    def call(self, *arguments: Part, max_bytes: int = MAX_REPLY_BYTES) -> Reply:
        """Send one command and return its reply. Raises RedisRefusal if that is an error."""
        self.send(arguments)
        reply = self.read(max_bytes=max_bytes)
        if isinstance(reply, RedisRefusal):
            raise reply
        return reply

    def _connect(self, until: float) -> None:
        address = self._address
        if address.path:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(self._left(until))
            try:
                made.connect(address.path)
            except BaseException:
                made.close()
                raise
        else:
            made = socket.create_connection((address.host, address.port), timeout=self._left(until))
        try:
            if not address.path:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF) if address.path else ():
                made.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)  # TCP sizes its windows better by itself
            if address.is_tls:
                context = ssl.create_default_context(cafile=address.ca_file or None)
                if not address.is_verified:
                    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                made = context.wrap_socket(made, server_hostname=address.host)
        except BaseException:
            made.close()
            raise
        self._socket = made
        hello: list[Sequence[Part]] = []
        if address.password:
            user = (address.username.encode(),) if address.username else ()
            hello.append((b"AUTH", *user, address.password.encode()))
        if address.database:
            hello.append((b"SELECT", b"%d" % address.database))
        if hello:
            self._send(hello, until)
        for _ in hello:
            reply = self._read(until, _Allowed(_BUFFER_BYTES))
            self.unanswered -= 1
            if isinstance(reply, RedisRefusal):
                raise RedisFailed(f"{address} refuses us: {reply}", reason="io")

    def _send(self, commands: Sequence[Sequence[Part | Sequence[Part]]], until: float) -> None:
        parts: list[Part] = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            for argument in command:
                pieces: Sequence[Part] = (argument,) if isinstance(argument, bytes | memoryview) else argument
                parts.append(b"$%d\r\n" % sum(map(len, pieces)))
                parts += pieces
                parts.append(b"\r\n")
        self.unanswered += len(commands)
        made = self._made()
        if isinstance(made, ssl.SSLSocket):
            for part in parts:
                made.settimeout(self._left(until))
                made.sendall(part)
            return
        left = [memoryview(part) for part in parts if len(part)]
        first = 0
        while first < len(left):
            made.settimeout(self._left(until))
            sent = made.sendmsg(left[first : first + _MAX_PARTS])
            while sent and sent >= len(left[first]):
                sent -= len(left[first])
                first += 1
            if sent:
                left[first] = left[first][sent:]

    # --- in -----------------------------------------------------------------------------------------------------------

    def read(self, *, max_bytes: int = MAX_REPLY_BYTES) -> Reply:
        """Return the next reply; an error as a RedisRefusal. The values in it may have at most `max_bytes` bytes
        together."""
        try:
            reply = self._read(time.monotonic() + self._deadline_s, _Allowed(max_bytes))
        except RedisFailed:
            self.close()
            raise
        except OSError as error:
            raise self._failed(error) from error
        self.unanswered -= 1
        return reply

    def read_into(self, targets: Sequence[memoryview]) -> bool:
        """Receive the next reply, a value as long as all targets together, into the targets. Returns False if there is
        no such value. Raises RedisRefusal if the reply is an error. Nothing is written to `targets` after this has
        returned or raised."""
        until = time.monotonic() + self._deadline_s
        try:
            kind, length = self._header(until)
            if isinstance(length, RedisRefusal):
                self.unanswered -= 1
                raise length
            if kind != b"$" or not isinstance(length, int):
                raise RedisFailed(f"{self._address} answers with {kind!r} and not with a value", reason="format")
            wanted = sum(map(len, targets))
            if length >= 0:
                if length != wanted:
                    problem = f"{self._address} has a value of {length} bytes and not of {wanted}"
                    raise WrongLength(problem, reason="short_read" if length < wanted else "format")
                self._receive(targets, until)
                self._end_of_line(until)
        except RedisFailed:
            self.close()
            raise
        except OSError as error:
            raise self._failed(error) from error
        self.unanswered -= 1
        return length >= 0

    def _read(self, until: float, allowed: _Allowed, depth: int = 0) -> Reply:
        kind, number = self._header(until)
        if not isinstance(number, int):  # a status or an error
            self._take(allowed, len(str(number)))
            return number
        if kind == b":":
            return number
        if number < 0:
            return None
        if kind == b"$":
            self._take(allowed, number)
            value = bytearray(number)
            self._receive([memoryview(value)], until)
            self._end_of_line(until)
            return bytes(value)
        allowed.items -= number
        if depth >= _MAX_DEPTH or allowed.items < 0:
            raise RedisFailed(f"{self._address} sends too large an array", reason="format")
        return [self._read(until, allowed, depth + 1) for _ in range(number)]

    def _take(self, allowed: _Allowed, size_bytes: int) -> None:
        allowed.size_bytes -= size_bytes
        if allowed.size_bytes < 0:
            raise RedisFailed(f"{self._address} sends more bytes than were asked for", reason="format")

    def _header(self, until: float) -> "tuple[bytes, int | bytes | RedisRefusal]":
        """Return the kind of the next reply and the contents of its first line: an error, a status, or a number."""
        line = self._line(until)
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return kind, RedisRefusal(rest.decode("utf-8", "replace"))
        if kind == b"+":
            return kind, rest
        if kind not in (b":", b"$", b"*") or not rest.removeprefix(b"-").isdigit() or len(rest) > 20:
            raise RedisFailed(f"{self._address} does not speak RESP", reason="format")
        return kind, int(rest)

    def _line(self, until: float) -> bytes:
        searched = self._start
        while True:
            end = self._bytes.find(b"\r\n", searched, self._end)
            if end >= 0:
                line = bytes(self._buffer[self._start : end])
                self._start = end + 2
                return line
            if self._start:
                kept = bytes(self._buffer[self._start : self._end])
                self._buffer[: len(kept)] = kept
                self._start, self._end = 0, len(kept)
            if self._end == len(self._buffer):
                raise RedisFailed(f"{self._address} sends a line without an end", reason="format")
            searched = max(0, self._end - 1)
            self._end += self._more([self._buffer[self._end :]], until)

    def _end_of_line(self, until: float) -> None:
        if self._line(until):
            raise RedisFailed(f"{self._address} sends a value longer than it said", reason="format")

    def _receive(self, targets: Sequence[memoryview], until: float) -> None:
        """Fill the targets, first with bytes that were received before."""
        left = [target for target in targets if len(target)]
        while left and self._start < self._end:
            taken = min(len(left[0]), self._end - self._start)
            left[0][:taken] = self._buffer[self._start : self._start + taken]
            self._start += taken
            left[0] = left[0][taken:]
            if not len(left[0]):
                left.pop(0)
        if not left:
            return
        self._start = self._end = 0  # used up
        wanted, first = sum(map(len, left)), 0
        while wanted:
            # The end of this value and the beginning of the next reply come with its last bytes.
            views = left[first : first + _MAX_PARTS]
            got = self._more([*views, self._buffer] if first + len(views) == len(left) else views, until)
            if got > wanted:
                self._end = got - wanted
                return
            wanted -= got
            while got and got >= len(left[first]):
                got -= len(left[first])
                first += 1
            if got:
                left[first] = left[first][got:]

    def _more(self, views: Sequence[memoryview], until: float) -> int:
        """Receive available bytes, at least one, and return how many. Raises RedisFailed, OSError."""
        made = self._made()
        made.settimeout(self._left(until))
        got = made.recv_into(views[0]) if isinstance(made, ssl.SSLSocket) else made.recvmsg_into(views)[0]
        if not got:
            raise RedisFailed(f"{self._address} has closed the connection", reason="io")
        return got

    def _made(self) -> socket.socket:
        if self._socket is None:
            raise RedisFailed(f"the connection to {self._address} is closed", reason="io")
        return self._socket

    def _left(self, until: float) -> float:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise RedisFailed(f"{self._address} does not answer within {self._deadline_s:g} s", reason="deadline")
        return left_s

    def _failed(self, error: OSError) -> RedisFailed:
        self.close()
        if isinstance(error, TimeoutError):
            return RedisFailed(f"{self._address} does not answer within {self._deadline_s:g} s", reason="deadline")
        return RedisFailed(f"{self._address}: {error}", reason="io")
