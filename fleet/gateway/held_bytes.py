"""Bounds the memory that a gateway uses for current requests: bodies, so that they can be sent again, incomplete
answers, and the data needed to resume a stream."""

from types import TracebackType
from typing import Self


class HeldBytes:
    """A counter of one gateway's memory for requests, which bounds it. To be used on its event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def lease(self) -> "Lease":
        """Return a request's part of the memory; the end of its `with` block frees it."""
        return Lease(self)


class Lease:
    """The bytes of memory that one request uses."""

    def __init__(self, whole: HeldBytes) -> None:
        self._whole = whole
        self.held = 0

    def grow(self, size: int) -> bool:
        """Reserve `size` more bytes. Returns whether there is room for them."""
        if self._whole.held + size > self._whole.most:
            return False
        self._whole.held += size
        self.held += size
        return True

    def shrink(self, size: int) -> None:
        """Free `size` bytes."""
        self._whole.held -= size
        self.held -= size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shrink(self.held)
