import contextlib
import errno
import random
import sqlite3
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.app.conversations import database, transcript_store
from reprise.app.conversations.digests import digest
from reprise.app.conversations.prepared_prompt import Base, PreparedPrompt
from reprise.app.conversations.transcript_store import NewAnswer, RecordedAnswer, TranscriptStore
from reprise.app.state_disk import DiskAway, StateDisk
from tests.example_counts import examples

TENANT = "tenant"


def open_store(path: Path | None = None, **limits) -> TranscriptStore:
    return TranscriptStore(**{"path": path, "max_bytes": 64 << 20, "max_answers_per_prompt": 4, **limits})


def prompt_of(
    name: str, ids, base: Base | None = None, session: str = "s", tenant: str = TENANT, starts: tuple[int, ...] = ()
) -> PreparedPrompt:
    return PreparedPrompt(
        token_ids=list(ids), session_id=session, spliced_tokens=0, tenant=tenant, chain=digest(name), chars=len(name),
        text_digest=digest("text", name), base=base, starts=starts, tail=digest("tail", name),
    )  # fmt: skip


def answer_of(name: str, ids, text: str = "text") -> NewAnswer:
    return NewAnswer(
        chain=digest(name), bare=digest("bare", name), tail=digest("tail", name), token_ids=array("I", ids), text=text,
        ends=array("I", range(len(list(ids)))),
    )  # fmt: skip


def found(store: TranscriptStore, name: str, session: str | None = None, since: float = 0.0) -> RecordedAnswer | None:
    answers = store.find_answers(after=digest(name), session_id=session, since=since)
    return answers[0] if answers else None


def full_ids(store: TranscriptStore, name: str) -> list[int] | None:
    answer = found(store, name)
    history = store.history(answer.id) if answer is not None else None
    return history.ids.tolist() if history is not None else None


def add_conversation(store: TranscriptStore, session: str, turns: int, now: float, tokens: int = 20) -> list[int]:
    """Turns named "<session> <n>", each going on from the one before. The last one's ids."""
    rng = random.Random(session)
    ids: list[int] = []
    base = None
    for turn in range(turns):
        ids = ids + [rng.randrange(1 << 17) for _ in range(tokens)]
        name = f"{session} {turn}"
        own = [rng.randrange(1 << 17) for _ in range(tokens)]
        store.add(prompt_of("p" + name, ids, base, session), answer_of(name, own), now=now)
        ids = ids + own
        answer = found(store, name)
        assert answer is not None
        base = Base(answer.id, answer.digest, len(ids))
    return ids


def test_digests_tell_fields_and_types_apart():
    lists = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), (b"ab", "c"), (1,), ("1",), (b"1",), (), ("",), (b"",)]
    assert len({digest(*fields) for fields in lists}) == len(lists)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_full_ids_are_those_recorded_hot_or_cold(tmp_path_factory, data):
    """Random trees of turns, each from any place inside any earlier answer, whatever the cache still holds."""
    path = tmp_path_factory.mktemp("store") / "t.sqlite3"
    store = open_store(path, max_answers_per_prompt=100)
    recorded: dict[str, list[int]] = {}
    for number in range(data.draw(st.integers(1, 10))):
        ids, base = [], None
        if recorded and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(recorded)))
            answer = found(store, name)
            taken = data.draw(st.integers(0, len(recorded[name])))
            ids, base = recorded[name][:taken], Base(answer.id, answer.digest, taken)
        tokens = st.lists(st.integers(0, 2**32 - 1), max_size=5)
        ids, own = ids + data.draw(tokens), data.draw(tokens)
        session = data.draw(st.sampled_from(["s", "s", "s", "t"]))
        store.add(prompt_of(f"p{number}", ids, base, session), answer_of(str(number), own), now=0.0)
        recorded[str(number)] = ids + own
        if data.draw(st.integers(0, 5)) == 0:
            store.close()
            store = open_store(path, max_answers_per_prompt=100)
    for _ in range(2):
        for name in data.draw(st.permutations(sorted(recorded))):
            assert full_ids(store, name) == recorded[name]
        store.close()
        store = open_store(path)  # nothing is hot
    store.close()


def test_a_base_inside_the_base_of_its_base(tmp_path):
    path = tmp_path / "t.sqlite3"
    store = open_store(path)
    store.add(prompt_of("p1", range(20)), answer_of("1", range(20, 30)), now=0.0)
    first = found(store, "1")
    store.add(prompt_of("p2", [*range(25), 7], Base(first.id, first.digest, 25)), answer_of("2", [8]), now=0.0)
    second = found(store, "2")
    store.add(prompt_of("p3", [*range(5), 9], Base(second.id, second.digest, 5)), answer_of("3", [10]), now=0.0)
    store.close()
    assert full_ids(open_store(path), "3") == [0, 1, 2, 3, 4, 9, 10]


