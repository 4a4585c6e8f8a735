"""Models of the answers about sessions."""

from typing import Any, Literal

from pydantic import Field, RootModel

from reprise.app.schemas.answers.shared import Answer


class Session(Answer):
    id: str
    object: Literal["session"]
    tokens: int = Field(description="tokens in the context")
    truncated_tokens: int = Field(description="tokens no longer in the context")
    blocks: dict[str, int] = Field(description="blocks by tier")
    bytes: dict[str, int] = Field(description="bytes of KV by tier")
    last_used_at: float = Field(description="Unix time")
    expires_at: float | None = Field(description="Unix time; null while pinned")
    pinned: bool = Field(description="a pinned session does not expire")
    running: bool = Field(description="a request of it runs")
    title: str | None = Field(None, description="with `titles`: as PATCH has set it; null: it has none")
    first_text: str | None = Field(None, description="with `titles`: how the first message of a user begins")
    num_messages: int | None = Field(None, description="with `titles`: messages kept; null: none are")


class SessionTitle(Answer):
    id: str
    object: Literal["session"]
    title: str | None = Field(description="null: it has none")


class PatchedSession(RootModel[Session | SessionTitle]):
    """A session after a change. Where only its title was changed, nothing is said of its KV."""


class SessionList(Answer):
    object: Literal["list"]
    data: list[Session]
    first_id: str | None
    last_id: str | None
    has_more: bool


class SessionMessage(Answer):
    id: str = Field(description="its place in the conversation, from 0")
    object: Literal["session.message"]
    role: str
    content: str
    name: str | None = None
    reasoning_content: str | None = Field(None, description="the thought of an answer")
    tool_calls: list[Any] | None = Field(None, description="calls of functions, as in a chat")
    tool_call_id: str | None = None


class SessionMessageList(Answer):
    object: Literal["list"]
    data: list[SessionMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CacheSession(Session):
    tenant: str
    cursor: str


class CacheSessionList(Answer):
    object: Literal["list"]
    data: list[CacheSession]
    has_more: bool
