"""Where messages begin in a rendered conversation.

A template is a program, so its output does not say. It is rendered once more with a mark in place of every content:
what stands between two marks also stands between the two contents. How much of that still belongs to the message in
front is what the template writes when that message is the last one; this is looked up once per text in between.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from app.template import TemplateError

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]  # messages, whether to open the answer

MAX_TAILS = 1024
MAX_GAP_CHARS = 1024


class MessageBounds:
    """For one thread. `mark` is text that no message holds and no filter changes."""

    def __init__(self, *, mark: str) -> None:
        self._mark = mark
        self._tails: OrderedDict[tuple[bytes, str, bool], int] = OrderedDict()  # least recently used first

    def find(
        self, text: str, messages: list[Message], *, first: int, render: Render, template: bytes
    ) -> list[int] | None:
        """Characters in `text`, rendered from `messages`, at which messages[first:] and then the answer begin.
        None where the template does not show it. `template` is its digest."""
        skeleton = [{**message, "content": self._mark} for message in messages]
        try:
            gaps = render(skeleton, True).split(self._mark)
        except TemplateError:
            return None
        if len(gaps) != len(messages) + 1:
            return None
        bounds: list[int] = []
        end = len(text)  # from the back, since what is new is there
        for index in range(len(messages), first - 1, -1):
            gap = gaps[index]  # in front of messages[index], or behind the last one
            if not text.endswith(gap, 0, end):
                return None
            begin = end - len(gap)
            if index == 0:
                bounds.append(0)
                return bounds[::-1] if begin == 0 else None
            bounds.append(begin + self._tail(skeleton, gaps, index, render, template))
            before, content = gaps[index - 1], _content(messages[index - 1])
            if text.endswith(before + content, 0, begin):
                end = begin - len(content)
            elif index > first:  # the template changes the content: look for what stands before it
                found = text.rfind(before, 0, begin) if before else -1
                if found < 0:
                    return None
                end = found + len(before)
        return bounds[::-1]

    def _tail(self, skeleton: list[Message], gaps: list[str], index: int, render: Render, template: bytes) -> int:
        """Leading characters of gaps[index] that close the message in front of it."""
        gap, is_last = gaps[index], index == len(skeleton)
        key = (template, gap, is_last)
        if (known := self._tails.get(key)) is not None:
            self._tails.move_to_end(key)
            return known
        place = index if is_last else gaps.index(gap, 1)  # the shortest conversation that shows it
        try:
            tail = render(skeleton[:place], False).rpartition(self._mark)[2]
        except TemplateError:
            tail = ""
        if not gap.startswith(tail):
            tail = ""  # what closes the message in front counts as the next one's then
        if len(gap) <= MAX_GAP_CHARS:
            self._tails[key] = len(tail)
            if len(self._tails) > MAX_TAILS:
                self._tails.popitem(last=False)
        return len(tail)


def _content(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
