"""Limits how many answers each tenant may run at once, and tells refused clients when to retry.

Places are counted in choices, running and waiting, so a request that the engine would refuse is refused before it is
tokenized. A tenant beyond its share gets 429, whatever the others do; a server without a free place answers 503. A key
may also have allowances per minute: of requests, and of the tokens of its prompts and answers.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from reprise.app.errors import overloaded, too_fast, too_many_requests
from reprise.app.tenancy.bucket import Bucket
from reprise.app.tenancy.keyring import NO_LIMITS, KeyLimits

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # OpenAI's clients ignore longer waits
RATE_WINDOW = 64  # number of recent endings from which the rate is computed


class Places:
    """A counter of places; each choice of a request occupies one while it runs or waits. One per app; to be used on its
    event loop. places: of the whole server. tenant_places: the most that one tenant may hold. running: how many choices
    the engine works on at once."""

    def __init__(
        self,
        *,
        places: int,
        tenant_places: int,
        running: int,
        limits: Callable[[str], KeyLimits] = lambda _: NO_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.places = places
        self.tenant_places = min(tenant_places, places)
        self.taken = 0
        self._running = running
        self._clock = clock
        self._limits = limits
        self._tenants: dict[str, int] = {}  # tenant -> places it holds
        self._requests: dict[str, Bucket] = {}  # buckets of tenants with an allowance, so at most one per key
        self._tokens: dict[str, Bucket] = {}
        # time at which the server was last idle, then the time each place was left
        self._endings = deque((clock(),), RATE_WINDOW)

    def places_of(self, tenant: str) -> int:
        """Return the most places that a tenant may hold."""
        return min(self._limits(tenant).requests or self.tenant_places, self.places)

    def request(self, tenant: str) -> None:
        """Count a request against its key's requests per minute. Raises ApiError 429 if the key has used them up."""
        bucket = self._requests_of(tenant)
        if bucket is not None:
            if wait_s := bucket.wait_s(1, self._clock()):
                headers = self.headers(tenant)
                raise too_fast("requests", bucket.per_minute, retry_after_s=bounded(wait_s), headers=headers)
            bucket.take(1, self._clock())

    def spend(self, tenant: str, tokens: int) -> None:
        """Count tokens against a key's tokens per minute, even if more than are left. Then `enter` refuses the key's
        requests until the minutes that follow have made up for it."""
        if (bucket := self._tokens_of(tenant)) is not None:
            bucket.take(tokens, self._clock())

    def enter(self, tenant: str, count: int, *, is_counted: bool = False) -> "Ticket":
        """Take `count` places for a request, one for each choice, until the returned ticket gives them back.
        is_counted: whether a gateway has already applied the key's own limits, over all servers of the fleet. Raises
        ApiError: 429 if the tenant holds too many places or has no tokens left, 503 if the server has no place left."""
        held = self._tenants.get(tenant, 0)
        bucket = None if is_counted else self._tokens_of(tenant)
        if bucket is not None and (wait_s := bucket.wait_s(1, self._clock())):
            headers = self.headers(tenant)
            raise too_fast("tokens", bucket.per_minute, retry_after_s=bounded(wait_s), headers=headers)
        tenant_places = self.places_of(tenant)
        if is_counted and self._limits(tenant).requests:
            tenant_places = self.places
        if held + count > tenant_places < self.places:
            raise too_many_requests(tenant_places, retry_after_s=self.wait_s(tenant), headers=self.headers(tenant))
        if self.taken + count > self.places:
            raise overloaded(self.retry_after_s, headers=self.headers(tenant))
        if self.taken == 0:
            self._endings.clear()
            self._endings.append(self._clock())
        self._tenants[tenant] = held + count
        self.taken += count
        return Ticket(self, tenant, count)

    def leave(self, tenant: str, count: int) -> None:
        """Free `count` places of a tenant. Only `Ticket` calls this."""
        self.taken -= count
        self._tenants[tenant] -= count
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        self._endings.extend([self._clock()] * count)

    def wait_s(self, tenant: str) -> float:
        """Return the seconds until an answer of the tenant is expected to end and free its place. Assumes that answers
        end at the recent rate of the whole server, and the tenant's in proportion to its share of the places in use."""
        held = self._tenants.get(tenant, 0)
        return bounded(self.taken / held * self._gap_s if held else 0.0)

    @property
    def retry_after_s(self) -> float:
        """Seconds until the answers that wait now are expected to run, if places become free at the recent rate."""
        return bounded(max(1, self.taken - self._running) * self._gap_s)

    def headers(self, tenant: str) -> dict[str, str]:
        """Return OpenAI's rate-limit headers. "requests" are those left in the minute if the key limits them, else the
        places left; a place is room for one choice, so a request with n choices takes n."""
        if (bucket := self._requests_of(tenant)) is not None:
            said = self._left("requests", bucket)
        else:
            held, places = self._tenants.get(tenant, 0), self.places_of(tenant)
            left = min(places - held, self.places - self.taken)
            said = limit_headers("requests", places, left, reset_s=self.reset_s(tenant))
        return said if (bucket := self._tokens_of(tenant)) is None else said | self._left("tokens", bucket)

    def reset_s(self, tenant: str) -> float:
        """Return the seconds until all places of the tenant are expected to be free; 0 if it holds none."""
        return self.taken * self._gap_s if tenant in self._tenants else 0.0

    def _left(self, what: str, bucket: Bucket) -> dict[str, str]:
        full_s = bucket.wait_s(bucket.per_minute, self._clock())
        return limit_headers(what, bucket.per_minute, bucket.level, reset_s=full_s)

    def _requests_of(self, tenant: str) -> Bucket | None:
        return self._bucket(self._requests, tenant, self._limits(tenant).requests_per_minute)

    def _tokens_of(self, tenant: str) -> Bucket | None:
        return self._bucket(self._tokens, tenant, self._limits(tenant).tokens_per_minute)

    def _bucket(self, buckets: dict[str, Bucket], tenant: str, per_minute: int) -> Bucket | None:
        if not per_minute:
            return None
        if tenant not in buckets or buckets[tenant].per_minute != per_minute:  # new, or its limit has changed
            buckets[tenant] = Bucket.full(per_minute, self._clock())
        return buckets[tenant]

    @property
    def _gap_s(self) -> float:
        """The mean seconds between two endings of answers, over the last RATE_WINDOW endings. While fewer have ended,
        half of the answers that the engine runs count as ended too, as if they had begun together and were in the
        middle."""
        done = len(self._endings) - 1.0
        if len(self._endings) < RATE_WINDOW:
            done = max(1.0, done, min(self.taken, self._running) / 2)
        return max(1e-3, self._clock() - self._endings[0]) / done


class Ticket:
    """The places that one request occupies until `leave` is called."""

    def __init__(self, places: Places, tenant: str, count: int) -> None:
        self._places = places
        self._tenant = tenant
        self._count = count

    @property
    def headers(self) -> dict[str, str]:
        return self._places.headers(self._tenant)

    @property
    def retry_after_s(self) -> float:
        return self._places.retry_after_s

    def leave(self) -> None:
        """Free the places. Idempotent."""
        count, self._count = self._count, 0
        if count:
            self._places.leave(self._tenant, count)


def limit_headers(what: str, limit: int, left: float, *, reset_s: float) -> dict[str, str]:
    """Return OpenAI's three headers of one limit. what: requests or tokens."""
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, int(left))),
        f"x-ratelimit-reset-{what}": duration(reset_s),
    }


def duration(seconds: float) -> str:
    """Format a time as OpenAI does: 0s, 120ms, 7s, 6m0s, 1h2m3s."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"


def bounded(seconds: float) -> float:
    """Return a wait, limited to the range that clients are told in `Retry-After`."""
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)
