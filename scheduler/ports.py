"""Says what the scheduler asks of the cache. `reprise.cache.requests.view.SchedulerView` answers it; in tests a fake
does."""

from typing import Protocol


class Residency(Protocol):
    """The tiers that hold the KV of a request's tokens right now. Tokens are counted once, in the fastest tier that has
    them."""

    @property
    def hbm_tokens(self) -> int: ...
    @property
    def lower_tokens(self) -> dict[str, int]:
        """Tier name -> tokens that would have to be loaded."""
        ...

    @property
    def bytes_to_load(self) -> int: ...
    @property
    def missing_tokens(self) -> int:
        """Tokens to be computed, whatever is loaded."""
        ...

    @property
    def compute_s(self) -> float:
        """Seconds that computing the missing tokens would take alone."""
        ...

    @property
    def own_tokens(self) -> int:
        """Count the tokens in any tier that only this session has: not those of a system prompt that many share."""
        ...

    @property
    def load_s(self) -> float:
        """Seconds that the bytes would take at the live rate, nothing else being loaded."""
        ...

    @property
    def exposed_s(self) -> float:
        """Return the part of `load_s` that computing the missing tokens would not hide."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether the bytes to load are on their way already; the seconds are what is left of them then."""
        ...


class CacheView(Protocol):
    """HBM room, asked for in tokens. Every method is O(blocks of the request) and answers at once."""

    def residency(self, request_id: str) -> Residency:
        """Return what would have to move or be computed for the request if it started now."""
        ...

    def resident_tokens(self, request_id: str) -> int:
        """Leading tokens that `admit` would find, at most all but one."""
        ...

    def waits_for_sibling(self, request_id: str, *, is_due: bool) -> bool:
        """Whether the very block this request needs next is being computed by a running one or fetched, so that waiting
        beats computing it twice. False once that has ended, however it ended. is_due: it would start now, so a fetch is
        waited for no longer than computing would take."""
        ...

    def admit(self, request_id: str, num_tokens: int) -> int | None:
        """Pin what is cached of the request and reserve room for `num_tokens` rows after its resident tokens.
        Returns the number of leading rows that need no computing (`resident_tokens`; fewer where nothing else runs and
        their copies had no room), or None when there is no room; None changes nothing."""
        ...

    def grow(self, request_id: str, num_tokens: int) -> int:
        """Reserve room for `num_tokens` rows after those computed. Return for how many there is room now, which may
        be more; 0 changes nothing."""
        ...

    def stall_s(self, request_id: str) -> float:
        """Seconds that a step would wait for KV of an admitted request that is still on its way to HBM."""
        ...

    def stalls_s(self) -> dict[str, float]:
        """Return `stall_s` of every request whose value is not 0."""
        ...

    def room_is_coming(self) -> bool:
        """Whether pages that no request holds any more wait only for the end of a load into them."""
        ...

    def withdraw(self, request_id: str) -> None:
        """An admitted request has not run and gives its room back, as if it had not been admitted."""
        ...

    def expect(self, request_id: str, score: int) -> None:
        """Tell how near the request is to needing its KV (CaR §III-B-3): 0 far, 1 in the window, 2 running. The blocks
        with the smallest sum leave HBM first."""
        ...

    def preempt(self, request_id: str) -> None:
        """Give the request's room back; what it computed stays cached for as long as there is space."""
        ...
