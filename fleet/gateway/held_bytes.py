"""Bounds the bytes that a gateway keeps for requests under way: bodies, so that they can be sent again, answers that
are not whole yet, and what is needed to resume a stream."""

from types import TracebackType
from typing import Self


class HeldBytes:
    """The memory of one gateway. To be used on its event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def lease(self) -> "Lease":
        """Return a request's part, which leaving its context gives back."""
        return Lease(self)


class Lease:
    """The bytes that one request holds."""

    def __init__(self, whole: HeldBytes) -> None:
        self._whole = whole
        self.held = 0

    def grow(self, size: int) -> bool:
        """Hold so many bytes more, if there is room for them."""
        if self._whole.held + size > self._whole.most:
            return False
        self._whole.held += size
        self.held += size
        return True

    def shrink(self, size: int) -> None:
        """Hold so many bytes less."""
        self._whole.held -= size
        self.held -= size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shrink(self.held)
