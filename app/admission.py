"""Who may have how many answers under way, and when to come back who was turned away.

Places are counted in choices, running and waiting: what the engine would refuse is refused before it is tokenized. A
tenant beyond its share gets 429, whatever the others do; a server without a place gets 503.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from app.errors import overloaded, too_many_requests

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # clients of OpenAI's kind believe no longer wait
RATE_WINDOW = 64  # endings


class Admission:
    """One per app, on its event loop. `places` of the whole server, of which one tenant may hold `tenant_places`;
    `running` of them can be worked on at once."""

    def __init__(
        self, *, places: int, tenant_places: int, running: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.places = places
        self.tenant_places = min(tenant_places, places)
        self.taken = 0
        self._running = running
        self._clock = clock
        self._tenants: dict[str, int] = {}  # tenant -> places it holds
        self._endings = deque((clock(),), RATE_WINDOW)  # since the server was last idle, then of each place

    def enter(self, tenant: str, count: int) -> "Ticket":
        """Take places. Raises ApiError: 429 if the tenant holds too many, 503 if the server has none left."""
        held = self._tenants.get(tenant, 0)
        if held + count > self.tenant_places < self.places:
            # Its own places become free at its share of the rate.
            wait_s = _bounded(self.taken / held * self._gap_s if held else 0.0)
            raise too_many_requests(self.tenant_places, retry_after_s=wait_s, headers=self.headers(tenant))
        if self.taken + count > self.places:
            raise overloaded(self.retry_after_s, headers=self.headers(tenant))
        if self.taken == 0:
            self._endings.clear()
            self._endings.append(self._clock())
        self._tenants[tenant] = held + count
        self.taken += count
        return Ticket(self, tenant, count)

    def leave(self, tenant: str, count: int) -> None:
        """For `Ticket`."""
        self.taken -= count
        self._tenants[tenant] -= count
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        self._endings.extend([self._clock()] * count)

    @property
    def retry_after_s(self) -> float:
        """Seconds until those that wait now will run, as fast as places have become free of late."""
        return _bounded(max(1, self.taken - self._running) * self._gap_s)

    def headers(self, tenant: str) -> dict[str, str]:
        """What is left to a tenant, OpenAI's way. A request with n choices counts as n."""
        held = self._tenants.get(tenant, 0)
        remaining = max(0, min(self.tenant_places - held, self.places - self.taken))
        return {
            "x-ratelimit-limit-requests": str(self.tenant_places),
            "x-ratelimit-remaining-requests": str(remaining),
            "x-ratelimit-reset-requests": duration(self.taken * self._gap_s if held else 0.0),
        }

    @property
    def _gap_s(self) -> float:
        """Mean time between two endings. Before the first: as if it were now."""
        return max(1e-3, self._clock() - self._endings[0]) / max(1, len(self._endings) - 1)


class Ticket:
    """The places of one request, until it leaves."""

    def __init__(self, admission: Admission, tenant: str, count: int) -> None:
        self._admission = admission
        self._tenant = tenant
        self._count = count

    @property
    def headers(self) -> dict[str, str]:
        return self._admission.headers(self._tenant)

    @property
    def retry_after_s(self) -> float:
        return self._admission.retry_after_s

    def leave(self) -> None:
        """Idempotent."""
        count, self._count = self._count, 0
        if count:
            self._admission.leave(self._tenant, count)


def duration(seconds: float) -> str:
    """As OpenAI writes it: 0s, 120ms, 7s, 6m0s, 1h2m3s."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"


def _bounded(seconds: float) -> float:
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)
