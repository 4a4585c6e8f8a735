"""What KV a session has, and what a running request stands on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from cache.blocks.keys import BLOCK_TOKENS, BlockKey, KeyDomain, token_bytes
from cache.blocks.table import SessionName
from cache.blocks.truncate import CutRules, Range, subtract


@dataclass(slots=True)
class Lineage:
    """The keys of a context's full blocks. As long as nothing was cut they are a chain from the domain's root. Behind a
    cut a new block's KV depends on which blocks stand before it, so it chains on all their keys: the `joint`."""

    domain: KeyDomain
    keys: list[BlockKey] = field(default_factory=list)
    plain: int = 0  # how many leading keys are a chain from the root; meaningful once there is a joint
    joint: int | None = None  # the block that chains on all before it
    joint_parent: BlockKey | None = None

    def extend(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """The keys of all full blocks of `token_ids`, whose first blocks are those known already."""
        for block in range(len(self.keys), len(token_ids) // BLOCK_TOKENS):
            start = block * BLOCK_TOKENS
            self.keys.append(self.domain.child(self.parent(block), token_ids[start : start + BLOCK_TOKENS]))
        return self.keys

    def parent(self, block: int) -> BlockKey:
        """What the key of a block, known or the next one, chains on."""
        if block == self.joint:
            assert self.joint_parent is not None
            return self.joint_parent
        return self.keys[block - 1] if block else self.domain.root

    def first(self, count: int) -> "Lineage":
        """The lineage of a context that begins with the first `count` blocks of this one and goes on by itself."""
        if self.joint is not None and count >= self.joint:
            return Lineage(self.domain, self.keys[:count], self.plain, self.joint, self.joint_parent)
        return self.anew(count)

    def anew(self, count: int) -> "Lineage":
        """The lineage of a context of which no more than the first `count` blocks are left, so that all behind them is
        computed on them alone."""
        keys, plain = self.keys[:count], self.num_plain
        if count <= plain:
            return Lineage(self.domain, keys)
        return Lineage(self.domain, keys, plain, count, self.domain.lineage(keys))

    def without(self, cuts: Sequence[Range], tail: BlockKey | None) -> "Lineage":
        """The lineage behind a truncation that drops these token ranges, all of whole blocks. tail: an open block that
        stood behind the last key and stays: the block that it becomes was begun in the longer context."""
        keys, start = [], 0
        for a, b in cuts:
            keys += self.keys[start : a // BLOCK_TOKENS]
            start = b // BLOCK_TOKENS
        keys += self.keys[start:]
        plain = min(self.num_plain, cuts[0][0] // BLOCK_TOKENS)
        if tail is not None:
            return Lineage(self.domain, keys, plain, len(keys), self.domain.lineage([*keys, tail]))
        if len(keys) <= plain:
            return Lineage(self.domain, keys)
        return Lineage(self.domain, keys, plain, len(keys), self.domain.lineage(keys))

    def is_held_by(self, num_blocks: int, has_tail: bool) -> bool:
        """Whether what is computed behind its first `num_blocks` blocks (and rows of an open one) belongs under its
        names. If less is left than a truncation had kept, it does not."""
        if self.joint is None or num_blocks > self.joint:
            return True
        if num_blocks < self.joint:
            return False
        return has_tail or self.joint_parent == self.domain.lineage(self.keys[: self.joint])

    @property
    def num_plain(self) -> int:
        return len(self.keys) if self.joint is None else self.plain


class SavedContext(msgspec.Struct, frozen=True, array_like=True):
    """A session's context as it is stored beside its blocks."""

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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SavedContext).decode


@dataclass(slots=True)
class SessionContext:
    """The context a session's last turn ended with: full blocks in order, then the open one. A claim, not a promise:
    the blocks themselves may be gone, which the cache table knows."""

    lineage: Lineage
    open_key: BlockKey | None
    open_tokens: tuple[int, ...]  # of the open block; also its place in a comparison when its bytes are gone
    last_used_s: float
    cuts: list[Range] = field(default_factory=list)  # of the whole conversation, what is no longer in the context
    client_cuts: list[Range] = field(default_factory=list)  # of these, what the client dropped and may send again
    cut_digest: bytes = b""  # of the conversation up to the end of the last cut
    cut_conversation: list[BlockKey] = field(default_factory=list)  # keys of all of it, where something is cut
    pinned: bool = False
    ttl_s: float | None = None  # None: the server's
    owned: dict[BlockKey, None] = field(default_factory=dict)  # every block that is in the table because of it

    @property
    def keys(self) -> list[BlockKey]:
        return self.lineage.keys

    @property
    def all_keys(self) -> list[BlockKey]:
        """The open block's too."""
        return [*self.keys, *((self.open_key,) if self.open_key else ())]

    @property
    def conversation_keys(self) -> list[BlockKey]:
        """Of the full blocks of the conversation as if nothing were cut: cuts are of whole blocks, so they would stand
        where the context's would."""
        return self.cut_conversation if self.cuts else self.keys

    @property
    def own_cuts(self) -> list[Range]:
        """Of the cuts, what was dropped because the window was full."""
        return subtract(self.cuts, self.client_cuts)

    @property
    def num_tokens(self) -> int:
        return len(self.keys) * BLOCK_TOKENS + len(self.open_tokens)

    @property
    def truncated_tokens(self) -> int:
        return sum(b - a for a, b in self.cuts)

    def pack(self) -> bytes:
        """For a tier that outlives the process."""
        lineage = self.lineage
        return _encode(
            SavedContext(
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
            )
        )

    @classmethod
    def unpack(cls, data: bytes, domain: KeyDomain, last_used_s: float) -> "SessionContext":
        """Raises msgspec.DecodeError."""
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
        )


@dataclass(frozen=True, slots=True)
class ExpiredContext:
    """What is known of a context whose time to live was over: enough to know it again."""

    num_blocks: int  # full ones of its conversation, nothing cut
    last_key: BlockKey  # of these

    @classmethod
    def of(cls, session: SessionContext) -> "ExpiredContext | None":
        keys = session.conversation_keys
        return cls(len(keys), keys[-1]) if keys else None

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_TOKENS


def digest_of(token_ids: Sequence[int]) -> bytes:
    """What a conversation begins with, in 16 bytes."""
    return blake2b(token_bytes(token_ids), digest_size=16).digest()


@dataclass(slots=True)
class RunningContext:
    """The pages of one running or waiting request. Context row p is row p % page_size of pages[p // page_size]."""

    request_id: str
    session: SessionName
    token_ids: list[int]  # the sequence's own list: grows as tokens are sampled, shrinks where it is cut
    prompt_tokens: int
    lineage: Lineage
    rules: CutRules
    stream: list[int]  # the conversation as it was sent, nothing cut; what was generated is not in it
    cuts: list[Range] = field(default_factory=list)  # of the stream and what was generated behind it
    client_cuts: list[Range] = field(default_factory=list)  # of these, what the client dropped itself
    open_hint: BlockKey | None = None  # an open block it can go on from, whatever that chains on
    open_place: int = 0  # how many full blocks stand before that
    sent_keys: list[BlockKey] = field(default_factory=list)  # of the stream's full blocks; filled where cuts are made
    cut_now: bool = False  # by this turn; what stood behind the last full block in front of a cut is lost to it
    moved_behind: bool = False  # history cannot be used where it is now, or behind what it is behind now
    lost_lineage: bool = False  # a block that was kept in a cut is gone, and with it all behind it
    shifted_tokens: int = 0  # history that the client itself had dropped from where it was
    pages: list[int] = field(default_factory=list)  # pinned, in order; empty while waiting
    computed: int = 0  # leading rows that hold KV, or will by the time they are read
    sealed: int = 0  # leading blocks already considered for publishing
    trusted: bool = True  # False: it shares blocks that gave an impossible result, so nothing of it is published
    awaited: BlockKey | None = None  # the block it waits for while another request computes it
    reached: int = 0  # the most it had computed when it was preempted; its KV may be gone, its tokens are known
    slots: dict[int, int] = field(default_factory=dict)  # block -> the DRAM slot it is being saved to
    unsaved: set[int] = field(default_factory=set)  # blocks that found no slot
    job: int | None = None  # the load under way for it
    sources: dict[str, int] = field(default_factory=dict)  # tier -> tokens, as they were admitted
    own_tokens: int = 0  # of these, what only its session had
    recompute_from: int | None = None  # loading from here on was judged slower, or failed
    outlived: int | None = None  # the load that was late for it; it waits for the end of that outside of the batch
    brought: dict[BlockKey, str] = field(default_factory=dict)  # what that has brought: block -> the tier it came from
    fetch_due_s: float | None = None  # its turn has come and a fetch for it has not; until then it is waited for
    skips_disk: bool = False  # a load or fetch was late for it once, so what is on disk alone by now is computed
    miss_reason: str | None = None  # why, for what lies behind recompute_from
    owned: dict[BlockKey, None] = field(default_factory=dict)  # what it has put into the table
    published: dict[int, tuple[BlockKey, int]] = field(default_factory=dict)  # moved copies: block -> (key, page)

    @property
    def conversation(self) -> list[int]:
        """All of it, nothing cut: what was sent, and what was generated behind that."""
        sent = len(self.stream) - sum(b - a for a, b in self.cuts)
        return self.stream + self.token_ids[sent:]

    def conversation_keys(self) -> list[BlockKey]:
        """Of the full blocks of the stream: see SessionContext.conversation_keys."""
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
        """Keys of all full blocks known so far."""
        return self.lineage.extend(self.token_ids)
