"""Finds where messages begin in a rendered conversation.

A template is a program, so its output does not show message boundaries. The conversation is rendered again with a mark
in place of every content; the text between two marks is then also the text between the two contents. Part of this gap
closes the message before it: the part that the template writes when that message is the last one. It is determined once
per gap.

Gaps found once are tried first for later conversations that end in messages of the same kind, which saves the second
render.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from reprise.app.text.template import TemplateError

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]  # (messages, whether to open the answer) -> text
Ending = tuple[bytes, tuple[tuple[str, ...], ...]]  # template digest; role and field names of each message

MAX_TAILS = 1024
MAX_ENDINGS = 256
MAX_ENDING_MESSAGES = 4
MAX_GAP_CHARS = 1024


class MessageBounds:
    """A finder of the places at which messages begin in a rendered text. It remembers the texts between contents
    (gaps). Must be used by one thread. mark: a text that no message contains and no template filter changes."""

    def __init__(self, *, mark: str) -> None:
        self._mark = mark
        # length of a gap's closing part; least recently used first
        self._tails: OrderedDict[tuple[bytes, str, bool], int] = OrderedDict()
        # the gaps, and the length of each one's closing part
        self._endings: OrderedDict[Ending, list[tuple[str, int]]] = OrderedDict()

    def find(
        self, text: str, messages: list[Message], *, first: int, render: Render, template: bytes
    ) -> list[int] | None:
        """Return the character offsets in `text` at which each of messages[first:], and then the answer, begin. None if
        they cannot be told. text: rendered from `messages`. render: the template. template: its digest."""
        ending = _ending(messages, first, template)
        known = self._endings.get(ending) if ending is not None else None
        if ending is not None and known is not None:
            bounds = _bounds_by(known, text, messages, first)
            if bounds is not None:
                self._endings.move_to_end(ending)
                return bounds
        skeleton = [{**message, "content": self._mark} for message in messages]
        try:
            gaps = render(skeleton, True).split(self._mark)
        except TemplateError:
            return None
        if len(gaps) != len(messages) + 1:
            return None
        bounds, tails = [], []
        end = len(text)  # from the back, because new messages are there
        for index in range(len(messages), first - 1, -1):
            gap = gaps[index]  # before messages[index], or after the last message
            if not text.endswith(gap, 0, end):
                return None
            begin = end - len(gap)
            if index == 0:
                bounds.append(0)
                return bounds[::-1] if begin == 0 else None
            tails.append(self._tail(skeleton, gaps, index, render, template))
            bounds.append(begin + tails[-1])
            before, content = gaps[index - 1], _content(messages[index - 1])
            if text.endswith(before + content, 0, begin):
                end = begin - len(content)
            elif index > first:  # the template changes the content: search for the text before it
                found = text.rfind(before, 0, begin) if before else -1
                if found < 0:
                    return None
                end = found + len(before)
        found_gaps = list(zip(gaps[first:], tails[::-1], strict=True))
        if ending is not None and sum(len(gap) for gap, _ in found_gaps) <= MAX_GAP_CHARS:
            self._endings[ending] = found_gaps
            if len(self._endings) > MAX_ENDINGS:
                self._endings.popitem(last=False)
        return bounds[::-1]

    def _tail(self, skeleton: list[Message], gaps: list[str], index: int, render: Render, template: bytes) -> int:
        """Return how many leading characters of gaps[index] close the message before it."""
        gap, is_last = gaps[index], index == len(skeleton)
        key = (template, gap, is_last)
        if (known := self._tails.get(key)) is not None:
            self._tails.move_to_end(key)
            return known
        place = index if is_last else gaps.index(gap, 1)  # the shortest conversation that shows this gap
        try:
            tail = render(skeleton[:place], False).rpartition(self._mark)[2]
        except TemplateError:
            tail = ""
        if not gap.startswith(tail):
            tail = ""  # the text that closes a message is counted to the next one
        if len(gap) <= MAX_GAP_CHARS:
            self._tails[key] = len(tail)
            if len(self._tails) > MAX_TAILS:
                self._tails.popitem(last=False)
        return len(tail)


def _ending(messages: list[Message], first: int, template: bytes) -> Ending | None:
    """Return the template's digest, and the role and field names of each of messages[first:] and of the message before
    them. Gaps are remembered under this value. None if there are too many messages, or no message before them."""
    if not 0 < first < len(messages) <= first + MAX_ENDING_MESSAGES:
        return None
    return template, tuple((str(message.get("role")), *sorted(message)) for message in messages[first - 1 :])


def _bounds_by(gaps: list[tuple[str, int]], text: str, messages: list[Message], first: int) -> list[int] | None:
    """Return the offsets in `text`, in characters, where each of messages[first:] and then the answer begin. None if
    `text` does not end in these messages. gaps: for each place between contents (the text there, how many of its first
    characters close the message before it)."""
    pieces = [gaps[0][0]]
    for message, (gap, _) in zip(messages[first:], gaps[1:], strict=True):
        pieces += (_content(message), gap)
    if not text.endswith("".join(pieces)):
        return None
    bounds: list[int] = []
    begin = len(text) - sum(map(len, pieces))
    for place, (gap, tail) in enumerate(gaps):
        bounds.append(begin + tail)
        begin += len(gap) + (len(pieces[2 * place + 1]) if place + 1 < len(gaps) else 0)
    return bounds


def _content(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
