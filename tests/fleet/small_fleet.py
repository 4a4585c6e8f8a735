"""Gateways and replicas with scripted engines on real sockets, before a real Redis, in one event loop."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from starlette.types import ASGIApp

from reprise.app.http.bounded_server import BoundedServer
from reprise.app.main import create_app
from reprise.app.settings.settings import Settings
from reprise.fleet.directory import Directory
from reprise.fleet.gateway import server as gateway_server
from tests.app.fakes import FakeEngine, Running, make_settings, until, write_tokenizer
from tests.redis_servers import RedisServer

CHAT = "/v1/chat/completions"


@dataclass
class SmallFleet:
    directory: Path
    settings: dict[str, dict[str, Any]]  # settings of all replicas
    replicas: dict[str, Running]
    gateways: list[httpx.AsyncClient]
    parts: list[gateway_server.Gateway]
    watcher: Directory

    async def beat(self) -> None:
        """Let all replicas beat, and all gateways hear of it."""
        for replica in self.replicas.values():
            await replica.app.state.hooks.beat()
        for gateway in self.parts:
            await gateway.parts.members.refresh()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def chat(content: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "test-model", "messages": [{"role": "user", "content": content}], **fields}


@asynccontextmanager
async def small_fleet(
    redis: RedisServer, directory: Path, *names: str, gateways: int = 1, **sections: dict[str, Any]
) -> AsyncIterator[SmallFleet]:
    """Start replicas of these names, and gateways. sections: settings of all of them."""
    secret = directory / "secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    waits = {"deadline_ms": 5000.0}
    shared: dict[str, dict[str, Any]] = {
        **sections,
        "server": {"tenant_secret_file": secret, "port": 0, **sections.get("server", {})},
        "fleet": {"redis_url": redis.url, **waits, **sections.get("fleet", {})},
    }
    async with AsyncExitStack() as stack:
        for module in ("routing", "members", "gateway.replicas"):  # a busy machine is late, not gone
            stack.enter_context(patch(f"reprise.fleet.{module}.STALE_S", 3600.0))
        watcher = Directory(url=redis.url, secret=secret_of(secret), deadline_s=5.0)
        stack.push_async_callback(watcher.close)
        fleet = SmallFleet(directory, shared, {}, [], [], watcher)
        for name in names:
            fleet.replicas[name] = await stack.enter_async_context(replica(fleet, name))
        for number in range(gateways):
            settings = make_settings(directory / f"gateway-{number}", **shared)
            client, parts = await stack.enter_async_context(gateway(settings))
            fleet.gateways.append(client)
            fleet.parts.append(parts)
        await fleet.beat()
        yield fleet


def secret_of(path: Path) -> bytes:
    from reprise.app.state_dir import load_tenant_secret

    return load_tenant_secret(path.parent, path)


@asynccontextmanager
async def replica(fleet: SmallFleet, name: str) -> AsyncIterator[Running]:
    own = {**fleet.settings, "fleet": {**fleet.settings["fleet"], "replica": name}}
    engine = FakeEngine(write_tokenizer(fleet.directory / "model"))
    settings = make_settings(fleet.directory / name, **own)
    app = create_app(settings, engine=engine)
    async with served(app, settings) as client:
        await app.state.readiness.wait_loaded()
        app.state.hooks.identity.url = str(client.base_url).rstrip("/")
        await app.state.hooks.beat()
        yield Running(app, engine, str(client.base_url), client)


@asynccontextmanager
async def gateway(settings: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, gateway_server.Gateway]]:
    made = gateway_server.make_gateway(settings)
    async with served(gateway_server.with_middleware(made, settings), settings) as client:
        yield client, made


@asynccontextmanager
async def served(app: ASGIApp, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an application, and end it as a signal would."""
    http = BoundedServer(app, settings)
    http.config.timeout_graceful_shutdown = 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            try:
                await until(lambda: http.started, 120)
                yield client
            finally:
                http.should_exit = True
                await asyncio.wait_for(serving, 120)
