"""Defines the ways in which a tier can fail."""

from typing import Literal, NamedTuple

Reason = Literal["missing", "checksum", "forged", "short_read", "deadline", "fingerprint", "format", "io", "memory"]
"""Why stored bytes could not be read or kept. missing: gone. checksum: altered. forged: not written with this server's
secret. short_read: cut off. deadline: the device did not answer in time. fingerprint: of another model. format: not a
record of this layout and version, or of other blocks. io: the device or the file system reported an error. memory: this
process had none to read or write with."""


class Problem(NamedTuple):
    """The reason why stored bytes cannot be used, with a text for people."""

    reason: Reason
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class TierFull(Exception):
    """The tier has no room, or the entry alone is larger than the tier. This is a normal outcome: the entry is not
    stored."""


class TierFailed(Exception):
    """The tier could not do what was asked, because its device is read-only, broken or hangs."""

    def __init__(self, message: str, *, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class BlockMissing(Exception):
    """No complete and intact block is stored under this key, so the caller must compute it. extent_id, block: the
    extent and block that could not be read. None: the reason is not one extent, or it concerns all blocks of an extent.
    An extent in Redis has a name instead of an id."""

    def __init__(
        self,
        message: str,
        *,
        reason: Reason = "missing",
        extent_id: int | bytes | None = None,
        block: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason, self.extent_id, self.block = reason, extent_id, block

    def concerns(self, extent_id: int | bytes, block: int) -> bool:
        return self.extent_id in (None, extent_id) and self.block in (None, block)
