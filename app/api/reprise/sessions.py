"""/v1/sessions: the asking tenant's conversations, and what the cache holds of them."""

import time
from typing import Annotated, Any, Literal, TypeVar, Unpack

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from reprise.app.api.calls import arrive, sessions_of, settings_of
from reprise.app.api.operation import described
from reprise.app.api.reprise.chats import described_message, one_line, with_titles
from reprise.app.conversations.message_table import MAX_TITLE_CHARS
from reprise.app.errors import from_validation, no_transcript, session_not_found
from reprise.app.http.body import parse_body, warning_header
from reprise.app.schemas.answers.sessions import PatchedSession, Session, SessionList, SessionMessageList
from reprise.app.schemas.fields import SESSION_ID
from reprise.app.turn.sessions import Question
from reprise.engine.messages import SessionInfo, SessionReply, given_salt, is_exact

MAX_LISTED = 1000
MAX_SALT_CHARS = 256
Q = TypeVar("Q", bound=BaseModel)
router = APIRouter()


class Page(BaseModel):
    """Query parameters of a list. (They arrive as strings, so validation is not strict.)"""

    model_config = ConfigDict(frozen=True, extra="ignore")

    limit: int = Field(100, ge=1, le=MAX_LISTED)
    after: str = Field("", max_length=128)
    order: Literal["asc"] = "asc"


class SessionPage(Page):
    """Query parameters of the list of sessions."""

    titles: bool = Field(False, description="with titles and first texts, and also conversations without KV")
    cache_salt: str = Field("", max_length=MAX_SALT_CHARS, description="with `titles`: the salt of the conversations")


class MessagePage(BaseModel):
    """Query parameters of a session's messages."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    limit: int = Field(100, ge=1, le=MAX_LISTED)
    after: int = Field(-1, ge=-1, lt=1 << 31)
    cache_salt: str = Field("", max_length=MAX_SALT_CHARS, description="the salt of the conversation")


class SessionPatch(BaseModel):
    """The fields that may be changed. An absent or null field stays as it is."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    pinned: bool | None = None
    ttl_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    title: Annotated[str, Field(max_length=MAX_TITLE_CHARS, description="empty: it has none")] | None = None

    @property
    def is_for_engine(self) -> bool:
        return self.pinned is not None or self.ttl_s is not None

    @model_validator(mode="after")
    def _check_something_is_said(self) -> "SessionPatch":
        if not self.is_for_engine and self.title is None:
            raise PydanticCustomError("nothing", "Nothing to change: send 'pinned', 'ttl_s' or 'title'")
        return self

    @classmethod
    def settled(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the body, and the names of its fields that have no effect."""
        return body, [name for name, value in body.items() if value is not None and name not in cls.model_fields]


@router.get("/v1/sessions", **described("List the conversations in the cache", SessionList, query=SessionPage))
async def list_sessions(request: Request) -> dict[str, Any]:
    """List those of this key, by id. `after`: the `last_id` of the previous page; that session may be gone. With
    `titles=true` each has its title and how it begins, and those are listed too whose messages are kept while no tier
    has their KV (`blocks` is empty): their next turn is computed anew. Titles and texts are those of `cache_salt`."""
    page = _query(request, SessionPage)
    reply = await _ask(request, "list", after=page.after, limit=page.limit)
    data, more = [describe_session(info) for info in reply.sessions], reply.more
    if page.titles:
        chats = await sessions_of(request).chats(
            tenant=request.state.tenant, cache_salt=page.cache_salt, after=page.after, limit=page.limit + 1
        )
        data, more = with_titles(data, chats, more=more, limit=page.limit)
    return _as_list(data, more=more)


@router.get("/v1/sessions/{session_id}", **described("Get a conversation's cache state", Session))
async def get_session(request: Request, session_id: str) -> dict[str, Any]:
    """404 until its first turn has ended."""
    return _only(session_id, await _ask(request, "get", session_id=session_id))


@router.patch(
    "/v1/sessions/{session_id}",
    **described("Pin a conversation, or set its time to live or title", PatchedSession, body=SessionPatch),
)
async def patch_session(request: Request, session_id: str) -> Response:
    """A pinned session does not expire. An expired one leaves every tier within a second or so, or at a hundred
    sessions a second where more expire together. A title is kept with the conversation's messages, and goes with them;
    where none are kept it is a 404 `no_transcript`. An answer to a title alone says nothing of the KV."""
    arrive(request)
    patch, lost = await parse_body(request, SessionPatch, settings_of(request).limits)
    _check(session_id)
    sessions, tenant = sessions_of(request), request.state.tenant
    described: dict[str, Any] = {"id": session_id, "object": "session"}
    if patch.is_for_engine:
        reply = await sessions.patch(session_id, tenant=tenant, pinned=patch.pinned, ttl_s=patch.ttl_s)
        described = _only(session_id, reply)
    if patch.title is not None:
        title = one_line(patch.title) or None
        if not await sessions.entitle(session_id, tenant=tenant, title=title):
            raise no_transcript(session_id)
        described["title"] = title
    body = msgspec.json.encode(described)
    return Response(body, headers=warning_header(lost), media_type="application/json")


@router.get(
    "/v1/sessions/{session_id}/messages",
    **described("List a conversation's messages", SessionMessageList, query=MessagePage),
)
async def list_messages(request: Request, session_id: str) -> dict[str, Any]:
    """The messages of the newest turn with its answer, thoughts and calls included, in the form in which a chat takes
    them. `after`: the `last_id` of the previous page. A page ends early where it has 4 MiB. 404 `no_transcript` where
    the server keeps none: after the session's time to live or its deletion, where another server had its turns, or
    where they were text completions. Side calls (`service_tier` `flex`) are not kept."""
    _check(session_id)
    page = _query(request, MessagePage)
    found = await sessions_of(request).messages(
        session_id, tenant=request.state.tenant, cache_salt=page.cache_salt, after=page.after, limit=page.limit
    )
    if found is None:
        raise no_transcript(session_id)
    return _as_list([described_message(place, message) for place, message in found.messages], more=found.more)


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
    **described("Load a conversation's KV", Session),
)
async def prefetch_session(request: Request, session_id: str) -> dict[str, Any]:
    """Announces the session's next turn: its KV is brought from disk or Redis to DRAM, and stays there for a minute.
    Answers before that is done."""
    return _only(session_id, await _ask(request, "prefetch", session_id=session_id))


def _query(request: Request, model: type[Q]) -> Q:
    """Return the request's query. Raises ApiError."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise from_validation(error) from None


def _as_list(data: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }


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
