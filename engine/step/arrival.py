"""Has a step wait for KV that is still being loaded, layer by layer (AttentionStore §3.2.1)."""

from collections.abc import Callable, Mapping

from reprise.cache.transfer.transfer import Transfer

_PATIENCE_S = 0.1  # longest wait of a step in which some sequences need no load: five times what the scheduler allows
_LONE_PATIENCE_S = 1.0  # longest wait of other steps: only requests that come meanwhile wait for their end


class Arrival:
    """A waiter for the loads of one step. Every layer calls it before it attends, on the engine's thread. It gives up a
    load when the step's waits in all layers together become too long, or when the load's next layer is not there after
    the time in which its KV could have been computed. Such a load counts as late: the rows that the step computes for
    its sequence are void, and the sequence starts anew. The rows of other sequences are valid."""

    def __init__(
        self,
        transfer: Transfer,
        jobs: Mapping[str, int],
        *,
        patience_s: Callable[[str], float],
        has_bystanders: bool,
    ) -> None:
        """Tell the transfer to go on with these loads beyond the few layers that are loaded before a request runs.
        jobs: request id -> job id of its load. patience_s(request id): the longest wait, in seconds, for the load's
        next layer. has_bystanders: whether some sequences of the step need no load; then the step waits for less
        time."""
        self._transfer = transfer
        self._patience_s = patience_s
        self.jobs, self.has_bystanders = jobs, has_bystanders
        self._jobs = dict(jobs)
        self._left_s = _PATIENCE_S if has_bystanders else _LONE_PATIENCE_S
        self.late: set[str] = set()  # requests whose load was not there in time
        self.waited_s = 0.0
        for job in jobs.values():
            transfer.start(job)

    def __call__(self, layer: int) -> None:
        """Wait until a layer's KV is loaded for every request of the step. A request whose load takes too long is added
        to `late`, and is not waited for in this layer or later ones."""
        for request_id, job in list(self._jobs.items()):
            before_s = self._transfer.waited_s
            timeout_s = max(0.0, min(self._left_s, self._patience_s(request_id)))
            arrived = self._transfer.wait_layer(job, layer, timeout_s)
            waited_s = self._transfer.waited_s - before_s
            self.waited_s += waited_s
            self._left_s -= waited_s
            if not arrived:
                self.late.add(request_id)
                del self._jobs[request_id]
