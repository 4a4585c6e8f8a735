"""A gateway on a real socket, before stub replicas and a directory in memory."""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx

from reprise.app.http.bounded_server import BoundedServer
from reprise.app.settings.settings import Settings
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.gateway import server
from reprise.fleet.keys import SessionName
from reprise.fleet.protocol import FRAMED, RELAY_HEADER, Frame, Kind, encode_frame
from reprise.fleet.records import Heartbeat, Member, Place, Record, Roll, Taken
from reprise.fleet.routing import Beat
from tests.fleet.gateway.stub_replica import Answer, Asked, StubReplica

MODEL = "0f"
FRAMES = f"{RELAY_HEADER}: {FRAMED}\r\n".encode()
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
LOAD = Beat(wait_s=0.0, s_per_token=1e-4, s_per_kilo_pair=0.0, kv_bytes_per_token=1000.0, redis_bytes_per_s=1e9)


class FakeDirectory:
    """A stand-in for `reprise.fleet.directory.Directory`, as far as a gateway asks it."""

    def __init__(self) -> None:
        self.beats: dict[str, tuple[Heartbeat, float]] = {}  # name -> (beat, age of it)
        self.records: dict[SessionName, Record] = {}
        self.chains: dict[tuple[str, bytes], Record] = {}
        self.drained: set[str] = set()
        self.wait_s = 0.0
        self.is_away = False
        self.state = "closed"
        self.failures = 0
        self.places: dict[str, int] = {}

    def on_answer(self, tell: Callable[[float], None]) -> None:
        """Nothing is timed here."""
        self.taken: list[tuple[str, str, int]] = []

    def _be_there(self) -> None:
        if self.is_away:
            raise DirectoryUnavailable

    async def members(self) -> Roll:
        self._be_there()
        members = tuple(Member(beat, age_s) for beat, age_s in self.beats.values())
        return Roll("born", members, frozenset(self.drained))

    async def find(self, tenant: str, chains: Sequence[bytes], *, fingerprint: str) -> Record | None:
        self._be_there()
        return next((self.chains[tenant, chain] for chain in chains if (tenant, chain) in self.chains), None)

    async def look(self, name: SessionName, *, fingerprint: str) -> Record | None:
        self._be_there()
        return self.records.get(name)

    async def take(self, tenant: str, kind: str, *, per_minute: int, amount: int, need: int) -> Taken:
        self._be_there()
        self.taken.append((tenant, kind, amount))
        return Taken(self.wait_s, 0.0)

    async def enter(self, place: Place, *, most: int, lease_s: float) -> tuple[bool, int]:
        self._be_there()
        in_use = self.places.get(place.tenant, 0)
        if in_use + place.count > most:
            return False, in_use
        self.places[place.tenant] = in_use + place.count
        return True, in_use + place.count

    async def leave_places(self, place: Place) -> None:
        self._be_there()
        self.places[place.tenant] -= place.count

    async def drain(self, replica: str, *, on: bool) -> None:
        self._be_there()
        (self.drained.add if on else self.drained.discard)(replica)

    async def move(self, name: SessionName, *, fingerprint: str, replica: str) -> bool:
        self._be_there()
        if name not in self.records:
            return False
        self.records[name] = replace_record(self.records[name], wanted=replica)
        return True

    async def close(self) -> None:
        pass


def record(home: str, **changes: Any) -> Record:
    fields = {"boot": "1", "epoch": 3, "turn": 1, "tokens": 500, "size_bytes": 1, "redis_tokens": 500, "idle_s": 1.0}
    return Record(**{"session_id": "s", "home": home, **fields, **changes})


def replace_record(old: Record, **changes: Any) -> Record:
    return replace(old, **changes)


def frame(kind: Kind, events: bytes, note: bytes = b"[]") -> bytes:
    return encode_frame(Frame(kind, events, note))


def event(text: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode()


@dataclass
class Fleet:
    directory: FakeDirectory
    replicas: dict[str, StubReplica]
    gateway: server.Gateway
    client: httpx.AsyncClient
    port: int

    async def refresh(self) -> None:
        """Do what the gateway does once a second."""
        await self.gateway.parts.members.refresh()

    def hear(self, name: str, *, age_s: float = 0.0, **changes: Any) -> None:
        """Let a replica beat; the gateway knows it after `refresh`."""
        fields = {"boot": "1", "url": self.replicas[name].url, "fingerprint": MODEL, "model": "m", "state": "ready"}
        self.directory.beats[name] = Heartbeat(**{"replica": name, "load": LOAD, **fields, **changes}), age_s

    def miss(self, name: str) -> None:
        """Let the directory know nothing of a replica; the gateway knows it after `refresh`."""
        del self.directory.beats[name]

    async def stream(self, body: Any = CHAT, path: str = "/v1/chat/completions", **headers: str):
        """Return status, headers and body of a streamed answer; the body is what came until it broke, if it did."""
        data = bytearray()
        is_whole = True
        async with self.client.stream("POST", path, json=body, headers=headers) as answer:
            try:
                async for chunk in answer.aiter_raw():
                    data += chunk
            except httpx.HTTPError:
                is_whole = False
        return answer, bytes(data), is_whole


@asynccontextmanager
async def fleet(settings: dict[str, Any] | None = None, **answers: Answer):
    """Start a stub replica for each answer, and a gateway before them."""
    directory = FakeDirectory()
    made = Settings.model_validate(
        {
            **(settings or {}),
            "server": {"port": 0, **(settings or {}).get("server", {})},
            "fleet": {"redis_url": "redis://127.0.0.1:1/0", **(settings or {}).get("fleet", {})},
        }
    )
    replicas = {name: StubReplica(answer) for name, answer in answers.items()}
    for replica in replicas.values():
        await replica.start()
    gateway = compose(made, directory)
    http = BoundedServer(server.with_middleware(gateway, made), made)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            whole = Fleet(directory, replicas, gateway, client, port)
            for name in replicas:
                whole.hear(name)
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            try:
                await until(lambda: http.started)
                yield whole
            finally:
                http.should_exit = http.force_exit = True
                await asyncio.wait_for(serving, 20)
                for replica in replicas.values():
                    await replica.stop()


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def compose(settings: Settings, directory: FakeDirectory) -> server.Gateway:
    return server.compose(settings, directory=directory, secret=bytes(range(32)))


async def one_answer(asked: Asked) -> None:
    """Answer a turn with two tokens, as a stream or whole."""
    if b'"stream":true' not in asked.body.replace(b" ", b""):
        await asked.plain(b'{"choices":[],"x_cache":{"session_id":"s"}}')
        return
    await asked.open_stream(FRAMES + b"x-session-id: s\r\n")
    await asked.chunk(frame(Kind.OPENING, event(""), b'{"id":1}'))
    await asked.chunk(frame(Kind.DELTA, event("one "), b"[1]"))
    await asked.chunk(frame(Kind.DELTA, event("two"), b"[2]"))
    await asked.chunk(frame(Kind.CLOSING, b'data: {"x_cache":{"a":1}}\n\ndata: [DONE]\n\n'))
    await asked.end_stream()


WHOLE = event("") + event("one ") + event("two")
