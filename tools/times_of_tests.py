"""A plugin for pytest that measures the processor time of each test and shows where it goes, by folder.

    python -m pytest -p tools.times_of_tests --times build/times.jsonl
    python -m tools.times_of_tests build/times.jsonl

Wall time says little on a machine that others use as well. Counts the time of a test's setup, call and teardown in the
process that runs it, and that of child processes which ended meanwhile: a server of a whole file counts for the last
test of the file. Leaves out what collecting costs, about 8 s in each process.
"""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pytest

_PROPERTY = "processor_s"


class Row(NamedTuple):
    test: str
    own_s: float
    children_s: float

    @property
    def folder(self) -> str:
        """The folder of its file below tests/, or the file where it lies in tests/ itself."""
        parts = PurePosixPath(self.test.split("::")[0]).parts[1:]
        return parts[0] if len(parts) == 1 else "/".join(parts[:-1])


class Clock:
    """A reader of this process' and its children's processor time since it was read last."""

    def __init__(self) -> None:
        self._last = os.times()

    def lap(self) -> tuple[float, float]:
        last, self._last = self._last, os.times()
        now = self._last
        children_s = now.children_user + now.children_system - last.children_user - last.children_system
        return now.user + now.system - last.user - last.system, children_s


class TimesOfTests:
    """Both sides of it: in the process that runs tests, and in the one that gathers the reports."""

    def __init__(self, file: Path) -> None:
        self._file, self._clock = file, Clock()
        self._rows: dict[str, tuple[float, float]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._clock.lap()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        report.user_properties.append((_PROPERTY, self._clock.lap()))
        return report  # type: ignore[no-any-return]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        own_s, children_s = self._rows.get(report.nodeid, (0.0, 0.0))
        for name, value in report.user_properties:
            if name == _PROPERTY:
                own_s, children_s = own_s + value[0], children_s + value[1]  # type: ignore[index]
        self._rows[report.nodeid] = own_s, children_s

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = [Row(test, round(own, 3), round(children, 3)) for test, (own, children) in self._rows.items()]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        terminalreporter.write_line("\n" + table(rows))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, default=Path("build/times.jsonl"), help="file for each test's time")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(TimesOfTests(config.getoption("--times")))


def table(rows: list[Row], other: list[Row] | None = None) -> str:
    """Return a Markdown table of folders and their seconds, the dearest first, beside those of another run if given."""
    runs = [rows] if other is None else [rows, other]
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(runs))
    tests: dict[str, int] = defaultdict(int)
    for index, run in enumerate(runs):
        for row in run:
            seconds[row.folder][index] += row.own_s + row.children_s
            tests[row.folder] += index == 0
    head = ["folder", "tests", "processor s", "after"][: 2 + len(runs)]
    lines = [head, ["---", *["--:"] * (1 + len(runs))]]
    for folder, spent in sorted(seconds.items(), key=lambda pair: -max(pair[1])):
        lines.append([folder, str(tests[folder]), *(f"{s:.1f}" for s in spent)])
    sums = [sum(spent[index] for spent in seconds.values()) for index in range(len(runs))]
    lines.append(["all", str(sum(tests.values())), *(f"{s:.0f}" for s in sums)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(file: Path) -> list[Row]:
    return [Row(*json.loads(line)) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Show where the time of tests goes.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--after", type=Path, help="file of a later run, for a column beside the first")
    given = parser.parse_args()
    print(table(read(given.file), given.after and read(given.after)))


if __name__ == "__main__":
    main()
