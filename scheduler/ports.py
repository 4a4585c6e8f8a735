"""Defines what the scheduler asks of the cache. `reprise.cache.requests.view.SchedulerView` implements it; tests use a
fake."""

from typing import Protocol


class Residency(Protocol):
    """A count of a request's tokens by the tier that holds their KV right now, asked of the cache. A token counts once,
    for the fastest tier that has it."""

    @property
    def bytes_to_load(self) -> int: ...
    @property
    def missing_tokens(self) -> int:
        """Tokens whose KV is in no tier and has to be computed."""
        ...

    @property
    def compute_s(self) -> float:
        """Seconds that computing the missing tokens would take alone."""
        ...

    @property
    def own_tokens(self) -> int:
        """Tokens in any tier that only this session has; a system prompt shared by many sessions does not count."""
        ...

    @property
    def load_s(self) -> float:
        """Seconds that the load would take at the current transfer rate if nothing else were being loaded."""
        ...

    @property
    def exposed_s(self) -> float:
        """Seconds of `load_s` that the request would wait for; the rest passes while missing tokens are computed."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether the request's KV is already being loaded. `load_s` is then the time that is left of that load."""
        ...


class CacheView(Protocol):
    """The cache as the scheduler sees it: room in HBM, requested in tokens. Every method takes O(blocks of the request)
    and never waits."""

    def residency(self, request_id: str) -> Residency:
        """Return where the request's KV lies now: what would have to be loaded or computed if it started."""
        ...

    def resident_tokens(self, request_id: str) -> int:
        """Return how many leading tokens `admit` would find cached; at most all but one."""
        ...

    def waits_for_sibling(self, request_id: str, *, is_due: bool) -> bool:
        """Return whether the next block that this request needs is on its way: being computed or loaded by another
        request, being fetched into DRAM, or part of an earlier load of this request that was late. Waiting then beats
        computing it twice. False once that has ended, even by failure. is_due: whether the request would start now; it
        then waits for a fetch no longer than computing would take."""
        ...

    def admit(self, request_id: str, num_tokens: int) -> int | None:
        """Pin the request's cached blocks and reserve room for `num_tokens` rows (a row is the KV of one token) after
        its resident tokens. Return the number of leading rows that need no computing, or None, with nothing changed,
        when HBM has no room. That number is usually `resident_tokens`. It is less if some cached blocks had to be
        copied into the request's own pages, nothing else runs, and HBM had no room for both a block and its copy."""
        ...

    def grow(self, request_id: str, num_tokens: int) -> int:
        """Reserve room in HBM for `num_tokens` rows (a row is the KV of one token) after the computed ones. Return for
        how many rows there is room now, which may be more than `num_tokens`; 0, with nothing changed, if HBM is
        full."""
        ...

    def stall_s(self, request_id: str) -> float:
        """Return the seconds that a step would wait for KV of an admitted request that is still being loaded."""
        ...

    def stalls_s(self) -> dict[str, float]:
        """Return `stall_s` by request id, for every request for which it is not 0."""
        ...

    def room_is_coming(self) -> bool:
        """Return whether HBM will have room soon without a preemption: a load into pages that no request holds any more
        is ending, or a context larger than HBM waits for its blocks to be saved to DRAM."""
        ...

    def withdraw(self, request_id: str) -> None:
        """Take back the room of an admitted request that has not run, as if it had not been admitted."""
        ...

    def expect(self, request_id: str, score: int) -> None:
        """Note how near the request is to needing its KV (CaR §III-B-3): score 0 far, 1 in the queue's window, 2
        running. The blocks whose requests have the smallest sum of scores leave HBM first."""
        ...

    def preempt(self, request_id: str) -> None:
        """Take back the room of a running request. What it computed stays cached for as long as there is space."""
        ...
