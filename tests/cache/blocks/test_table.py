from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reprise.cache.blocks.table
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BlockRow, CacheTable, common_prefix

ROOT = BlockKey(b"root")
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


def row(name, tokens, *, parent=ROOT, session=None):
    key = BlockKey(name if isinstance(name, bytes) else str(name).encode())
    return BlockRow(
        key=key, parent=parent, token_ids=array("I", tokens), page=0, offset=0, size_bytes=0, session_id=session
    )


def test_a_row_is_found_until_it_is_dropped():
    table = CacheTable()
    first = row("a", [1, 2])
    table.publish(first)
    assert table.get(first.key) is first
    assert first.key in table
    assert list(table) == [first]
    with pytest.raises(KeyError):
        table.publish(first)
    assert table.drop(first.key) is first
    assert table.get(first.key) is None
    assert len(table) == 0
    assert table.closest_child(ROOT, [1, 2], "s", 2) is None
    with pytest.raises(KeyError):
        table.drop(first.key)


def test_a_chain_matches_up_to_its_first_gap():
    table = CacheTable()
    rows = [row(i, [i], parent=BlockKey(str(i - 1).encode()) if i else ROOT) for i in range(4)]
    for one in rows:
        table.publish(one)
    keys = [one.key for one in rows]
    assert table.matched(keys) == rows
    table.drop(keys[2])
    assert table.matched(keys) == rows[:2]
    rows[1].page, rows[1].copies["dram"] = None, 3  # it is still somewhere
    assert table.matched(keys) == rows[:2]
    assert table.resident(keys) == 1
    assert table.resident(keys[:1]) == 1
    assert table.matched([]) == []


@given(
    children=st.lists(
        st.tuples(TOKENS.map(tuple), st.sampled_from([None, None, "mine", "yours"])), max_size=12, unique=True
    ),
    dropped=st.sets(st.integers(0, 11)),
    asked=TOKENS,
    limit=st.integers(0, 5),
)
def test_the_closest_child_is_the_best_of_all_that_may_be_seen(children, dropped, asked, limit):
    table, visible = CacheTable(), []
    for name, (tokens, session) in enumerate(children):
        child = row(name, tokens, session=session)
        table.publish(child)
        if name in dropped:
            table.drop(child.key)
        elif session != "yours":
            visible.append(child)
    table.publish(row("elsewhere", asked, parent=BlockKey(b"other")))
    best = max((common_prefix(child.token_ids, asked, limit) for child in visible), default=0)
    found = table.closest_child(ROOT, asked, "mine", limit)
    if best == 0:
        assert found is None
        return
    child, shared = found
    assert child in visible
    assert shared == best == common_prefix(child.token_ids, asked, limit)
    if any(common_prefix(c.token_ids, asked, limit) == best and c.is_open for c in visible):
        assert child.is_open, "its own open block can be taken over, so it is preferred"


def test_a_thousand_conversations_behind_one_system_prompt_are_not_compared_one_by_one(monkeypatch):
    table = CacheTable()
    for i in range(1000):
        table.publish(row(i, [7, i % 10, i // 10 % 10, i // 100]))
    compared = []
    monkeypatch.setattr(
        reprise.cache.blocks.table, "common_prefix", lambda *args: compared.append(args) or common_prefix(*args)
    )
    found = table.closest_child(ROOT, [7, 3, 4, 99], "mine", 4)
    assert found is not None
    assert found[1] == 3
    assert len(compared) <= 2


@given(left=TOKENS, right=TOKENS, limit=st.integers(0, 6))
def test_common_prefix(left, right, limit):
    shared = common_prefix(left, right, limit)
    assert left[:shared] == right[:shared]
    assert shared <= limit
    assert shared == min(len(left), len(right), limit) or left[shared] != right[shared]
