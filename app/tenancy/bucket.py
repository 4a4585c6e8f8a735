"""Allowances per minute: a bucket that fills evenly and may be overdrawn."""

from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """Holds up to a minute's worth. What is taken need not be there: its cost may be known only afterwards, and what
    was overdrawn is waited for."""

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
        """Seconds until `amount` is there, of which there is never more than the whole."""
        self._fill(now)
        return max(0.0, min(amount, self.per_minute) - self.level) * 60.0 / self.per_minute

    def _fill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + (now - self.at_s) * self.per_minute / 60.0)
        self.at_s = now
