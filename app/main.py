"""Creates the ASGI application from the settings."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from reprise.app.api import openapi
from reprise.app.api.responses.response_service import Responses, Store
from reprise.app.api.thought_seal import ThoughtSeal
from reprise.app.conversations.redis_store import RedisStore
from reprise.app.conversations.response_store import ResponseStore
from reprise.app.conversations.text_thread import TextThread
from reprise.app.conversations.transcripts import Transcripts
from reprise.app.errors import install_handlers
from reprise.app.http.compression import Compression
from reprise.app.http.cors import cors_options
from reprise.app.http.middleware import Authentication, RequestContext
from reprise.app.observe.answer_log import AnswerLog
from reprise.app.observe.live import MAX_WATCHERS, Live
from reprise.app.observe.logs import EngineOutput
from reprise.app.observe.loss_log import LossLog
from reprise.app.observe.metrics import Metrics, RedisCollector, StateDiskCollector
from reprise.app.observe.tracing import OtelTracer, make_tracer
from reprise.app.settings.settings import Settings
from reprise.app.state_dir import SecretKeeper, StateDir, open_state_dir, weakness
from reprise.app.state_disk import StateDisk
from reprise.app.tenancy.configured_keys import follow_keys_file, make_keyring
from reprise.app.tenancy.keyring import Keyring
from reprise.app.tenancy.places import Places
from reprise.app.tenancy.quotas import HeldHere, Holdings, Quotas
from reprise.app.turn.alone import LoneServer
from reprise.app.turn.observer import Observers, TurnObserver
from reprise.app.turn.ports import EnginePort, ServerHooks
from reprise.app.turn.readiness import Readiness
from reprise.app.turn.service import TurnService
from reprise.app.turn.sessions import SessionCommands
from reprise.app.version import version
from reprise.engine.process.client import EngineClient

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # without a sign of life of a load: it is begun anew
HANG_TIMEOUT_S = 300.0  # without a heartbeat: the engine is restarted
TRANSCRIPTS_FILE = "transcripts.sqlite3"  # a file in the state directory
MAX_TRANSCRIPT_BYTES = 256 << 20  # largest file of transcripts
MAX_ANSWERS_PER_PROMPT = 8  # remembered (n, regenerate)
MAX_STORED_BYTES = 64 << 20  # most for responses and conversations


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of which the app consists. Routes find each of them under its name in `app.state`."""

    settings: Settings
    state_dir: StateDir
    state_disk: StateDisk
    engine: EnginePort
    keyring: Keyring
    hooks: ServerHooks
    secret_keeper: SecretKeeper
    text_thread: TextThread
    readiness: Readiness
    sessions: SessionCommands
    quotas: Quotas
    service: TurnService
    responses: Responses
    thought_seal: ThoughtSeal
    metrics: Metrics
    live: Live
    losses: LossLog
    tracer: OtelTracer | None  # None: no traces are wanted


def create_app(settings: Settings, *, engine: EnginePort | None = None) -> FastAPI:
    """Return the app, with an engine process of its own unless one is given. Nothing runs before its lifespan starts.

    Makes the state directory. Raises OSError, ValueError for a damaged secret, KeyFileError, TracingUnavailable or
    RedisStoreUnavailable.
    """
    parts = compose(settings, engine)
    # Bodies are read and validated by hand, so a generated description of them would be wrong.
    app = FastAPI(title="Reprise", lifespan=lambda _: lifespan(parts), openapi_url=None, redirect_slashes=False)
    for part in fields(parts):
        setattr(app.state, part.name, getattr(parts, part.name))
    add_routes(app)
    add_middleware(app, parts)
    return app


