"""Change the KV of a text's beginning and score what follows it, with the engine's own runner.

    python -m benchmarks.texts PROGRAM --data DIR [--model smollm2] [...]

PROGRAM is codecs, cuts, drift, keeping, packed_weights or selectors; `PROGRAM --help` describes it.
"""

import importlib
import sys

PROGRAMS = ("codecs", "cuts", "drift", "keeping", "packed_weights", "selectors")


def main() -> int:
    """Run the program that the first argument names. Returns the exit status."""
    if len(sys.argv) < 2 or sys.argv[1] not in PROGRAMS:
        print(__doc__)
        return 2
    status: int = importlib.import_module(f"benchmarks.texts.{sys.argv[1]}").EXPERIMENT.main(sys.argv[2:])
    return status


if __name__ == "__main__":
    raise SystemExit(main())
