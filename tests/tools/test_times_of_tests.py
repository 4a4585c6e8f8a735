"""Tests how the times of tests add up to a table."""

import os
import subprocess
import sys
from pathlib import Path

from tools.import_graph import ROOT
from tools.times_of_tests import Row, read, table

ROWS = [
    Row("tests/cache/blocks/test_a.py::test_a[1]", 1.0, 0.5),
    Row("tests/cache/blocks/test_b.py::test_b", 0.5, 0.0),
    Row("tests/test_faults.py::test_c", 0.25, 4.0),
]


def test_folders_are_added_up_and_the_dearest_comes_first() -> None:
    assert table(ROWS).splitlines() == [
        "| folder | tests | processor s |",
        "| --- | --: | --: |",
        "| test_faults.py | 1 | 4.2 |",
        "| cache/blocks | 2 | 2.0 |",
        "| all | 3 | 6 |",
    ]


def test_two_runs_stand_beside_each_other() -> None:
    later = [Row("tests/cache/blocks/test_a.py::test_a[1]", 0.5, 0.0), Row("tests/model/test_d.py::test_d", 1.0, 0.0)]
    assert table(ROWS, later).splitlines()[2:] == [
        "| test_faults.py | 1 | 4.2 | 0.0 |",
        "| cache/blocks | 2 | 2.0 | 0.5 |",
        "| model | 0 | 0.0 | 1.0 |",
        "| all | 3 | 6 | 2 |",
    ]


SUITE = """
import subprocess, sys, time

def test_itself():
    while time.process_time() < STARTED + 0.2:
        pass

def test_by_a_child():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.2: pass"], check=True)

STARTED = time.process_time()
"""


def test_a_run_is_measured_and_read_again(tmp_path: Path) -> None:
    """One test computes, the other has a child that does."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(SUITE)
    file = tmp_path / "out" / "times.jsonl"
    words = ["-p", "tools.times_of_tests", "--times", file, "-p", "no:schemathesis", "-c", "pytest.ini", "test_it.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr
    own, by_child = read(file)
    assert own.own_s > 0.1
    assert own.children_s == 0
    assert by_child.children_s > 0.15
