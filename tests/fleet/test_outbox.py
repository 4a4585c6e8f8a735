from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reprise.fleet.outbox import Outbox, Unsent


def unsent(session_id: str = "chat", **changes: Any) -> Unsent:
    fields: dict[str, Any] = {
        "tenant": "alice", "salt": "", "fingerprint": "ff", "since": 1, "base_turn": 2, "exported": 3, "tokens": 4,
        "ttl_s": None, "head": b"h",
    }  # fmt: skip
    return Unsent(**{"session_id": session_id, **fields, **changes})


def test_what_waits_survives_a_restart_in_its_order(tmp_path):
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20)
    for name in ("a", "b", "c", "a"):
        outbox.put(unsent(name, salt=""))
    outbox.put(unsent("b", salt="s"))
    outbox.close()
    outbox = Outbox(path=tmp_path / "outbox", max_bytes=1 << 20)
    assert [(entry.session_id, entry.salt) for entry in outbox.first(9)] == [
        ("b", ""),
        ("c", ""),
        ("a", ""),
        ("b", "s"),
    ]
    assert len(outbox.first(2)) == 2
    outbox.forget("alice", "b")
    outbox.remove("alice", "c", "")
    assert [entry.session_id for entry in outbox.first(9)] == ["a"]
    outbox.close()


def test_a_full_outbox_drops_the_oldest():
    outbox = Outbox(path=None, max_bytes=200_000)
    for n in range(40):
        outbox.put(unsent(str(n), head=bytes(10_000)))
    kept = [int(entry.session_id) for entry in outbox.first(99)]
    assert kept == list(range(40 - len(kept), 40))
    assert 5 < len(kept) < 21
    assert outbox.dropped == 40 - len(kept)
    assert outbox.waiting == len(kept)


def test_an_entry_that_cannot_be_read_is_removed():
    outbox = Outbox(path=None, max_bytes=1 << 20)
    outbox.put(unsent("a"))
    outbox._db.execute("UPDATE waiting SET entry = x'00'")
    assert outbox.first(1) == []
    assert outbox.waiting == 0


@given(
    names=st.lists(st.tuples(st.text(max_size=2), st.text(max_size=2), st.text(max_size=2)), max_size=6, unique=True)
)
def test_sessions_never_share_an_entry(names):
    outbox = Outbox(path=None, max_bytes=1 << 20)
    for tenant, session_id, salt in names:
        outbox.put(unsent(session_id, tenant=tenant, salt=salt))
    assert outbox.waiting == len(names)
    for tenant, session_id, _ in names[:1]:
        outbox.forget(tenant, session_id)
        left = [name for name in names if name[:2] != (tenant, session_id)]
        assert [(entry.tenant, entry.session_id, entry.salt) for entry in outbox.first(9)] == left
