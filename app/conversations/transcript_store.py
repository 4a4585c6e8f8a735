"""Stores transcripts: recorded answers with their exact token ids.

A conversation costs bytes in proportion to its length: a prompt stores its ids only from where it leaves an earlier
answer of the same session, its base. An answer's full ids are those of its base up to there, its prompt's own, and its
own.
"""

import functools
import logging
import sqlite3
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from reprise.app.conversations.database import Database
from reprise.app.conversations.digests import Message, digest
from reprise.app.conversations.message_table import SCHEMA as MESSAGES
from reprise.app.conversations.message_table import Chat, MessagePage, MessageTable
from reprise.app.conversations.offered import Tools
from reprise.app.conversations.outline import Asked, Outline
from reprise.app.conversations.outline_table import SCHEMA as OUTLINES
from reprise.app.conversations.outline_table import NewOutline, OutlineTable
from reprise.app.conversations.prepared_prompt import PreparedPrompt
from reprise.app.conversations.transcript_rows import Exported, TranscriptRow, encode_row, readable
from reprise.app.state_disk import DiskAway, StateDisk

log = logging.getLogger(__name__)

SCHEMA_VERSION = 2
MAX_EXACT = 2  # records of the same text that a lookup compares
MAX_SIBLINGS = 64  # answers to one prompt that a lookup compares
SWEEP_BATCH = 200  # sessions that one sweep removes; a longer sweep would hold up requests
_MAX_SALTS = 1000  # sessions of one id, under a tenant's salts, that get a title together
HOT_TOKENS = 4_000_000  # most tokens of recently used answers in memory; 4 bytes each

_SCHEMA = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, used REAL NOT NULL,
    extra REAL NOT NULL DEFAULT 0, UNIQUE (tenant, name)
);
CREATE INDEX sessions_by_use ON sessions (used + extra);
CREATE TABLE prompts (
    id INTEGER PRIMARY KEY, session INTEGER NOT NULL, chain BLOB NOT NULL, base INTEGER, base_tokens INTEGER NOT NULL,
    ids BLOB NOT NULL, starts BLOB NOT NULL, chars INTEGER NOT NULL, text_digest BLOB NOT NULL, digest BLOB NOT NULL
);
CREATE INDEX prompts_by_chain ON prompts (chain);
CREATE INDEX prompts_by_session ON prompts (session);
CREATE INDEX prompts_by_base ON prompts (base) WHERE base IS NOT NULL;
CREATE TABLE answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT, session INTEGER NOT NULL, prompt INTEGER NOT NULL, chain BLOB NOT NULL,
    bare BLOB NOT NULL, tail BLOB NOT NULL, ids BLOB NOT NULL, text BLOB NOT NULL, ends BLOB NOT NULL,
    digest BLOB NOT NULL
);
CREATE INDEX answers_by_chain ON answers (chain);
CREATE INDEX answers_by_tail ON answers (tail);
CREATE INDEX answers_by_bare ON answers (bare) WHERE bare <> chain;
CREATE INDEX answers_by_prompt ON answers (prompt);
CREATE INDEX answers_by_session ON answers (session)
"""
# Choose by ids alone: texts are long, and the sorter would carry those of every candidate.
_FIND = """
SELECT a.id, s.name, a.chain, a.bare, a.digest, a.text, a.ends, a.ids, p.chars, p.text_digest, p.base
FROM answers a JOIN prompts p ON p.id = a.prompt JOIN sessions s ON s.id = a.session
WHERE a.id IN (
    SELECT a.id FROM answers a JOIN prompts p ON p.id = a.prompt JOIN sessions s ON s.id = a.session
    WHERE {where} AND s.used + s.extra >= :since ORDER BY s.name = :session DESC, a.id DESC LIMIT :limit
)
ORDER BY s.name = :session DESC, a.id DESC
"""
_AFTER = "(a.chain = :key OR (a.bare = :key AND a.bare <> a.chain))"
_BEFORE = "p.chain = :key"
_TAIL = "a.tail = :key"
_OF_TENANT = """
name = :name AND (:tenant IS NULL OR tenant = :tenant OR substr(tenant, 1, length(:tenant) + 1) = :tenant || '/')
"""
_LINK = """
SELECT a.chain, a.bare, a.tail, a.ids, a.text, a.ends, a.digest,
       p.chain, p.base_tokens, p.ids, p.starts, p.chars, p.text_digest, p.digest, p.base, b.digest
