"""Explains where a request leaves the conversation that it was expected to continue, and why, for people to read.

Pure: compares outlines, two lists of tools and a few words of two texts. What decides a prompt is compared in the order
of its effect: the key and its salt, the model, the template's arguments, the tools, the messages. If all of these are
equal, the template itself wrote the earlier messages in another way.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reprise.app.conversations.digests import canonical
from reprise.app.conversations.outline import Mark, Outline

Tool = dict[str, Any]

MAX_EXCERPT_CHARS = 24  # characters of one quote in an explanation
MAX_NAME_CHARS = 64
_SYSTEM = ("system", "developer")
_IN_DOUBT = 2  # messages that have to follow one another to be recognised at another place

_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_CHANGING = (
    (re.compile(r"(?<!\d)\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"), "a time of day in it makes every turn new"),
    (re.compile(rf"(?<!\d)\d{{4}}-\d{{2}}-\d{{2}}|\b\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}|\b\d{{1,2}} ({_MONTHS})"
                rf"|\b({_MONTHS})[a-z]* \d{{1,2}}|\b(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"),
     "a date in it makes every day's first turn new"),
    (re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|(?<!\w)[0-9a-f]{16,}|(?<!\d)\d{10,}"),
     "an id in it makes every conversation new"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Divergence:
    """The place where a request differs from the recorded conversation that it was expected to continue, and a sentence
    that says why."""

    message: int | None  # index of the request's message; None: the place is in no message
    role: str | None  # role of the message
    where: str  # what differs: "content", "tools[3].parameters", "model", ...
    token: int  # number of the prompt's leading tokens that are as recorded
    sentence: str


@dataclass(frozen=True, slots=True)
class Change:
    """The first place where a prompt's tokens differ from the recorded ones, with the text around it."""

    token: int
    message: int | None = None  # index of the message that holds the token; None: unknown
    before: str = ""  # the common text before it
    was: str = ""  # the recorded text from there on
    now: str = ""
    dropped_thoughts: int = 0  # thoughts that the request sends and its prompt does not show


def explain(
    was: Outline,
    now: Outline,
    *,
    was_tools: Sequence[Tool] | None,
    now_tools: Sequence[Tool] | None,
    change: Change,
    numbers: Sequence[int] | None = None,
) -> Divergence:
    """Explain why a later request does not continue a recorded one. was: outline (a record by digests, without text) of
    the recorded request with its answer. now: outline of the later one. was_tools: None if they are not known any more.
    change: where the tokens differ. numbers: for each message of `now`, the index of the client's message that it
    begins with; -1 for a message that the server has added. None: the messages of `now` are the client's, one for
    one."""
    for where, sentence in (_of_model(was, now), _of_arguments(was, now), _of_tools(was, now, was_tools, now_tools)):
        if sentence:
            return Divergence(None, None, where, change.token, sentence)
    return _of_messages(was.marks, now.marks, change, numbers or range(len(now.marks)))


def hidden_by(tenants: Sequence[str], tenant: str) -> str | None:
    """Return a sentence if conversations of the same name exist that `tenant` cannot see, since they belong to another
    key or salt; None if not. tenants: those that have a conversation of that name, each with its salt
    ("tenant/salt")."""
    key = tenant.partition("/")[0]
    others = [other for other in tenants if other != tenant]
    if any(other.partition("/")[0] == key for other in others):
        return "another salt (cache_salt or kv_quality) hides a conversation of this name: salts share nothing"
    return "another key has a conversation of this name: keys share nothing" if others else None


def _of_model(was: Outline, now: Outline) -> tuple[str, str]:
    where = "model" if was.model != now.model else "template" if was.template != now.template else ""
    return where, "the model or its template changed" if where else ""


def _of_arguments(was: Outline, now: Outline) -> tuple[str, str]:
    names = sorted(name for name in was.arguments | now.arguments if was.arguments.get(name) != now.arguments.get(name))
    if not names:
        return "", ""
    where = names[0] if names[0] == "reasoning_effort" else f"chat_template_kwargs.{names[0]}"
    return where, f"{names[0]}, an argument of the template, changed"


