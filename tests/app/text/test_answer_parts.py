"""Tests what every parser of answers has from its base."""

from reprise.app.text.answer_parts import AnswerWriter, Wanted


class Circling(AnswerWriter):
    """A parser with a defect: two steps name each other, and take nothing."""

    def __init__(self) -> None:
        super().__init__(Wanted())
        self._step = self._one

    def _one(self, final: bool) -> bool:
        self._step = self._other
        return True

    def _other(self, final: bool) -> bool:
        self._step = self._one
        return True


def test_steps_that_take_nothing_are_not_repeated_for_ever() -> None:
    parser = Circling()
    assert parser.push("Hello").content + parser.push(" you").content + parser.flush().content == "Hello you"
