"""Decides which tests `make test` runs: all that are cheap, and of every dear kind some that stand for the others.

A marker says what makes a test dear. `always` on one of them keeps it in `make test`; `sweep(n)` keeps every n-th case
of a parametrised test. Whatever remains gets the marker `dear`, which `make test` leaves to `make test-all`.
"""

from collections import Counter
from pathlib import Path

import pytest

KINDS = ("triton", "bench", "servers", "ranks", "long")
"""Markers of dear tests: see `markers` in pyproject.toml. `sweep` is one as well, in part."""

_FIRST = ("servers", "ranks")  # kinds that take half a minute and several processes


def start_early(items: list[pytest.Item]) -> None:
    """Sort the files, so that processes which share the tests end at the same time: files that start processes first,
    then those of the whole tree, which lie beside this one and take seconds too. What comes last is cheap."""
    long = {item.path for item in items if any(item.get_closest_marker(kind) for kind in _FIRST)}
    items.sort(key=lambda item: (item.path not in long, item.path.parent != Path(__file__).parent))


def mark_dear(items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves out."""
    cases: Counter[tuple[str, str]] = Counter()  # cases so far of each function with a sweep
    for item in items:
        sweep = item.get_closest_marker("sweep")
        is_dear = any(item.get_closest_marker(kind) for kind in KINDS)
        if sweep is not None:
            test = str(item.path), item.nodeid.split("[")[0]
            is_dear |= cases[test] % sweep.args[0] != 0
            cases[test] += 1
        if is_dear and item.get_closest_marker("always") is None:
            item.add_marker("dear")
