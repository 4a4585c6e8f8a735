"""One disk: what is read and what is written behind the turns share its time."""


class Disk:
    """Reads go one after the other, in the order in which they were asked for; what is to be written waits in memory
    for the time between them. Where more is unwritten than memory holds, reads wait as well: nothing is lost, and a
    server that asks too much of its disk becomes as slow as that."""

    def __init__(self, bytes_per_s: float, buffer_bytes: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._buffer_s = buffer_bytes / bytes_per_s
        self._free_s = 0.0  # until then its time is spoken for, or past
        self._unwritten_s = 0.0

    def read(self, num_bytes: float, not_before_s: float, least_s: float = 0.0) -> float:
        """Returns when it is over. least_s: it lasts no less, for what it feeds is slower."""
        seconds = max(num_bytes / self._bytes_per_s, least_s)
        self._pass(not_before_s)
        self._pass(self._free_s + max(0.0, self._unwritten_s - self._buffer_s))
        self._free_s += seconds
        return self._free_s

    def write(self, num_bytes: float, now: float) -> None:
        self._pass(now)
        self._unwritten_s += num_bytes / self._bytes_per_s

    def _pass(self, until_s: float) -> None:
        """Nothing is read until then."""
        if until_s > self._free_s:
            self._unwritten_s = max(0.0, self._unwritten_s - (until_s - self._free_s))
            self._free_s = until_s
