"""One disk: what is read and what is written behind the turns take their share of its time."""


class Disk:
    """Carries out one transfer at a time, in the order in which they were asked for, reads and writes alike. Who asks
    for more than it can carry waits for it: nothing is lost, and the server becomes as slow as its disk."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.free_s = 0.0  # when it is done with all that was asked for
        self.busy_s = 0.0

    def transfer(self, num_bytes: float, not_before_s: float, least_s: float = 0.0) -> float:
        """Returns when it is over. least_s: it lasts no less, for what it feeds is slower."""
        seconds = max(num_bytes / self._bytes_per_s, least_s)
        self.free_s = max(self.free_s, not_before_s) + seconds
        self.busy_s += seconds
        return self.free_s
