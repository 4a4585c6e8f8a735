"""Tests which tests `make test` leaves to `make test-all`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.costs import KINDS, mark_dear, start_early


@dataclass
class Item:
    """A collected test with its markers, as far as `mark_dear` looks at it."""

    nodeid: str
    marks: list[Any]
    path: Path = Path("tests/test_it.py")
    added: list[str] = field(default_factory=list)

    def get_closest_marker(self, name: str) -> Any:
        return next((mark.mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, name: str) -> None:
        self.added.append(name)


def kept(items: list[Item]) -> list[str]:
    """Mark the items, and return the names of those that are not dear."""
    mark_dear(items)  # type: ignore[arg-type]
    return [item.nodeid for item in items if item.added != ["dear"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dear_test_is_left_out_unless_it_stands_for_its_kind(kind: str) -> None:
    mark = getattr(pytest.mark, kind)
    assert kept([Item("dear", [mark]), Item("stands", [mark, pytest.mark.always]), Item("cheap", [])]) == [
        "stands",
        "cheap",
    ]


def test_of_a_sweep_every_nth_case_stays_in_each_function_and_file() -> None:
    third, half = pytest.mark.sweep(3), pytest.mark.sweep(2)
    cases = [Item(f"a[{n}]", [third]) for n in range(7)]
    others = [
        Item("b[0]", [half]),
        Item("b[1]", [half, pytest.mark.always]),
        Item("b[2]", [half]),
        Item("b[3]", [half]),
    ]
    elsewhere = [Item("a[0]", [third], path=Path("tests/test_other.py"))]
    assert kept([*cases, *others, *elsewhere]) == ["a[0]", "a[3]", "a[6]", "b[0]", "b[1]", "b[2]", "a[0]"]


def test_a_sweep_of_a_dear_kind_is_left_out() -> None:
    assert kept([Item("a[0]", [pytest.mark.sweep(2), pytest.mark.long])]) == []


def test_files_that_start_processes_come_first_and_then_those_of_the_whole_tree() -> None:
    tests = Path(__file__).parent
    server, whole, part = tests / "page/test_a.py", tests / "test_b.py", tests / "app/test_c.py"
    items = [
        Item("cheap", [], part),
        Item("beside the dear one", [], server),
        Item("dear", [pytest.mark.servers], server),
        Item("of the tree", [], whole),
    ]
    start_early(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["beside the dear one", "dear", "of the tree", "cheap"]


def test_every_marker_is_declared(request: pytest.FixtureRequest) -> None:
    declared = {line.split(":")[0] for line in request.config.getini("markers")}
    assert {*KINDS, "always", "dear", "sweep(n)"} <= declared
