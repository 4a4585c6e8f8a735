"""Splits an answer's text into content, thoughts and tool calls.

Text arrives in pieces cut anywhere. A part is passed on as soon as it is clear what it belongs to; the arguments of a
call are passed on while they are written.
"""

from collections.abc import Callable

from reprise.app.text.answer_parts import AnswerWriter, Wanted, possible
from reprise.app.text.families.reading import Progress, Reader, Skip
from reprise.app.text.families.table import Family
from reprise.app.text.families.thoughts import Thoughts

_SPACE = " \t\n\r\f\v"


class AnswerParser(AnswerWriter):
    """Parses the answer of one choice.

    A thought with which the answer begins is reasoning. A tool call inside an open thought ends the thought. Calls of
    functions that the request does not allow (`Wanted.tools`) are treated as content, because no client could answer
    them.
    """

    def __init__(
        self,
        wanted: Wanted,
        *,
        calls: Family | None,
        thoughts: Thoughts | None,
        in_thought: bool,
        short_ids: bool = False,
    ) -> None:
        """Set up. calls: the family that tells how the model writes calls; None: it may make none. thoughts: its marks
        around thoughts; None: it has none. in_thought: whether the prompt ends with an opened thought."""
        super().__init__(wanted, short_ids=short_ids)
        self._thoughts = thoughts
        self._openings: dict[str, list[Callable[[], Reader]]] = {}
        self._starts: list[Callable[[], Reader]] = []  # readers of calls that can only begin an answer
        self._wrap = ("", "")
        if calls is not None:
            self._wrap = calls.wrap
            for literal in calls.ignored:
                self._skip(literal)
            for shape in calls.shapes if wanted.tools else ():
                for literal in shape.openings:
                    self._openings.setdefault(literal, []).append(shape.reader)
                if shape.at_start:
                    self._starts.append(shape.reader)
        self._readers: list[Reader] = []  # those that may read what comes now, most likely first
        self._has_marker = False  # whether a marker called for them
        self._has_call = False  # whether the first of them has taken a part of a call
        self._is_thought = False  # whether text is reasoning
        self._is_trimmed = False  # whether the text has begun
        self._rejected = 0  # characters of the held text in which no call begins
        self._blank = 0  # characters of white space that the held text is known to begin with, while text is read
        self._gap = 0  # characters of white space in the held text, before a marker
        self._step = self._start
        if in_thought and thoughts is not None:
            self._begin_thought()
        elif thoughts is None:
            self._step = self._unwrap

    def _skip(self, literal: str) -> None:
        self._openings[literal] = [lambda: Skip(literal)]

    # Each step takes from the held text what can be told, and returns whether another step may take more.

    def _start(self, final: bool) -> bool:
        """Look for a thought."""
        assert self._thoughts is not None
        text = self._held.lstrip()
        if text.startswith(self._thoughts.open):
            self._drop(len(self._held) - len(text) + len(self._thoughts.open))
            self._begin_thought()
            return True
        if self._thoughts.open.startswith(text) and not final:
            return False
        self._step = self._unwrap
        return True

    def _begin_thought(self) -> None:
        self._is_thought, self._step = True, self._text

    def _unwrap(self, final: bool) -> bool:
        """Look for a tag around the content, and for calls that begin it."""
        opening, closing = self._wrap
        text = self._held.lstrip()
        if opening and text.startswith(opening):
            rest = text[len(opening) :].removeprefix("\n")
            if not rest and not final:
                return False  # a newline may follow
            self._drop(len(self._held) - len(rest))
            self._skip(closing)
        elif opening and opening.startswith(text) and not final:
            return False
        self._wrap = ("", "")
        if self._starts:
            text = self._held.lstrip(_SPACE + ",;")
            if not text and not final:
                return False
            self._try(self._starts, len(self._held) - len(text), has_marker=False)
        else:
            self._step = self._text
        return True

    def _try(self, readers: list[Callable[[], Reader]], gap: int, *, has_marker: bool) -> None:
        """Let readers look at the held text after the first `gap` characters, which are white space."""
        self._readers = [reader() for reader in readers]
        self._gap, self._has_marker, self._has_call, self._step = gap, has_marker, False, self._call

    def _text(self, final: bool) -> bool:
        """Pass on text up to the next marker."""
        end = self._thoughts.close if self._is_thought and self._thoughts is not None else ""
        trim = self._thoughts.trim if self._is_thought and self._thoughts is not None else _SPACE
        if self._is_thought and not self._is_trimmed:
            self._drop(len(self._held) - len(self._held.lstrip(trim)))
            if not self._held and not final:
                return False
            self._is_trimmed = bool(self._held)
        if not self._openings and not end:
            self._say(len(self._held))
            return False
        literals = [*self._openings, *([end] if end else [])]
        start = max(self._rejected, self._blank)  # no marker begins with white space
        found = [(place, -len(each), each) for each in literals if (place := self._held.find(each, start)) >= 0]
        if found:
            self._blank = 0
            place, _, literal = min(found)
            gap = place - len(self._held[:place].rstrip(trim))
            if literal == end:
                self._say(place - gap, is_thought=True)
                self._drop(gap + len(end))
                self._end_thought()
                return True
            self._say(place - gap, is_thought=self._is_thought)
            self._rejected = 0
            self._try(self._openings[literal], gap, has_marker=True)
            return True
        if final:
            # White space at the end of calls is not content, and none at the end of a thought is part of it.
            ends_bare = self._is_thought or bool(self.calls)
            self._say(len(self._held.rstrip(trim) if ends_bare else self._held), is_thought=self._is_thought)
            if self._is_thought:
                self.thought_chars = self._at + len(self._held)
            return False
        end_of_text = len(self._held) - possible(self._held, *literals)
        more = self._held[self._blank : end_of_text].rstrip(trim)
        shown = self._blank + len(more) if more else 0
        self._say(shown, is_thought=self._is_thought)
        self._blank = end_of_text - shown
        self._rejected = max(0, self._rejected - shown)
        return False

    def _end_thought(self) -> None:
        self.thought_chars = self._at
        self._is_thought, self._rejected, self._step = False, 0, self._after_thought

    def _after_thought(self, final: bool) -> bool:
        assert self._thoughts is not None
        self._drop(len(self._held) - len(self._held.lstrip(self._thoughts.trim)))
        if self._held:
            self._step = self._unwrap
        return bool(self._held)

    def _call(self, final: bool) -> bool:
        """Let a reader take what it can. Until it has taken something, its marker may turn out to be text."""
        taken, progress = self._readers[0].read(self._held[self._gap :], self, final=final)
        if taken and not self._has_call:
            self._has_call = True
            if self._is_thought:
                self.thought_chars = self._at + self._gap
                self._is_thought = False
                if self._thoughts is not None:
                    self._skip(self._thoughts.close)  # it may still come
        if taken:
            self._drop(self._gap + taken)
            self._gap = 0
        if progress is Progress.MORE and (self._has_call or not final):
            return False
        if not self._has_call:
            self._readers.pop(0)
            if self._readers:
                return True
            self._rejected = self._gap + 1 if self._has_marker else 0
        self._step = self._text
        return True
