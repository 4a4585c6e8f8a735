"""What can go wrong in a tier."""

from typing import Literal

Reason = Literal["missing", "checksum", "forged", "short_read", "deadline", "fingerprint", "format", "io"]
"""Why stored bytes could not be had or kept: gone; altered; not written with this server's secret; cut off; the device
did not answer; another model's; not a record of this layout and version, or of other blocks; the device or the file
system said no."""


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
