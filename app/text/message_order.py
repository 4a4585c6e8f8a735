"""Puts messages into an order that a chat template takes, without losing any, and without changing the past.

Agents send several system messages, reminders in the middle of a conversation, and users' messages one after another.
Many templates refuse these or leave them out. Where one does, leading system messages become one, a later one becomes
a reminder in the user's turn that follows it, and neighbours that must not follow each other are joined. Where a
template leaves out all thoughts before the last message of a user, a reminder in an agent's turn is put into the result
of the call beside it.

A message is never moved before an earlier one. So a conversation that grows keeps the text that it had, and its KV. A
template that takes an order gets it as it was sent.
"""

from dataclasses import dataclass

from reprise.app.text.probe import Message, Outcome
from reprise.app.text.template_traits import TemplateTraits

_OPEN, _CLOSE = "<system-reminder>", "</system-reminder>"
REMINDER = f"{_OPEN}\n{{text}}\n{_CLOSE}"
_JOINED_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")
_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class Ordered:
    """The messages in the order for the template. places: for each original message, the index of the message that
    holds it."""

    messages: list[Message]
    places: tuple[int, ...]


def ordered(messages: list[Message], traits: TemplateTraits) -> Ordered:
    """Return the messages in an order that the template takes. They are the original list if the template takes
    that."""
    groups: list[list[Message]] = []  # messages that become one
    places: list[int] = []
    joined, in_results = traits.joined, traits.reminds_in_results
    last = ""  # the role of the last group
    is_leading = True
    is_begun = False  # whether the last one is a system message in a user's turn, which the user's text completes
    for message in messages:
        is_leading = is_leading and message["role"] == "system"
        shown = _shown(message, traits, is_leading=is_leading) if message["role"] == "system" else message
        role = shown["role"]
        completes = is_begun and (role == "user" or (role == "tool" and in_results))
        is_in_result = in_results and last == "tool" and (shown is not message or _is_reminder(message))
        if groups and (completes or is_in_result or (last, role) in joined):
            groups[-1].append(shown)
            last = role if role == "tool" else last
        else:
            groups.append([shown])
            last = role
        places.append(len(groups) - 1)
        is_begun = shown is not message and not is_in_result
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


def _is_reminder(message: Message) -> bool:
    """Return whether a message is a user's that consists of reminders alone, which clients put there."""
    content = message.get("content")
    if message["role"] != "user" or not isinstance(content, str):
        return False
    *reminders, rest = content.split(_CLOSE)
    return bool(reminders) and not rest.strip() and all(each.lstrip().startswith(_OPEN) for each in reminders)


def _as_user(text: str) -> Message:
    return {"role": "user", "content": text}


def _joined(group: list[Message]) -> Message:
    """Return one message with the texts, the thoughts and the calls of all. Its other fields are those of the first, or
    of the result of a call that it holds."""
    message = dict(next((each for each in group if each["role"] == "tool"), group[0]))
    for name in _JOINED_TEXTS:
        if texts := [text for each in group if (text := each.get(name))]:
            message[name] = _SEPARATOR.join(texts)
    if calls := [call for each in group for call in each.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return message