def compose(settings: Settings, engine: EnginePort | None) -> Parts:
    """Build every part of the app, and give each the others that it uses. engine: None for an engine process of its
    own. Raises what `create_app` does."""
    keyring = make_keyring(settings)
    tracer = make_tracer(settings.server.traces_endpoint, version())
    state_dir = open_state_dir(settings.state_dir, settings.server.tenant_secret_file)
    state_disk = StateDisk()
    secret = state_dir.secret
    if (weak := weakness(state_dir.path)) is not None:
        log.warning("%s; %s", *weak)
    if engine is None:
        engine = make_engine(settings, state_dir)
    text_thread = TextThread(make_transcripts(settings, state_dir.path, state_disk))
    metrics = Metrics(engine=engine, active=lambda: len(service.generations))
    live = Live(engine=engine, places=MAX_WATCHERS, state_disk=state_disk)
    observers: list[TurnObserver] = [metrics, live]
    if tracer is not None:
        observers.append(tracer)
    if settings.server.access_log:
        observers.append(AnswerLog())
    chosen = settings.model
    readiness = Readiness(engine=engine, aliases=chosen.aliases, calls=chosen.calls, thoughts=chosen.thoughts)
    sessions = SessionCommands(engine=engine, readiness=readiness, transcripts=text_thread)
    metrics.add(StateDiskCollector(state_disk))
    store = make_store(settings, state_dir.path, state_disk)
    if isinstance(store, RedisStore):
        metrics.add(RedisCollector(store))
    hooks: ServerHooks = LoneServer(sessions.delete_here)
    holdings: Holdings = HeldHere(sessions)
    if settings.fleet.is_on:
        hooks, holdings = join_fleet(
            settings,
            secret=secret,
            engine=engine,
            readiness=readiness,
            transcripts=text_thread,
            sessions=sessions,
            keyring=keyring,
            metrics=metrics,
            state_disk=state_disk,
        )
    sessions.hooks = hooks
    live.replica = hooks.name
    quotas = Quotas(limits=keyring.limits, holdings=holdings)
    service = TurnService(
        settings=settings,
        engine=engine,
        readiness=readiness,
        sessions=sessions,
        transcripts=text_thread,
        places=make_places(settings, keyring),
        quotas=quotas,
        observer=Observers(observers),
    )
    thought_seal = ThoughtSeal(secret)
    is_elsewhere = settings.server.tenant_secret_file is not None or state_dir.problem is not None
    return Parts(
        settings=settings,
        state_dir=state_dir,
        state_disk=state_disk,
        engine=engine,
        keyring=keyring,
        hooks=hooks,
        secret_keeper=SecretKeeper(
            state_dir.path, None if is_elsewhere else secret, state_disk, is_written=state_dir.is_secret_written
        ),
        text_thread=text_thread,
        readiness=readiness,
        sessions=sessions,
        quotas=quotas,
        service=service,
        responses=Responses(
            service,
            store,
            hooks,
            thought_seal,
            ttl_s=settings.server.responses_ttl_s,
            max_referred_bytes=settings.limits.body_bytes,
        ),
        thought_seal=thought_seal,
        metrics=metrics,
        live=live,
        losses=LossLog(),
        tracer=tracer,
    )


@asynccontextmanager
async def lifespan(parts: Parts) -> AsyncIterator[None]:
    """Start the engine and the background work of the app. At the end, stop every part after those that use it."""
    await parts.engine.start()
    background = (
        parts.readiness.load(),
        parts.text_thread.sweep_forever(),
        follow_keys_file(parts.settings, parts.keyring),
        parts.secret_keeper.run(),
        parts.hooks.run(),
    )
    tasks = [asyncio.create_task(work) for work in background]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await parts.responses.close()
        await parts.service.close()
        await parts.hooks.leave()
        await parts.sessions.close()
        await parts.quotas.close()
        await parts.engine.stop()
        await parts.text_thread.close()
        await parts.secret_keeper.close()
        if parts.tracer is not None:
            await asyncio.to_thread(parts.tracer.shut_down)


