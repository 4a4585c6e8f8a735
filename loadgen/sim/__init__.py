"""What a server would do with a workload, in minutes instead of days: queue, batch and tiers from event to event, with
the server's own queue and policy classes (`server.py`), on machines that are stated (`presets.py`) or measured
(`calibrate.py`).

    result = simulate(workload, machine, config)
    result.tier_token_hit_rate["dram"], result.ttft_mean_s, result.prefill_mean_s, result.cost, result.records

The workload is what `reprise load` sends: `Conversation`s with the lengths, starts and think times of their turns. What
they say, and what they share with each other, does not count here; block-exact sharing is `loadgen.blocks.replay`'s.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from loadgen.sim.books import check
from loadgen.sim.future import NextTurns
from loadgen.sim.machine import Config, Costs, Machine
from loadgen.sim.policies import POLICIES
from loadgen.sim.result import Result, summarize
from loadgen.sim.simulated_server import SimulatedServer
from loadgen.sim.store import BrokenBooks
from loadgen.sim.turn import TurnRecord
from loadgen.workloads.workload import Conversation

__all__ = ["BrokenBooks", "Config", "Costs", "Machine", "Result", "TurnRecord", "simulate", "simulate_belady"]


def simulate(workload: Sequence[Conversation], machine: Machine, config: Config) -> Result:
    """One run to the end of all conversations. Deterministic. Raises ValueError for a policy that is not known or where
    no turn is left behind the warm-up, BrokenBooks if bytes, counts or tokens do not add up at the end."""
    if config.policy not in POLICIES:
        raise ValueError(f"no policy {config.policy!r}; there are {', '.join(POLICIES)}")
    return _run(SimulatedServer(workload, machine, config))


def simulate_belady(workload: Sequence[Conversation], machine: Machine, config: Config) -> Result:
    """A ceiling for policies: what returns last leaves first. The future is that of a run where everything is kept, so
    it is exact where the order of turns does not depend on what is hit."""
    unbounded = replace(machine, dram_bytes=math.inf, disk_bytes=0.0)
    future = _run(SimulatedServer(workload, unbounded, replace(config, policy="lru", warmup_turns=0)))
    return _run(SimulatedServer(workload, machine, config, future=NextTurns(future.records)))


def _run(server: SimulatedServer) -> Result:
    server.run()
    check(server)
    return summarize(server)
