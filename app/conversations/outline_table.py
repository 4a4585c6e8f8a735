"""Keeps the outlines of recorded requests, their tools, and why a request left its conversation, beside the
transcripts.

A session has an outline for each of its openings, the newest few: requests with another first message, such as one for
a title, are of other conversations. A list of tools is kept as long as an outline refers to it.
"""

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from reprise.app.conversations.database import Database
from reprise.app.conversations.divergence import Divergence
from reprise.app.conversations.offered import MAX_LIST_BYTES, Tools
from reprise.app.conversations.outline import Asked, Outline, outline_of

MAX_OPENINGS = 4  # outlines of a session

# Files of an earlier program lack these tables.
SCHEMA = """
CREATE TABLE IF NOT EXISTS outlines (
    session INTEGER NOT NULL, opening BLOB NOT NULL, tail BLOB NOT NULL, answer INTEGER NOT NULL, tools BLOB NOT NULL,
    data BLOB NOT NULL, left_at REAL, why TEXT, PRIMARY KEY (session, opening)
);
CREATE INDEX IF NOT EXISTS outlines_by_tail ON outlines (tail);
CREATE INDEX IF NOT EXISTS outlines_by_tools ON outlines (tools);
CREATE TABLE IF NOT EXISTS tools (key BLOB PRIMARY KEY, data BLOB NOT NULL)
"""
_FIND = """
SELECT o.answer, o.data FROM outlines o JOIN sessions s ON s.id = o.session JOIN answers a ON a.id = o.answer
WHERE {where} AND s.used + s.extra >= :since ORDER BY s.name = :name DESC, o.answer DESC LIMIT :limit
"""
_BY_TAIL = "o.tail = :tail"
_BY_NAME = "s.tenant = :tenant AND s.name = :name"
_BY_OPENING = f"{_BY_NAME} AND o.opening = :opening"
_PUT = """
INSERT INTO outlines (session, opening, tail, answer, tools, data, left_at, why) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (session, opening) DO UPDATE SET
    tail = excluded.tail, answer = excluded.answer, tools = excluded.tools, data = excluded.data,
    left_at = coalesce(excluded.left_at, left_at), why = coalesce(excluded.why, why)
"""
_SURPLUS = (
    "session = ? AND opening NOT IN (SELECT opening FROM outlines WHERE session = ? ORDER BY answer DESC LIMIT ?)"
)
_REPORTS = """
SELECT s.tenant, count(DISTINCT a.id), max(o.left_at), o.why FROM sessions s
LEFT JOIN answers a ON a.session = s.id LEFT JOIN outlines o ON o.session = s.id AND o.why IS NOT NULL
WHERE s.name = ? GROUP BY s.id ORDER BY s.used DESC
"""
_decode = msgspec.msgpack.Decoder(Outline).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class NewOutline:
    """The outline of a request to be stored with its answer, and why the request left its conversation, if it did."""

    asked: Asked
    outline: Outline
    tail: bytes  # `reprise.app.conversations.outline.tail_of` the answer
    why: Divergence | None  # why the request left its conversation; None: it did not


@dataclass(frozen=True, slots=True)
class SessionReport:
    """The findings that `reprise doctor` reports of one session."""

    tenant: str  # with its salt ("tenant/salt")
    answers: int
    left_s: float | None  # when a request last left it, in seconds since the epoch
    why: Divergence | None


