"""Collects the parts of one answer (content, thoughts, calls) and finds stop strings in its content."""

import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from reprise.app.text.detokenizer import StopFinder
from reprise.app.text.plain_text import plain_text

_ID_CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_MAX_ID_CHARS = 256  # longest id of a call in a request (`CallId` in app/schemas/tools.py)
_SPARE_IDLE_STEPS = 64  # steps that may take nothing, beside one for each held character
SHORT_ID_CHARS = 9  # length of the only ids that templates of Mistral's models accept


@dataclass(slots=True)
class Call:
    """A tool call, as far as it has been parsed."""

    id: str
    name: str
    arguments: str = ""


class TextPiece(NamedTuple):
    """The next piece of the content, or of the reasoning (`is_thought`)."""

    text: str
    is_thought: bool


class CallPiece(NamedTuple):
    """The next piece of a call's arguments. place: index of the call among the answer's calls. call: the call if it
    begins with this piece, else None."""

    place: int
    call: Call | None
    arguments: str


class _Block(NamedTuple):
    """The beginning of a text, a thought or a call. start: the offset in the content or in the reasoning, or the index
    of the call."""

    kind: Literal["text", "thought", "call"]
    start: int


@dataclass(slots=True)
class AnswerParts:
    """The pieces of content, reasoning and calls that one step of parsing has added to the answer, in the order in
    which the model wrote them. Adjacent texts of one kind are one piece."""

    pieces: list[TextPiece | CallPiece] = field(default_factory=list)

    @property
    def content(self) -> str:
        return self._text(is_thought=False)

    @property
    def reasoning(self) -> str:
        return self._text(is_thought=True)

    @property
    def calls(self) -> list[CallPiece]:
        return [piece for piece in self.pieces if isinstance(piece, CallPiece)]

    def say(self, text: str, *, is_thought: bool = False) -> None:
        last = self.pieces[-1] if self.pieces else None
        if not text:
            return
        if isinstance(last, TextPiece) and last.is_thought == is_thought:
            self.pieces[-1] = TextPiece(last.text + text, is_thought)
        else:
            self.pieces.append(TextPiece(text, is_thought))

    def add(self, later: "AnswerParts") -> None:
        for piece in later.pieces:
            if isinstance(piece, TextPiece):
                self.say(piece.text, is_thought=piece.is_thought)
            else:
                self.pieces.append(piece)

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def _text(self, *, is_thought: bool) -> str:
        texts = (piece for piece in self.pieces if isinstance(piece, TextPiece))
        return "".join(piece.text for piece in texts if piece.is_thought == is_thought)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The request's options that decide how its answer is parsed."""

    tools: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # functions that may be called -> their schemas
    parallel: bool = True  # several calls are allowed
    stops: tuple[str, ...] = ()
    shows_stop: bool = False  # a stop string that is found is part of the content