FROM answers a JOIN prompts p ON p.id = a.prompt LEFT JOIN answers b ON b.id = p.base
WHERE a.id = ?
"""
_ROWS = """
SELECT a.id, a.digest, a.chain, a.bare, a.tail, a.ids, a.text, a.ends, p.chain, b.digest, p.base_tokens, p.ids,
       p.starts, p.chars, p.text_digest
FROM answers a JOIN prompts p ON p.id = a.prompt JOIN sessions s ON s.id = a.session
LEFT JOIN answers b ON b.id = p.base
WHERE s.tenant = ? AND s.name = ? AND a.id > ? ORDER BY a.id DESC LIMIT ?
"""
_REMOVE_BRANCH = """
WITH RECURSIVE branch (id) AS (
    VALUES (?) UNION SELECT a.id FROM branch JOIN prompts p ON p.base = branch.id JOIN answers a ON a.prompt = p.id
)
DELETE FROM answers WHERE id IN branch
"""
_REMOVE_UNANSWERED = """
DELETE FROM prompts WHERE session = ? AND NOT EXISTS (SELECT 1 FROM answers WHERE answers.prompt = prompts.id)
"""


@dataclass(frozen=True, slots=True)
class History:
    """All token ids up to the end of a recorded answer, and the indices at which its prompt's messages begin."""

    ids: "array[int]"
    starts: "array[int]"


@dataclass(frozen=True, slots=True)
class NewAnswer:
    chain: bytes  # digest of the prompt's chain and the answer
    bare: bytes  # digest of the chain when a client sends the answer back without its reasoning
    tail: bytes  # digest of the scope, the message before and the answer without its reasoning
    token_ids: "array[int]"
    text: str  # what the client saw
    ends: "array[int]"  # per token: number of characters of text complete after it


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """A recorded answer, without the ids of its prompt."""

    id: int
    session_id: str
    chain: bytes
    bare: bytes
    digest: bytes
    text: str
    ends: "array[int]"
    token_ids: "array[int]"
    prompt_chars: int
    prompt_digest: bytes  # digest of the rendered text
    continues: bool  # its prompt goes on from an earlier answer of the session


Method = TypeVar("Method", bound=Callable[..., Any])


