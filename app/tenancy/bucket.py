"""Implements allowances per minute: a bucket that fills evenly and may be overdrawn."""

from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """A token bucket that fills evenly and holds at most one minute's allowance. More may be taken than it has, because
    some costs are known only afterwards; later callers then wait until the overdraft is made up."""

    per_minute: int
    level: float
    at_s: float  # monotonic; when `level` was true

    @classmethod
    def full(cls, per_minute: int, now: float) -> "Bucket":
        return cls(per_minute, float(per_minute), now)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self.level -= amount

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket has `amount`, or is full if `amount` exceeds what it can hold."""
        self._fill(now)
        return max(0.0, min(amount, self.per_minute) - self.level) * 60.0 / self.per_minute

    def _fill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + (now - self.at_s) * self.per_minute / 60.0)
        self.at_s = now