class AnswerWriter:
    """Holds an answer's text until a subclass has decided what it is, and collects the parts.

    A subclass sets `_step` to its first step. A step is given whether no more text will come, takes text from the front
    of `_held` by `_say` and `_drop`, and returns whether another step may take more. Special tokens are pushed as
    marks. A mark that becomes content or reasoning is left out of it. Stop strings count in content alone; after one,
    all further text is ignored. Positions are in characters of all that was pushed, marks included.
    """

    def __init__(self, wanted: Wanted, *, short_ids: bool = False) -> None:
        """Set up. short_ids: whether the model's template accepts only ids of SHORT_ID_CHARS letters and digits."""
        self._step: Callable[[bool], bool]
        self.calls: list[Call] = []
        self.content = ""
        self.reasoning = ""
        self.thought_chars = 0  # position at which the thought ended
        self.stopped_at = 0  # position at which a stop string cut the answer
        self._blocks: list[_Block] = []
        self._wanted = wanted
        self._short_ids = short_ids
        self._parts = AnswerParts()
        self._held = ""  # read, but not yet clear what it belongs to
        self._at = 0  # position of the held text
        self._marks: list[tuple[int, int]] = []  # positions of special tokens in the held text
        self._is_dropped = False  # whether the current call exceeds the permitted number
        self._finder = StopFinder(wanted.stops)
        self._unsearched = 0  # position before which stop strings do not count
        self._given = 0  # characters of content, with those that the finder holds back
        self._passed = 0  # those given past it
        self._spans: list[tuple[int, int]] = []  # (offset in the content, position) of each run of content, in order

    @property
    def stop_string(self) -> str:
        """The stop string that was found; empty if there is none."""
        return self._finder.found

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._finder.hit

    @property
    def said(self) -> list[TextPiece | Call]:
        """The texts, thoughts and calls of the answer so far, in the order in which the model wrote them."""
        found: list[TextPiece | Call] = []
        ends = {"text": len(self.content), "thought": len(self.reasoning)}
        for kind, start in reversed(self._blocks):
            if kind == "call":
                found.append(self.calls[start])
                continue
            text = (self.content if kind == "text" else self.reasoning)[start : ends[kind]]
            found.append(TextPiece(text, kind == "thought"))
            ends[kind] = start
        return found[::-1]

    def content_from(self, start: int, end: int) -> int | None:
        """Return the offset in the content of its first character that comes from the positions `start` to `end`; None
        if none does. A position whose character is not part of the content stands for the next one that is."""
        index = bisect_right(self._spans, start, key=lambda span: span[1]) - 1
        next_offset, next_position = self._spans[index + 1] if index + 1 < len(self._spans) else (self._given, end)
        if index >= 0:
            offset = self._spans[index][0] + start - self._spans[index][1]
            if offset < next_offset:
                return offset
        return next_offset if next_position < end else None

    def content_before(self, offset: int) -> int:
        """Return the position after the first `offset` characters of the content."""
        return self._position(offset) if self._spans else 0

    @property
    def shown_up_to(self) -> int:
        """The position up to which all content was given out. What comes after it is held back, since a stop string may
        begin there."""
        held = self._finder.held_chars
        return self._position(self._given - held) if held else self._at + len(self._held)

    def push(self, text: str, *, is_mark: bool = False, is_searched: bool = True) -> AnswerParts:
        """Add text of the model. is_mark: whether it is a special token. is_searched: whether stop strings count in it.
        Returns the parts of the answer that are certain now."""
        if not self.is_stopped:
            end = self._at + len(self._held)
            if is_mark:
                self._marks.append((end, end + len(text)))
            self._held += text
            if not is_searched:
                self._unsearched = end + len(text)
            self._advance(final=False)
        return self._take_parts()

    def flush(self) -> AnswerParts:
        """End the answer. Returns the parts that were held back."""
        if not self.is_stopped:
            self._advance(final=True)
            self._drop(len(self._held))
        if not self.is_stopped:
            self._show(self._finder.flush())
        return self._take_parts()

    def _advance(self, *, final: bool) -> None:
        """Run steps as long as they may take more. Where they go in a circle without taking anything, say one held
        character as it is, so that each push ends."""
        num_idle = 0
        while not self.is_stopped:
            at = self._at
            if not self._step(final):
                return
            num_idle = num_idle + 1 if self._at == at else 0
            if num_idle > len(self._held) + _SPARE_IDLE_STEPS:
                if not self._held:
                    return
                self._say(1)
                num_idle = 0

    def _take_parts(self) -> AnswerParts:
        parts, self._parts = self._parts, AnswerParts()
        return parts

    # What readers of calls do with an answer: see `reprise.app.text.families.reading.Calls`.

    def knows(self, name: str) -> bool:
        return name in self._wanted.tools

    def schema(self, name: str) -> dict[str, Any]:
        return self._wanted.tools[name]

    def begin(self, name: str, call_id: str = "") -> None:
        self._is_dropped = self.is_stopped or (bool(self.calls) and not self._wanted.parallel)
        if not self._is_dropped:
            self._blocks.append(_Block("call", len(self.calls)))
            self.calls.append(Call(self._id_of(plain_text(call_id)), name))
            self._parts.pieces.append(CallPiece(len(self.calls) - 1, self.calls[-1], ""))

    def add(self, arguments: str) -> None:
        if arguments and not self._is_dropped:
            self.calls[-1].arguments += arguments
            self._parts.pieces.append(CallPiece(len(self.calls) - 1, None, arguments))

    def _id_of(self, given: str) -> str:
        """Return the id that the model has given a call, if clients can send it back and tell the call by it."""
        is_kept = 0 < len(given) <= _MAX_ID_CHARS and all(call.id != given for call in self.calls)
        return given if is_kept else self._new_id()

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_ID_CHARS) for _ in range(SHORT_ID_CHARS))
        return f"call_{secrets.token_hex(12)}"

    def _drop(self, count: int) -> None:
        """Remove held text that is markup."""
        self._held = self._held[count:]
        self._at += count
        while self._marks and self._marks[0][1] <= self._at:
            self._marks.pop(0)

    def _say(self, count: int, *, is_thought: bool = False) -> None:
        """Make held text part of the content, or of the reasoning."""
        end, place = self._at + count, self._at
        for start, stop in [*self._marks, (end, end)]:
            if place < min(start, end):
                self._put(self._held[place - self._at : min(start, end) - self._at], place, is_thought=is_thought)
            place = max(place, stop)
        self._drop(count)

    def _put(self, text: str, position: int, *, is_thought: bool = False) -> None:
        """Add text to the content or to the reasoning. position: where it comes from."""
        if self.is_stopped:
            return
        if is_thought:
            self._begin_block("thought", len(self.reasoning), text)
            self.reasoning += text
            self._parts.say(text, is_thought=True)
            return
        if not self._spans or position - self._given != self._spans[-1][1] - self._spans[-1][0]:
            self._spans.append((self._given, position))
        self._given += len(text)
        if not self._wanted.stops:
            self._show(text)
        else:
            unsearched = min(len(text), max(0, self._unsearched - position))
            self._passed += unsearched
            self._show(text[:unsearched] + self._finder.push(text[unsearched:]))
            if self._finder.end is not None:
                self._stop(self._passed + self._finder.end)

    def _stop(self, end: int) -> None:
        """End the content. end: the offset in it at which the stop string begins."""
        if self._wanted.shows_stop:
            self._show(self._finder.found)
            end += len(self._finder.found)
        self.stopped_at = self._position(end)

    def _show(self, text: str) -> None:
        self._begin_block("text", len(self.content), text)
        self.content += text
        self._parts.say(text)

    def _begin_block(self, kind: Literal["text", "thought"], start: int, text: str) -> None:
        if text and (not self._blocks or self._blocks[-1].kind != kind):
            self._blocks.append(_Block(kind, start))

    def _position(self, offset: int) -> int:
        """Return the position up to which the first `offset` characters of the content reach, or from which on they
        come if `offset` is 0."""
        index = bisect_right(self._spans, max(0, offset - 1), key=lambda span: span[0]) - 1
        start, position = self._spans[index]
        return position + offset - start


def possible(text: str, *literals: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of the literals, so that they must be
    held back until more text comes."""
    longest = max(map(len, literals), default=0)
    tail = text[max(0, len(text) - longest + 1) :]
    if not any(literal[0] in tail for literal in literals):
        return 0
    for count in range(min(len(text), longest - 1), 0, -1):
        if any(literal.startswith(text[-count:]) for literal in literals if len(literal) > count):
            return count
    return 0
