"""Enforces the limits of keys over the whole fleet: requests and tokens a minute, and running answers.

The directory counts. While it does not answer, each gateway counts requests and answers by itself, and each replica
tokens. A key may then use its limits once at every gateway, and its tokens once at every replica.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable

from reprise.app.errors import ApiError, too_fast, too_many_requests
from reprise.app.tenancy.keyring import KeyLimits
from reprise.app.tenancy.places import Places, Ticket, bounded, limit_headers
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.gateway.metrics import Metrics
from reprise.fleet.records import Place, Taken

LEASE_S = 30.0  # places of a gateway that is gone come back after so long
RENEW_S = 10.0


class Admission:
    """A request that was counted against the limits of its API key. A turn also occupies places, one for each answer
    that it runs, of which a key has a limited number; `leave` frees them."""

    def __init__(self, allowances: "Allowances") -> None:
        self.is_counted = False  # by the directory; else replicas hold the key to its limits, each by itself
        self.headers: dict[str, str] = {}  # the key's limits in the fleet, for the answer
        self._allowances = allowances
        self._ticket: Ticket | None = None
        self._place: Place | None = None

    def hold(self, ticket: Ticket) -> None:
        """Record the places that the request occupies by this gateway's count, so that `leave` frees them."""
        self._ticket = ticket

    def hold_in_fleet(self, place: Place) -> None:
        """Record the places that the request occupies by the directory's count for the whole fleet, so that `leave`
        frees them."""
        self._place = place

    async def leave(self) -> None:
        """Free all places that the request occupies. Idempotent."""
        ticket, self._ticket = self._ticket, None
        place, self._place = self._place, None
        if ticket is not None:
            ticket.leave()
        if place is not None:
            await self._allowances.give_back(place)


class Allowances:
    """The limits of keys, as this gateway enforces them. One per gateway, on its event loop."""

    def __init__(
        self, *, directory: Directory, places: Places, limits: Callable[[str], KeyLimits], metrics: Metrics
    ) -> None:
        """Set up. places: counts the running answers of this gateway. While the directory does not answer, it also
        counts the requests that reach this gateway."""
        self._directory = directory
        self._places = places
        self._limits = limits
        self._metrics = metrics
        self._leases: dict[str, Place] = {}

    async def request(self, tenant: str) -> Admission:
        """Count a request against its key's requests per minute, whether or not it is a turn. Raises ApiError 429 if
        the key has used them up."""
        admission = Admission(self)
        per_minute = self._limits(tenant).requests_per_minute
        if not per_minute:
            admission.is_counted = True
            return admission
        try:
            taken = await self._directory.take(tenant, "r", per_minute=per_minute, amount=1, need=1)
            admission.is_counted = True
        except DirectoryUnavailable:
            self._places.request(tenant)
            return admission
        admission.headers |= _of_bucket("requests", per_minute, taken)
        if taken.wait_s:
            self._metrics.limited("requests")
            wait_s = bounded(taken.wait_s)
            raise too_fast("requests", per_minute, retry_after_s=wait_s, headers=admission.headers)
        return admission

    async def enter(self, admission: Admission, tenant: str, count: int) -> None:
        """Admit a turn that asks for `count` answers. The places that it takes are freed by `admission.leave`. Raises
        ApiError 429 if its key has too few places left, or no tokens for this minute."""
        limits = self._limits(tenant)
        # A replica says what is wrong with a turn that asks for more choices than its key may have.
        count = min(count, limits.requests) if limits.requests else 1
        try:
            admission.hold(self._places.enter(tenant, count))
            await self._ask(admission, tenant, count, limits)
        except DirectoryUnavailable:
            admission.is_counted = False
            admission.headers.clear()
        except ApiError as error:
            error.headers |= admission.headers
            await admission.leave()
            raise
        except BaseException:
            await admission.leave()
            raise

    async def _ask(self, admission: Admission, tenant: str, count: int, limits: KeyLimits) -> None:
        """Ask the directory whether a key has tokens left for this minute, and take `count` places for running answers.
        Puts the limits into the admission's headers. Raises DirectoryUnavailable, or ApiError 429."""
        if per_minute := limits.tokens_per_minute:
            taken = await self._directory.take(tenant, "k", per_minute=per_minute, amount=0, need=1)
            admission.headers |= _of_bucket("tokens", per_minute, taken)
            if taken.wait_s:
                self._metrics.limited("tokens")
                raise too_fast("tokens", per_minute, retry_after_s=bounded(taken.wait_s), headers={})
        if not (most := limits.requests):
            return
        place = Place(tenant, secrets.token_hex(8), count)
        entered, in_use = await self._directory.enter(place, most=most, lease_s=LEASE_S)
        if not limits.requests_per_minute:
            reset_s = self._places.reset_s(tenant)
            admission.headers |= limit_headers("requests", most, most - in_use, reset_s=reset_s)
        if not entered:
            self._metrics.limited("places")
            raise too_many_requests(most, retry_after_s=self._places.wait_s(tenant), headers={})
        self._leases[place.lease] = place
        admission.hold_in_fleet(place)

    async def give_back(self, place: Place) -> None:
        """Free places that the directory counts. If the directory does not answer, their lease ends by itself."""
        self._leases.pop(place.lease, None)
        with contextlib.suppress(DirectoryUnavailable):
            await self._directory.leave_places(place)

    async def run(self) -> None:
        """Renew the leases of places in the directory until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(DirectoryUnavailable):
                await self._directory.renew(list(self._leases.values()), lease_s=LEASE_S)


def _of_bucket(what: str, per_minute: int, taken: Taken) -> dict[str, str]:
    full_s = (per_minute - taken.level) * 60 / per_minute
    return limit_headers(what, per_minute, taken.level, reset_s=full_s)
