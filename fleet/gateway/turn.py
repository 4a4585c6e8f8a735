"""Reads a turn's request as far as a gateway needs: what the client sent, and which conversation it belongs to."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.types import Scope

from reprise.fleet.identify import (
    Conversation,
    TurnBody,
    choices_of,
    conversation_of,
    read_body,
    salt_in,
    session_id_of,
)

TURN_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
LONG_BODY_BYTES = 1 << 18  # a longer one is read on a thread; it would hold up others' streams for milliseconds

# Of one connection, or made anew by the gateway, by its HTTP server, or by the replica's.
_NOT_FORWARDED = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"host", b"content-length", b"x-request-id"),
        b"content-encoding",  # the gateway has decompressed the body
    }
)
_NOT_RETURNED = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"content-length", b"date", b"server", b"x-request-id", b"openai-processing-ms"),
    }
)
_OURS = b"x-reprise-"
_CORS = b"access-control-"

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request whose answer a model generates."""

    tenant: str
    path: str
    target: bytes  # path and query as the client wrote them
    headers: Headers  # those that the replica gets too
    request_id: str
    arrived_s: float  # monotonic
    body: bytes
    model: str
    streams: bool
    salt: str
    session_id: str | None  # as the client calls its conversation
    conversation: Conversation
    choices: int = 1


async def read_turn(
    *,
    tenant: str,
    is_exact: bool,
    path: str,
    target: bytes,
    headers: Headers,
    session_header: str | None,
    request_id: str,
    arrived_s: float,
    body: bytes,
) -> Turn:
    """Return the parts of a request that the gateway needs. A request with an invalid body is returned too, with an
    empty conversation: the replica tells the client what is wrong with it. is_exact: whether the API key of the tenant
    demands exact KV (KV that no codec changes) for all turns. target: path and query. headers: from `forwarded`.
    session_header: the first of `SESSION_HEADERS` that was sent. arrived_s: on the monotonic clock."""
    if len(body) > LONG_BODY_BYTES:
        said, conversation = await asyncio.to_thread(_read, body)
    else:
        said, conversation = _read(body)
    return Turn(
        tenant=tenant,
        path=path,
        target=target,
        headers=headers,
        request_id=request_id,
        arrived_s=arrived_s,
        body=body,
        model=said.model if isinstance(said.model, str) else "",
        streams=said.stream is True,
        salt=salt_in(said, is_exact=is_exact),
        session_id=session_id_of(said, session_header),
        conversation=conversation,
        choices=choices_of(said),
    )


def _read(body: bytes) -> tuple[TurnBody, Conversation]:
    said = read_body(body) or TurnBody()
    return said, conversation_of(said)


def target_of(scope: Scope) -> bytes:
    """Return the path and query as the client wrote them."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def forwarded(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Return a request's headers, with names in lower case, without those that concern only its connection and those
    that only a gateway may send."""
    kept = [(name, value) for name, value in headers if name not in _NOT_FORWARDED and not name.startswith(_OURS)]
    named = [value for name, value in headers if name == b"connection"]  # what it names is of the connection too
    dropped = {word.strip().lower() for value in named for word in value.split(b",")}
    return [(name, value) for name, value in kept if name not in dropped]


def returned(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return an answer's headers without those of its connection and those that the gateway makes itself."""
    return [
        (name, value)
        for name, value in headers
        if name not in _NOT_RETURNED and not name.startswith(_OURS) and not name.startswith(_CORS)
    ]
