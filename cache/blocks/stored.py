"""Defines the values that the cache and its storage exchange: stored blocks, session records and extents."""

import math
from dataclasses import dataclass

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey

MAX_CONTEXT_BYTES = 4 << 20
MAX_NAME_BYTES = 64 << 10  # longest tenant, salt or session id
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block inside an extent (blocks that are written together and deleted together)."""

    key: BlockKey  # 16 bytes
    parent: BlockKey
    token_ids: bytes  # little-endian uint32 each; fewer than 32 tokens: an open block
    is_open: bool  # private to the session

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.parent) != KEY_BYTES:
            raise ValueError(f"a block key has {KEY_BYTES} bytes")
        if len(self.token_ids) % 4 or not 0 < len(self.token_ids) <= 4 * BLOCK_TOKENS:
            raise ValueError(f"{len(self.token_ids)} bytes are not the token ids of one block")


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The stored data of a session, besides its blocks."""

    tenant: str
    salt: str
    session_id: str
    context: bytes  # the cache's own record, opaque here; at most 4 MiB
    last_used_s: float  # unix time
    pinned: bool
    ttl_s: float | None

    def __post_init__(self) -> None:
        if len(self.context) > MAX_CONTEXT_BYTES:
            raise ValueError(f"a context of {len(self.context)} bytes; the limit is {MAX_CONTEXT_BYTES}")
        if any(len(name.encode()) > MAX_NAME_BYTES for name in self.names):
            raise ValueError(f"a tenant, salt or session id of more than {MAX_NAME_BYTES} bytes")
        if not math.isfinite(self.last_used_s) or not (self.ttl_s is None or math.isfinite(self.ttl_s)):
            raise ValueError("times are finite")

    @property
    def names(self) -> tuple[str, str, str]:
        """The names that identify the session: (tenant, salt, session id)."""
        return self.tenant, self.salt, self.session_id


def is_coded(extent: int | bytes) -> bool:
    """Return whether a codec has compressed the segments of an extent, given by its id or its name in Redis; the last
    bit says so. Only for a server that has a codec; otherwise the bit means nothing."""
    return bool((extent if isinstance(extent, int) else extent[-1]) & 1)


@dataclass(frozen=True, slots=True)
class RedisExtent:
    """An extent (blocks that are stored and deleted together) in Redis, described by its header."""

    name: bytes  # a keyed hash of the header, and so of all that is in it
    session: SessionRecord  # as it was when the extent was written
    blocks: tuple[StoredBlock, ...]
    size_bytes: int  # size of all blocks together


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """An extent (blocks that are stored and deleted together), described by the storage that has it."""

    extent_id: int  # never used twice in a directory; increases in order of writing
    session: SessionRecord  # as it was when the extent was written
    blocks: tuple[StoredBlock, ...]
    size_bytes: int  # on disk, header and padding included
