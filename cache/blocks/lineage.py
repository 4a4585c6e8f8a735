"""Names the blocks of a context: a chain of keys, which continues differently after a cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey, KeyDomain
from reprise.cache.blocks.truncate import Range


@dataclass(slots=True)
class Lineage:
    """The keys of a context's full blocks, in order. Until something is cut, they are one chain from the domain's root.
    The first block computed after a cut is called the joint. Its KV depends on exactly which blocks remain before it,
    so its key hashes the keys of all of them, not only that of the block before."""

    domain: KeyDomain
    keys: list[BlockKey] = field(default_factory=list)
    plain: int = 0  # number of leading keys that chain from the root; used only if there is a joint
    joint: int | None = None  # index of the block whose key chains on all blocks before it
    joint_parent: BlockKey | None = None

    def extend(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Add the keys of all full blocks of `token_ids`, which must begin with the tokens of the present blocks.
        Returns all keys."""
        for block in range(len(self.keys), len(token_ids) // BLOCK_TOKENS):
            start = block * BLOCK_TOKENS
            self.keys.append(self.domain.child(self.parent(block), token_ids[start : start + BLOCK_TOKENS]))
        return self.keys

    def parent(self, block: int) -> BlockKey:
        """Return the parent key of a block. block: its index; that of the next block, which has no key yet, is
        allowed."""
        if block == self.joint:
            assert self.joint_parent is not None
            return self.joint_parent
        return self.keys[block - 1] if block else self.domain.root

    def is_moved(self, block: int) -> bool:
        """Return whether a block of this lineage has other blocks before it now than when it was computed, because some
        were cut or recalled since. block: its index."""
        return self.joint is not None and self.plain <= block < self.joint

    def first(self, count: int) -> "Lineage":
        """Return the lineage of a context that shares the first `count` blocks with this one and continues
        differently."""
        if self.joint is not None and count >= self.joint:
            return Lineage(self.domain, self.keys[:count], self.plain, self.joint, self.joint_parent)
        return self.anew(count)

    def anew(self, count: int) -> "Lineage":
        """Return the lineage of a context that keeps at most the first `count` blocks and computes the rest again."""
        keys, plain = self.keys[:count], self.num_plain
        if count <= plain:
            return Lineage(self.domain, keys)
        return Lineage(self.domain, keys, plain, count, self.domain.lineage(keys))

    def without(self, cuts: Sequence[Range], tail: BlockKey | None) -> "Lineage":
        """Return the lineage after a truncation that drops these token ranges, which consist of whole blocks. tail: key
        of an open block that stays after the last full one; its rows were computed before the cut, so the key of the
        block that it grows into hashes `tail` too."""
        keys, start = [], 0
        for a, b in cuts:
            keys += self.keys[start : a // BLOCK_TOKENS]
            start = b // BLOCK_TOKENS
        keys += self.keys[start:]
        return self.rejoined(keys, cuts[0][0] // BLOCK_TOKENS, tail)

    def rejoined(self, keys: list[BlockKey], same: int, tail: BlockKey | None) -> "Lineage":
        """Return the lineage of a context that consists of these blocks after others were dropped or brought back.
        same: how many leading blocks have the same index as in this lineage. tail: key of an open block after the last
        full one, or None."""
        plain = min(self.num_plain, same)
        if tail is not None:
            return Lineage(self.domain, keys, plain, len(keys), self.domain.lineage([*keys, tail]))
        if len(keys) <= plain:
            return Lineage(self.domain, keys)
        return Lineage(self.domain, keys, plain, len(keys), self.domain.lineage(keys))

    def is_held_by(self, num_blocks: int, has_tail: bool) -> bool:
        """Return whether blocks that are computed now may get this lineage's keys, which name all blocks that a
        truncation kept. num_blocks, has_tail: how many full blocks were found in the cache, and whether the open
        block's rows were. If some of the kept blocks were not found, the answer is False, because the KV to come
        depends on other blocks."""
        if self.joint is None or num_blocks > self.joint:
            return True
        if num_blocks < self.joint:
            return False
        return has_tail or self.joint_parent == self.domain.lineage(self.keys[: self.joint])

    @property
    def num_plain(self) -> int:
        return len(self.keys) if self.joint is None else self.plain
