"""Defines the bounds of the batch, of its steps and of the queue."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes and switches of a `Scheduler`; they do not change while it runs."""

    max_seqs: int  # sequences that run at once
    max_queued: int  # waiting requests; a later one is refused
    step_tokens: int  # most tokens while a sequence decodes, and so waits for the end of every step
    lone_step_tokens: int  # most tokens while none does
    itl_target_s: float | None
    """Target in seconds for a step while a sequence decodes. 0: no target, only `step_tokens` bounds the step. None:
    the length that serves decoding streams and waiting prompts best."""
    least_chunk_tokens: int  # least of a prompt in a step: fewer make products inefficient
    chunked_prefill: bool  # a prompt may be computed in several steps