def test_no_session_builds_on_the_rows_of_another(tmp_path):
    path = tmp_path / "t.sqlite3"
    store = open_store(path)
    ids = add_conversation(store, "s", turns=2, now=0.0)
    last = found(store, "s 1")
    store.add(prompt_of("p", ids, Base(last.id, last.digest, len(ids)), "other"), answer_of("a", [1]), now=0.0)
    store.forget("s", tenant=TENANT)
    store.close()
    assert full_ids(open_store(path), "a") == [*ids, 1]


def test_bytes_grow_with_the_conversation_not_with_its_square():
    store = open_store()
    empty = store.used_bytes()
    add_conversation(store, "short", turns=50, now=0.0, tokens=100)
    short = store.used_bytes() - empty
    add_conversation(store, "long", turns=400, now=0.0, tokens=100)
    long = store.used_bytes() - empty - short
    assert long < 9 * short
    assert short < 50 * 200 * 4 * 3  # 200 tokens a turn, 4 bytes each for the id and for an answer token's end, indexes


def test_the_hot_ids_are_bounded(monkeypatch):
    monkeypatch.setattr(transcript_store, "HOT_TOKENS", 1000)
    store = open_store()
    ids = add_conversation(store, "s", turns=60, now=0.0)
    assert store._hot_tokens == sum(map(len, store._hot.values())) <= 1000
    assert full_ids(store, "s 59") == ids


# Limits


def test_the_sessions_used_longest_ago_leave_first(tmp_path):
    path = tmp_path / "t.sqlite3"
    limit = 400_000
    store = open_store(path, max_bytes=limit)
    for number in range(40):
        add_conversation(store, f"s{number}", turns=4, now=float(number), tokens=500)
        if number >= 5:
            store.touch(TENANT, "s2", now=float(number))  # it is in use all the time
        assert store.used_bytes() <= limit
    store.close()
    assert path.stat().st_size <= limit
    store = open_store(path, max_bytes=limit)
    kept = [number for number in range(40) if found(store, f"s{number} 3")]
    assert kept == [2, *range(40 - len(kept) + 1, 40)]
    assert len(kept) > 5


def test_a_session_larger_than_the_cap_leaves_itself():
    store = open_store(max_bytes=200_000)
    add_conversation(store, "small", turns=1, now=0.0)
    store.add(prompt_of("huge", range(100_000)), answer_of("huge", range(10)), now=1.0)
    assert store.used_bytes() <= 200_000
    assert found(store, "huge") is None
    add_conversation(store, "next", turns=1, now=2.0)
    assert found(store, "next 0") is not None


def test_expired_sessions_are_not_found_and_swept_in_batches(monkeypatch):
    monkeypatch.setattr(transcript_store, "SWEEP_BATCH", 3)
    store = open_store()
    for number in range(8):
        add_conversation(store, f"s{number}", turns=1, now=float(number))
    assert found(store, "s4 0", since=5.0) is None
    assert found(store, "s5 0", since=5.0) is not None
    assert store.find_siblings(before=digest("ps4 0"), session_id=None, since=5.0) == []
    assert [store.sweep(before=5.0) for _ in range(3)] == [3, 2, 0]
    assert [number for number in range(8) if found(store, f"s{number} 0")] == [5, 6, 7]


def test_time_never_goes_backwards_for_a_session():
    store = open_store()
    add_conversation(store, "s", turns=1, now=100.0)
    store.touch(TENANT, "s", now=50.0)
    assert store.sweep(before=100.0) == 0


def test_a_branch_leaves_with_the_answer_it_grew_from():
    store = open_store(max_answers_per_prompt=1)
    add_conversation(store, "s", turns=3, now=0.0)
    store.add(prompt_of("ps 0", range(20)), answer_of("another", range(5)), now=1.0)
    assert [found(store, name) is not None for name in ("s 0", "s 1", "s 2", "another")] == [False, False, False, True]
    assert store.known_prompts([digest(f"ps {turn}") for turn in range(3)]) == {digest("ps 0")}