class OutlineTable:
    """The tables of the transcripts' database that hold the outlines. The caller opens and commits the transactions.
    Every method may raise sqlite3.Error."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def put(self, session: int, answer_id: int, new: NewOutline, *, now: float) -> None:
        """Store the outline of a session's newest request, in place of that of the session's last request with the same
        first message. The session's oldest outlines beyond MAX_OPENINGS are deleted."""
        key = (session, new.asked.opening)
        before = self._db.execute("SELECT tools FROM outlines WHERE session = ? AND opening = ?", key).fetchone()
        why = None if new.why is None else json.dumps(asdict(new.why))
        left_at = None if new.why is None else now
        columns = (new.tail, answer_id, new.outline.tools, _encode(new.outline), left_at, why)
        self._db.execute(_PUT, (*key, *columns))
        if new.asked.tools:
            self._keep_tools(new.asked.tools_key, new.asked.tools)
        values = (session, session, MAX_OPENINGS)
        surplus = self._db.execute(f"SELECT tools FROM outlines WHERE {_SURPLUS}", values).fetchall()
        if surplus:
            self._db.execute(f"DELETE FROM outlines WHERE {_SURPLUS}", values)
        self._drop_tools({row[0] for row in (*surplus, *([before] if before else ()))})

    def find(self, asked: Asked, *, session_id: str | None, since: float) -> tuple[int, Outline] | None:
        """Return (answer id, outline) of the recorded request that `asked` most likely continues; None if there is
        none. The request is looked for by the last answer in `asked` and the message before it, then by session and
        first message, then by any answer of the session. since: sessions whose last use, plus the extra time set for
        them (`TranscriptStore.extend`), is earlier than this are left out."""
        values = {
            "tail": asked.tail, "opening": asked.opening, "tenant": asked.tenant, "name": session_id or "",
            "since": since, "limit": 1,
        }  # fmt: skip
        for where in (_BY_TAIL, _BY_OPENING):
            row = self._db.execute(_FIND.format(where=where), values).fetchone()
            if row is not None and (outline := _outline(row[1])) is not None:
                return row[0], outline
        return self._with_answer(asked, values) if session_id and asked.tail is not None else None

    def _with_answer(self, asked: Asked, values: dict[str, Any]) -> tuple[int, Outline] | None:
        """Return the newest request of a session whose answer is in this one: what was asked may have been edited."""
        said = {mark.said for mark in outline_of(asked).marks if mark.role == "assistant"}
        for answer, data in self._db.execute(_FIND.format(where=_BY_NAME), {**values, "limit": MAX_OPENINGS}):
            outline = _outline(data)
            if outline is not None and outline.answer is not None and outline.answer.said in said:
                return answer, outline
        return None

    def known(self, asked: Asked, *, session_id: str) -> Outline | None:
        """Return the stored outline that `put` would replace: that of the session's last request with the same first
        message."""
        row = self._db.execute(
            "SELECT o.data FROM outlines o JOIN sessions s ON s.id = o.session"
            " WHERE s.tenant = ? AND s.name = ? AND o.opening = ?",
            (asked.tenant, session_id, asked.opening),
        ).fetchone()
        return None if row is None else _outline(row[0])

    def tools(self, key: bytes) -> Tools | None:
        """Return the stored list of tools with this key (`offered.key_of`). The keys of its objects are in the order in
        which the tenant first sent them."""
        row = self._db.execute("SELECT data FROM tools WHERE key = ?", (key,)).fetchone()
        try:
            tools = None if row is None else json.loads(row[0])
        except (ValueError, TypeError):
            return None
        return tools if isinstance(tools, list) else None

    def drop(self, session: int) -> None:
        """Delete the outlines of a session, and the lists of tools that no other outline uses."""
        rows = self._db.execute("SELECT tools FROM outlines WHERE session = ?", (session,)).fetchall()
        if rows:
            self._db.execute("DELETE FROM outlines WHERE session = ?", (session,))
            self._drop_tools({row[0] for row in rows})

    def _keep_tools(self, key: bytes, tools: Tools) -> None:
        if key and self._db.execute("SELECT 1 FROM tools WHERE key = ?", (key,)).fetchone() is None:
            text = json.dumps(tools)
            if len(text) <= MAX_LIST_BYTES:
                self._db.execute("INSERT INTO tools VALUES (?, ?)", (key, text.encode()))

    def _drop_tools(self, keys: set[bytes]) -> None:
        for key in keys:
            self._db.execute(
                "DELETE FROM tools WHERE key = ? AND NOT EXISTS (SELECT 1 FROM outlines WHERE outlines.tools = key)",
                (key,),
            )


def reports_of(path: Path, session_id: str) -> list[SessionReport]:
    """Read what is stored of all sessions of one name, with every key and salt, the last used first. A server may be
    using the file. Raises sqlite3.Error, and OSError if there is no file."""
    if not path.is_file():
        raise FileNotFoundError(path)
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        rows: list[tuple[Any, ...]] = db.execute(_REPORTS, (session_id,)).fetchall()
    return [SessionReport(tenant, answers, left_s, _divergence(why)) for tenant, answers, left_s, why in rows]


def _outline(data: object) -> Outline | None:
    try:
        return _decode(data) if isinstance(data, bytes) else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _divergence(text: object) -> Divergence | None:
    try:
        return msgspec.json.decode(text, type=Divergence) if isinstance(text, str) else None
    except msgspec.DecodeError:
        return None
