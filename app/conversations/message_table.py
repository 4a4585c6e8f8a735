"""Keeps the messages of conversations beside their transcripts, so that a client can show a conversation again.

Transcripts hold token ids, from which no message can be read back exactly. So the messages of a session's newest turn
are kept too, one row each. The next turn repeats them and adds some, and only what it adds is written; where it
differs, because a message was edited or an answer was made anew, it takes the place of what was kept. An answer that
comes back without its thought keeps it, for many clients do not send thoughts.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from reprise.app.conversations.database import Database
from reprise.app.conversations.digests import REASONING, Message, without_reasoning

MAX_TITLE_CHARS = 200
FIRST_TEXT_CHARS = 200
MAX_PAGE_BYTES = 4 << 20  # most JSON of one page of messages, which has at least one message
MAX_MESSAGE_BYTES = 64 << 20  # longest JSON of one message; the bodies of requests are shorter
_MARK_BYTES = 16

# Files of an earlier program lack these tables.
SCHEMA = """
CREATE TABLE IF NOT EXISTS chats (
    session INTEGER PRIMARY KEY, count INTEGER NOT NULL, first TEXT NOT NULL, title TEXT
);
CREATE TABLE IF NOT EXISTS messages (
    session INTEGER NOT NULL, place INTEGER NOT NULL, mark BLOB NOT NULL, bare BLOB NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (session, place)
) WITHOUT ROWID
"""
_PUT_CHAT = """
INSERT INTO chats (session, count, first) VALUES (?, ?, ?)
ON CONFLICT (session) DO UPDATE SET count = excluded.count, first = excluded.first
"""
_LIST = """
SELECT s.tenant, s.name, s.used, s.extra, c.count, c.first, c.title FROM sessions s JOIN chats c ON c.session = s.id
WHERE s.tenant IN (?, ?) AND s.name > ? AND s.used + s.extra >= ? ORDER BY s.name, s.tenant LIMIT ?
"""
_NEWEST = """
SELECT s.id FROM sessions s JOIN chats c ON c.session = s.id
WHERE s.tenant IN (?, ?) AND s.name = ? AND s.used + s.extra >= ? ORDER BY s.used DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as the list of conversations shows it."""

    tenant: str  # with its salt ("tenant/salt")
    session_id: str
    used_s: float  # unix time
    kept_s: float  # how much longer than others it is kept after its last use
    num_messages: int
    first_text: str  # how the first message of a user begins
    title: str | None


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Some messages of a conversation, in order."""

    messages: list[tuple[int, Message]]  # each with its place in the conversation, from 0
    more: bool


class MessageTable:
    """The tables of the transcripts' database that hold the messages. The caller opens and commits the transactions.
    Every method may raise sqlite3.Error."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def put(self, session: int, messages: Sequence[Message]) -> None:
        """Store the messages of a session's newest turn in place of those that were stored of the session. Only the
        first message that differs from the stored one, and those after it, are written. A message that only lacks the
        reasoning of the stored one counts as equal."""
        texts = [_as_json(message) for message in messages]
        kept = self._db.execute(
            "SELECT mark, bare FROM messages WHERE session = ? ORDER BY place", (session,)
        ).fetchall()
        start = 0
        for text, message, (mark, bare) in zip(texts, messages, kept, strict=False):
            if mark != _mark(text) and (_has_thought(message) or bare != _mark(text)):
                break
            start += 1
        if len(kept) > start:
            self._db.execute("DELETE FROM messages WHERE session = ? AND place >= ?", (session, start))
        for place in range(start, len(texts)):
            text, bare = texts[place], _mark(_as_json(without_reasoning(messages[place])))
            row = (session, place, _mark(text), bare, zlib.compress(text, 1))
            self._db.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", row)
        self._db.execute(_PUT_CHAT, (session, len(texts), _first_text(messages)))

    def entitle(self, sessions: Sequence[int], title: str | None) -> int:
        """Set the title of sessions; None removes it. Returns how many of the sessions have stored messages: only these
        can have a title."""
        marks = ", ".join("?" * len(sessions))
        return self._db.execute(f"UPDATE chats SET title = ? WHERE session IN ({marks})", (title, *sessions)).rowcount

    def chats(self, tenants: tuple[str, str], *, after: str, since: float, limit: int) -> list[Chat]:
        """Return the conversations whose session id comes after `after`, in the order of these ids, at most `limit`.
        tenants: the domains to look in ("tenant" or "tenant/salt"). since: sessions whose last use, plus the extra time
        set for them (`TranscriptStore.extend`), is earlier than this are left out."""
        return [Chat(*row) for row in self._db.execute(_LIST, (*tenants, after, since, limit))]

    def page(
        self, tenants: tuple[str, str], session_id: str, *, after: int, since: float, limit: int
    ) -> MessagePage | None:
        """Return the messages of a session after the message at index `after`: at most `limit`, and at most
        MAX_PAGE_BYTES of text unless the first one alone is longer. tenants: the domains to look in ("tenant" or
        "tenant/salt"); if several have a session of that id, it is the last used one. None if there is no such session
        with messages, or its last use, plus the extra time set for it (`TranscriptStore.extend`), is earlier than
        `since`. Damaged rows are left out."""
        found = self._db.execute(_NEWEST, (*tenants, session_id, since)).fetchone()
        if found is None:
            return None
        rows = self._db.execute(
            "SELECT place, mark, data FROM messages WHERE session = ? AND place > ? ORDER BY place", (found[0], after)
        )
        messages: list[tuple[int, Message]] = []
        size = 0
        for place, mark, data in rows:
            text = _text(mark, data)
            if len(messages) >= limit or (messages and size + len(text) > MAX_PAGE_BYTES):
                return MessagePage(messages, more=True)
            if text:
                messages.append((place, json.loads(text)))
                size += len(text)
        return MessagePage(messages, more=False)

    def drop(self, session: int) -> None:
        """Delete the messages and the title of a session."""
        self._db.execute("DELETE FROM messages WHERE session = ?", (session,))
        self._db.execute("DELETE FROM chats WHERE session = ?", (session,))


def _as_json(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":"), sort_keys=True).encode()


def _mark(text: bytes) -> bytes:
    return blake2b(text, digest_size=_MARK_BYTES).digest()


def _has_thought(message: Message) -> bool:
    return any(message.get(name) for name in REASONING)


def _text(mark: Any, data: Any) -> bytes:
    """Return a message as it was written; empty if it is damaged."""
    try:
        text = zlib.decompressobj().decompress(data, MAX_MESSAGE_BYTES)
    except (zlib.error, TypeError):
        return b""
    return text if _mark(text) == mark else b""


def _first_text(messages: Sequence[Message]) -> str:
    """Return how the first message of a user begins, in one line."""
    content = next((message.get("content") for message in messages if message.get("role") == "user"), None)
    text = content if isinstance(content, str) else ""
    # A half of a character, as JSON may have it, cannot be stored.
    line = " ".join(text[: 4 * FIRST_TEXT_CHARS].split())[:FIRST_TEXT_CHARS]
    return line.encode("utf-8", "replace").decode()
