"""The process of one section: measures its items, and says each line of results on its standard output as JSON.

    python -m benchmarks.gpu_day.worker SECTION --device cuda --carried DIR --out DIR [--skip ITEM ...]

Whatever is printed otherwise goes to standard error. A line with `limit_s` says what begins.
"""

import argparse
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.gpu_day.items import Asked, Section
from benchmarks.gpu_day.supervisor import OPENING
from reprise.kernels.device_errors import is_sticky

_OPENING_LIMIT_S = 90.0
_MOST_WORDS = 300  # characters of an error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section")
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--carried", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--skip", nargs="*", default=[])
    given = parser.parse_args()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module: Any = importlib.import_module(f"benchmarks.gpu_day.{given.section}")
    run(module, Asked(given.device, given.carried, given.out), given.skip, channel)
    channel.flush()
    os._exit(0)  # an engine's threads would go on, and unpinning tens of GiB would take seconds


def run(section: Section, asked: Asked, skip: list[str], channel: TextIO) -> None:
    """Measure all items except those in `skip`, and write each line of results to `channel`. Ends the process after an
    error that the device does not recover from: the items that follow need a new process."""

    def say(item: str, **values: object) -> None:
        channel.write(json.dumps({"item": item, **values}, default=str) + "\n")
        channel.flush()

    say(OPENING, limit_s=_OPENING_LIMIT_S)
    state = section.open_section(asked)
    for item in section.items(asked):
        if item.name in skip:
            continue
        say(item.name, limit_s=item.limit_s)
        try:
            for values in item.measure(state):
                say(item.name, **values)
        except Exception as error:
            traceback.print_exc()
            say(item.name, **told(error))
            if is_sticky(error):
                sys.exit(3)


def told(error: BaseException) -> dict[str, object]:
    """Return an error, and the last places of its traceback, as values of a line of results."""
    places = [
        f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    return {"error": f"{type(error).__name__}: {str(error)[:_MOST_WORDS]}", "where": places[-4:]}


if __name__ == "__main__":
    main()