def _forgiving(default: Callable[[], Any], *, is_asked: bool = False) -> Callable[[Method], Method]:
    """Return a decorator that has a method run within the disk's deadline, and return `default()` if the database
    fails: that costs a request its reuse, never the request. is_asked: a client asked for this very thing, so DiskAway
    is raised, also where the database cannot be read or written now."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: "TranscriptStore", *args: Any, **kwargs: Any) -> Any:
            def work() -> Any:
                try:
                    return method(self, *args, **kwargs)
                except sqlite3.Error as error:
                    if not self.recover(error) and is_asked:
                        raise DiskAway(self._db.problem or "it cannot be used now") from error
                    return default()

            try:
                return self._db.run(work)
            except DiskAway:
                if is_asked:
                    raise
                return default()

        return cast(Method, call)

    return decorate


class TranscriptStore:
    """A store of recorded answers, used from one thread at a time. If the database fails, or its disk does not answer,
    that is logged and nothing is found or recorded. Only what a client asks for by name (`entitle`, `chats`,
    `message_page`, `names` and `forget`) then raises DiskAway, with the cause."""

    def __init__(
        self, *, path: Path | None, max_bytes: int, max_answers_per_prompt: int, disk: StateDisk | None = None
    ) -> None:
        """Open the store. max_bytes: bounds the database file with its indexes; the log beside it adds up to 4 MiB."""
        self._db = Database(
            path=path, schema=_SCHEMA, version=SCHEMA_VERSION, added=f"{OUTLINES};{MESSAGES}", disk=disk
        )
        self._outlines = OutlineTable(self._db)
        self._messages = MessageTable(self._db)
        self._max_bytes = max_bytes
        self._max_answers = max_answers_per_prompt
        self._hot: OrderedDict[int, History] = OrderedDict()  # by answer id, least recently used first
        self._hot_tokens = 0

    @_forgiving(set)
    def known_prompts(self, chains: list[bytes]) -> set[bytes]:
        """Return those of `chains` (digests of message lists) under which a prompt is recorded. One query asks for all
        of them, since most are unknown."""
        marks = ", ".join("?" * len(chains))
        return {
            row[0] for row in self._db.execute(f"SELECT DISTINCT chain FROM prompts WHERE chain IN ({marks})", chains)
        }

    @_forgiving(list)
    def find_answers(self, *, after: bytes, session_id: str | None, since: float) -> list[RecordedAnswer]:
        """Return the recorded answers that are the last message of the message list whose digest is `after`: those of
        the session first, and newer before older. since: sessions whose last use, plus their extra time (`extend`), is
        earlier than this are left out."""
        return self._find(_AFTER, after, session_id, since, MAX_EXACT)

    @_forgiving(list)
    def find_siblings(self, *, before: bytes, session_id: str | None, since: float) -> list[RecordedAnswer]:
        """Return the recorded answers to the message list whose digest is `before`: those of the session first, and
        newer before older. since: sessions whose last use, plus their extra time (`extend`), is earlier than this are
        left out."""
        return self._find(_BEFORE, before, session_id, since, MAX_SIBLINGS)

    @_forgiving(list)
    def find_tails(self, *, tail: bytes, session_id: str | None, since: float) -> list[RecordedAnswer]:
        """Return the recorded answers whose digest of scope, last prompt message and answer is `tail`, whatever the
        earlier messages were: those of the session first, and newer before older. since: sessions whose last use, plus
        their extra time (`extend`), is earlier than this are left out."""
        return self._find(_TAIL, tail, session_id, since, MAX_EXACT)

    @_forgiving(lambda: None)
    def history(self, answer_id: int) -> History | None:
        """Return the token ids of an answer and everything before it. None if it is gone or a row is damaged; its
        session is then deleted."""
        parts: list[tuple[array[int], array[int]]] = []
        current: int | None = answer_id
        take: int | None = None  # how many of the leading ids of `current` are wanted; None: all
        while current is not None:
            if (hot := self._hot.get(current)) is not None:
                self._hot.move_to_end(current)
                parts.append((hot.ids[:take], hot.starts if take is None else _below(hot.starts, take)))
                break
            row = self._db.execute(_LINK, (current,)).fetchone()
            if row is None or not _is_intact(row):
                log.warning("transcript record %d is damaged; its session is dropped", answer_id)
                self._drop_session_of(answer_id)
                return None
            base_tokens = row[8]
            ids, starts = _ids(row[9]) + _ids(row[3]), _ids(row[10])
            parts.append((ids, starts) if take is None else (ids[: max(0, take - base_tokens)], _below(starts, take)))
            current, take = row[14], base_tokens if take is None else min(take, base_tokens)
        full = History(array("I"), array("I"))
        for ids, starts in reversed(parts):
            full.ids.extend(ids)
            full.starts.extend(starts)
        self._keep_hot(answer_id, full)
        return full

    @_forgiving(lambda: None)
    def add(
        self,
        prompt: PreparedPrompt,
        answer: NewAnswer,
        *,
        now: float,
        outline: NewOutline | None = None,
        messages: Sequence[Message] = (),
    ) -> None:
        """Record an answer, the outline of its request, and the conversation's messages with it if there are any.
        Recording the same answer again renews its session and replaces the messages."""
        with self._db.transaction():
            session = self._session(prompt.tenant, prompt.session_id, now)
            if messages:
                self._messages.put(session, messages)
            prompt_id, prompt_digest = self._add_prompt(session, prompt)
            columns = (
                *(answer.chain, answer.bare, answer.tail, answer.token_ids.tobytes()),
                *(_encoded(answer.text), answer.ends.tobytes()),
            )
            mark = digest("answer", *columns, prompt_digest)
            if self._db.execute("SELECT 1 FROM answers WHERE prompt = ? AND digest = ?", (prompt_id, mark)).fetchone():
                self._make_room()
                return
            answer_id = self._insert_answer(session, prompt_id, columns, mark)
            if outline is not None:
                self._outlines.put(session, answer_id, outline, now=now)
            self._cap_answers(session, prompt.chain, answer_id)
            self._make_room()
        self._db.shrink(self._max_bytes)
        all_ids, all_starts = prompt.recorded
        self._keep_hot(answer_id, History(array("I", all_ids) + answer.token_ids, array("I", all_starts)))

    @_forgiving(lambda: None)
    def find_outline(self, asked: Asked, *, session_id: str | None, since: float) -> tuple[int, Outline] | None:
        """Return (answer id, outline) of the recorded request that `asked` most likely continues, as
        `OutlineTable.find` does; None if there is none."""
        return self._outlines.find(asked, session_id=session_id, since=since)

    @_forgiving(lambda: None)
    def known_outline(self, asked: Asked, *, session_id: str) -> Outline | None:
        """Return the outline of the session's last request with the same first message, so that its digests need not be
        computed again."""
        return self._outlines.known(asked, session_id=session_id)

    @_forgiving(lambda: None)
    def tools(self, key: bytes) -> Tools | None:
        """Return the stored list of tools with this key (`offered.key_of`), in the order of keys in which the tenant
        first sent it; None if there is none."""
        return self._outlines.tools(key)

    @_forgiving(int, is_asked=True)
    def entitle(self, session_id: str, *, tenant: str, title: str | None) -> int:
        """Set the title of the sessions that a tenant has recorded under this id, with any salt; None removes it.
        Returns for how many sessions that was done; sessions without stored messages can have no title."""
        with self._db.transaction():
            values = {"name": session_id, "tenant": tenant}
            rows = self._db.execute(f"SELECT id FROM sessions WHERE {_OF_TENANT} LIMIT {_MAX_SALTS}", values).fetchall()
            count = self._messages.entitle([row[0] for row in rows], title)
        if not count and (problem := self._db.problem) is not None:
            raise DiskAway(problem)  # its messages may be missing for that alone
        return count

    @_forgiving(list, is_asked=True)
    def chats(self, tenants: tuple[str, str], *, after: str, since: float, limit: int) -> list[Chat]:
        """Return the conversations whose messages are stored and whose session id comes after `after`, in the order of
        these ids, at most `limit`. tenants: the domains to look in ("tenant" or "tenant/salt"). since: sessions whose
        last use, plus their extra time (`extend`), is earlier than this are left out."""
        return self._messages.chats(tenants, after=after, since=since, limit=limit)

    @_forgiving(lambda: None, is_asked=True)
    def message_page(
        self, tenants: tuple[str, str], session_id: str, *, after: int, since: float, limit: int
    ) -> MessagePage | None:
        """Return the messages of a session after the message at index `after`, as `MessageTable.page` does; None if
        there is no such session with messages, or its last use, plus its extra time (`extend`), is earlier than
        `since`."""
        return self._messages.page(tenants, session_id, after=after, since=since, limit=limit)

    def export(self, session_id: str, *, tenant: str, after: int, most: int) -> Exported:
        """Return the rows of a session's answers recorded after the one with the id `after`, at most the newest `most`.
        tenant: with the salt, if there is one."""
        return self._export(tenant, session_id, after, most) or Exported({}, after)

    @_forgiving(lambda: None)
    def _export(self, tenant: str, name: str, after: int, most: int) -> Exported | None:
        rows: dict[bytes, bytes] = {}
        newest = after
        for answer_id, mark, *columns in self._db.execute(_ROWS, (tenant, name, after, most)):
            chain, bare, tail, ids, text, ends, prompt, base, base_tokens, prompt_ids, starts, chars, shown = columns
            row = TranscriptRow(
                chain=chain, bare=bare, tail=tail, ids=ids, text=text, ends=ends, prompt_chain=prompt, base=base or b"",
                base_tokens=base_tokens, prompt_ids=prompt_ids, starts=starts, chars=chars, text_digest=shown,
            )  # fmt: skip
            newest = max(newest, answer_id)
            if row.digest == mark:  # else it is damaged
                rows[mark] = encode_row(row)
        return Exported(rows, newest)

    def adopt(self, session_id: str, rows: Mapping[bytes, bytes], *, tenant: str, now: float, after: int) -> int:
        """Record what other servers have exported of a session. Rows that are damaged, or whose base is missing, are
        left out. after: id of the newest answer that this server has exported. Returns the `after` of the next export:
        the id of the newest answer here. But if an answer newer than `after` is recorded here that `rows` lacks,
        returns an id just below that answer's, so that the answer is exported too."""
        return self._adopt(tenant, session_id, rows, now, after) or after

    @_forgiving(lambda: None)
    def _adopt(self, tenant: str, name: str, rows: Mapping[bytes, bytes], now: float, after: int) -> int | None:
        with self._db.transaction():
            session = self._session(tenant, name, now)
            known: dict[bytes, int] = dict(
                self._db.execute("SELECT digest, id FROM answers WHERE session = ?", (session,))
            )
            for row in readable(rows):
                if row.digest not in known:
                    known[row.digest] = self._insert_row(session, row, known.get(row.base))
            self._make_room()
        self._db.shrink(self._max_bytes)
        unsent = [answer_id for mark, answer_id in known.items() if answer_id > after and mark not in rows]
        return min(unsent) - 1 if unsent else max(known.values(), default=after)

    def _insert_row(self, session: int, row: TranscriptRow, base: int | None) -> int:
        columns = (row.prompt_chain, row.base_tokens, row.prompt_ids, row.starts, row.chars)
        prompt = self._insert_prompt(session, columns, row.text_digest, row.prompt_digest, base)
        answer = (row.chain, row.bare, row.tail, row.ids, row.text, row.ends)
        return self._insert_answer(session, prompt, answer, row.digest)

    @_forgiving(list, is_asked=True)
    def names(self) -> list[tuple[str, str]]:
        """Return (tenant with its salt, session id) of all sessions, without those of a file that is not used."""
        return self._db.execute("SELECT tenant, name FROM sessions").fetchall()

    @_forgiving(lambda: None)
    def extend(self, session_id: str, *, tenant: str, extra_s: float) -> None:
        """Keep a session `extra_s` seconds longer than others after its last use; shorter if negative."""
        self._db.execute(
            f"UPDATE sessions SET extra = :extra WHERE {_OF_TENANT}",
            {"name": session_id, "tenant": tenant, "extra": extra_s},
        )

    @_forgiving(lambda: None)
    def touch(self, tenant: str, session_id: str, *, now: float) -> None:
        self._db.execute(
            "UPDATE sessions SET used = max(used, ?) WHERE tenant = ? AND name = ?", (now, tenant, session_id)
        )

    @_forgiving(int, is_asked=True)
    def forget(self, session_id: str, *, tenant: str | None) -> int:
        """Delete the sessions with this name: those of a tenant, with any salt, or if `tenant` is None those of all
        tenants. Returns how many were deleted."""
        with self._db.transaction():
            rows = self._db.execute(
                f"SELECT id FROM sessions WHERE {_OF_TENANT}",
                {"name": session_id, "tenant": tenant},
            ).fetchall()
            for (session,) in rows:
                self._drop_session(session)
        if rows:
            self._db.scrub()
        if self.hides_file:  # what is in the file would be there again after a restart
            raise DiskAway(self._db.problem or "its file is not used")
        return len(rows)

    @_forgiving(int)
    def sweep(self, *, before: float) -> int:
        """Delete the sessions whose last use, plus their extra time (`extend`), is earlier than `before`, at most
        SWEEP_BATCH of them. Returns how many."""
        with self._db.transaction():
            rows = self._db.execute(
                "SELECT id FROM sessions WHERE used + extra < ? LIMIT ?", (before, SWEEP_BATCH)
            ).fetchall()
            for (session,) in rows:
                self._drop_session(session)
        return len(rows)

    @_forgiving(int)
    def used_bytes(self) -> int:
        return self._db.used_bytes()

    @property
    def hides_file(self) -> bool:
        """Whether it works in memory until the next start although a file with transcripts lies there, which could not
        be opened."""
        return self._db.hides_file

    def recover(self, error: sqlite3.Error) -> bool:
        """Handle an error of the database: replace a damaged database by an empty one, and log other errors. Returns
        whether all that was in the database is gone."""
        if not self._db.recover(error):
            return False
        self._hot.clear()
        self._hot_tokens = 0
        return True

    def close(self) -> None:
        self._db.close()

    def _find(self, where: str, key: bytes, session_id: str | None, since: float, limit: int) -> list[RecordedAnswer]:
        rows = self._db.execute(
            _FIND.format(where=where), {"key": key, "session": session_id or "", "since": since, "limit": limit}
        )
        # Damage shows when the digests are compared with what is rendered; until then a row only has to be readable.
        return [
            RecordedAnswer(
                id=row[0], session_id=row[1], chain=row[2], bare=row[3], digest=row[4],
                text=row[5].decode("utf-8", "replace"), ends=_ids(row[6]), token_ids=_ids(row[7]),
                prompt_chars=row[8], prompt_digest=row[9], continues=row[10] is not None,
            )
            for row in rows
            if all(isinstance(value, bytes) for value in (*row[2:8], row[9])) and isinstance(row[8], int)
        ]  # fmt: skip

    def _session(self, tenant: str, name: str, now: float) -> int:
        rows: list[tuple[int]] = self._db.execute(
            "INSERT INTO sessions (tenant, name, used) VALUES (?, ?, ?)"
            " ON CONFLICT (tenant, name) DO UPDATE SET used = max(used, excluded.used) RETURNING id",
            (tenant, name, now),
        ).fetchall()
        return rows[0][0]

    def _add_prompt(self, session: int, prompt: PreparedPrompt) -> tuple[int, bytes]:
        """Add a prompt, unless it is stored already. Returns the id of its row and its digest."""
        base = prompt.base
        # A base of another session would be deleted with that session, and a deleted base is of no use.
        if (
            base is not None
            and not self._db.execute(
                "SELECT 1 FROM answers WHERE id = ? AND digest = ? AND session = ?",
                (base.answer_id, base.digest, session),
            ).fetchone()
        ):
            base = None
        start = base.tokens if base is not None else 0
        all_ids, all_starts = prompt.recorded
        ids = array("I", all_ids[start:])
        starts = array("I", all_starts[bisect_left(all_starts, start) :])
        columns = (prompt.chain, start, ids.tobytes(), starts.tobytes(), prompt.chars)
        mark = digest("prompt", *columns, prompt.text_digest, base.digest if base is not None else b"")
        row = self._db.execute(
            "SELECT id FROM prompts WHERE chain = ? AND session = ? AND digest = ?", (prompt.chain, session, mark)
        ).fetchone()
        if row is not None:
            return row[0], mark
        base_id = base.answer_id if base is not None else None
        return self._insert_prompt(session, columns, prompt.text_digest, mark, base_id), mark

    def _insert_prompt(
        self, session: int, columns: tuple[Any, ...], text_digest: bytes, mark: bytes, base: int | None
    ) -> int:
        rows: list[tuple[int]] = self._db.execute(
            "INSERT INTO prompts (chain, base_tokens, ids, starts, chars, text_digest, digest, base, session)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
            (*columns, text_digest, mark, base, session),
        ).fetchall()
        return rows[0][0]

    def _insert_answer(self, session: int, prompt: int, columns: tuple[Any, ...], mark: bytes) -> int:
        rows: list[tuple[int]] = self._db.execute(
            "INSERT INTO answers (chain, bare, tail, ids, text, ends, digest, session, prompt)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
            (*columns, mark, session, prompt),
        ).fetchall()
        return rows[0][0]

    def _cap_answers(self, session: int, chain: bytes, newest: int) -> None:
        """Delete answers to a prompt beyond the cap: first those that no later turn builds on, the oldest first. An
        answer that is built on takes its branch along."""
        rows = self._db.execute(
            "SELECT a.id FROM answers a JOIN prompts p ON p.id = a.prompt"
            " WHERE p.chain = ? AND p.session = ? AND a.id <> ?"
            " ORDER BY EXISTS (SELECT 1 FROM prompts later WHERE later.base = a.id), a.id",
            (chain, session, newest),
        ).fetchall()
        for row in rows[: max(0, len(rows) + 1 - self._max_answers)]:
            self._db.execute(_REMOVE_BRANCH, row)
            self._db.execute(_REMOVE_UNANSWERED, (session,))

    def _make_room(self) -> None:
        """Delete the sessions used longest ago until the database fits; even the one just written, if it alone is too
        large."""
        while self._db.used_bytes() > self._max_bytes:
            row = self._db.execute("SELECT id FROM sessions ORDER BY used + extra, id LIMIT 1").fetchone()
            if row is None:
                break
            self._drop_session(row[0])

    def _drop_session(self, session: int) -> None:
        self._outlines.drop(session)
        self._messages.drop(session)
        self._db.execute("DELETE FROM answers WHERE session = ?", (session,))
        self._db.execute("DELETE FROM prompts WHERE session = ?", (session,))
        self._db.execute("DELETE FROM sessions WHERE id = ?", (session,))

    def _drop_session_of(self, answer_id: int) -> None:
        with self._db.transaction():
            row = self._db.execute("SELECT session FROM answers WHERE id = ?", (answer_id,)).fetchone()
            if row is not None:
                self._drop_session(row[0])

    def _keep_hot(self, answer_id: int, history: History) -> None:
        before = self._hot.pop(answer_id, None)
        self._hot_tokens += len(history.ids) - (len(before.ids) if before is not None else 0)
        self._hot[answer_id] = history
        while self._hot_tokens > HOT_TOKENS:
            self._hot_tokens -= len(self._hot.popitem(last=False)[1].ids)


def _below(starts: "array[int]", end: int) -> "array[int]":
    return starts[: bisect_left(starts, end)]


def _ids(data: bytes) -> "array[int]":
    ids = array("I")
    ids.frombytes(data[: len(data) // ids.itemsize * ids.itemsize])
    return ids


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _is_intact(link: tuple[Any, ...]) -> bool:
    """Return whether a row of _LINK is as it was written. Digests cover those of the row before, so a chain of intact
    rows is the chain that was written."""
    *answer, answer_mark, chain, base_tokens, ids, starts, chars, text_digest, prompt_mark, base, base_mark = link
    prompt = (chain, base_tokens, ids, starts, chars, text_digest, base_mark or b"")
    return (
        all(
            isinstance(value, bytes)
            for value in (*answer, prompt_mark, chain, ids, starts, text_digest, base_mark or b"")
        )
        and isinstance(base_tokens, int)
        and isinstance(chars, int)
        and (base is None) == (base_mark is None)
        and prompt_mark == digest("prompt", *prompt)
        and answer_mark == digest("answer", *answer, prompt_mark)
    )
