"""Makes the keys that name blocks.

A block is 32 consecutive tokens with their KV of all layers, on every backend. Its key is a hash of its tokens, chained
to the key of its prefix, in a domain that no other model, tenant or layout can reach.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BLOCK_TOKENS = 32
LAYOUT_VERSION = 1

BlockKey = NewType("BlockKey", bytes)
"""A keyed blake2b hash of (parent key, token ids), 16 bytes."""


def typed_fields(*fields: bytes | str | int) -> bytes:
    """Encode a tuple so that no two tuples give the same bytes: every field carries its type and its length."""
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
    """Encode token ids as little-endian unsigned 32-bit integers, on every machine."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def tokens_of(data: bytes) -> "array[int]":
    """Decode the result of `token_bytes`."""
    tokens = array("I", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


_EXACT = "exact\0"  # begins the salts of what is never coded


def salt_of(cache_salt: str, *, is_exact: bool) -> str:
    """Return the salt (a name beside tenant and model) of a request's key domain. Exact requests, which want unchanged
    KV, have domains of their own, in which no codec changes KV."""
    return _EXACT + cache_salt if is_exact else cache_salt


def is_exact(salt: str) -> bool:
    """Return whether a codec must not change the blocks under this salt."""
    return salt.startswith(_EXACT)


def given_salt(salt: str) -> str:
    """Return the salt that the request itself gave, without the mark that `salt_of` adds for exact requests."""
    return salt.removeprefix(_EXACT)


class KeyDomain:
    """The maker of the block keys of one tenant, for one model and one salt (a label: only requests with equal salts
    share KV). Equal prefixes get equal keys in equal domains, and different keys in different ones."""

    __slots__ = ("_key", "root")

    def __init__(self, *, secret: bytes, fingerprint: bytes, tenant: str, salt: str) -> None:
        fields = typed_fields("reprise-kv", LAYOUT_VERSION, BLOCK_TOKENS, fingerprint, tenant, salt)
        # Hash the secret first: blake2b takes keys of at most 64 bytes, and every byte of a longer secret must count.
        self._key = blake2b(fields, key=blake2b(secret).digest(), digest_size=32).digest()
        self.root = self._hash(b"root", b"")

    def _hash(self, kind: bytes, data: bytes) -> BlockKey:
        return BlockKey(blake2b(data, key=self._key, digest_size=16, person=kind).digest())

    def child(self, parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
        """Return the key of a full block with the tokens `token_ids`. parent: key of the block before it; `root` for
        the first block; after a cut, what `lineage` returns."""
        return self._hash(b"block", parent + token_bytes(token_ids))

    def open_block(self, parent: BlockKey, token_ids: Sequence[int], session_id: str) -> BlockKey:
        """Return the key of a session's unfinished last block. parent: as for `child`. When the block is full, it gets
        another key, from `child`."""
        return self._hash(b"open", typed_fields(parent, token_bytes(token_ids), session_id))

    def lineage(self, keys: Sequence[BlockKey]) -> BlockKey:
        """Return the parent key of the first block after a cut. It is made of the keys of all blocks before it, which
        no longer form one chain."""
        return self._hash(b"cut", typed_fields(*keys))

    def chain(self, token_ids: Sequence[int], known: Sequence[BlockKey] = ()) -> list[BlockKey]:
        """Return the keys of all full blocks of `token_ids`. known: keys of the first blocks, if already computed."""
        keys = list(known)
        parent = keys[-1] if keys else self.root
        for start in range(len(keys) * BLOCK_TOKENS, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = self.child(parent, token_ids[start : start + BLOCK_TOKENS])
            keys.append(parent)
        return keys
