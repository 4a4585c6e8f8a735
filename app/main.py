"""create_app: settings in, the ASGI application out."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from app.api import openapi
from app.api.responses.response_service import Responses, Store
from app.conversations.redis_store import RedisStore
from app.conversations.response_store import ResponseStore
from app.conversations.text_thread import TextThread
from app.conversations.transcripts import Transcripts
from app.errors import install_handlers
from app.http.middleware import Authentication, RequestContext
from app.observe.answer_log import AnswerLog
from app.observe.live import Live
from app.observe.logs import EngineOutput
from app.observe.metrics import Metrics
from app.observe.tracing import make_tracer
from app.settings.settings import GIB, Settings
from app.state_dir import SecretKeeper, load_tenant_secret, weakness
from app.tenancy.key_file import follow_keys, load_keys
from app.tenancy.keyring import Key, KeyLimits, Keyring, digest_of
from app.tenancy.places import Places
from app.tenancy.quotas import Quotas
from app.turn.observer import Observers, TurnObserver
from app.turn.ports import EnginePort
from app.turn.readiness import Readiness
from app.turn.service import TurnService
from app.turn.sessions import SessionCommands
from app.version import version
from engine.process.client import EngineClient

# What a script of another page may read of an answer, besides its body.
EXPOSED_HEADERS = (
    *("x-request-id", "openai-processing-ms", "x-session-id", "x-cache", "warning", "retry-after"),
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)

log = logging.getLogger(__name__)


def create_app(settings: Settings, *, engine: EnginePort | None = None) -> FastAPI:
    """The app, with an engine process of its own unless one is given. Nothing runs before its lifespan starts.

    Makes the state directory. Raises OSError, ValueError for a damaged secret, KeyFileError, TracingUnavailable or
    RedisStoreUnavailable.
    """
    keyring = make_keyring(settings)
    tracer = make_tracer(settings.server.traces_endpoint, version())
    secret = load_tenant_secret(settings.state_dir)
    keeper = SecretKeeper(settings.state_dir, secret)
    if (weak := weakness(settings.state_dir)) is not None:
        log.warning("%s; %s", *weak)
    if engine is None:
        json_lines: dict[str, Any] = {"echo": EngineOutput(_write)} if settings.server.log_format == "json" else {}
        engine = EngineClient(
            config=settings.engine_config(secret),
            start_timeout_s=settings.engine.start_timeout_s,
            hang_timeout_s=settings.engine.hang_timeout_s,
            **json_lines,
        )
    transcripts = Transcripts(
        path=settings.state_dir / "transcripts.sqlite3",
        max_bytes=settings.cache.transcript_mib << 20,
        ttl_s=settings.cache.ttl_s,
        max_answers_per_prompt=settings.cache.answers_per_prompt,
    )
    text_thread = TextThread(transcripts)

    metrics = Metrics(engine=engine, active=lambda: len(service.generations))
    live = Live(engine=engine, places=settings.limits.watchers)
    observers: list[TurnObserver] = [metrics, live, tracer]
    if settings.server.access_log:
        observers.append(AnswerLog())
    readiness = Readiness(engine=engine, aliases=settings.model.aliases)
    sessions = SessionCommands(
        engine=engine, readiness=readiness, transcripts=text_thread, timeout_s=settings.limits.sessions_timeout_s
    )
    quotas = Quotas(limits=keyring.limits, sessions=sessions)
    service = TurnService(
        settings=settings,
        engine=engine,
        readiness=readiness,
        sessions=sessions,
        transcripts=text_thread,
        places=Places(
            places=settings.places,
            tenant_places=settings.tenant_places,
            running=settings.scheduler.max_seqs,
            limits=keyring.limits,
        ),
        quotas=quotas,
        observer=Observers(observers),
    )
    remembered = Responses(service, make_store(settings))
    if isinstance(remembered.store, RedisStore):
        metrics.follow(remembered.store)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        background = (readiness.load(), text_thread.sweep_forever(), _follow_keys(settings, keyring), keeper.run())
        tasks = [asyncio.create_task(work) for work in background]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await remembered.close()
            await service.close()
            await sessions.close()
            await quotas.close()
            await engine.stop()
            await text_thread.close()
            await asyncio.to_thread(keeper.look)
            await asyncio.to_thread(tracer.shut_down)

    def count(scope: Scope, status: int) -> None:
        # The path of the route, not of the request: a scanner must not fill the metrics with labels.
        metrics.requests.labels(getattr(scope.get("route"), "path", "unknown"), str(status)).inc()

    # Bodies are read and validated by hand, so a generated description of them would be wrong.
    app = FastAPI(title="Reprise", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.settings = settings
    app.state.engine = engine
    app.state.readiness = readiness
    app.state.service = service
    app.state.sessions = sessions
    app.state.quotas = quotas
    app.state.metrics = metrics
    app.state.live = live
    app.state.responses = remembered
    modules = (*openapi.MODULES, openapi)
    for module in modules:
        app.include_router(module.router)
    install_handlers(app, [route for module in modules for route in module.router.routes])
    app.state.keyring = keyring
    hostnames = (settings.server.host, *settings.server.hostnames)
    app.add_middleware(Authentication, keyring=keyring, hostnames=hostnames)
    if settings.server.cors_origins:
        app.add_middleware(
            CORSMiddleware,  # in front of the keys: a browser asks without one whether it may ask
            allow_origins=settings.server.cors_origins,
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestContext, on_done=count, log_access=settings.server.access_log)
    return app


def make_store(settings: Settings) -> Store:
    """Of responses and conversations. Raises RedisStoreUnavailable."""
    bounds: dict[str, Any] = {
        "max_bytes": settings.server.responses_mib << 20,
        "ttl_s": settings.server.responses_ttl_s,
    }
    if settings.cache.redis_url:
        return RedisStore(url=settings.cache.redis_url, **bounds)
    return ResponseStore(path=settings.state_dir / "responses.sqlite3", **bounds)


def make_keyring(settings: Settings) -> Keyring:
    """Every key there is. Raises KeyFileError."""
    server, limits = settings.server, limits_of_keys(settings)
    keys = [] if server.keys_file is None else load_keys(server.keys_file.expanduser(), limits)
    return Keyring([*keys, *_keys_of_settings(settings)], local=limits)


def limits_of_keys(settings: Settings) -> KeyLimits:
    """What a key may have that says nothing else in its file."""
    limits = settings.limits
    return KeyLimits(
        requests=limits.key_requests,
        requests_per_minute=limits.key_requests_per_minute,
        tokens_per_minute=limits.key_tokens_per_minute,
        sessions=limits.key_sessions,
        cache_bytes=int(limits.key_cache_gib * GIB),
    )


def _keys_of_settings(settings: Settings) -> list[Key]:
    server, limits = settings.server, limits_of_keys(settings)
    keys = [Key(digest_of(key), limits=limits) for key in server.api_keys]
    return keys + [Key(digest_of(key), is_admin=True, limits=limits) for key in server.admin_keys]


async def _follow_keys(settings: Settings, keyring: Keyring) -> None:
    """Until cancelled, if there is a file to follow."""
    if settings.server.keys_file is not None:
        fixed = _keys_of_settings(settings)
        path = settings.server.keys_file.expanduser()
        await follow_keys(path, limits_of_keys(settings), lambda keys: keyring.use([*keys, *fixed]))


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