def add_routes(app: FastAPI) -> None:
    """Add every endpoint, and handlers for requests to other paths."""
    modules = (*openapi.MODULES, openapi)
    for module in modules:
        app.include_router(module.router)
    install_handlers(app, [route for module in modules for route in module.router.routes])


def add_middleware(app: FastAPI, parts: Parts) -> None:
    """Add the layers that every request passes before its route: the last one added comes first."""
    server = parts.settings.server
    app.add_middleware(Compression)
    app.add_middleware(Authentication, keyring=parts.keyring, hostnames=(server.host, *server.hostnames))
    if server.cors_origins:
        # In front of the keys: a browser asks without one whether it may ask.
        app.add_middleware(CORSMiddleware, **cors_options(server.cors_origins))
    app.add_middleware(RequestContext, on_done=parts.metrics.request_done, log_access=server.access_log)


def make_engine(settings: Settings, state_dir: StateDir) -> EngineClient:
    """Return the client of an engine process, which its `start` starts. Without the installation's secret the engine
    gets no disk tier: it could not read what other servers of the installation have written there, nor could they read
    what it writes."""
    if not state_dir.is_own_secret:
        cache = settings.cache.model_copy(update={"disk_dir": state_dir.path, "disk_gib": 0.0})
        settings = settings.model_copy(update={"cache": cache})
    json_lines: dict[str, Any] = {"echo": EngineOutput(_write)} if settings.server.log_format == "json" else {}
    return EngineClient(
        config=settings.engine_config(state_dir.secret),
        start_timeout_s=START_TIMEOUT_S,
        hang_timeout_s=HANG_TIMEOUT_S,
        **json_lines,
    )


def make_transcripts(settings: Settings, directory: Path, disk: StateDisk) -> Transcripts:
    return Transcripts(
        path=directory / TRANSCRIPTS_FILE,
        max_bytes=MAX_TRANSCRIPT_BYTES,
        ttl_s=settings.cache.ttl_s,
        max_answers_per_prompt=MAX_ANSWERS_PER_PROMPT,
        disk=disk,
    )


def make_places(settings: Settings, keyring: Keyring) -> Places:
    return Places(
        places=settings.places,
        tenant_places=settings.tenant_places,
        running=settings.scheduler.max_seqs,
        limits=keyring.limits,
    )


def join_fleet(
    settings: Settings,
    *,
    secret: bytes,
    engine: EnginePort,
    readiness: Readiness,
    transcripts: TextThread,
    sessions: SessionCommands,
    keyring: Keyring,
    metrics: Metrics,
    state_disk: StateDisk,
) -> tuple[ServerHooks, Holdings]:
    """Make this server a member of the fleet that the settings name. Returns its hooks, and a counter of the sessions
    and the KV of each key. Raises OSError, ValueError, ImportError."""
    # Imported here, so that a server that is in no fleet loads nothing of one.
    from reprise.fleet.replica.holdings import HeldInFleet
    from reprise.fleet.replica.metrics import ReplicaCollector
    from reprise.fleet.replica.replica import Replica

    replica = Replica(
        settings=settings,
        secret=secret,
        engine=engine,
        readiness=readiness,
        transcripts=transcripts,
        commands=sessions,
        limits=keyring.limits,
        state_disk=state_disk,
    )
    metrics.add(ReplicaCollector(replica))
    longest_s = settings.limits.request_timeout_s
    return replica, HeldInFleet(directory=replica.directory, here=HeldHere(sessions), longest_s=longest_s)


def make_store(settings: Settings, directory: Path, disk: StateDisk) -> Store:
    """Make the store of responses and conversations. Raises RedisStoreUnavailable."""
    ttl_s = settings.server.responses_ttl_s
    if settings.responses_redis_url:
        return RedisStore(url=settings.responses_redis_url, max_bytes=MAX_STORED_BYTES, ttl_s=ttl_s)
    return ResponseStore(path=directory / "responses.sqlite3", max_bytes=MAX_STORED_BYTES, ttl_s=ttl_s, disk=disk)


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
