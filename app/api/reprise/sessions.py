"""/v1/sessions: the asking tenant's conversations, and what the cache holds of them."""

import time
from typing import Annotated, Any, Literal, Unpack

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from reprise.app.api.calls import arrive, sessions_of, settings_of
from reprise.app.api.operation import described
from reprise.app.errors import from_validation, session_not_found
from reprise.app.http.body import parse_body
from reprise.app.schemas import answers
from reprise.app.schemas.fields import SESSION_ID
from reprise.app.turn.sessions import Question
from reprise.engine.messages import SessionInfo, SessionReply, given_salt, is_exact

MAX_LISTED = 1000
router = APIRouter()


class Page(BaseModel):
    """Query parameters of a list. (They arrive as strings, so validation is not strict.)"""

    model_config = ConfigDict(frozen=True, extra="ignore")

    limit: int = Field(100, ge=1, le=MAX_LISTED)
    after: str = Field("", max_length=128)
    order: Literal["asc"] = "asc"


class SessionPatch(BaseModel):
    """The fields that may be changed. An absent or null field stays as it is."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    pinned: bool | None = None
    ttl_s: Annotated[float, Field(gt=0, le=1e9)] | None = None

    @model_validator(mode="after")
    def _check_something_is_said(self) -> "SessionPatch":
        if self.pinned is None and self.ttl_s is None:
            raise PydanticCustomError("nothing", "Nothing to change: send 'pinned' or 'ttl_s'")
        return self

    @classmethod
    def ignored(cls, body: dict[str, object]) -> list[str]:
        return [name for name, value in body.items() if value is not None and name not in cls.model_fields]


@router.get("/v1/sessions", **described("List the conversations in the cache", answers.SessionList, query=Page))
async def list_sessions(request: Request) -> dict[str, Any]:
    """This key's conversations, by id. `after`: the `last_id` of the previous page; that session may be gone."""
    try:
        page = Page.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise from_validation(error) from None
    reply = await _ask(request, "list", after=page.after, limit=page.limit)
    data = [describe_session(info) for info in reply.sessions]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": reply.more,
    }


@router.get("/v1/sessions/{session_id}", **described("Get a conversation's cache state", answers.Session))
async def get_session(request: Request, session_id: str) -> dict[str, Any]:
    """404 until its first turn has ended."""
    return _only(session_id, await _ask(request, "get", session_id=session_id))


@router.patch(
    "/v1/sessions/{session_id}",
    **described("Pin a conversation or set its time to live", answers.Session, body=SessionPatch),
)
async def patch_session(request: Request, session_id: str) -> Response:
    """A pinned session does not expire. An expired one leaves every tier within a second or so, or at a hundred
    sessions a second where more expire together."""
    arrive(request)
    patch, headers = await parse_body(request, SessionPatch, settings_of(request).limits)
    _check(session_id)
    reply = await sessions_of(request).patch(
        session_id, tenant=request.state.tenant, pinned=patch.pinned, ttl_s=patch.ttl_s
    )
    body = msgspec.json.encode(_only(session_id, reply))
    return Response(body, headers=headers, media_type="application/json")


@router.delete(
    "/v1/sessions/{session_id}",
    status_code=204,
    response_class=Response,
    **described("Remove a conversation from every tier", None),
)
async def delete_session(request: Request, session_id: str) -> None:
    """Answers 204 when the session's bytes have left every tier and its transcript is deleted. Blocks shared with other
    sessions stay, and KV that another model left in the same directory stays until its room is needed or
    `reprise cache clear`. 409 while a request of it runs. 503 `not_deleted` if the disk keeps some of it; the server
    keeps trying."""
    _check(session_id)
    await sessions_of(request).delete(session_id, tenant=request.state.tenant)


@router.post(
    "/v1/sessions/{session_id}/prefetch",
    status_code=202,
    **described("Load a conversation's KV", answers.Session),
)
async def prefetch_session(request: Request, session_id: str) -> dict[str, Any]:
    """Announces the session's next turn. Its KV is brought from disk or Redis to DRAM, after that of turns that wait,
    and stays there for a minute. Answers before that is done."""
    return _only(session_id, await _ask(request, "prefetch", session_id=session_id))


async def _ask(request: Request, action: str, **fields: Unpack[Question]) -> SessionReply:
    if "session_id" in fields:
        _check(fields["session_id"])
    return await sessions_of(request).ask(action, tenant=request.state.tenant, **fields)


def _check(session_id: str) -> None:
    """Raise ApiError 404 for a string that cannot be a session id."""
    if not SESSION_ID.fullmatch(session_id):
        raise session_not_found(session_id)


def _only(session_id: str, reply: SessionReply) -> dict[str, Any]:
    """Return the description of the session in a reply. Several sessions may have the same id and different cache
    salts. Only the last used of them is returned; the list of sessions shows all."""
    if not reply.sessions:
        raise session_not_found(session_id)
    return describe_session(max(reply.sessions, key=lambda info: info.last_used_s))


def describe_session(info: SessionInfo) -> dict[str, Any]:
    return {
        "id": info.session_id,
        "object": "session",
        "cache_salt": given_salt(info.cache_salt) or None,
        "kv_quality": "exact" if is_exact(info.cache_salt) else "default",
        "tokens": info.tokens,
        "truncated_tokens": info.truncated_tokens,
        "blocks": info.blocks,
        "bytes": info.bytes,
        "last_used_at": round(info.last_used_s, 3),
        "expires_at": None if info.expires_s is None else round(info.expires_s, 3),
        "expires_in_s": None if info.expires_s is None else round(max(0.0, info.expires_s - time.time()), 3),
        "pinned": info.pinned,
        "running": info.running,
    }
