"""Defines the access to KV that is stored outside of a simulated server, where other servers find it too."""

from typing import Protocol


class RemoteKV(Protocol):
    """One server's access to shared KV. Times are seconds of the virtual clock and do not decrease from call to
    call."""

    def found(self, session: str, now: float) -> int:
        """Return the number of leading tokens of a session's context whose KV is stored there."""
        ...

    def wait_s(self, now: float) -> float:
        """Return how many seconds a load that is ordered now waits for others."""
        ...

    def seconds(self, num_tokens: int) -> float:
        """Return how many seconds a load takes once it has begun."""
        ...

    def load(self, session: str, num_tokens: int, now: float) -> float:
        """Load the KV of `num_tokens` tokens of a session. Returns the time at which all of it has arrived."""
        ...

    def save(self, session: str, num_tokens: int, now: float) -> None:
        """Save a session's context of `num_tokens` in the background; do nothing if there is no room or no time."""
        ...
