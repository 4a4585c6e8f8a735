"""The KV context of a session between turns, and of a request while it waits or runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from cache.blocks.keys import BLOCK_TOKENS, BlockKey, KeyDomain, token_bytes
from cache.blocks.match import RememberedMatch
from cache.blocks.table import SessionName
from cache.blocks.truncate import CutRules, Range, subtract
from cache.stats import MissReason


@dataclass(slots=True)
class Lineage:
    """The keys of a context's full blocks, in order. Until something is cut, they are one chain from the domain's root.
    The first block computed after a cut depends on exactly which blocks remain before it, so its key chains on all of
    their keys; this block is the `joint`."""

    domain: KeyDomain
    keys: list[BlockKey] = field(default_factory=list)
    plain: int = 0  # number of leading keys that chain from the root; used only if there is a joint
    joint: int | None = None  # index of the block whose key chains on all blocks before it
    joint_parent: BlockKey | None = None

    def extend(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Add the keys of all full blocks of `token_ids`, which begins with the blocks already known. Returns all
        keys."""
        for block in range(len(self.keys), len(token_ids) // BLOCK_TOKENS):
            start = block * BLOCK_TOKENS
            self.keys.append(self.domain.child(self.parent(block), token_ids[start : start + BLOCK_TOKENS]))
        return self.keys

    def parent(self, block: int) -> BlockKey:
        """Return the key on which the key of `block` chains. `block` is a known one or the next one."""
        if block == self.joint:
            assert self.joint_parent is not None
            return self.joint_parent
        return self.keys[block - 1] if block else self.domain.root

    def is_moved(self, block: int) -> bool:
        """Whether a known block was computed behind other blocks than those before it now, which a cut has dropped."""
        return self.joint is not None and self.plain <= block < self.joint

    def first(self, count: int) -> "Lineage":
        """Return the lineage of a context that shares the first `count` blocks with this one and then continues by
        itself."""
        if self.joint is not None and count >= self.joint:
            return Lineage(self.domain, self.keys[:count], self.plain, self.joint, self.joint_parent)
        return self.anew(count)

    def anew(self, count: int) -> "Lineage":
        """Return the lineage of a context that keeps at most the first `count` blocks and computes the rest after them
        anew."""
        keys, plain = self.keys[:count], self.num_plain
        if count <= plain:
            return Lineage(self.domain, keys)
        return Lineage(self.domain, keys, plain, count, self.domain.lineage(keys))

    def without(self, cuts: Sequence[Range], tail: BlockKey | None) -> "Lineage":
        """Return the lineage after a truncation that drops these token ranges, which consist of whole blocks. tail: the
        key of an open block after the last full one that stays; the block it grows into was begun in the longer
        context."""
        keys, start = [], 0
        for a, b in cuts:
            keys += self.keys[start : a // BLOCK_TOKENS]
            start = b // BLOCK_TOKENS
        keys += self.keys[start:]
        return self.rejoined(keys, cuts[0][0] // BLOCK_TOKENS, tail)

    def rejoined(self, keys: list[BlockKey], same: int, tail: BlockKey | None) -> "Lineage":
        """Return the lineage of a context of these blocks, of which only the first `same` are where they were. tail: as
        in `without`."""
        plain = min(self.num_plain, same)
        if tail is not None:
            return Lineage(self.domain, keys, plain, len(keys), self.domain.lineage([*keys, tail]))
        if len(keys) <= plain:
            return Lineage(self.domain, keys)
        return Lineage(self.domain, keys, plain, len(keys), self.domain.lineage(keys))

    def is_held_by(self, num_blocks: int, has_tail: bool) -> bool:
        """Whether KV computed after the first `num_blocks` blocks (and, with `has_tail`, the rows of an open one) may
        use this lineage's keys. It may not if fewer blocks are left than the truncation had kept."""
        if self.joint is None or num_blocks > self.joint:
            return True
        if num_blocks < self.joint:
            return False
        return has_tail or self.joint_parent == self.domain.lineage(self.keys[: self.joint])

    @property
    def num_plain(self) -> int:
        return len(self.keys) if self.joint is None else self.plain


MAX_DROPPED = 2048
"""The most dropped blocks that a session remembers: 65,536 tokens."""


class SavedContext(msgspec.Struct, frozen=True, array_like=True):
    """A session's context in the form in which it is stored next to its blocks."""

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
    """The same, of a session that may recall what was dropped."""

    dropped: tuple[tuple[int, bytes], ...] = ()
    recalled: tuple[int, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SavedWithDropped).decode


@dataclass(slots=True)
class SessionContext:
    """The context at the end of a session's last turn: full blocks in order, then the open block. It does not guarantee
    that the blocks still exist; the cache table knows that."""

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
    turns: int = 0  # that have ended
    pinned: bool = False
    ttl_s: float | None = None  # None: the server's default applies
    renewed_s: float = -math.inf  # when what it has in Redis was last kept for longer
    # every block that is in the table because of this session
    owned: dict[BlockKey, None] = field(default_factory=dict)
    # how much later text attended to its blocks, as in `CutBlocks.attention`; not stored
    attention: dict[BlockKey, float] = field(default_factory=dict)
    # With `cache.recall`, both by place in the conversation: keys of computed blocks that are not in the context any
    # more, at most MAX_DROPPED, and which blocks are in it again.
    dropped: dict[int, BlockKey] = field(default_factory=dict)
    recalled: set[int] = field(default_factory=set)

    @property
    def keys(self) -> list[BlockKey]:
        return self.lineage.keys

    @property
    def all_keys(self) -> list[BlockKey]:
        """Keys of the full blocks and of the open block."""
        return [*self.keys, *((self.open_key,) if self.open_key else ())]

    @property
    def conversation_keys(self) -> list[BlockKey]:
        """Keys of the conversation's full blocks as if nothing were cut. (Cuts consist of whole blocks, so block
        boundaries are the same in both.)"""
        return self.cut_conversation if self.cuts else self.keys

    @property
    def own_cuts(self) -> list[Range]:
        """The part of `cuts` that was dropped because the window was full."""
        return subtract(self.cuts, self.client_cuts)

    @property
    def num_tokens(self) -> int:
        return len(self.keys) * BLOCK_TOKENS + len(self.open_tokens)

    @property
    def truncated_tokens(self) -> int:
        return sum(b - a for a, b in self.cuts)

    def pack(self) -> bytes:
        """Encode the context for a tier that outlives the process."""
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
    """The rest of a context after its time to live: enough to recognise the conversation when it returns."""

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
    """Return a 16-byte digest of the conversation's beginning."""
    return blake2b(token_bytes(token_ids), digest_size=16).digest()


PARKED = -1
"""Stands for a page that a context has given up, because its blocks are read from their slots."""


class SlotBlock(NamedTuple):
    """A full block of a running context in the slot that is pinned for it."""

    key: BlockKey
    slot: int
    position: int  # for which its keys are rotated when they are read


@dataclass(slots=True)
class RunningContext:
    """The context of one running or waiting request. Its row p is row p % page_size of pages[p // page_size], unless
    that page is PARKED."""

    request_id: str
    session: SessionName
    token_ids: list[int]  # the sequence's own list: grows with sampled tokens, shrinks when it is truncated
    prompt_tokens: int
    lineage: Lineage
    rules: CutRules
    stream: list[int]  # the conversation as the client sent it, without generated tokens and with nothing cut
    cuts: list[Range] = field(default_factory=list)  # ranges of the stream and the tokens generated after it
    client_cuts: list[Range] = field(default_factory=list)  # the part of `cuts` that the client dropped itself
    open_hint: BlockKey | None = None  # an open block that the request can continue, whatever its key chains on
    open_place: int = 0  # number of full blocks before `open_hint`
    continues_raw: bool = False  # the first rows of the block at `open_place` may have come out of a codec
    # keys of the stream's full blocks; filled only if there are cuts
    sent_keys: list[BlockKey] = field(default_factory=list)
    cut_now: bool = False  # this turn makes a cut; tokens between the last full block and the cut are lost
    moved_behind: bool = False  # history cannot be used: its position, or what precedes it, has changed
    lost_lineage: bool = False  # a block that a truncation kept is gone, and with it all blocks after it
    shifted_tokens: int = 0  # tokens of history that moved because the client dropped some before them
    pages: list[int] = field(default_factory=list)  # pinned, in order; empty while waiting
    computed: int = 0  # leading rows that hold KV now, or will before they are read
    sealed: int = 0  # leading blocks already considered for publishing
    trusted: bool = True  # False: it shares blocks that gave an impossible result, so none of its blocks are published
    awaited: BlockKey | None = None  # the block that it waits for while another request computes it
    reached: int = 0  # most rows it had computed when it was preempted; the tokens are known, the KV may be gone
    slots: dict[int, int] = field(default_factory=dict)  # block -> the DRAM slot it is being saved to
    # block -> where DRAM has it, pinned; only of a context that HBM cannot hold (`cache.requests.parking`)
    in_slots: dict[int, SlotBlock] = field(default_factory=dict)
    unsaved: set[int] = field(default_factory=set)  # blocks for which no slot was free
    job: int | None = None  # number of the load under way for it
    # tier -> prompt tokens whose KV came from it, counted at admission
    sources: dict[str, int] = field(default_factory=dict)
    own_tokens: int = 0  # part of these tokens that only its own session had
    coded_tokens: int = 0  # part of these tokens that came out of a codec
    # first token to compute instead of load, because loading it was judged slower or failed
    recompute_from: int | None = None
    outlived: int | None = None  # number of a load that was too late; the request leaves the batch until that load ends
    # blocks that the late load has brought -> the tier they came from
    brought: dict[BlockKey, str] = field(default_factory=dict)
    fetch_due_s: float | None = None  # until when it waits for a fetch that was not done when its turn came
    was_fetched: bool = False  # a fetch was ordered for it because its blocks have to be in DRAM
    skips_disk: bool = False  # a load or fetch was too late once, so blocks that are only on disk are computed instead
    # blocks that could not be read for it, and why: they are computed, unless another tier has them, and their copies
    # stay. Those that there was no memory to decode are computed wherever they are.
    unread: dict[BlockKey, str] = field(default_factory=dict)
    miss_reason: MissReason | None = None  # reason why blocks from `recompute_from` on are computed
    owned: dict[BlockKey, None] = field(default_factory=dict)  # blocks that it has put into the table
    published: dict[int, tuple[BlockKey, int]] = field(default_factory=dict)  # moved copies: block -> (key, page)
    attention: dict[BlockKey, float] = field(default_factory=dict)  # this and the next two: see `SessionContext`
    dropped: dict[int, BlockKey] = field(default_factory=dict)
    recalled: set[int] = field(default_factory=set)
    recalled_tokens: int = 0  # of these, brought back for this turn
    remembered: RememberedMatch | None = None  # what was found stored while it waits; gone once it has pages

    @property
    def conversation(self) -> list[int]:
        """All tokens with nothing cut: those sent, then those generated."""
        sent = len(self.stream) - sum(b - a for a, b in self.cuts)
        return self.stream + self.token_ids[sent:]

    def conversation_keys(self) -> list[BlockKey]:
        """Keys of the stream's full blocks, as in `SessionContext.conversation_keys`."""
        if not self.cuts:
            return self.chain()[: self.prompt_tokens // BLOCK_TOKENS]
        self.sent_keys = self.domain.chain(self.stream, self.sent_keys)
        return self.sent_keys

    @property
    def tenant(self) -> str:
        return self.session[0]

    @property
    def session_id(self) -> str:
        return self.session[2]

    @property
    def domain(self) -> KeyDomain:
        return self.lineage.domain

    @property
    def keys(self) -> list[BlockKey]:
        return self.lineage.keys

    def chain(self) -> list[BlockKey]:
        """Return the keys of all full blocks so far."""
        return self.lineage.extend(self.token_ids)
