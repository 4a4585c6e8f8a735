"""Plays random small servers on a virtual clock, and checks invariants in every step. A seed decides everything, so a
run that breaks one is replayed by its seed.

    python -m reprise.loadgen.virtual.random_servers --seeds 10000
    python -m reprise.loadgen.virtual.random_servers --first 1234 --seeds 1  one of them again
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence as Items

from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.loadgen.virtual.simulation import BrokenInvariant, Simulation
from reprise.loadgen.virtual.virtual_server import VirtualServer
from reprise.loadgen.workloads.workload import ConversationShape, poisson
from reprise.scheduler.make_policy import POLICIES as SCHEDULER_POLICIES


def random_case(seed: int) -> Simulation:
    """Return a simulation of a small server under some load, all of it drawn from the seed."""
    rng = random.Random(seed)
    machine = VirtualServer(
        hbm_blocks=rng.randint(8, 40),
        dram_blocks=rng.choice([0, 6, 20, 60]),
        disk_blocks=rng.choice([0, 0, 40, 400]),
        policy=rng.choice(["due", "due", *SCHEDULER_POLICIES]),
        window=rng.randint(1, 6),
        max_seqs=rng.choice([1, 1, 2, 3, 5]),
        step_tokens=rng.choice([16, 64, 256]),
        lone_step_tokens=rng.choice([64, 256, 512]),
        itl_target_s=rng.choice([0.0, 0.02, 0.1, None, None]),
        chunked_prefill=rng.random() < 0.8,
        oracle=rng.random() < 0.3,
        cache_policy=rng.choice(["lookahead", "lookahead", "lru"]),
        high_water=rng.choice([0.5, 0.9, 1.0]),
        scores=rng.random() < 0.5,
        low_water=0.5,
        s_per_token=rng.choice([0.0001, 0.01, 0.1]),
        dram_bytes_per_s=rng.choice([1e5, 1e6, 1e7]),
        disk_bytes_per_s=rng.choice([5e4, 1e6]),
        failures=rng.choice([0.0, 0.1, 0.3]),
        cancels=rng.choice([0.0, 0.0, 0.02]),
        prefer_contiguous=rng.random() < 0.5,
        redis_blocks=random.Random(f"redis {seed}").choice([0, 0, 40, 400]),
        coded_share=random.Random(f"coded {seed}").choice([0.0, 0.0, 0.25]),
        block_scorer=random.Random(f"cuts {seed}").choice(["", "", *BLOCK_SCORERS]),
        recall=random.Random(f"recall {seed}").random() < 0.5,
    )
    shape = ConversationShape(
        turns=4, prompt_tokens=40, answer_tokens=8, think_s=rng.choice([0.0, 0.1, 1.0]), spread=0.7
    )
    conversations = poisson(
        rng=rng, count=rng.randint(1, 7), rate_per_s=rng.choice([1.0, 10.0, 1000.0]), shape=shape, tenants=("a", "b")
    )
    return Simulation(machine=machine, conversations=conversations, rng=rng)


def main(arguments: Items[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    options = parser.parse_args(arguments)
    began_s, steps, broken = time.monotonic(), 0, 0
    for seed in range(options.first, options.first + options.seeds):
        case = random_case(seed)
        try:
            case.run()
        except (BrokenInvariant, AssertionError, KeyError, IndexError, ValueError) as error:
            broken += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
        steps += case.steps
    seconds = time.monotonic() - began_s
    print(f"{options.seeds} seeds, {steps} steps, {broken} broken, {seconds:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
