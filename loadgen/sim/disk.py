"""Models one disk, whose time is shared by reads and by writes in the background."""


class Disk:
    """A disk that serves reads one at a time, in order of request. Writes wait in memory for idle time between reads.
    When more is unwritten than memory holds, reads wait too, so nothing is lost and a server that asks too much of its
    disk becomes as slow as the disk."""

    def __init__(self, bytes_per_s: float, buffer_bytes: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._buffer_s = buffer_bytes / bytes_per_s
        self._free_s = 0.0  # the disk's time is taken or past until then
        self._unwritten_s = 0.0

    def read(self, num_bytes: float, not_before_s: float, least_s: float = 0.0) -> float:
        """Read `num_bytes`, beginning at the time `not_before_s` or once the disk is free. Returns the time at which
        the read ends. least_s: the read takes at least so many seconds, because its receiver is slower than the
        disk."""
        seconds = max(num_bytes / self._bytes_per_s, least_s)
        self._pass(not_before_s)
        self._pass(self._free_s + max(0.0, self._unwritten_s - self._buffer_s))
        self._free_s += seconds
        return self._free_s

    def write(self, num_bytes: float, now: float) -> None:
        self._pass(now)
        self._unwritten_s += num_bytes / self._bytes_per_s

    def _pass(self, until_s: float) -> None:
        """Use the time until `until_s` for writes."""
        if until_s > self._free_s:
            self._unwritten_s = max(0.0, self._unwritten_s - (until_s - self._free_s))
            self._free_s = until_s
