"""/health, /ready, /metrics, /version."""

import platform
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from reprise.app.api.calls import engine_of, readiness_of, require_admin
from reprise.app.api.operation import described
from reprise.app.conversations.redis_store import RedisStore
from reprise.app.errors import unavailable
from reprise.app.schemas.answers.server import Health, ReadyStatus, SchedulerObject, Version
from reprise.app.turn.readiness import Status
from reprise.app.version import version
from reprise.engine.messages import WIRE_VERSION

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.head("/v1/health", include_in_schema=False)
@router.get("/health", **described("Check that the server is alive", Health))
@router.get("/v1/health", **described("Check that the server is alive", Health))
async def health(request: Request) -> dict[str, Any]:
    """Loading and restarting are healthy; 503 means that the engine will not come back by itself. No key needed."""
    status = readiness_of(request).status
    if status in (Status.FAILED, Status.STOPPED):
        raise unavailable(f"The engine is {status}.", code=str(status), retry_after_s=60.0)
    answer = {"status": "ok", "engine": str(status)}
    stats = engine_of(request).stats
    if stats is not None and stats.tier_capacity.get("disk"):
        answer["disk"] = "away" if "disk" in stats.tier_problems else "used"  # without it, KV is computed again
    state_disk = request.app.state.state_disk
    if (problem := state_disk.problem) is not None:  # it keeps transcripts and stored responses too
        answer |= {"disk": state_disk.state, "disk_problem": problem}
    if isinstance(store := request.app.state.responses.store, RedisStore):
        answer["redis"] = store.state  # without Redis, answers still work; stored responses do not
    return answer


@router.head("/ready", include_in_schema=False)
@router.get("/ready", **described("Check that the server takes requests", ReadyStatus))
async def ready(request: Request) -> dict[str, Any]:
    """200 while the server accepts requests. No key needed."""
    model, _ = readiness_of(request).require()
    return {"status": "ready", "model": model.name}


@router.get("/metrics", **described("Show metrics in Prometheus text format", None))
async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/scheduler", **described("Show the queue", SchedulerObject))
async def scheduler(request: Request) -> dict[str, Any]:
    """Return the queue at the engine's last heartbeat, at most a second ago. `front` are the requests that start next,
    of all tenants: for each where its KV lies, and in `order` what decides where it stands: `due_in_s` for the policy
    `due`; for `car` its `class` (1, 2 or 3), and how often others have `overtaken` it. For `server.admin_keys` where
    there are keys."""
    require_admin(request)
    readiness_of(request).require()
    stats = engine_of(request).stats
    if stats is None or stats.scheduler is None:
        raise unavailable("The engine has not reported yet.", code="unavailable", retry_after_s=1.0)
    answer: dict[str, Any] = msgspec.to_builtins(stats.scheduler)
    return {"object": "scheduler", "running": stats.running, "waiting": stats.waiting, **answer}


@router.get("/version", **described("Show the versions", Version))
async def get_version() -> dict[str, Any]:
    return {"version": version(), "wire_version": WIRE_VERSION, "python": platform.python_version()}
