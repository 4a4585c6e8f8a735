"""Defines what reads calls, and the parts that several readers share.

A reader is a small state machine over streamed text. It begins at a marker that may open a call, and is given the text
from there that it has not taken yet, however the stream is cut.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Protocol

MAX_HEAD_CHARS = 16_384  # from a marker up to where it is clear that a call begins
_MAX_IDLE_STEPS = 32  # steps of a reader in a row that may take nothing
MAX_NAME_CHARS = 512  # the same, for markers that a function's name follows directly
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,}\]{\[\"]+(?=[\s,}\]])")
SPACE = re.compile(r"\s*")


class Progress(Enum):
    """A reader's verdict on the text that it has not taken.

    MORE: it needs more text. OVER: its calls are complete, the text is the answer's. TEXT: the text is no call after
    all, and belongs to the answer.
    """

    MORE = auto()
    OVER = auto()
    TEXT = auto()


class Calls(Protocol):
    """The calls of an answer, to which readers add."""

    def knows(self, name: str) -> bool:
        """Return whether this function may be called. What looks like a call to another one stays text."""
        ...

    def schema(self, name: str) -> dict[str, Any]:
        """Return the JSON schema of a known function's arguments."""
        ...

    def begin(self, name: str, call_id: str = "") -> None: ...

    def add(self, arguments: str) -> None:
        """Add to the JSON text of the current call's arguments."""
        ...


class Reader(Protocol):
    """A reader of one call, or of a run of calls."""

    def read(self, text: str, calls: Calls, *, final: bool) -> tuple[int, Progress]:
        """Return how many characters were taken, and what is to be said of the rest. text: from the marker on, or else
        from where the last read ended. final: no more text will come."""
        ...


class Steps(ABC):
    """A reader made of steps. A step looks at `text[at:]`, moves `at` past what it has taken, and either names the next
    step and returns None, or returns what is to be said of the rest.

    Before `_begin` nothing is certain: unless a step returns OVER, nothing counts as taken, and the next read starts
    anew.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.final = False
        self._taken = 0  # characters taken by earlier reads
        self._spaces: dict[int, int] = {}  # where white space that is not taken begins -> how far it has been read
        self.calls: Calls
        self._object_end = JsonEnd()
        self.has_begun = False
        self.step: Callable[[], Progress | None] = self.open

    @abstractmethod
    def open(self) -> Progress | None:
        """Read the marker: the first step."""

    def read(self, text: str, calls: Calls, *, final: bool) -> tuple[int, Progress]:
        self.text, self.at, self.calls, self.final = text, 0, calls, final
        progress = self._run()
        if not self.has_begun and progress is not Progress.OVER:
            self.step = self.open
            return 0, progress
        if self.at:
            self._taken += self.at
            self._spaces.clear()
        return self.at, progress

    def _run(self) -> Progress:
        """Run steps up to a verdict. Steps that go in a circle without taking anything end the calls."""
        num_idle = 0
        while num_idle <= _MAX_IDLE_STEPS:
            at = self.at
            if (progress := self.step()) is not None:
                return progress
            num_idle = num_idle + 1 if self.at == at else 0
        return Progress.OVER

    def begin(self, name: str, call_id: str = "") -> None:
        self.has_begun = True
        self.calls.begin(name, call_id)

    def then(self, step: Callable[[], Progress | None]) -> Progress | None:
        """Name the next step, and return None."""
        self.step = step
        return None

    def skip_space(self) -> None:
        self.at = self.past_space(self.at)

    def past_space(self, place: int) -> int:
        """Return where the white space from `place` on ends. What an earlier read has seen is not read again: a model
        may write white space for ever."""
        start = self._taken + place
        seen = self._spaces.get(start, start) - self._taken
        found = SPACE.match(self.text, seen)
        end = found.end() if found is not None else seen
        self._spaces[start] = self._taken + end
        return end

    def take(self, *literals: str) -> bool:
        """Take the longest of the literals that the text goes on with. Returns whether there was one."""
        found = [literal for literal in literals if literal and self.text.startswith(literal, self.at)]
        self.at += max(map(len, found), default=0)
        return bool(found)

    def may_become(self, *literals: str) -> bool:
        """Return whether the rest of the text is the beginning of one of the literals, of which more may come."""
        rest = self.text[self.at :]
        return not self.final and any(literal.startswith(rest) for literal in literals if literal)

    def add_object(self) -> bool:
        """Add the JSON object that comes next to the arguments of the call, as far as it has come. Returns whether it
        has ended."""
        start = self.at
        self.at = self._object_end.push(self.text, start)
        self.calls.add(self.text[start : self.at])
        has_ended = self._object_end.found
        if has_ended:
            self._object_end = JsonEnd()
        return has_ended

    def after_call(
        self, head: Callable[[], Progress | None], opening: str, *, close: Sequence[str], skipped: Sequence[str]
    ) -> Progress | None:
        """Read what follows a call: the end of all calls, markup, or another call. head: the step that reads the next
        call's head, which begins with `opening`. White space before anything else is not taken."""
        place = self.at
        self.skip_space()
        if self.take(*close):
            return Progress.OVER
        if self.take(*skipped):
            return None
        if self.text.startswith(opening, self.at):
            return self.then(head)
        if self.may_become(*close, *skipped, opening):
            self.at = place
            return Progress.MORE
        self.at = len(self.text) if self.final and self.at == len(self.text) else place
        return Progress.OVER

    def wait(self, most: int) -> Progress:
        """Return MORE, or TEXT if a head has become longer than `most` characters, or none will come."""
        return Progress.TEXT if self.final or len(self.text) - self.at > most else Progress.MORE


class Skip:
    """A reader of a literal that is markup and no call."""

    def __init__(self, literal: str) -> None:
        self._literal = literal

    def read(self, text: str, calls: Calls, *, final: bool) -> tuple[int, Progress]:
        return len(self._literal), Progress.OVER


class JsonEnd:
    """A finder of the end of a JSON object or list that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False
        self.found = False
        self.deepest = 0  # most levels so far

    def push(self, text: str, start: int = 0) -> int:
        """Return the place in `text` at which the value ends, or its length while it goes on. start: where the value
        begins or goes on."""
        for place in range(start, len(text)):
            char = text[place]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
                self.deepest = max(self.deepest, self._depth)
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.found = True
                    return place + 1
        return len(text)


def json_string(text: str, at: int) -> tuple[str, int] | None:
    """Return the JSON string that begins at `at`, decoded, and where it ends; None if it is incomplete or wrong."""
    found = _STRING.match(text, at)
    if found is None:
        return None
    try:
        return json.loads(found[0], strict=False), found.end()
    except ValueError:
        return None


def json_end(text: str, at: int) -> int | None:
    """Return where the JSON value that begins at `at` ends; None while that is not clear."""
    if text.startswith('"', at):
        found = _STRING.match(text, at)
        return None if found is None else found.end()
    if text.startswith(("{", "["), at):
        end = JsonEnd()
        place = end.push(text, at)
        return place if end.found else None
    found = _SCALAR.match(text, at)
    return None if found is None else found.end()
