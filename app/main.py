"""create_app: settings in, the ASGI application out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import Scope

from app.auth import Keyring, load_tenant_secret
from app.errors import install_handlers
from app.generation import Engine
from app.middleware import Authentication, RequestContext
from app.routes import chat, completions, events, models, ops, page, sessions, tokens
from app.service import Service
from app.settings import Settings
from app.text_thread import TextThread
from app.transcript import Transcripts
from engine.client import EngineClient


def create_app(settings: Settings, *, engine: Engine | None = None) -> FastAPI:
    """The app, with an engine process of its own unless one is given. Nothing runs before its lifespan starts.

    Makes the state directory. Raises OSError, or ValueError for a damaged secret.
    """
    secret = load_tenant_secret(settings.state_dir)
    if engine is None:
        engine = EngineClient(
            config=settings.engine_config(secret),
            start_timeout_s=settings.engine.start_timeout_s,
            hang_timeout_s=settings.engine.hang_timeout_s,
        )
    transcripts = Transcripts(
        path=settings.state_dir / "transcripts.sqlite3",
        max_bytes=settings.cache.transcript_mib << 20,
        ttl_s=settings.cache.ttl_s,
        max_answers_per_prompt=settings.cache.answers_per_prompt,
    )
    text_thread = TextThread(transcripts)
    service = Service(settings=settings, engine=engine, transcripts=text_thread)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    def count(scope: Scope, status: int) -> None:
        # The path of the route, not of the request: a scanner must not fill the metrics with labels.
        service.metrics.requests.labels(getattr(scope.get("route"), "path", "unknown"), str(status)).inc()

    # Bodies are read and validated by hand, so a generated description of them would be wrong.
    app = FastAPI(title="Reprise", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    modules = (chat, completions, tokens, models, ops, sessions, events, page)
    for module in modules:
        app.include_router(module.router)
    install_handlers(app, [route for module in modules for route in module.router.routes])
    keyring = Keyring(api_keys=settings.server.api_keys, admin_keys=settings.server.admin_keys)
    app.state.keyring = keyring
    app.add_middleware(Authentication, keyring=keyring)
    app.add_middleware(RequestContext, on_done=count, log_access=settings.server.access_log)
    return app
