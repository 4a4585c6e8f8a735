"""Lets the threads of a compiled call go through its phases together.

A phase is a number of tasks. Threads take tasks from a counter, and the thread that finishes a phase's last task opens
the next phase. Threads wait only for tasks that have been taken, never for a thread: one that comes late, or that the
system sets aside, delays the others only if it has a task.
"""

from typing import Any

from llvmlite import ir
from numba import types

from reprise.kernels.cpu.emit import I64, Emit, compiled, emitted, emitted_value
from reprise.kernels.views import Int64

NEXT, DONE = 0, 8
"""Places in two cache lines: the phase with its next task, and how many of its tasks are done."""
COUNTERS = 16
PHASE_BITS = 32
"""The upper half of the counter of tasks is the phase."""
_YIELD_SPINS = 2_000  # how often a thread looks for the next phase before it lets others run


@emitted_value(types.int64)
def take(e: Emit, counters: ir.Value, at: ir.Value) -> Any:
    """Add one to the counter at index `at`, atomically, and return the value that it had before."""
    pointer = e.b.bitcast(e.at(counters, e.mul(at, 8)), I64.as_pointer())
    return e.b.atomic_rmw("add", pointer, I64(1), "seq_cst")


@emitted_value(types.int64)
def look(e: Emit, counters: ir.Value, at: ir.Value) -> Any:
    return e.b.load_atomic(e.b.bitcast(e.at(counters, e.mul(at, 8)), I64.as_pointer()), "seq_cst", 8)


@emitted
def publish(e: Emit, counters: ir.Value, at: ir.Value, value: ir.Value) -> None:
    e.b.store_atomic(value, e.b.bitcast(e.at(counters, e.mul(at, 8)), I64.as_pointer()), "seq_cst", 8)


@emitted
def _pause(e: Emit) -> None:
    e.call("llvm.x86.sse2.pause", ir.VoidType())


@emitted
def _yield(e: Emit) -> None:
    e.call("sched_yield", ir.IntType(32))


@compiled()
def wait_for(counters: Int64, phase: int) -> None:
    """Wait until the threads have ended all tasks of a phase (a stage of a layer's computation)."""
    spins = 0
    while look(counters, NEXT) >> PHASE_BITS == phase:
        _pause()
        spins += 1
        if spins > _YIELD_SPINS:
            _yield()
