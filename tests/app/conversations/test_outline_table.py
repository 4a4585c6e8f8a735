import sqlite3
from pathlib import Path

import pytest

from reprise.app.conversations import transcript_store
from reprise.app.conversations.database import Database
from reprise.app.conversations.divergence import Divergence
from reprise.app.conversations.offered import MAX_LIST_BYTES
from reprise.app.conversations.outline import Asked, outline_of, tail_of
from reprise.app.conversations.outline_table import MAX_OPENINGS, NewOutline, SessionReport, reports_of
from reprise.app.conversations.transcript_store import TranscriptStore
from tests.app.conversations.test_outline import asked_of
from tests.app.conversations.test_transcript_store import answer_of, open_store, prompt_of

ANSWER = {"role": "assistant", "content": "cat"}
WHY = Divergence(3, "user", "content", 40, "message 3 was edited")
TOOLS = [{"name": "f", "b": 1, "a": 2}]


def asked_for(text: str = "hello", **fields) -> Asked:
    return asked_of([{"role": "user", "content": text}], **fields)


def new(asked: Asked, why: Divergence | None = None) -> NewOutline:
    return NewOutline(asked, outline_of(asked, ANSWER), tail_of(asked.tenant, asked.messages[-1], ANSWER), why)


def add(store: TranscriptStore, name: str, outline: NewOutline, *, session: str = "s", now: float = 0.0) -> None:
    tenant = outline.asked.tenant
    store.add(
        prompt_of(f"p{name}", [1], session=session, tenant=tenant), answer_of(name, [2]), now=now, outline=outline
    )


def following(asked: Asked) -> Asked:
    return asked_of([*asked.messages, ANSWER, {"role": "user", "content": "more"}], tenant=asked.tenant)


def test_the_request_before_is_found_by_its_answer_or_by_its_name_and_opening() -> None:
    store, asked = open_store(), asked_for()
    add(store, "a", new(asked))
    outline = outline_of(asked, ANSWER)
    assert store.known_outline(asked, session_id="s") == outline
    for session_id in (None, "s", "other"):
        found = store.find_outline(following(asked), session_id=session_id, since=0.0)
        assert found is not None
        assert found[1] == outline
    assert store.find_outline(asked, session_id="s", since=0.0) is not None
    edited = following(asked_for("another"))
    found = store.find_outline(edited, session_id="s", since=0.0)
    assert found is not None
    assert found[1] == outline
    assert store.find_outline(edited, session_id="other", since=0.0) is None
    for other in (asked_for("another"), following(asked_for("another", tenant="u")), asked_for(tenant="u")):
        assert store.find_outline(other, session_id="s", since=0.0) is None
    assert store.find_outline(following(asked), session_id="s", since=1.0) is None, "it has expired"


def test_a_session_keeps_the_outlines_of_few_openings() -> None:
    store = open_store()
    for number in range(MAX_OPENINGS + 2):
        add(store, str(number), new(asked_for(f"hello {number}", tools=TOOLS, tools_key=bytes([number]))))
    kept = [store.known_outline(asked_for(f"hello {n}"), session_id="s") is not None for n in range(MAX_OPENINGS + 2)]
    assert kept == [False, False] + [True] * MAX_OPENINGS
    assert [store.tools(bytes([n])) is not None for n in range(MAX_OPENINGS + 2)] == kept


def test_tools_stay_as_long_as_a_session_refers_to_them() -> None:
    store = open_store()
    asked = asked_for(tools=TOOLS, tools_key=b"k")
    add(store, "a", new(asked), session="s")
    add(store, "b", new(asked), session="t")
    assert list((store.tools(b"k") or [{}])[0]) == ["name", "b", "a"]
    store.forget("s", tenant="t")
    assert store.tools(b"k") == TOOLS
    add(store, "c", new(asked_for(tools=TOOLS, tools_key=b"l")), session="t")
    assert (store.tools(b"k"), store.tools(b"l")) == (None, TOOLS)
    store.sweep(before=1.0)
    assert store.tools(b"l") is None
    long = asked_for(tools=[{"name": "x" * MAX_LIST_BYTES}], tools_key=b"m")
    add(store, "d", new(long))
    assert store.tools(b"m") is None


def test_reports_are_read_while_the_store_is_open(tmp_path: Path) -> None:
    path = tmp_path / "transcripts.sqlite3"
    store = open_store(path)
    assert reports_of(path, "s") == []
    add(store, "a", new(asked_for()))
    assert reports_of(path, "s") == [SessionReport("t", 1, None, None)]
    add(store, "b", new(asked_for(), WHY), now=5.0)
    add(store, "c", new(asked_for("title"), None), now=6.0)  # tells nothing of the other
    add(store, "d", new(asked_for()), now=7.0)
    add(store, "e", new(asked_for(tenant="u")), now=1.0)
    assert reports_of(path, "s") == [SessionReport("t", 4, 5.0, WHY), SessionReport("u", 1, None, None)]
    store.close()
    with pytest.raises(FileNotFoundError):
        reports_of(tmp_path / "none", "s")


def test_a_file_of_an_earlier_program_gets_the_tables_and_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "transcripts.sqlite3"
    old = Database(path=path, schema=transcript_store._SCHEMA, version=transcript_store.SCHEMA_VERSION)
    old.execute("INSERT INTO sessions (tenant, name, used) VALUES ('t', 's', 1.0)")
    old.close()
    with pytest.raises(sqlite3.Error):
        reports_of(path, "s")
    store = open_store(path)
    assert store.names() == [("t", "s")]
    add(store, "a", new(asked_for()))
    assert store.known_outline(asked_for(), session_id="s") is not None
    store.close()
