"""Limits how long a request may take: as long as its client asked for, but no longer than the server allows."""

import asyncio
import math
import time
from dataclasses import dataclass

from reprise.app.errors import ApiError, invalid, overloaded, request_timeout
from reprise.app.schemas.fields import MAX_TIMEOUT_S

HEADER = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class Deadline:
    """The latest time at which a request may end, on the monotonic clock, which is that of the event loop."""

    at_s: float
    timeout_s: float
    by_client: bool  # whether the client asked for less than the server allows

    @classmethod
    def of(cls, *, arrived_s: float, field_s: float | None, header: str | None, limit_s: float) -> "Deadline":
        """Return a request's deadline. arrived_s: on the monotonic clock. field_s: seconds that the body asks for,
        which win over the header's. limit_s: the most that the server allows. Raises ApiError 400 for a header that is
        not a number of seconds."""
        asked_s = field_s if field_s is not None else _seconds(header)
        timeout_s = limit_s if asked_s is None else min(asked_s, limit_s)
        return cls(arrived_s + timeout_s, timeout_s, asked_s is not None and asked_s < limit_s)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at_s

    def limit(self) -> asyncio.Timeout:
        """Return a context that raises TimeoutError at the deadline."""
        return asyncio.timeout(self.at_s - time.monotonic())

    def error(self, *, retry_after_s: float) -> ApiError:
        """Return the error for a request that missed this deadline: that its client allowed too little time, if the
        client set the deadline, else that the server is overloaded."""
        if self.by_client:
            return request_timeout(self.timeout_s)
        return overloaded(retry_after_s, message=f"The answer was not complete within {self.timeout_s:g} s.")


def _seconds(header: str | None) -> float | None:
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise invalid(f"Invalid '{HEADER}': seconds, more than 0 and at most {MAX_TIMEOUT_S:g}.", HEADER)
    return seconds
