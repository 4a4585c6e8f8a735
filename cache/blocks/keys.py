"""What a block is called. A block is 32 consecutive tokens of all layers, on every backend; its key is a hash of its
tokens chained to its prefix, in a domain that no other model, tenant or layout can reach (DESIGN "Identity")."""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BLOCK_TOKENS = 32
LAYOUT_VERSION = 1

BlockKey = NewType("BlockKey", bytes)
"""16 bytes: keyed blake2b of (parent key, token ids)."""


def typed_fields(*fields: bytes | str | int) -> bytes:
    """An injective encoding of a tuple: every field carries its type and its length, so no two tuples collide."""
    out = bytearray()
    for value in fields:
        if isinstance(value, str):
            tag, data = b"s", value.encode("utf-8", "surrogatepass")
        elif isinstance(value, int):
            tag, data = b"i", str(value).encode()
        else:
            tag, data = b"b", value
        out += tag + len(data).to_bytes(8, "little") + data
    return bytes(out)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian unsigned 32 bit, on every machine."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def tokens_of(data: bytes) -> "array[int]":
    """The inverse of `token_bytes`."""
    tokens = array("I", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


class KeyDomain:
    """The names of one tenant's blocks for one model: equal tokens have equal keys inside, and only inside."""

    __slots__ = ("_key", "root")

    def __init__(self, *, secret: bytes, fingerprint: bytes, tenant: str, salt: str) -> None:
        fields = typed_fields("reprise-kv", LAYOUT_VERSION, BLOCK_TOKENS, fingerprint, tenant, salt)
        # Digested first: blake2b takes keys of at most 64 bytes, and every byte of a longer secret must count.
        self._key = blake2b(fields, key=blake2b(secret).digest(), digest_size=32).digest()
        self.root = self._hash(b"root", b"")

    def _hash(self, kind: bytes, data: bytes) -> BlockKey:
        return BlockKey(blake2b(data, key=self._key, digest_size=16, person=kind).digest())

    def child(self, parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
        """The key of the full block `token_ids` behind `parent`."""
        return self._hash(b"block", parent + token_bytes(token_ids))

    def open_block(self, parent: BlockKey, token_ids: Sequence[int], session_id: str) -> BlockKey:
        """The key of a session's unfinished last block; superseded by `child` when it is full."""
        return self._hash(b"open", typed_fields(parent, token_bytes(token_ids), session_id))

    def lineage(self, keys: Sequence[BlockKey]) -> BlockKey:
        """What the next block chains on where a context was cut and is no chain any more: all blocks before it."""
        return self._hash(b"cut", typed_fields(*keys))

    def chain(self, token_ids: Sequence[int], known: Sequence[BlockKey] = ()) -> list[BlockKey]:
        """The keys of all full blocks of `token_ids`; `known` are the first ones, if they were computed before."""
        keys = list(known)
        parent = keys[-1] if keys else self.root
        for start in range(len(keys) * BLOCK_TOKENS, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = self.child(parent, token_ids[start : start + BLOCK_TOKENS])
            keys.append(parent)
        return keys
