"""What bounds the batch, its steps and the queue."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes and switches of a `Scheduler`; they do not change while it runs."""

    max_seqs: int  # that run at once
    max_queued: int  # that wait; who comes beyond that is refused
    step_tokens: int  # while somebody decodes, and so waits for the end of every step
    lone_step_tokens: int  # while nobody does
    itl_target_s: float | None
    """What a step may take while somebody decodes; 0: whatever its tokens take; None: what serves all of them best."""
    least_chunk_tokens: int  # of a prompt: below that, products are inefficient
    chunked_prefill: bool  # a prompt may be computed in several steps
