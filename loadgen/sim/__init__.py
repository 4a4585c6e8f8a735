"""Simulates a server on a workload, in minutes instead of days. It moves queue, batch and tiers from event to event,
with the server's own queue and policy classes (`simulated_server.py`), on machines that are stated (`presets.py`) or
measured (`calibrate.py`).

    result = simulate(workload, machine, config)
    result.tier_token_hit_rate["dram"], result.ttft_mean_s, result.prefill_mean_s, result.cost, result.records

The workload is what `reprise load` sends: `Conversation`s with the lengths, starts and think times of their turns.
Their text and what they share does not matter here; `reprise.loadgen.blocks.replay` models shared blocks exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from reprise.loadgen.sim.books import check
from reprise.loadgen.sim.future import NextTurns
from reprise.loadgen.sim.machine import Config, Costs, Machine
from reprise.loadgen.sim.policies import SIMULATED_POLICIES
from reprise.loadgen.sim.result import Result, summarize
from reprise.loadgen.sim.simulated_server import SimulatedServer
from reprise.loadgen.sim.store import BrokenBooks
from reprise.loadgen.sim.turn import TurnRecord
from reprise.loadgen.workloads.workload import Conversation

__all__ = ["BrokenBooks", "Config", "Costs", "Machine", "Result", "TurnRecord", "simulate", "simulate_belady"]


def simulate(workload: Sequence[Conversation], machine: Machine, config: Config) -> Result:
    """Run all conversations to their end. Deterministic. Raises ValueError for an unknown policy or if no turn is left
    after the warm-up, and BrokenBooks if bytes, counts or tokens do not add up at the end of the run."""
    if config.policy not in SIMULATED_POLICIES:
        raise ValueError(f"no policy {config.policy!r}; there are {', '.join(SIMULATED_POLICIES)}")
    return _run(SimulatedServer(workload, machine, config))


def simulate_belady(workload: Sequence[Conversation], machine: Machine, config: Config) -> Result:
    """Run with Belady's policy, an upper bound for others: the session that returns last leaves first. The future is
    taken from a run that keeps everything, so it is exact where the order of turns does not depend on hits."""
    unbounded = replace(machine, dram_bytes=math.inf, disk_bytes=0.0)
    future = _run(SimulatedServer(workload, unbounded, replace(config, policy="lru", warmup_turns=0)))
    return _run(SimulatedServer(workload, machine, config, future=NextTurns(future.records)))


def _run(server: SimulatedServer) -> Result:
    server.run()
    check(server)
    return summarize(server)
