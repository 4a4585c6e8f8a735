"""The format of gpt-oss, "harmony": an answer is a run of messages in channels, for thoughts, text and calls."""

import re
from dataclasses import dataclass
from typing import Any

from reprise.app.text.answer_parts import AnswerWriter, Wanted, possible
from reprise.app.text.families.lark import Lark, OfferedTool
from reprise.app.text.families.reading import JsonEnd, Reader, Skip
from reprise.app.text.plain_text import json_text

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_MAX_HEAD_CHARS = 1024  # up to `<|message|>`; what is longer is text
_ENDS = (END, CALL, RETURN, START)
_CUT_HEAD = re.compile(  # what a header that was cut may look like; text that mentions a mark looks otherwise
    r"\s*(<\|start\|>\s*\w{0,32})?(\s*to=[^\s<]*)?\s*(<\|channel\|>\s*\w{0,32}(\s*to=[^\s<]*)?\s*)?"
    r"(<\|constrain\|>\s*\w{0,32}\s*)?(<[|a-z]{0,10})?"
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True, slots=True)
class HarmonyCalls:
    """The form of calls in OpenAI's harmony format, where a call is a message in a channel. Its `reader` reads nothing:
    `HarmonyParser` parses these calls."""

    @property
    def openings(self) -> tuple[str, ...]:
        return ()

    @property
    def at_start(self) -> bool:
        return False

    @property
    def markers(self) -> tuple[str, ...]:
        return START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN

    def reader(self) -> Reader:
        return Skip("")

    def written(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        return "\n".join(f"to=functions.{name} {json_text(arguments)}" for name, arguments in calls)

    def grammar(self, tools: list[OfferedTool], many: bool, lark: Lark) -> str:
        rules = [
            lark.rule(
                "call",
                lark.joined(
                    lark.literal(f"{CHANNEL}commentary to=functions.{tool.name} {CONSTRAIN}json{MESSAGE}"),
                    lark.json(tool.schema, tool),
                ),
            )
            for tool in tools
        ]
        return lark.repeated("", "", "", rules, False)  # a call ends the answer


class HarmonyParser(AnswerWriter):
    """Parses the answer of one choice by its channels. The prompt has opened the answer's first message.

    `analysis` is reasoning. Messages to a wanted function are calls. All else is content, also text before any mark.
    """

    def __init__(self, wanted: Wanted, *, in_thought: bool, tokens: frozenset[str] = frozenset()) -> None:
        """Set up. in_thought: whether the prompt ends with an opened thought. tokens: the marks that are special
        tokens; text that merely looks like one of them is text."""
        super().__init__(wanted)
        self._tokens = tokens
        self._step = self._body if in_thought else self._beginning
        self._is_thought = in_thought
        self._is_call = False
        self._has_text = False  # whether the present message has text
        self._end = JsonEnd()

    def _find(self, mark: str, end: int | None = None) -> int:
        """Return the place of a mark in the held text before `end`; -1 if there is none."""
        if mark not in self._tokens:
            return self._held.find(mark, 0, end)
        last = len(self._held) if end is None else end
        places = (start - self._at for start, stop in self._marks if stop - self._at <= last)
        return next((place for place in places if self._held.startswith(mark, place)), -1)

    def _mark_at(self, place: int, *marks: str) -> str:
        """Return that of the marks which stands at a place of the held text; empty if none does."""
        starts = [start - self._at for start, _ in self._marks]
        found = (mark for mark in marks if self._held.startswith(mark, place))
        return next((mark for mark in found if mark not in self._tokens or place in starts), "")

    def _may_become(self, place: int, *marks: str) -> bool:
        """Return whether the held text from `place` on may be the beginning of a mark."""
        rest = self._held[place:]
        return not rest or any(mark.startswith(rest) for mark in marks if mark not in self._tokens)

    def _num_space(self) -> int:
        return len(self._held) - len(self._held.lstrip())

    # Each step takes from the held text what can be told, and returns whether another step may take more.

    def _beginning(self, final: bool) -> bool:
        """Decide whether the answer has marks at all. A header may begin with a recipient."""
        heads, gap = (CHANNEL, START, "to=functions.", MESSAGE), self._num_space()
        if self._mark_at(gap, *heads):
            self._step = self._header
            return True
        if self._may_become(gap, *heads) and not final:
            return False
        self._step = self._body
        return True

    def _between(self, final: bool) -> bool:
        """Look for another message. Text without a header is content."""
        gap = self._num_space()
        if self._mark_at(gap, START, CHANNEL):
            self._step = self._header
            return True
        if end := self._mark_at(gap, *_ENDS):
            self._drop(gap + len(end))
            return True
        if self._may_become(gap, *_ENDS, CHANNEL) and not final:
            return False
        self._is_thought = self._is_call = False
        self._step = self._body
        return gap < len(self._held)

    def _header(self, final: bool) -> bool:
        """Read from `<|start|>` or `<|channel|>` to `<|message|>`."""
        longest = _MAX_HEAD_CHARS + len(MESSAGE)
        place = self._find(MESSAGE, longest)
        if place < 0:
            if len(self._held) < longest and (not final or _CUT_HEAD.fullmatch(self._held)):
                return False
            return self._give_back()
        header = self._held[:place]
        channel = header.partition(CHANNEL)[2].split(maxsplit=1)
        recipient = _RECIPIENT.search(header)
        name = recipient[1].partition(CONSTRAIN)[0].partition(CHANNEL)[0] if recipient is not None else ""
        self._is_thought = bool(channel) and channel[0].startswith("analysis") and not name
        self._is_call = self.knows(name)
        self._has_text = False
        if name and not self._is_call:
            self._put(f"{recipient[0]} " if recipient is not None else "", self._at)  # what no client could answer
            self._has_text = True
        self._drop(place + len(MESSAGE))
        if self._is_call:
            self.begin(name)
            self._end = JsonEnd()
        self._step = self._body
        return True

    def _give_back(self) -> bool:
        """Make content of what looked like a header: first its mark, which would begin a header again."""
        if self._is_thought or self._is_call:
            self._has_text = False
        self._is_thought = self._is_call = False
        gap = self._num_space()
        self._separate()
        self._say(gap + len(self._mark_at(gap, START, CHANNEL)))
        self._step = self._body
        return True

    def _body(self, final: bool) -> bool:
        ends = [place for end in _ENDS if (place := self._find(end)) >= 0]
        written = [end for end in _ENDS if end not in self._tokens]
        count = min(ends) if ends else len(self._held) - (0 if final else possible(self._held, *written))
        if self._is_call:
            if not self._end.found:
                self.add(self._held[: self._end.push(self._held[:count])])
            self._drop(count)
        elif count:
            self._separate()
            self._say(count, is_thought=self._is_thought)
        if not ends:
            if final and self._is_thought:
                self.thought_chars = self._at
            return False
        self._drop(len(self._mark_at(0, END, CALL, RETURN)))  # `<|start|>` begins the next header
        if self._is_thought:
            self.thought_chars = self._at
        self._step = self._between
        return True

    def _separate(self) -> None:
        """Put an empty line between two messages of one kind."""
        if not self._has_text and (self.reasoning if self._is_thought else self.content):
            self._put("\n\n", self._at, is_thought=self._is_thought)
        self._has_text = True