def test_recording_again_takes_no_room_and_renews():
    store = open_store()
    store.add(prompt_of("p", [1]), answer_of("a", [2]), now=0.0)
    before = store.used_bytes()
    for _ in range(50):
        store.add(prompt_of("p", [1]), answer_of("a", [2]), now=9.0)
    assert store.used_bytes() == before
    assert store.sweep(before=9.0) == 0


# Sessions and tenants


def test_forgetting_is_for_one_tenant_or_for_all():
    store = open_store()
    for tenant in ("a", "b", "c"):
        store.add(prompt_of("p" + tenant, [1], tenant=tenant), answer_of(tenant, [2]), now=0.0)
    store.forget("s", tenant="b")
    assert [full_ids(store, tenant) for tenant in ("a", "b", "c")] == [[1, 2], None, [1, 2]]
    store.forget("s", tenant=None)
    assert [full_ids(store, tenant) for tenant in ("a", "b", "c")] == [None] * 3


def test_a_forgotten_conversation_is_not_in_the_file(tmp_path):
    path = tmp_path / "t.sqlite3"
    store = open_store(path)
    store.add(prompt_of("p", [1]), answer_of("a", [2], text="an unmistakable secret"), now=0.0)
    store.forget("s", tenant=TENANT)
    store.close()  # the log is written back
    assert b"unmistakable" not in path.read_bytes()


def test_the_own_session_comes_first_then_the_newest():
    store = open_store()
    for session in ("x", "y", "z"):
        store.add(prompt_of("p", [1], session=session), answer_of("a", [2]), now=0.0)
    assert found(store, "a", session="x").session_id == "x"
    assert found(store, "a").session_id == "z"
    siblings = store.find_siblings(before=digest("p"), session_id="y", since=0.0)
    assert [answer.session_id for answer in siblings] == ["y", "z", "x"]


def test_a_base_that_has_gone_is_replaced_by_the_ids_themselves():
    store = open_store()
    ids = add_conversation(store, "s", turns=2, now=0.0)
    answer = found(store, "s 1")
    base = Base(answer.id, answer.digest, len(ids))
    store.forget("s", tenant=TENANT)
    store.add(prompt_of("p", [*ids, 7], base), answer_of("a", [8]), now=0.0)
    wrong = Base(found(store, "a").id, digest("other"), 2)  # the right number, but another answer
    store.add(prompt_of("q", [1, 2, 3], wrong), answer_of("b", [4]), now=0.0)
    assert full_ids(store, "a") == [*ids, 7, 8]
    assert full_ids(store, "b") == [1, 2, 3, 4]


# Damage


def columns() -> list[tuple[str, str]]:
    answers = [("answers", name) for name in ("ids", "text", "ends", "digest")]
    return answers + [("prompts", name) for name in ("ids", "chars", "base_tokens", "text_digest", "digest", "chain")]


@pytest.mark.parametrize(("table", "column"), columns())
@pytest.mark.parametrize("turn", [0, 2])
def test_a_changed_row_is_no_match_and_its_session_leaves(tmp_path, caplog, table, column, turn):
    path = tmp_path / "t.sqlite3"
    store = open_store(path)
    add_conversation(store, "s", turns=3, now=0.0)
    ids = add_conversation(store, "well", turns=2, now=0.0)
    store.close()
    with sqlite3.connect(path) as db:
        where = (
            f"WHERE id = (SELECT {'id' if table == 'answers' else 'prompt'} FROM answers ORDER BY id LIMIT 1 OFFSET ?)"
        )
        (value,) = db.execute(f"SELECT {column} FROM {table} {where}", (turn,)).fetchone()
        changed = value + 1 if isinstance(value, int) else bytes([value[0] ^ 1]) + value[1:]
        assert db.execute(f"UPDATE {table} SET {column} = ? {where}", (changed, turn)).rowcount == 1
    db.close()
    store = open_store(path)
    assert full_ids(store, "s 2") is None
    assert "damaged" in caplog.text
    assert found(store, "s 1") is None
    assert full_ids(store, "well 1") == ids


def test_a_value_of_another_type_is_no_match(tmp_path):
    path = tmp_path / "t.sqlite3"
    store = open_store(path)
    add_conversation(store, "s", turns=2, now=0.0)
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE answers SET ids = 'text', text = 3.5")
    db.close()
    store = open_store(path)
    assert found(store, "s 1") is None
    assert store.history(2) is None


