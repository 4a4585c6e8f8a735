"""Tests which faults are seeded, that each is one change of the text, and that what tests find is told."""

import ast
from pathlib import Path

import pytest

from tools.import_graph import ROOT
from tools.seed_faults import FILES, drawn, faults_in, judge, stages

SOURCE = """
LIMIT = 3  # what runs at import stays

def room(taken, spare):
    if taken < 4 and spare:
        note(taken)
        return min(taken + 1, spare)
    return place(taken, spare)  # behind: häuser
"""


def test_each_kind_of_fault_is_found_and_changes_one_place() -> None:
    faults = faults_in("cache/room.py", SOURCE)
    lines = SOURCE.encode().splitlines()
    changed = {}
    for fault in faults:
        after = fault.applied(SOURCE.encode())
        ast.parse(after)
        differing = [number for number, (a, b) in enumerate(zip(lines, after.splitlines(), strict=True), 1) if a != b]
        assert differing == [fault.line]
        changed[fault.kind, fault.line] = after.splitlines()[fault.line - 1].decode().strip()
    assert changed == {
        ("and or", 5): "if ((taken < 4) or (spare)):",
        ("condition", 5): "if not (taken < 4 and spare):",
        ("comparison", 5): "if (taken) <= (4) and spare:",
        ("off by one", 5): "if taken < 5 and spare:",
        ("dropped call", 6): "pass",
        ("min max", 7): "return max(taken + 1, spare)",
        ("sign", 7): "return min(((taken) - (1)), spare)",
        ("off by one", 7): "return min(taken + 2, spare)",
        ("swapped", 8): "return place(spare, taken)  # behind: häuser",
    }


def test_a_seed_draws_the_same_fault_of_every_file() -> None:
    faults = drawn(FILES, 1)
    assert len(faults) == 60
    assert faults == drawn(FILES, 1)
    assert [fault.file for fault in faults] == list(FILES)
    assert faults != drawn(FILES, 2)


def test_near_tests_come_first_and_none_twice() -> None:
    assert stages("scheduler/scheduler.py", far=True) == [
        ("its file", ["tests/scheduler/test_scheduler.py"]),
        ("its folder", ["tests/scheduler"]),
        ("its users", ["tests/loadgen/virtual", "tests/engine"]),
        ("all", ["tests"]),
    ]
    assert stages("cache/storage/space.py", far=False)[2] == ("its top folder", ["tests/cache"])


COMPARES = "def test_it():\n    assert open('scheduler/waiting.py').read() == {source!r}\n"
FAILS = "def test_that_always_fails():\n    assert False\n"


@pytest.mark.parametrize(
    ("test", "found_by"), [(FAILS + COMPARES, "its file"), (FAILS, ""), ("def test_that_is_content(): ...", "")]
)
def test_what_tests_find_is_told_and_the_copy_is_mended(tmp_path: Path, test: str, found_by: str) -> None:
    """A test that fails without the fault as well has not found it."""
    source = (ROOT / "scheduler" / "waiting.py").read_text()
    fault = faults_in("scheduler/waiting.py", source)[0]
    file = tmp_path / "tests" / "scheduler" / "test_waiting.py"
    for path, text in (
        (tmp_path / "pytest.ini", "[pytest]\nmarkers =\n    dear: x\n    gpu: x\n    api: x\n    slow: x\n"),
        (tmp_path / "scheduler" / "waiting.py", source),
        (file, test.format(source=source)),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    verdict = judge(fault, tmp_path, everything=False, far=False)
    assert verdict.found_by == found_by
    assert verdict.test == ("tests/scheduler/test_waiting.py::test_it" if found_by else "")
    assert (tmp_path / "scheduler" / "waiting.py").read_text() == source
