"""Counts what a key uses and stores in the whole fleet."""

from collections.abc import Callable

from reprise.app.tenancy.keyring import KeyLimits
from reprise.app.tenancy.quotas import Holdings, excess
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable

OLDEST_AT_ONCE = 16  # sessions
MAX_LEAVING = 1024  # sessions that one check deletes


class HeldInFleet:
    """The sessions and KV that tenants have in the fleet; while the directory does not answer, those on this server."""

    def __init__(self, *, directory: Directory, here: Holdings, longest_s: float) -> None:
        """Set up. longest_s: the longest that a turn may run."""
        self._directory = directory
        self._here = here
        self._longest_s = longest_s

    async def trim(self, tenant: str, limits: KeyLimits) -> str:
        """Delete the tenant's sessions that exceed its quota in the whole fleet, those used longest ago first. Returns
        what still exceeds the quota; empty if nothing does. Every server, this one included, deletes its own copies
        later, when it learns of the deletion. Two servers that check the same quota at the same time may both delete
        the same session, which does no harm."""
        try:
            place = left = 0
            held = await self._directory.held(tenant)
            while excess(held.sessions, held.size_bytes, limits) and left < MAX_LEAVING:
                found = await self._directory.held(tenant, first=place, count=OLDEST_AT_ONCE, longest_s=self._longest_s)
                if not found.oldest:
                    held = found
                    break
                for name in found.oldest:
                    if not excess(held.sessions, held.size_bytes, limits):
                        break
                    if not name:
                        place += 1
                        continue
                    await self._directory.forget_name(tenant, name)
                    left += 1
                    held = await self._directory.held(tenant)
            return excess(held.sessions, held.size_bytes, limits)
        except DirectoryUnavailable:
            return await self._here.trim(tenant, limits)


class Spending:
    """A counter of the tokens that tenants have used on this replica and that the directory has not been told of.
    Counts only tenants with a limit of tokens per minute. One per replica, on its event loop."""

    def __init__(self, *, directory: Directory, limits: Callable[[str], KeyLimits]) -> None:
        self._directory = directory
        self._limits = limits
        self._owed: dict[str, int] = {}  # tenant with an allowance -> tokens of which the directory has not heard

    def add(self, tenant: str, tokens: int) -> bool:
        """Count tokens that a tenant has used. Returns whether they were counted; False if the tenant has no limit of
        tokens per minute."""
        per_minute = self._limits(tenant).tokens_per_minute
        if not per_minute or tokens <= 0:
            return False
        # Where nobody has heard of it for long, the allowance has been refilled meanwhile.
        self._owed[tenant] = min(self._owed.get(tenant, 0) + tokens, 2 * per_minute)
        return True

    async def tell(self) -> None:
        """Report to the directory all counted tokens, and reset the counts. Raises DirectoryUnavailable; what was not
        reported stays counted."""
        while self._owed:
            tenant = next(iter(self._owed))
            tokens = self._owed.pop(tenant, 0)
            per_minute = self._limits(tenant).tokens_per_minute
            if not tokens or not per_minute:
                continue
            try:
                await self._directory.take(tenant, "k", per_minute=per_minute, amount=tokens, need=0)
            except DirectoryUnavailable:
                self.add(tenant, tokens)
                raise
