"""Starts a `reprise serve` that is one replica of a fleet, checks whether it is healthy and how busy it is, and drains
it. The process that places replicas owns one such server for each: see `reprise.fleet.ray_app`."""

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

import httpx

from reprise.app.http.bounded_server import LAST_WORDS_S
from reprise.app.settings.settings import Settings
from reprise.app.state_dir import SECRET_FILE, load_tenant_secret
from reprise.engine.process.client import STOP_S
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.routing import STALE_S
from reprise.fleet.supervise.owned_process import OwnedProcess

READY_S = 3600.0  # longest start: a large model comes over a network
POLL_S = 0.1
ANSWER_S = 5.0  # longest wait for an answer of the server or of Redis
MAX_SLOTS = 1000


class Unhealthy(Exception):
    """The server's process runs, but /health does not answer, or answers that the server will not serve again."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A directory for the state of one replica. This process has locked it."""

    directory: Path
    lock: int  # descriptor; the directory is taken while a process holds it open


class OwnedServer:
    """A `reprise serve` process that this process owns. One per process, on its event loop; `wait` and `drain` block,
    and any thread may call them."""

    def __init__(self, settings: Settings, *, config: Path | None, node_ip: str) -> None:
        """Start the server, with our environment. config: TOML file with settings. node_ip: address at which other
        machines reach this one. Raises OSError, ValueError for an invalid secret, ImportError without redis' client."""
        self._drain_s = drain_s(settings)
        self.is_draining = False
        server, host = settings.server, settings.server.host
        port = free_port(host)
        self.url = address(node_ip if host in ("0.0.0.0", "::") else host, port)
        secret = load_tenant_secret(settings.state_dir, server.tenant_secret_file)
        self._directory = Directory(url=settings.fleet.redis_url, secret=secret, deadline_s=ANSWER_S)
        self._client = httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S)
        slot = claim_slot(settings.state_dir)
        arguments = ["serve", "--port", str(port), "--fleet.advertise", self.url]
        arguments += ["--cache.disk_dir", str(slot.directory.absolute())]
        # Replicas of one machine share the secret of the directory in which their own directories lie.
        secret_file = server.tenant_secret_file or settings.state_dir / SECRET_FILE
        arguments += ["--server.tenant_secret_file", str(secret_file.expanduser().absolute())]
        if config is not None:
            arguments += ["--config", str(config.absolute())]
        try:
            self._process = OwnedProcess(arguments, keep=(slot.lock,))
        finally:
            os.close(slot.lock)  # from here on the server holds it

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> None:
        """Return when the server takes requests. Raises ProcessEnded, TimeoutError."""
        async with asyncio.timeout(READY_S):
            while True:
                self._process.must_live()
                with suppress(httpx.HTTPError):
                    if (await self._client.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(POLL_S)

    async def check(self) -> None:
        """Raise ProcessEnded if the server has ended, Unhealthy if it does not answer or will not serve again. A server
        that restarts its engine is healthy."""
        self._process.must_live()
        try:
            status = (await self._client.get("/health")).status_code
        except httpx.HTTPError as error:
            raise Unhealthy(f"{self.url}/health does not answer: {type(error).__name__}") from None
        if status != 200:
            raise Unhealthy(f"{self.url}/health answers {status}")

    async def load(self) -> dict[str, float]:
        """Return the seconds that a new turn would wait at the server and the share of its time in which it computes
        prompts, from its last beat; empty if it has sent none."""
        try:
            roll = await self._directory.members()
        except DirectoryUnavailable:
            return {}
        for member in roll.members:
            if member.beat.url == self.url and member.age_s <= STALE_S and (load := member.beat.load) is not None:
                return {"wait_s": load.wait_s, "busy": load.busy}
        return {}

    def wait(self) -> None:
        """Wait until the server has ended."""
        self._process.wait()

    def drain(self) -> None:
        """Send the server SIGTERM, and return when it has ended. It refuses new requests and finishes running answers.
        After `server.drain_s` seconds it stops those left: the gateway has another server of the fleet continue them
        where that can be done, and the others end early. A server that does not end in time is killed."""
        self.is_draining = True
        self._process.stop(self._drain_s)


def drain_s(settings: Settings) -> float:
    """Return the longest time, in seconds, after which a server that was told to end has ended."""
    return settings.server.drain_s + 2 * LAST_WORDS_S + STOP_S


def address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_port(host: str) -> int:
    """Return a port on which no process listens now. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def claim_slot(directory: Path) -> Slot:
    """Claim the first free one of the directories replica-0, replica-1 and so on in `directory`, making it if needed.
    The successor of a dead replica thus finds its state. Raises OSError."""
    for number in range(MAX_SLOTS):
        slot = directory / f"replica-{number}"
        slot.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(slot / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            flock(lock, LOCK_EX | LOCK_NB)
            return Slot(slot, lock)
        except BlockingIOError:
            os.close(lock)
    raise OSError(f"{MAX_SLOTS} replicas have their directories in {directory} already")
