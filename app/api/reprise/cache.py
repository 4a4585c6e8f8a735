"""/v1/cache: the whole cache, across tenants. Where keys are configured, only `server.admin_keys` may use it."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reprise.app.api.calls import body_of, engine_of, readiness_of, require_admin, sessions_of, settings_of
from reprise.app.api.operation import described
from reprise.app.api.reprise.sessions import MAX_LISTED, describe_session
from reprise.app.errors import ApiError, from_validation, session_not_found, unavailable
from reprise.app.observe.live import tiers_of
from reprise.app.schemas.answers.server import CacheCleared, CacheStatsObject
from reprise.app.schemas.answers.sessions import CacheSessionList
from reprise.app.schemas.fields import SESSION_ID, Part

CLEAR_AT_ONCE = 32  # sessions deleted concurrently: each waits for the disk while the engine keeps answering
CLEAR_PAGE = 200  # sessions per listing: the engine walks all their blocks for one
router = APIRouter()


class CachePage(BaseModel):
    """Query parameters of the list. (They arrive as strings, so validation is not strict.)"""

    model_config = ConfigDict(frozen=True, extra="ignore")

    limit: int = Field(100, ge=1, le=MAX_LISTED)
    after: str = Field("", max_length=256)


class ClearRequest(Part):
    """A body without fields. Requiring JSON keeps web pages in a browser from sending this request."""


@router.get("/v1/cache/stats", **described("Show the cache's contents and counters", CacheStatsObject))
async def stats(request: Request) -> dict[str, Any]:
    """Statistics of the engine's last heartbeat, at most a second old. Counters start with the engine. Hit rates are
    shares of prompt tokens whose KV was not computed. For `server.admin_keys` where there are keys."""
    require_admin(request)
    model, _ = readiness_of(request).require()
    stats = engine_of(request).stats
    if stats is None:
        raise unavailable("The engine has not reported yet.", code="unavailable", retry_after_s=1.0)
    prompt_tokens = {"hbm": 0, "dram": 0, "disk": 0, "redis": 0, "computed": 0} | stats.prompt_tokens
    total = sum(prompt_tokens.values())
    problem = request.app.state.state_disk.problem
    return {
        "object": "cache.stats",
        "mode": settings_of(request).cache.mode,
        "sessions": stats.sessions,
        "tiers": tiers_of(stats, model),
        "problems": stats.tier_problems | ({} if problem is None else {"state": problem}),
        "prompt_tokens": prompt_tokens,
        "hit_rate": round(1 - prompt_tokens["computed"] / total, 6) if total else None,
        "hit_rates": {tier: round(n / total, 6) if total else None for tier, n in prompt_tokens.items()},
        "miss_tokens": stats.miss_tokens,
        "moved_bytes": stats.moved_bytes,
        "moved_seconds": {direction: round(seconds, 6) for direction, seconds in stats.moved_seconds.items()},
        "load_seconds": round(stats.load_seconds, 6),
        "load_wait_seconds": round(stats.load_wait_seconds, 6),
        "evicted_blocks": stats.evictions,
        "refused_blocks": stats.refused,
        "load_failures": stats.load_failures,
        "write_failures": stats.write_failures,
        "truncated_tokens": stats.truncated_tokens,
        "recalled_tokens": stats.recalled_tokens,
        "verified_loads": stats.verified_loads,
        "verify_mismatches": stats.verify_mismatches,
        "leases": stats.leases,
        "in_flight": stats.in_flight,
    }


@router.get("/v1/cache/sessions", **described("List all tenants' conversations", CacheSessionList, query=CachePage))
async def list_sessions(request: Request) -> dict[str, Any]:
    """List them by tenant, then id. `after`: the `cursor` of the last session of the previous page. For
    `server.admin_keys` where there are keys."""
    require_admin(request)
    try:
        page = CachePage.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise from_validation(error) from None
    reply = await sessions_of(request).ask("list_all", after=page.after, limit=page.limit)
    data = [
        {"tenant": info.tenant, "cursor": f"{info.tenant}/{info.session_id}"} | describe_session(info)
        for info in reply.sessions
    ]
    return {"object": "list", "data": data, "has_more": reply.more}


@router.delete(
    "/v1/cache/sessions/{tenant}/{session_id}",
    status_code=204,
    response_class=Response,
    **described("Remove any tenant's conversation", None),
)
async def delete_session(request: Request, tenant: str, session_id: str) -> None:
    """Act as `DELETE /v1/sessions/{session_id}` does. For `server.admin_keys` where there are keys."""
    require_admin(request)
    if not SESSION_ID.fullmatch(session_id) or not SESSION_ID.fullmatch(tenant):
        raise session_not_found(session_id)
    await sessions_of(request).delete(session_id, tenant=tenant)


@router.post("/v1/cache/clear", **described("Remove the KV of all conversations", CacheCleared, body=ClearRequest))
async def clear(request: Request) -> dict[str, Any]:
    """The body is `{}`. Pinned conversations lose their KV too; those with a running request keep it, and KV that
    another model left in the same directory stays (`reprise cache clear` removes all). Transcripts stay; a session is
    404 until its next turn. Answers when the bytes are gone; 503 if the disk could not delete some. For
    `server.admin_keys` where there are keys."""
    require_admin(request)
    await body_of(request, ClearRequest)
    names: dict[tuple[str, str], None] = {}
    after, more = "", True
    while more:
        reply = await sessions_of(request).ask("list_all", after=after, limit=CLEAR_PAGE)
        names |= {(info.tenant, info.session_id): None for info in reply.sessions}
        more = reply.more and bool(reply.sessions)
        after = f"{reply.sessions[-1].tenant}/{reply.sessions[-1].session_id}" if reply.sessions else ""
    counts = {"removed": 0, "running": 0, "gone": 0}
    listed, problem = list(names), None
    for start in range(0, len(listed), CLEAR_AT_ONCE):
        some = listed[start : start + CLEAR_AT_ONCE]
        found = await asyncio.gather(*(_remove(request, *name) for name in some), return_exceptions=True)
        for outcome in found:
            if isinstance(outcome, BaseException):
                problem = problem or outcome
            else:
                counts[outcome] += 1
    if problem is not None:
        raise problem
    return {"object": "cache.cleared", "removed": counts["removed"], "running": counts["running"]}


async def _remove(request: Request, tenant: str, session_id: str) -> str:
    """Delete a session. Returns "removed", "running", or "gone" if another request has deleted it meanwhile."""
    try:
        await sessions_of(request).ask("delete", tenant=tenant, session_id=session_id)
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        return "gone" if error.status == 404 else "running"
    return "removed"
