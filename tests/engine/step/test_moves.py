"""Tests the order in which rows and moves reach the transfer."""

from types import SimpleNamespace
from typing import Any

import pytest

from reprise.cache.moves import CapturePiece, DeleteExtents, SealSlot
from reprise.cache.transfer.capture import Captured
from reprise.engine.step.moves import _MOST_SEALS, StepMoves


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def carry_out(self, moves: Any, running: Any = ()) -> None:
        self.calls.append(("carry out", list(moves), running))

    def save(self, captured: Any, pieces: Any) -> None:
        self.calls.append(("save", captured, pieces))

    def poll(self) -> list[Any]:
        return []


class Decided:
    """Stands for the cache and the scheduler. may_wait: whether seals may."""

    def __init__(self, *, may_wait: bool) -> None:
        self.may_wait, self.moves = may_wait, list[Any]()
        self.changes = 0
        self.num_waiting, self.num_starting, self.running = 0, 0, ()
        self.requests = self

    def is_roomy(self, num_running: int) -> bool:
        return self.may_wait

    def take_moves(self) -> list[Any]:
        moves, self.moves = self.moves, []
        return moves

    def take_failed(self) -> list[str]:
        return []

    def upcoming(self) -> None: ...

    def plan(self, line: Any, starting: int, now: float) -> None: ...


class Steps:
    """Moves of steps that nothing disturbs, and what reaches the transfer of them."""

    def __init__(self, recorder: Recorder | None = None, *, may_wait: bool = False) -> None:
        self.recorder = recorder or Recorder()
        self.decided = Decided(may_wait=may_wait)
        given: Any = {"cache": self.decided, "scheduler": self.decided, "transfer": self.recorder}
        self.moves = StepMoves(**given)
        self.moves.catch_up(0.0)

    def begin(self, moves: list[Any], *running: str) -> None:
        """A step begins, for which the cache has decided these moves."""
        self.decided.moves = moves
        chunks = [SimpleNamespace(sequence=SimpleNamespace(request_id=name)) for name in running]
        self.moves.begin_step(SimpleNamespace(preempted=[], chunks=chunks))  # type: ignore[arg-type]

    def hold(self, moves: list[Any], captured: Captured | None, pieces: list[CapturePiece]) -> None:
        self.decided.moves = moves
        self.moves.hold(captured, pieces)

    def recorded(self, *, all_of_it: bool = False) -> list[Any]:
        """Return what reaches the transfer between two steps, or before a cut."""
        self.recorder.calls.clear()
        if all_of_it:
            self.moves.carry_out_held()
        else:
            self.moves.catch_up(0.0)
        return [call[:2] for call in self.recorder.calls if call[0] == "save" or call[1]]


def test_what_a_step_leaves_waits_and_comes_before_everything_decided_later() -> None:
    steps = Steps()
    recorder = steps.recorder
    taken, sealed = DeleteExtents(1, (), None), SealSlot(1, 0, 32)
    captured, pieces = Captured(), [CapturePiece(0, 0, 0, 1)]
    steps.hold([taken], captured, pieces)
    assert recorder.calls == []
    steps.begin([sealed], "a")
    assert recorder.calls == [
        ("carry out", [taken], ()),
        ("save", captured, pieces),
        ("carry out", [sealed], {"a"}),
    ]
    recorder.calls.clear()
    steps.moves.catch_up(0.0)
    assert recorder.calls == [], "and once only"


def test_a_step_is_not_forgotten_for_the_next() -> None:
    steps = Steps()
    steps.hold([], Captured(), [])
    with pytest.raises(AssertionError):
        steps.hold([], Captured(), [])


def test_what_broke_is_not_tried_again() -> None:
    class Broken(Recorder):
        def save(self, captured: Any, pieces: Any) -> None:
            raise OSError("no room")

    steps = Steps(Broken())
    steps.hold([], Captured(), [])
    with pytest.raises(OSError, match="no room"):
        steps.moves.catch_up(0.0)
    steps.moves.catch_up(0.0)


def test_seals_that_may_wait_are_carried_out_before_all_that_comes_later() -> None:
    steps = Steps(may_wait=True)
    seals = [SealSlot(n, n, 32) for n in range(4)]
    steps.begin(seals[:1])
    steps.hold(seals[1:2], None, [])
    steps.begin(seals[2:3])
    steps.hold([], None, [])
    assert steps.recorded() == []
    steps.hold(seals[3:], None, [])
    expected = [("carry out", seals[:3]), ("carry out", seals[3:]), ("save", None)]
    assert steps.recorded(all_of_it=True) == expected
    assert steps.recorded(all_of_it=True) == []


def test_seals_wait_until_they_may_no_longer() -> None:
    steps, seal = Steps(may_wait=True), SealSlot(1, 0, 32)
    steps.begin([seal])
    assert steps.recorded() == []
    steps.decided.may_wait = False
    assert steps.recorded() == [("carry out", [seal])]


@pytest.mark.parametrize("captured", [None, Captured()])
@pytest.mark.parametrize("move", [SealSlot(9, 9, 32), DeleteExtents(1, (), None)])
def test_only_seals_wait_and_only_where_the_rows_are_saved(captured: Captured | None, move: Any) -> None:
    steps = Steps(may_wait=True)
    first = SealSlot(1, 0, 32)
    steps.begin([first])
    steps.hold([move], captured, [])
    waits = captured is None and isinstance(move, SealSlot)
    in_order = [("carry out", [first]), ("carry out", [move]), ("save", captured)]
    assert steps.recorded() == ([] if waits else in_order)
    assert steps.recorded(all_of_it=True) == ([("carry out", [first, move])] if waits else [])


def test_not_any_number_of_seals_waits() -> None:
    steps = Steps(may_wait=True)
    for n in range(_MOST_SEALS + 1):
        assert steps.recorder.calls == []
        steps.begin([SealSlot(n, n, 32)])
    assert [len(call[1]) for call in steps.recorder.calls] == [_MOST_SEALS, 1]
