"""Describes the KV context of a session between turns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey, KeyDomain, token_bytes
from reprise.cache.blocks.lineage import Lineage
from reprise.cache.blocks.truncate import Range, subtract

MAX_DROPPED = 2048
"""The most blocks dropped from its window that a session remembers; 2048 blocks are 65,536 tokens."""


class SavedContext(msgspec.Struct, frozen=True, array_like=True):
    """A session's context in the form in which it is stored: on disk next to its blocks, and in heads (the signed
    records by which another server takes over a session)."""

    keys: tuple[bytes, ...]
    plain: int
    joint: int | None
    joint_parent: bytes | None
    open_key: bytes | None
    open_tokens: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]
    cut_digest: bytes
    conversation_keys: tuple[bytes, ...] = ()
    client_cuts: tuple[tuple[int, int], ...] = ()
    turns: int = 0


class SavedWithDropped(SavedContext, frozen=True, array_like=True):
    """A stored context that also lists the blocks dropped from the window, so that they may be recalled."""

    dropped: tuple[tuple[int, bytes], ...] = ()
    recalled: tuple[int, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SavedWithDropped).decode


@dataclass(slots=True)
class SessionContext:
    """A session's context at the end of its last turn: full blocks in order, then the open block (the last one, which
    is not full). The blocks themselves may no longer exist; the cache table knows which do."""

    lineage: Lineage
    open_key: BlockKey | None
    open_tokens: tuple[int, ...]  # tokens of the open block, kept for comparison even if its bytes are gone
    last_used_s: float
    # ranges of the whole conversation that are no longer in the context
    cuts: list[Range] = field(default_factory=list)
    # the part of `cuts` that the client dropped and may send again
    client_cuts: list[Range] = field(default_factory=list)
    cut_digest: bytes = b""  # digest of the conversation up to the end of the last cut
    # keys of the whole conversation; filled only if something is cut
    cut_conversation: list[BlockKey] = field(default_factory=list)
    turns: int = 0  # turns that have ended
    pinned: bool = False
    ttl_s: float | None = None  # None: the server's default applies
    renewed_s: float = -math.inf  # time at which its extents in Redis were last renewed
    # every block that is in the table because of this session
    owned: dict[BlockKey, None] = field(default_factory=dict)
    # how much later text attended to its blocks, as in `CutBlocks.attention`; not stored
    attention: dict[BlockKey, float] = field(default_factory=dict)
    # Used with `cache.recall`, by place in the conversation: keys of computed blocks that are not in the context any
    # more, at most MAX_DROPPED; and blocks that are in it again.
    dropped: dict[int, BlockKey] = field(default_factory=dict)
    recalled: set[int] = field(default_factory=set)

    @property
    def keys(self) -> list[BlockKey]:
        return self.lineage.keys

    @property
    def all_keys(self) -> list[BlockKey]:
        """The keys of the full blocks, then that of the open block."""
        return [*self.keys, *((self.open_key,) if self.open_key else ())]

    @property
    def conversation_keys(self) -> list[BlockKey]:
        """The keys that the conversation's full blocks would have if nothing had been cut. Cuts consist of whole
        blocks, so the blocks of the cut context begin at the same tokens as blocks of the uncut conversation."""
        return self.cut_conversation if self.cuts else self.keys

    @property
    def own_cuts(self) -> list[Range]:
        """The ranges of `cuts` that the server dropped because the window was full."""
        return subtract(self.cuts, self.client_cuts)

    @property
    def num_tokens(self) -> int:
        return len(self.keys) * BLOCK_TOKENS + len(self.open_tokens)

    @property
    def truncated_tokens(self) -> int:
        return sum(b - a for a, b in self.cuts)

    def pack(self) -> bytes:
        """Encode the context for storage that outlives the process: on disk, or in a head, by which another server can
        take over the session."""
        lineage = self.lineage
        fields = (
            tuple(lineage.keys),
            lineage.plain,
            lineage.joint,
            lineage.joint_parent,
            self.open_key,
            self.open_tokens,
            tuple(self.cuts),
            self.cut_digest,
            tuple(self.cut_conversation),
            tuple(self.client_cuts),
            self.turns,
        )
        if not self.dropped:
            return _encode(SavedContext(*fields))
        return _encode(SavedWithDropped(*fields, tuple(sorted(self.dropped.items())), tuple(sorted(self.recalled))))

    @classmethod
    def unpack(cls, data: bytes, domain: KeyDomain, last_used_s: float) -> "SessionContext":
        """Decode a stored context. Raises msgspec.DecodeError."""
        saved = _decode(data)
        keys = [BlockKey(key) for key in saved.keys]
        parent = None if saved.joint_parent is None else BlockKey(saved.joint_parent)
        return cls(
            lineage=Lineage(domain, keys, saved.plain, saved.joint, parent),
            open_key=None if saved.open_key is None else BlockKey(saved.open_key),
            open_tokens=saved.open_tokens,
            last_used_s=last_used_s,
            cuts=list(saved.cuts),
            client_cuts=list(saved.client_cuts),
            cut_digest=saved.cut_digest,
            cut_conversation=[BlockKey(key) for key in saved.conversation_keys],
            turns=saved.turns,
            dropped={block: BlockKey(key) for block, key in saved.dropped[-MAX_DROPPED:]},
            recalled=set(saved.recalled),
        )


@dataclass(frozen=True, slots=True)
class ExpiredContext:
    """The part of a context that outlives the session's time to live: enough to recognise the conversation when it
    returns."""

    num_blocks: int  # full blocks of its conversation, with nothing cut
    last_key: BlockKey  # key of the last of these blocks

    @classmethod
    def of(cls, session: SessionContext) -> "ExpiredContext | None":
        keys = session.conversation_keys
        return cls(len(keys), keys[-1]) if keys else None

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_TOKENS


def digest_of(token_ids: Sequence[int]) -> bytes:
    """Return a 16-byte digest of token ids, by which the beginning of a conversation is recognised."""
    return blake2b(token_bytes(token_ids), digest_size=16).digest()
