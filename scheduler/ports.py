"""What the scheduler asks of the cache. `cache.manager.CacheManager` implements it; a fake in tests is five lines."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the KV of a request's tokens is right now. Tokens are counted once, in the fastest tier that has them."""

    hbm_tokens: int
    lower_tokens: dict[str, int]  # tier name -> tokens that would have to be loaded
    bytes_to_load: int
    missing_tokens: int  # to be computed, whatever is loaded


class CacheView(Protocol):
    """HBM room, asked for in tokens. Every method is O(blocks of the request) and answers at once."""

    def residency(self, request_id: str) -> Residency: ...

    def admit(self, request_id: str, num_tokens: int) -> int | None:
        """Pin what is cached of the request and reserve room for `num_tokens` further rows.
        Returns the number of leading rows that need no computing (at most all but one), or None when there is no
        room; None changes nothing."""
        ...

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Reserve room for `num_tokens` rows behind those computed. False changes nothing."""
        ...

    def preempt(self, request_id: str) -> None:
        """Give the request's room back; what it computed stays cached for as long as there is space."""
        ...
