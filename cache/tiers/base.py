"""What a tier is: bytes by key, nothing else."""

from typing import Literal, Protocol

from cache.block import BlockKey

Reason = Literal["missing", "checksum", "short_read", "deadline", "fingerprint", "format", "io"]
"""Why stored bytes could not be had or kept: gone; altered; cut off; the device did not answer; another model's; not a
record of this layout and version; the device or the file system said no."""


class TierFull(Exception):
    """There is no room, or the entry alone is larger than the tier. A normal outcome: the entry is not stored."""


class TierFailed(Exception):
    """The tier could not do it: the device is read-only, broken or hangs. What was asked for did not happen."""

    def __init__(self, message: str, *, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class BlockMissing(Exception):
    """Nothing complete and intact is stored under this key. The caller computes instead."""

    def __init__(self, message: str, *, reason: Reason = "missing") -> None:
        super().__init__(message)
        self.reason = reason


class Tier(Protocol):
    """Stores bytes and decides nothing. Methods may be called from I/O threads, one call per key at a time."""

    name: str
    capacity_bytes: int

    def write(self, key: BlockKey, data: memoryview) -> None:
        """Store a copy, all of it or nothing. Raises TierFull."""
        ...

    def read(self, key: BlockKey, out: memoryview) -> None:
        """Fill `out`, whose size is that of what was written. Raises BlockMissing."""
        ...

    def delete(self, key: BlockKey) -> None:
        """Forgives unknown keys."""
        ...

    def used_bytes(self) -> int: ...