def _of_tools(
    was: Outline, now: Outline, was_tools: Sequence[Tool] | None, now_tools: Sequence[Tool] | None
) -> tuple[str, str]:
    """Explain a change of the tools: the first one that differs, and how."""
    is_known = was_tools is not None or not was.tools
    if was.tools == now.tools and (not is_known or json.dumps(was_tools) == json.dumps(now_tools)):
        return "", ""
    if not is_known:
        return "tools", "the tools changed"
    before, after = was_tools or (), now_tools or ()
    names_before, names_after = [_name(tool) for tool in before], [_name(tool) for tool in after]
    for names, others, done in ((names_after, names_before, "added"), (names_before, names_after, "removed")):
        if changed := list((Counter(names) - Counter(others)).elements()):
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            which = "tool" if len(changed) == 1 else "tools"
            verb = "was" if len(changed) == 1 else "were"
            return f"tools[{names.index(changed[0])}]", f"the {which} {_shown(changed[0])}{more} {verb} {done}"
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if _name(old) != _name(new):
            return f"tools[{index}]", "the order of the tools changed"
        if old != new or json.dumps(old) != json.dumps(new):
            return _of_tool(index, old, new)
    return "", ""


def _of_tool(index: int, was: Tool, now: Tool) -> tuple[str, str]:
    before, after = _fields(was), _fields(now)
    for name in (*after, *(name for name in before if name not in after)):
        old, new = before.get(name), after.get(name)
        where = f"tools[{index}].{name}"
        if canonical(old) != canonical(new):
            return where, f"the {name} of the tool {_shown(_name(now))} changed"
        if json.dumps(old) != json.dumps(new):
            return where, f"tools[{index}] has another key order"
    return f"tools[{index}]", f"tools[{index}] has another key order"


def _of_messages(was: Sequence[Mark], now: Sequence[Mark], change: Change, numbers: Sequence[int]) -> Divergence:
    """Explain a change of the messages: of the first one that differs."""
    first = next((n for n, (a, b) in enumerate(zip(was, now, strict=False)) if not _is_same(was, n, b)), None)
    if first is None:
        return _of_template(now, change, numbers)
    number = max(0, numbers[first])
    where, sentence = _of_message(was, now, first, change, number=number)
    return Divergence(number, now[first].role, where, change.token, sentence)


def _of_message(
    was: Sequence[Mark], now: Sequence[Mark], first: int, change: Change, *, number: int
) -> tuple[str, str]:
    old, new = was[first], now[first]
    if first == len(was) - 1 and old.role == "assistant" and new.role == "user":
        return "messages", f"the answer that came before message {number} was not sent back"
    said_before, said_now = [mark.said for mark in was], [mark.said for mark in now]
    if old.said == new.said:
        return "reasoning_content", _of_thoughts(was[first:], now[first:], number)
    if (dropped := _offset(said_before, said_now, first)) is not None:
        if all(mark.role in _SYSTEM for mark in was[first : first + dropped]):
            return "messages", f"the {old.role} prompt was removed"
        is_start = all(mark.role in _SYSTEM for mark in was[:first])
        return "messages", f"{_messages(dropped)} removed from {'the start' if is_start else f'message {number} on'}"
    if (more := _offset(said_now, said_before, first)) is not None:
        if all(mark.role in _SYSTEM for mark in now[first : first + more]):
            return "messages", f"a {new.role} prompt was added"
        return "messages", f"{_messages(more)} inserted at message {number}"
    if old.said in said_now[first + 1 :] and new.said in said_before[first + 1 :]:
        return "messages", "the order of messages changed"
    return _of_edit(old, new, change, is_here=change.message in (None, first), number=number)


def _is_same(was: Sequence[Mark], index: int, now: Mark) -> bool:
    """Return whether a message is as recorded. The recorded answer, which is last, may come back without its
    thought."""
    mark = was[index]
    return mark.said == now.said and (mark.thought == now.thought or (index == len(was) - 1 and not now.thought))


def _of_thoughts(was: Sequence[Mark], now: Sequence[Mark], number: int) -> str:
    """Explain messages the first of which, with this number, differs in its thought alone."""
    old, new = was[0].thought, now[0].thought
    if old and new:
        return f"the reasoning text of message {number} was edited"
    if new:
        return f"a reasoning text that was not there before came with message {number}"
    count = sum(
        bool(a.thought) and not b.thought for a, b in zip(was, now, strict=False) if a.said == b.said
    )  # fmt: skip
    if count == 1:
        return f"a reasoning text was not sent back, that of message {number}"
    return f"reasoning texts of {count} messages were not sent back, the first that of message {number}"


