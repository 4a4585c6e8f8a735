"""Renders small conversations with a model's chat template, to find out what it does with them.

A template is a program, and its source shows little of what it renders: a word in it may never be reached, and a
message that it does not expect may be refused, or left out without a sound. So the words of a probe are looked for in
what comes out.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from reprise.app.text.template import TemplateError

Message = dict[str, Any]
Tools = list[dict[str, Any]]
Render = Callable[[list[Message], Tools | None, dict[str, Any], bool], str]
"""Renders (messages, tools, template arguments, whether to open an answer). Raises TemplateError."""


class Outcome(StrEnum):
    """The result of a probe: what a template does with the words that a probe's messages contain. `MOVED`: it renders
    all of them, but in another order than that of the messages."""

    KEPT = "kept"
    MOVED = "moved"
    LOST = "lost"
    REFUSED = "refused"

    @property
    def is_shown(self) -> bool:
        """Whether all words were rendered, in whatever order."""
        return self in (Outcome.KEPT, Outcome.MOVED)


class Probe:
    """A chat template that is examined by rendering small conversations."""

    def __init__(self, render: Render, *, in_parts: bool = False) -> None:
        """Set up. in_parts: give the content of messages as a list of parts."""
        self._render, self._in_parts = render, in_parts

    def text(self, messages: list[Message], tools: Tools | None = None, *, opens: bool = False, **args: Any) -> str:
        """Return what the template renders; empty if it refuses. opens: whether to add the opening of an answer. args:
        further arguments of the template."""
        return self._rendered(messages, tools, args, opens) or ""

    def outcome(self, messages: list[Message], words: Sequence[str], tools: Tools | None = None) -> Outcome:
        """Return what the template does with `words`, which are in `messages` in this order."""
        text = self._rendered(messages, tools, {}, True)
        if text is None:
            return Outcome.REFUSED
        places = [text.find(word) for word in words]
        if min(places) < 0:
            return Outcome.LOST
        return Outcome.KEPT if places == sorted(places) else Outcome.MOVED

    def _rendered(self, messages: list[Message], tools: Tools | None, args: dict[str, Any], opens: bool) -> str | None:
        try:
            return self._render(
                [as_parts(each) for each in messages] if self._in_parts else messages, tools, args, opens
            )
        except TemplateError:
            return None


def as_parts(message: Message) -> Message:
    """Return a message whose content is a list of one text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