@settings(max_examples=examples(40))
@given(data=st.data())
def test_no_damage_to_the_file_gives_wrong_ids_or_an_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "t.sqlite3"
    store = open_store(path)
    recorded = {f"s {turn}": None for turn in range(6)}
    last = add_conversation(store, "s", turns=6, now=0.0)
    for name in recorded:
        recorded[name] = full_ids(store, name)
    assert recorded["s 5"] == last
    store.close()
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 30))):
        start = data.draw(st.integers(0, len(content) - 1))
        content[start : start + 4] = data.draw(st.binary(min_size=1, max_size=4))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path.write_bytes(content)
    store = open_store(path)
    for name in data.draw(st.permutations(sorted(recorded))):
        assert full_ids(store, name) in (recorded[name], None)
    # Where writing finds damage it begins a new file; then all is well again.
    for attempt in range(3):
        store.add(prompt_of(f"p{attempt}", [1]), answer_of(f"new {attempt}", [2]), now=1.0)
    assert full_ids(store, "new 2") == [1, 2]
    store.sweep(before=0.5)
    # A file that is no damaged one for SQLite stays, and with it what was to be deleted.
    with pytest.raises(DiskAway) if store.hides_file else contextlib.nullcontext():
        store.forget("s", tenant=None)
    store.close()


def test_a_database_that_refuses_costs_nothing_but_the_reuse(tmp_path, caplog):
    path = tmp_path / "t.sqlite3"
    store = open_store(path)
    ids = add_conversation(store, "s", turns=2, now=0.0)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store.add(prompt_of("p", [1]), answer_of("a", [2]), now=1.0)
    store.touch(TENANT, "s", now=1.0)
    assert store.sweep(before=1.0) == 0
    assert "locked" in caplog.text
    assert full_ids(store, "s 1") == ids
    other.execute("ROLLBACK")
    other.close()
    store.add(prompt_of("p", [1]), answer_of("a", [2]), now=1.0)
    assert full_ids(store, "a") == [1, 2]
    store.close()
    assert store.find_answers(after=digest("a"), session_id=None, since=0.0) == []  # closed: nothing, and no error


def test_what_is_forgotten_is_in_no_file_any_more(tmp_path):
    store = open_store(tmp_path / "t.sqlite3")
    said = array("I", [314159, 271828, 141421])
    for session in ("s", "other"):
        store.add(
            prompt_of(f"p-{session}", range(9), session=session), answer_of(session, said, "zebra quartz"), now=0.0
        )
    assert any(b"zebra quartz" in path.read_bytes() for path in tmp_path.iterdir())
    assert store.forget("s", tenant=TENANT) == 1
    assert store.forget("other", tenant=TENANT) == 1
    for path in tmp_path.iterdir():
        assert not [what for what in (b"zebra quartz", said.tobytes()) if what in path.read_bytes()], path
    store.close()


def test_a_session_is_not_told_to_be_deleted_while_its_file_cannot_be_opened(tmp_path, monkeypatch):
    """Say no falsehood: after a restart it would be there again."""
    path = tmp_path / "t.sqlite3"
    store = open_store(path)
    add_conversation(store, "s", turns=1, now=0.0)
    store.close()

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(database, "_make_private", refuse)
        store = open_store(path)
    add_conversation(store, "s", turns=1, now=1.0)
    with pytest.raises(DiskAway):
        store.forget("s", tenant=TENANT)
    assert store.hides_file
    assert store.names() == []
    store.close()
    store = open_store(path)
    assert store.names() == [(TENANT, "s")]
    assert store.forget("s", tenant=TENANT) == 1
    store.close()


def test_what_is_asked_for_by_name_on_a_disk_without_room_is_told_with_the_cause(tmp_path):
    disk = StateDisk()
    store = TranscriptStore(path=tmp_path / "t.sqlite3", max_bytes=1 << 24, max_answers_per_prompt=4, disk=disk)
    add_conversation(store, "s", turns=1, now=0.0)
    store._db.execute("PRAGMA query_only = ON")  # every write fails with SQLITE_READONLY
    for call in (
        lambda: store.entitle("s", tenant=TENANT, title="A title"),
        lambda: store.forget("s", tenant=TENANT),
    ):
        with pytest.raises(DiskAway, match="cannot be written to"):
            call()
    assert disk.state == "read_only"
    store.add(prompt_of("p", [1]), answer_of("a", [2]), now=1.0)  # costs the transcript, and nothing else
    store._db.execute("PRAGMA query_only = OFF")
    with pytest.raises(DiskAway):  # it may be one that could not be recorded
        store.entitle("unknown", tenant=TENANT, title="A title")
    assert store.forget("s", tenant=TENANT) == 1
    assert disk.state == "used"
    assert store.entitle("unknown", tenant=TENANT, title="A title") == 0