def _of_edit(old: Mark, new: Mark, change: Change, *, is_here: bool, number: int) -> tuple[str, str]:
    """Explain an edited message. is_here: whether the text of `change` is the message's."""
    place = _place(change) if is_here else ""
    if old.role != new.role:
        return "role", f"message {number} was edited: it was of the role {old.role}"
    if old.content == new.content and new.role == "assistant":
        return "tool_calls", f"the calls of message {number} were edited{place}"
    if old.content == new.content:
        return "fields", f"a field of message {number} was edited{place}"
    if new.role in _SYSTEM:
        why = _why_it_changes(change) if is_here else ""
        place = _place(change, shows_change=not why) if is_here else ""
        return "content", f"the {new.role} prompt differs{place}" + (f": {why}" if why else "")
    return "content", f"message {number} was edited{place}"


def _of_template(now: Sequence[Mark], change: Change, numbers: Sequence[int]) -> Divergence:
    """Explain a difference though all messages are as recorded."""
    index, token = change.message, change.token
    message = numbers[index] if index is not None and index < len(now) and numbers[index] >= 0 else None
    role = now[index].role if index is not None and message is not None else None
    if count := change.dropped_thoughts:
        dropped = f"the template dropped {count} thought{'s' if count > 1 else ''}"
        return Divergence(message, role, "reasoning_content", token, dropped)
    place = _place(change)
    what = "earlier messages" if message is None else f"message {message}"
    return Divergence(message, role, "template", token, f"the template writes {what} in another way now{place}")


def _offset(longer: Sequence[object], shorter: Sequence[object], first: int) -> int | None:
    """Return how many items of `longer` from index `first` on are missing in `shorter`, whose other items follow one
    another as they do there; None if that is not so."""
    rest = shorter[first:]
    if not rest:
        return None
    for place in range(first + 1, len(longer)):
        common = min(len(rest), len(longer) - place)
        is_enough = longer[place] == rest[0] and common >= min(_IN_DOUBT, len(rest))
        if is_enough and longer[place : place + common] == rest[:common]:
            return place - first
    return None


def _why_it_changes(change: Change) -> str:
    """Return what is known of texts of this kind: a time, a date and an id differ in every request."""
    place = len(change.before)
    texts = (change.before + change.was, change.before + change.now)
    for pattern, why in _CHANGING:
        if all(any(m.start() <= place < m.end() for m in pattern.finditer(text)) for text in texts):
            return why
    return ""


def _place(change: Change, *, shows_change: bool = True) -> str:
    """Return words that say where the difference is, and what was there and is there now. shows_change: whether to say
    the latter, which is not needed where the sentence explains it."""
    before, was, now = _before(change), _after(change.was), _after(change.now)
    if not before:
        return f" at {now}" if now else ""
    if not shows_change or was == now:
        return f" at {before}"
    if was and now:
        return f" at {before}, where {was} became {now}"
    return f" at {before}, where {now} was added" if now else f" at {before}, where {was} was removed"


def _after(text: str) -> str:
    """Return the first words of a text, in quotes; nothing if it has none."""
    words = text.strip().partition("\n")[0]
    if len(words) > MAX_EXCERPT_CHARS:
        words = words[:MAX_EXCERPT_CHARS].rpartition(" ")[0] or words[:MAX_EXCERPT_CHARS]
    return f"'{_printable(words)}'" if words else ""


def _before(change: Change) -> str:
    """Return the last words before the difference, in quotes; nothing if there are none on its line."""
    line = change.before.rpartition("\n")[2].replace("\ufffd", "")
    words = line[-MAX_EXCERPT_CHARS:]
    is_cut = len(line) > len(words) and line[-len(words) - 1] != " "
    if is_cut and " " in words:
        words = words.partition(" ")[2]
    return f"'{_printable(words)}'" if words.strip() else ""


def _messages(count: int) -> str:
    return f"{count} message{'s were' if count > 1 else ' was'}"


def _fields(tool: Tool) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _name(tool: Tool) -> str:
    return str(_fields(tool).get("name") or "")


def _shown(name: str) -> str:
    return _printable(name[:MAX_NAME_CHARS])


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
