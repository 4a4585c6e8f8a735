"""Tests the order in which rows and moves reach the transfer."""

from typing import Any

import pytest

from reprise.cache.moves import CapturePiece, DeleteExtents, SealSlot
from reprise.cache.transfer.capture import Captured
from reprise.engine.step.held_moves import _MOST_SEALS, HeldMoves


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def carry_out(self, moves: Any, running: Any = ()) -> None:
        self.calls.append(("carry out", list(moves), running))

    def save(self, captured: Any, pieces: Any) -> None:
        self.calls.append(("save", captured, pieces))


def held_moves(recorder: Recorder | None = None, *, may_wait: bool = False) -> HeldMoves:
    """may_wait: seals, at any time."""
    return HeldMoves(recorder or Recorder(), seals_may_wait=lambda: may_wait)  # type: ignore[arg-type]


def test_what_a_step_leaves_waits_and_comes_before_everything_decided_later() -> None:
    recorder = Recorder()
    moves = held_moves(recorder)
    taken, sealed = DeleteExtents(1, (), None), SealSlot(1, 0, 32)
    captured, pieces = Captured(), [CapturePiece(0, 0, 0, 1)]
    moves.hold([taken], captured, pieces)
    assert recorder.calls == []
    moves.carry_out([sealed], {"a"})
    assert recorder.calls == [
        ("carry out", [taken], ()),
        ("save", captured, pieces),
        ("carry out", [sealed], {"a"}),
    ]
    recorder.calls.clear()
    moves.carry_out()
    assert recorder.calls == [], "and once only"


def test_a_step_is_not_forgotten_for_the_next() -> None:
    moves = held_moves()
    moves.hold([], Captured(), [])
    with pytest.raises(AssertionError):
        moves.hold([], Captured(), [])


def test_what_broke_is_not_tried_again() -> None:
    class Broken(Recorder):
        def save(self, captured: Any, pieces: Any) -> None:
            raise OSError("no room")

    moves = held_moves(Broken())
    moves.hold([], Captured(), [])
    with pytest.raises(OSError, match="no room"):
        moves.carry_out()
    moves.carry_out()


def recorded(moves: HeldMoves, *, all_of_it: bool = False) -> list[Any]:
    """What reaches the transfer when `carry_out` is called, or `carry_out_all`."""
    recorder = moves._transfer
    assert isinstance(recorder, Recorder)
    recorder.calls.clear()
    (moves.carry_out_all if all_of_it else moves.carry_out)()
    return [call[:2] for call in recorder.calls if call[0] == "save" or call[1]]


def test_seals_that_may_wait_are_carried_out_before_all_that_comes_later() -> None:
    moves = held_moves(may_wait=True)
    seals = [SealSlot(n, n, 32) for n in range(4)]
    moves.carry_out(seals[:1])
    moves.hold(seals[1:2], None, [])
    moves.carry_out(seals[2:3])
    moves.hold([], None, [])
    assert recorded(moves) == []
    moves.hold(seals[3:], None, [])
    expected = [("carry out", seals[:3]), ("carry out", seals[3:]), ("save", None)]
    assert recorded(moves, all_of_it=True) == expected
    assert recorded(moves, all_of_it=True) == []


def test_seals_wait_until_they_may_no_longer() -> None:
    may_wait = True
    recorder, seal = Recorder(), SealSlot(1, 0, 32)
    moves = HeldMoves(recorder, seals_may_wait=lambda: may_wait)  # type: ignore[arg-type]
    moves.carry_out([seal])
    assert recorded(moves) == []
    may_wait = False
    assert recorded(moves) == [("carry out", [seal])]


@pytest.mark.parametrize("captured", [None, Captured()])
@pytest.mark.parametrize("move", [SealSlot(9, 9, 32), DeleteExtents(1, (), None)])
def test_only_seals_wait_and_only_where_the_rows_are_saved(captured: Captured | None, move: Any) -> None:
    moves = held_moves(may_wait=True)
    first = SealSlot(1, 0, 32)
    moves.carry_out([first])
    moves.hold([move], captured, [])
    waits = captured is None and isinstance(move, SealSlot)
    in_order = [("carry out", [first]), ("carry out", [move]), ("save", captured)]
    assert recorded(moves) == ([] if waits else in_order)
    assert recorded(moves, all_of_it=True) == ([("carry out", [first, move])] if waits else [])


def test_not_any_number_of_seals_waits() -> None:
    recorder = Recorder()
    moves = held_moves(recorder, may_wait=True)
    for n in range(_MOST_SEALS + 1):
        assert recorder.calls == []
        moves.carry_out([SealSlot(n, n, 32)])
    assert [len(call[1]) for call in recorder.calls] == [_MOST_SEALS, 1]
