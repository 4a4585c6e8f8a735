"""A fleet of real processes and what befalls it: one scenario, as `python -m benchmarks.fleet kills --quick`.

    moves      conversations that change their replica every turn: texts, and what a move costs
    kills      replicas and engines killed in the middle of answers
    homes      turns that come home behind two gateways, also when those are new
    faults     fifteen faults of Redis, under load: texts, errors, times, recovery

`python -m benchmarks.fleet SCENARIO --help` says what it does, what it holds, and its options.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

SCENARIOS = ("moves", "kills", "homes", "faults")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=SCENARIOS)
    name = parser.parse_args(words[:1]).scenario
    status: int = importlib.import_module(f"benchmarks.fleet.{name}").EXPERIMENT.main(words[1:])
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
