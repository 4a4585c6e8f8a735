"""Encodes the head of a session: the signed record of its context and its extents in Redis, with which another server
can continue the session."""

import hmac
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from reprise.cache.blocks.stored import MAX_CONTEXT_BYTES, SessionRecord

HEAD_VERSION = 1
MAX_EXTENTS = 4096  # most extents that a head names; blocks of others are computed
_MAC_BYTES, _NAME_BYTES = 16, 16


class SessionHead(msgspec.Struct, frozen=True, array_like=True):
    """The decoded contents of a head (the signed record by which another server takes over a session): the session
    after one of its turns, and the names of its extents in Redis."""

    version: int
    turns: int
    tenant: str
    salt: str
    session_id: str
    context: bytes  # `SessionContext.pack`
    pinned: bool
    ttl_s: float | None
    extents: tuple[bytes, ...]


class HeadToTell(NamedTuple):
    """A session's head, which is to be stored outside of this process so that another server can take over the session.
    `signed` is the head itself: the session's context and the names of its extents in Redis, encoded and signed. The
    other fields say, for the code that stores it, of which session and turn it is, and how many tokens are in Redis."""

    name: tuple[str, str, str]  # tenant, salt, session id
    turns: int
    redis_tokens: int  # leading tokens of the context whose KV is in Redis
    signed: bytes


class BadHead(Exception):
    """The bytes are not a head (the signed record by which a server takes over a session) that a server with this model
    and secret has made for this session."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SessionHead).decode


def encode_head(record: SessionRecord, turns: int, extents: Sequence[bytes], key: bytes) -> bytes:
    """Encode and sign the head of a session after `turns` turns. extents: names of the session's extents in Redis;
    those beyond MAX_EXTENTS are left out. key: signs the head."""
    names = tuple(extents[:MAX_EXTENTS])
    body = _encode(SessionHead(HEAD_VERSION, turns, *record.names, record.context, record.pinned, record.ttl_s, names))
    return _mac(body, key) + body


def decode_head(data: bytes, names: tuple[str, str, str], key: bytes) -> SessionHead:
    """Verify and decode the head of a session. names: (tenant, salt, session id). key: the one that `encode_head` has
    signed with. The signature is checked before anything else is decoded. Raises BadHead."""
    if len(data) > 2 * MAX_CONTEXT_BYTES or not hmac.compare_digest(data[:_MAC_BYTES], _mac(data[_MAC_BYTES:], key)):
        raise BadHead("not signed with this server's secret for this model")
    try:
        head = _decode(data[_MAC_BYTES:])
    except msgspec.DecodeError as error:
        raise BadHead(f"not a head: {error}") from error
    if head.version != HEAD_VERSION or (head.tenant, head.salt, head.session_id) != names:
        raise BadHead("of another version or session")
    if len(head.extents) > MAX_EXTENTS or any(len(name) != _NAME_BYTES for name in head.extents):
        raise BadHead("names what cannot be extents")
    return head


def _mac(body: bytes, key: bytes) -> bytes:
    return blake2b(body, key=key, digest_size=_MAC_BYTES, person=b"head").digest()
