"""Describes one step: how many tokens of which sequences it computes, first as a draft and then as the engine runs
it."""

from dataclasses import dataclass, field

from reprise.scheduler.budgets.budget import StepBudget, StepWork
from reprise.scheduler.sequence import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step as the engine runs it, whose chunks have room reserved in HBM."""

    chunks: list[Chunk]
    preempted: list[Sequence]  # gave their pages back; they wait at the head of the line
    work: StepWork


@dataclass(slots=True, eq=False)
class StepDraft:
    """A step that the scheduler is still putting together."""

    now: float
    loading: dict[str, float]  # request id -> seconds left of the load that a running sequence waits for
    sat_out: frozenset[Sequence]  # skipped the previous step, in favour of a starved sequence
    sits_out: frozenset[Sequence] = frozenset()  # skip this step, for the same reason
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    has_decodes: bool = False
    prefills: list[Sequence] = field(default_factory=list)  # running, with a prompt to compute, next first
    budget: StepBudget = field(init=False)  # what is left for prompts; set once the decodes are known
