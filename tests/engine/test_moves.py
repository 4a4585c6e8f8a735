"""The order in which rows and moves reach the transfer."""

from typing import Any

import pytest

from cache.plan import CapturePiece, DeleteExtents, SealSlot
from cache.tiers.capture import Captured
from engine.moves import Moves


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def carry_out(self, moves: Any, running: Any = ()) -> None:
        self.calls.append(("carry out", list(moves), running))

    def save(self, captured: Any, pieces: Any) -> None:
        self.calls.append(("save", captured, pieces))


def test_what_a_step_leaves_waits_and_comes_before_everything_decided_later() -> None:
    recorder = Recorder()
    moves = Moves(recorder)  # type: ignore[arg-type]
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
    assert recorder.calls == [("carry out", [], ())]  # and once only


def test_a_step_is_not_forgotten_for_the_next() -> None:
    moves = Moves(Recorder())  # type: ignore[arg-type]
    moves.hold([], None, [])
    with pytest.raises(AssertionError):
        moves.hold([], None, [])


def test_what_broke_is_not_tried_again() -> None:
    class Broken(Recorder):
        def save(self, captured: Any, pieces: Any) -> None:
            raise OSError("no room")

    moves = Moves(Broken())  # type: ignore[arg-type]
    moves.hold([], None, [])
    with pytest.raises(OSError, match="no room"):
        moves.carry_out()
    moves.carry_out()
