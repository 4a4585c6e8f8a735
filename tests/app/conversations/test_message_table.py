"""Tests keeping the messages of conversations."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.conversations import message_table
from reprise.app.conversations.database import Database
from reprise.app.conversations.message_table import MessagePage, MessageTable

NONE = ("t", "t/exact")
SESSIONS = "CREATE TABLE sessions (id INTEGER PRIMARY KEY, tenant TEXT, name TEXT, used REAL, extra REAL DEFAULT 0)"
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=8) | st.just("\ud83d")}
    ),
    max_size=8,
)


@pytest.fixture
def db() -> Database:
    return new_db()


def new_db() -> Database:
    db = Database(path=None, schema=SESSIONS, version=1, added=message_table.SCHEMA)
    db.execute("INSERT INTO sessions (id, tenant, name, used) VALUES (1, 't', 'a', 10), (2, 't', 'b', 20)")
    return db


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def page(table: MessageTable, after: int = -1, limit: int = 100, name: str = "a") -> MessagePage:
    found = table.page(NONE, name, after=after, since=0, limit=limit)
    assert found is not None
    return found


@given(turns=st.lists(MESSAGES, min_size=1, max_size=5))
def test_the_newest_turn_is_what_is_kept(turns: list[list[dict[str, Any]]]) -> None:
    table = MessageTable(new_db())
    table.put(2, [user("of another session")])
    for messages in turns:
        table.put(1, messages)
        assert page(table) == MessagePage(list(enumerate(messages)), more=False)
    assert page(table, name="b").messages == [(0, user("of another session"))]
    assert [chat.num_messages for chat in table.chats(NONE, after="", since=0, limit=9)] == [len(turns[-1]), 1]


def test_an_answer_keeps_its_thought_until_another_comes(db: Database) -> None:
    table = MessageTable(db)
    said = {"role": "assistant", "content": "Blue."}
    thought = {**said, "reasoning_content": "Which colour?"}
    table.put(1, [user("Sky?"), thought])
    table.put(1, [user("Sky?"), said, user("Sea?"), said])
    assert [message for _, message in page(table).messages] == [user("Sky?"), thought, user("Sea?"), said]
    other = {**said, "reasoning_content": "Hm."}
    table.put(1, [user("Sky?"), other, user("Sea?"), other])
    assert [message for _, message in page(table).messages] == [user("Sky?"), other, user("Sea?"), other]
    table.put(1, [user("Sky?"), {**said, "content": "Grey."}])
    assert page(table).messages[1] == (1, {**said, "content": "Grey."})


def test_a_turn_writes_only_what_it_adds(db: Database) -> None:
    table = MessageTable(db)
    history = [user(f"message {n}") for n in range(50)]
    table.put(1, history)
    before = db._db.total_changes
    table.put(1, [*history, user("new")])
    assert db._db.total_changes - before == 2, "the message, and the line of the list"


@given(messages=MESSAGES, limit=st.integers(1, 4))
def test_pages_give_every_message_once(messages: list[dict[str, Any]], limit: int) -> None:
    table = MessageTable(new_db())
    table.put(1, messages)
    found, more = [], True
    while more:
        part = page(table, after=found[-1][0] if found else -1, limit=limit)
        assert len(part.messages) <= limit
        found, more = found + part.messages, part.more
    assert found == list(enumerate(messages))


def test_a_page_ends_at_its_most_bytes_but_has_one_message(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_table, "MAX_PAGE_BYTES", 100)
    table = MessageTable(db)
    table.put(1, [user("x" * 200), user("y"), user("z"), user("x" * 200)])
    seen = [page(table, after=after) for after in (-1, 0, 2)]
    assert [[place for place, _ in one.messages] for one in seen] == [[0], [1, 2], [3]]
    assert [one.more for one in seen] == [True, True, False]


@pytest.mark.parametrize("column", ["mark", "data"])
def test_a_damaged_message_is_left_out(db: Database, column: str) -> None:
    table = MessageTable(db)
    table.put(1, [user("one"), user("two"), user("three")])
    db.execute(f"UPDATE messages SET {column} = x'00112233' WHERE place = 1")
    assert [place for place, _ in page(table).messages] == [0, 2]


def test_an_expired_session_and_another_tenants_have_none(db: Database) -> None:
    table = MessageTable(db)
    table.put(1, [user("one")])
    assert table.page(NONE, "a", after=-1, since=11, limit=9) is None
    assert table.page(("u", "u/exact"), "a", after=-1, since=0, limit=9) is None
    assert table.chats(NONE, after="", since=11, limit=9) == []
    assert table.chats(("u", "u/exact"), after="", since=0, limit=9) == []


def test_a_title_stays_while_turns_come_and_goes_with_the_session(db: Database) -> None:
    table = MessageTable(db)
    assert table.entitle([1], "too early") == 0
    table.put(1, [{"role": "system", "content": "Be brief."}, user("  What\nis   this?  ")])
    assert table.entitle([1, 2], "Questions") == 1
    table.put(1, [{"role": "system", "content": "Be brief."}, user("What is that?")])
    (chat,) = table.chats(NONE, after="", since=0, limit=9)
    assert (chat.title, chat.first_text) == ("Questions", "What is that?")
    table.drop(1)
    assert table.chats(NONE, after="", since=0, limit=9) == []
    assert db.execute("SELECT count(*) FROM messages").fetchone() == (0,)


def test_the_first_text_is_one_short_line(db: Database) -> None:
    table = MessageTable(db)
    table.put(1, [user("a\ud83d b\n\t" + "long " * 1000)])
    (chat,) = table.chats(NONE, after="", since=0, limit=9)
    assert chat.first_text.startswith("a? b long long")
    assert len(chat.first_text) <= message_table.FIRST_TEXT_CHARS
