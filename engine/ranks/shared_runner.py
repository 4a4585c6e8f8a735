"""Runs the model on rank 0: every forward pass is one of all ranks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from reprise.cache.transfer.capture import CaptureSink, SavedRows
from reprise.engine.model.batch import BatchInput
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.ranks.group import RankGroup
from reprise.engine.ranks.wire import pack_step
from reprise.engine.step.arrival import Arrival


class SharedRunner(ModelRunner):
    """A ModelRunner that sends each step to the other ranks before it runs here. If a step raises in one rank, the
    others wait in the middle of it, so the engine ends. Called by the engine's thread."""

    def __init__(self, *, ranks: RankGroup, **runner: Any) -> None:
        """Set up. runner: the arguments of `ModelRunner`, for this rank's part."""
        super().__init__(**runner)
        self._ranks = ranks

    def forward(
        self, batch: BatchInput, arrive: Callable[[int], None] | None, saved: SavedRows | None = None
    ) -> Tensor:
        arrival = arrive if isinstance(arrive, Arrival) else None
        jobs = {} if arrival is None else arrival.jobs
        captures = isinstance(self.sink, CaptureSink) and self.sink.step is not None
        bystanders = arrival is not None and arrival.has_bystanders
        self._ranks.send(pack_step(batch, captures=captures, jobs=list(jobs.values()), has_bystanders=bystanders))
        try:
            logits = super().forward(batch, arrive, saved)
        except Exception:
            self._ranks.end("a step has failed")
        if arrival is not None and jobs:
            late = set(self._ranks.step_ended())
            arrival.late |= {request_id for request_id, job in jobs.items() if job in late}
        return logits
