"""Composes a gateway from the settings, and serves it until it is told to end."""

import logging
import random
import time
from collections.abc import Callable
from types import FrameType

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from reprise.app.http.body import MAX_CHOICES
from reprise.app.http.bounded_server import LAST_WORDS_S, BoundedServer
from reprise.app.http.cors import cors_options
from reprise.app.http.middleware import Authentication, RequestContext
from reprise.app.settings.settings import MIB, Settings
from reprise.app.state_dir import load_tenant_secret
from reprise.app.tenancy.configured_keys import follow_keys_file, make_keyring
from reprise.app.tenancy.places import Places
from reprise.fleet.directory import Directory
from reprise.fleet.gateway.allowances import Allowances
from reprise.fleet.gateway.finder import Finder
from reprise.fleet.gateway.gateway import Gateway, Parts
from reprise.fleet.gateway.held_bytes import HeldBytes
from reprise.fleet.gateway.metrics import Metrics
from reprise.fleet.gateway.replicas import Replicas
from reprise.fleet.members import Members
from reprise.fleet.protocol import fleet_key
from reprise.fleet.routing import FleetView, Router

KNOWN_PATHS = frozenset(
    {
        *("/health", "/v1/health", "/ready", "/metrics", "/v1/models", "/v1/sessions", "/v1/conversations"),
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/fleet", "/v1/fleet/targets"),
    }
)

log = logging.getLogger(__name__)


class NoFleet(ValueError):
    """The settings describe no fleet."""


def make_gateway(settings: Settings) -> Gateway:
    """Make the gateway that the settings describe. Raises NoFleet, OSError or ValueError for a secret that cannot be
    read, KeyFileError, ImportError without redis' client."""
    if not settings.fleet.is_on:
        raise NoFleet("a gateway needs fleet.redis_url, the Redis in which its replicas are")
    secret = load_tenant_secret(settings.state_dir, settings.server.tenant_secret_file)
    directory = Directory(url=settings.fleet.redis_url, secret=secret, deadline_s=settings.fleet.deadline_ms / 1e3)
    return compose(settings, directory=directory, secret=secret)


def compose(settings: Settings, *, directory: Directory, secret: bytes) -> Gateway:
    """Build a gateway and everything that it uses. secret: the tenant secret of the fleet. Raises KeyFileError."""
    keyring = make_keyring(settings)
    members = Members(directory=directory, view=FleetView())
    replicas = Replicas(members)
    held = HeldBytes(settings.fleet.held_mib * MIB)
    metrics = Metrics()
    directory.on_answer(metrics.asked)
    # Replicas refuse what is too much for them; here only a key's own limit counts.
    most = settings.limits.connections * MAX_CHOICES
    places = Places(places=most, tenant_places=most, running=most, limits=keyring.limits)

    def replicas_by_state() -> dict[str, int]:
        counts: dict[str, int] = {}
        for name, beat in members.beats.items():
            state = "silent" if name in members.silent() else beat.state
            counts[state] = counts.get(state, 0) + 1
        return counts

    metrics.follow(
        breaker=lambda: directory.state,
        redis_failures=lambda: directory.failures,
        held_bytes=lambda: held.held,
        replicas=replicas_by_state,
    )
    return Gateway(
        Parts(
            settings=settings,
            keyring=keyring,
            directory=directory,
            members=members,
            finder=Finder(directory=directory, members=members, router=Router(view=members.view, rng=random.Random())),
            replicas=replicas,
            allowances=Allowances(directory=directory, places=places, limits=keyring.limits, metrics=metrics),
            held=held,
            metrics=metrics,
            fleet_key=fleet_key(secret),
            follow_keys=lambda: follow_keys_file(settings, keyring),
            clock=time.monotonic,
        )
    )


def with_middleware(gateway: Gateway, settings: Settings) -> ASGIApp:
    """Return the application that the server calls: the gateway, inside the layers that every request passes first:
    request ids, the check of keys, and CORS."""
    server, parts = settings.server, gateway.parts

    def count(scope: Scope, status: int) -> None:
        path = scope["path"]
        parts.metrics.requests.labels(path if path in KNOWN_PATHS else "other", str(status)).inc()

    app: ASGIApp = Authentication(gateway, keyring=parts.keyring, hostnames=(server.host, *server.hostnames))
    if server.cors_origins:
        app = CORSMiddleware(app, **cors_options(server.cors_origins))
    return RequestContext(app, on_done=count, log_access=server.access_log)


class GatewayServer(BoundedServer):
    """A server for a gateway. After the first signal it refuses new requests while running answers continue for
    `server.drain_s`; the second signal ends it."""

    def __init__(self, settings: Settings, *, on_ready: Callable[[str], None]) -> None:
        """Set up. on_ready: called with the address. Raises what `make_gateway` does."""
        self._gateway = make_gateway(settings)
        super().__init__(with_middleware(self._gateway, settings), settings)
        self._drain_s = settings.server.drain_s
        self._drain_started_s: float | None = None
        self._on_ready = on_ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_started_s is None:
            self._drain_started_s = time.monotonic()
            self._gateway.is_draining = True
        else:
            self.force_exit = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._drain_started_s is not None:
            waited_s = time.monotonic() - self._drain_started_s
            if not self._gateway.under_way or waited_s >= self._drain_s + LAST_WORDS_S:
                self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list | None = None) -> None:  # type: ignore[type-arg]  # as uvicorn has it
        await super().startup(sockets)
        self._on_ready(self.url)
