"""Describes conversations for people: their titles and messages, beside what the cache has of them."""

import json
import time
from collections.abc import Sequence
from typing import Any

from reprise.app.conversations.digests import Message
from reprise.app.conversations.transcripts import KeptChat
from reprise.engine.messages import given_salt, is_exact

Described = dict[str, Any]


def with_titles(
    sessions: Sequence[Described], chats: Sequence[KeptChat], *, more: bool, limit: int
) -> tuple[list[Described], bool]:
    """Return (a page of sessions with their titles, whether there are further ones). Also lists conversations whose KV
    is in no tier.

    sessions: sessions of the cache, ordered by id, as `describe_session` returns them; either all sessions of an id are
    among them or none. more: whether the cache has sessions after these. chats: conversations whose messages are
    stored, ordered by id; more than `limit` if there are so many.
    """
    rows = {_key(one): {**one, "title": None, "first_text": None, "num_messages": None} for one in sessions}
    for kept in chats:
        _, _, salt = kept.chat.tenant.partition("/")
        row = rows.setdefault((kept.chat.session_id, *_salt(salt)), _without_kv(kept, salt))
        row |= {
            "title": kept.chat.title,
            "first_text": kept.chat.first_text,
            "num_messages": kept.chat.num_messages,
        }
    # After the place at which one of the two lists was cut, the other one would seem to have sessions of its own alone.
    ends = [sessions[-1]["id"]] if more and sessions else []
    if len(chats) > limit:
        ends.append(chats[limit - 1].chat.session_id)
    names = sorted({key[0] for key in rows if not ends or key[0] <= min(ends)})
    listed = set(names[:limit])
    found = [rows[key] for key in sorted(rows) if key[0] in listed]
    return found, bool(ends) or len(names) > limit


def described_message(place: int, message: Message) -> Described:
    """Return a stored message in the form in which a chat request takes it. Its `id` is its index in the
    conversation."""
    shown = {"id": str(place), "object": "session.message", **message}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [_call(call) for call in calls]
    return shown


def one_line(text: str) -> str:
    """Return a text on one line: white space becomes single spaces. Lone surrogates, which cannot be sent, become
    "?"."""
    return " ".join(text.split()).encode("utf-8", "replace").decode()


def _call(call: Described) -> Described:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _key(session: Described) -> tuple[str, str, str]:
    return session["id"], session["cache_salt"] or "", session["kv_quality"]


def _salt(salt: str) -> tuple[str, str]:
    return given_salt(salt), "exact" if is_exact(salt) else "default"


def _without_kv(kept: KeptChat, salt: str) -> Described:
    """Return what `describe_session` says of a session, for one that the cache does not know."""
    cache_salt, quality = _salt(salt)
    return {
        "id": kept.chat.session_id,
        "object": "session",
        "cache_salt": cache_salt or None,
        "kv_quality": quality,
        "tokens": 0,
        "truncated_tokens": 0,
        "blocks": {},
        "bytes": {},
        "last_used_at": round(kept.chat.used_s, 3),
        "expires_at": None if kept.expires_s is None else round(kept.expires_s, 3),
        "expires_in_s": None if kept.expires_s is None else round(max(0.0, kept.expires_s - time.time()), 3),
        "pinned": kept.expires_s is None,
        "running": False,
    }
