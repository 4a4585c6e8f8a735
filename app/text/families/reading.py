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
    """The state of a reader after a read.

    MORE: it needs more text. OVER: its calls are complete, and the text that it has not taken comes after them in the
    answer. TEXT: what looked like a call is none, and the text is plain text of the answer.
    """

    MORE = auto()
    OVER = auto()
    TEXT = auto()


class Calls(Protocol):
    """A collector of the tool calls in one model answer. A reader (a parser of calls) adds each call that it finds:
    `begin` with the function's name, then `add` with each piece of its arguments."""

    def knows(self, name: str) -> bool:
        """Return whether a function of this name may be called. Text that looks like a call of another function stays
        text."""
        ...

    def schema(self, name: str) -> dict[str, Any]:
        """Return the JSON schema of a known function's arguments."""
        ...

    def begin(self, name: str, call_id: str = "") -> None: ...

    def add(self, arguments: str) -> None:
        """Append to the arguments of the current call, which are JSON."""
        ...


class Reader(Protocol):
    """A parser of one tool call, or of several in a row, from text that comes in pieces."""

    def read(self, text: str, calls: Calls, *, final: bool) -> tuple[int, Progress]:
        """Read text and add the calls in it to `calls`. Returns how many characters were taken, and the state. text:
        all that has arrived and was not taken yet; until something was taken, it begins where a call may begin. final:
        whether no more text will come."""
        ...


class Steps(ABC):
    """A reader made of steps. A step looks at `text[at:]` and moves `at` past what it has taken. It either names the
    next step (`then`) and returns None, or returns the state in which the read ends.

    Until a step calls `begin` it is not certain that a call is there: unless a step returns OVER, nothing counts as
    taken, and the next read starts anew.
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
        """Read the marker that may open a call. This is the first step."""

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
        """Make `step` the next step. Returns None, which a step returns to go on."""
        self.step = step
        return None

    def skip_space(self) -> None:
        self.at = self.past_space(self.at)

    def past_space(self, place: int) -> int:
        """Return the index in `text` at which the white space that begins at `place` ends. White space that an earlier
        read has seen is not looked at again, because a model may write white space for ever."""
        start = self._taken + place
        seen = self._spaces.get(start, start) - self._taken
        found = SPACE.match(self.text, seen)
        end = found.end() if found is not None else seen
        self._spaces[start] = self._taken + end
        return end

    def take(self, *literals: str) -> bool:
        """Move `at` past the longest of the literals that the text continues with. Returns whether there was one."""
        found = [literal for literal in literals if literal and self.text.startswith(literal, self.at)]
        self.at += max(map(len, found), default=0)
        return bool(found)

    def may_become(self, *literals: str) -> bool:
        """Return whether the rest of the text is an incomplete literal (one of these) that later text may complete."""
        rest = self.text[self.at :]
        return not self.final and any(literal.startswith(rest) for literal in literals if literal)

    def add_object(self) -> bool:
        """Add the JSON object that comes next to the call's arguments, as far as it has arrived. Returns whether it is
        complete."""
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
        """Read what follows a call: the end of all calls (one of `close`), markup (one of `skipped`), or another call,
        which begins with `opening` and is read by the step `head`. White space before anything else is not taken."""
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
        """Return MORE, to wait for the rest of a call's beginning. Returns TEXT if that has become longer than `most`
        characters, or no more text will come: then it is no call."""
        return Progress.TEXT if self.final or len(self.text) - self.at > most else Progress.MORE


class Skip:
    """A reader of a given text that belongs to the markup of calls without being a call. It reads no call."""

    def __init__(self, literal: str) -> None:
        self._literal = literal

    def read(self, text: str, calls: Calls, *, final: bool) -> tuple[int, Progress]:
        return len(self._literal), Progress.OVER


class JsonEnd:
    """A finder of the end of a JSON object or list whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False
        self.found = False
        self.deepest = 0  # most levels so far

    def push(self, text: str, start: int = 0) -> int:
        """Look for the end of the value in the next piece of text. Returns the index after its end, or the length of
        `text` while it goes on (`found` tells which). start: index in `text` at which the value begins or continues."""
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
    """Return (the decoded JSON string that begins at index `at`, the index after it); None if it is incomplete or
    malformed."""
    found = _STRING.match(text, at)
    if found is None:
        return None
    try:
        return json.loads(found[0], strict=False), found.end()
    except ValueError:
        return None


def json_end(text: str, at: int) -> int | None:
    """Return the index after the JSON value that begins at index `at`; None while its end is not certain."""
    if text.startswith('"', at):
        found = _STRING.match(text, at)
        return None if found is None else found.end()
    if text.startswith(("{", "["), at):
        end = JsonEnd()
        place = end.push(text, at)
        return place if end.found else None
    found = _SCALAR.match(text, at)
    return None if found is None else found.end()
