"""The KV that a step's sequences stand on while it is still on its way (AttentionStore §3.2.1)."""

from collections.abc import Callable, Mapping

from reprise.cache.transfer.transfer import Transfer

_PATIENCE_S = 0.1  # of a step with sequences that wait for no load: five times what the scheduler lets in
_LONE_PATIENCE_S = 1.0  # of a step without any: only requests that come meanwhile wait for its end


class Arrival:
    """Called by every layer of one step before it attends. A load that lets the step wait for too long, all layers
    together, or for so long that to compute would have been faster, is waited for no more: its sequence's rows are
    void, and those of the others as good as ever."""

    def __init__(
        self,
        transfer: Transfer,
        jobs: Mapping[str, int],
        *,
        patience_s: Callable[[str], float],
        has_bystanders: bool,
    ) -> None:
        """jobs: request id -> its load. They are told that their requests run now. patience_s: of a request, for its
        next layer."""
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
        """Returns when the layer is there for all that are not late."""
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
