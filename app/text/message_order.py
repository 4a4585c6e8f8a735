"""Puts messages into an order that a chat template takes, without losing any, and without changing the past.

Agents send several system messages, reminders in the middle of a conversation, and users' messages one after another.
Many templates refuse these or leave them out. Where one does, leading system messages become one, a later one becomes
a reminder in the user's turn that follows it, and neighbours that must not follow each other are joined.

A message is never moved before an earlier one. So a conversation that grows keeps the text that it had, and its KV. A
template that takes an order gets it as it was sent.
"""

from dataclasses import dataclass

from reprise.app.text.probe import Message, Outcome
from reprise.app.text.template_traits import TemplateTraits

REMINDER = "<system-reminder>\n{text}\n</system-reminder>"
_JOINED_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")
_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class Ordered:
    """Messages for the template. places: for each message that was given, the index of the one that holds it."""

    messages: list[Message]
    places: tuple[int, ...]


def ordered(messages: list[Message], traits: TemplateTraits) -> Ordered:
    """Return the messages in an order that the template takes; the very list if it takes theirs."""
    groups: list[list[Message]] = []  # messages that become one
    places: list[int] = []
    joined = traits.joined
    is_leading = True
    is_begun = False  # whether the last one is a system message in a user's turn, which the user's text completes
    for message in messages:
        is_leading = is_leading and message["role"] == "system"
        shown = _shown(message, traits, is_leading=is_leading) if message["role"] == "system" else message
        role = shown["role"]
        if groups and ((is_begun and role == "user") or (groups[-1][0]["role"], role) in joined):
            groups[-1].append(shown)
        else:
            groups.append([shown])
        places.append(len(groups) - 1)
        is_begun = shown is not message
    kept = [_joined(group) if len(group) > 1 else group[0] for group in groups]
    is_same = len(kept) == len(messages) and all(one is other for one, other in zip(kept, messages, strict=True))
    return Ordered(messages if is_same else kept, tuple(places))


def _shown(message: Message, traits: TemplateTraits, *, is_leading: bool) -> Message:
    """Return a system message as the template takes it: as it is, or as one of a user."""
    if is_leading:
        return message if traits.system.is_shown else _as_user(message["content"])
    if traits.later_system is Outcome.KEPT:
        return message
    return _as_user(REMINDER.format(text=message["content"]))


def _as_user(text: str) -> Message:
    return {"role": "user", "content": text}


def _joined(group: list[Message]) -> Message:
    """Return one message with the texts, the thoughts and the calls of all. Its other fields are those of the first."""
    message = dict(group[0])
    for name in _JOINED_TEXTS:
        if texts := [text for each in group if (text := each.get(name))]:
            message[name] = _SEPARATOR.join(texts)
    if calls := [call for each in group for call in each.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return message
