import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.context import SessionContext, digest_of
from reprise.cache.blocks.keys import BLOCK_TOKENS, KeyDomain
from reprise.cache.blocks.lineage import Lineage

DOMAIN = KeyDomain(secret=b"s", fingerprint=b"f", tenant="t", salt="")
TOKENS = list(range(10 * BLOCK_TOKENS))


def blocks(start, stop):
    return start * BLOCK_TOKENS, stop * BLOCK_TOKENS


def lineage(num_blocks=10):
    made = Lineage(DOMAIN)
    made.extend(TOKENS[: num_blocks * BLOCK_TOKENS])
    return made


def without(made, tokens, cuts, tail=None):
    """Return the lineage after the cuts, and the tokens that are left."""
    kept, start = [], 0
    for a, b in cuts:
        kept += tokens[start:a]
        start = b
    return made.without(cuts, tail), kept + tokens[start:]


def test_uncut_it_is_the_chain_of_the_domain():
    assert lineage().keys == DOMAIN.chain(TOKENS)
    assert lineage().parent(0) == DOMAIN.root
    assert lineage().parent(10) == lineage().keys[9]


CUTS = st.sampled_from(
    [[blocks(0, 2)], [blocks(0, 3)], [blocks(1, 3)], [blocks(1, 4)], [blocks(2, 3), blocks(5, 6)], [blocks(2, 6)]]
)


@given(left=CUTS, right=CUTS, more=st.lists(st.integers(0, 9), min_size=64, max_size=64))
def test_what_is_computed_behind_different_cuts_never_has_one_name(left, right, more):
    names = []
    for cuts in (left, right):
        made, kept = without(lineage(), TOKENS, cuts)
        names.append(set(made.extend(kept + more)[len(kept) // BLOCK_TOKENS :]))
    plain = set(DOMAIN.chain(TOKENS + more)[10:])
    assert len(names[0]) == 2
    assert not names[0] & plain
    assert (names[0] == names[1]) == (left == right)
    assert left == right or not names[0] & names[1]


def test_what_a_cut_keeps_keeps_its_names_and_the_next_stands_on_all_of_them():
    made, kept = without(lineage(), TOKENS, [blocks(1, 4)])
    assert made.keys == [lineage().keys[0], *lineage().keys[4:]]
    assert (made.plain, made.joint) == (1, 7)
    keys = made.extend(kept + TOKENS[:64])
    assert keys[7] == DOMAIN.child(DOMAIN.lineage(keys[:7]), TOKENS[:32])
    assert keys[8] == DOMAIN.child(keys[7], TOKENS[32:64])


def test_a_cut_that_leaves_nothing_behind_it_leaves_a_chain():
    made, kept = without(lineage(), TOKENS, [blocks(3, 10)])
    assert made == lineage(3)
    assert len(kept) == 96


def test_an_open_block_that_stays_tells_its_block_from_one_begun_anew():
    tail = DOMAIN.open_block(lineage().keys[-1], [1, 2, 3], "s")
    with_tail, kept = without(lineage(), TOKENS, [blocks(3, 10)], tail)
    anew, _ = without(lineage(), TOKENS, [blocks(3, 10)])
    block = kept + [7] * 32
    assert with_tail.extend(block)[3] != anew.extend(block)[3] == DOMAIN.chain(block)[3]


@pytest.mark.parametrize(("count", "has_tail", "held"), [
    (10, False, True), (8, False, True), (7, False, True), (7, True, True), (6, True, False), (0, False, False),
])  # fmt: skip
def test_what_may_be_computed_under_its_names(count, has_tail, held):
    made, kept = without(lineage(), TOKENS, [blocks(1, 4)])
    made.extend(kept + [0] * 96)
    assert made.is_held_by(count, has_tail) == held
    assert lineage().is_held_by(count, has_tail), "a chain is computed again under its names"


def test_without_its_open_block_it_may_not():
    tail = DOMAIN.open_block(lineage().keys[-1], [1, 2, 3], "s")
    made = lineage().without([blocks(1, 4)], tail)
    assert made.is_held_by(7, True)
    assert not made.is_held_by(7, False)
    assert made.is_held_by(8, False)


@given(count=st.integers(0, 8))
def test_what_is_computed_on_less_than_was_kept_has_names_of_its_own(count):
    made, kept = without(lineage(), TOKENS, [blocks(2, 3)])
    made.extend(kept + [0] * 64)
    for part in (made.anew(count), made.first(count)):
        assert part.keys == made.keys[:count]
    again = made.anew(count)
    keys = again.extend(kept + [0] * 64)
    if count <= 2:
        assert keys == DOMAIN.chain(kept + [0] * 64)
    else:
        assert keys[count] == DOMAIN.child(
            DOMAIN.lineage(keys[:count]), (kept + [0] * 64)[count * 32 : count * 32 + 32]
        )
        assert keys[count] != made.keys[count]
    assert made.first(10).extend(kept + [0] * 64) == made.keys


def test_a_session_outlives_its_process():
    made, kept = without(lineage(), TOKENS, [blocks(1, 4)])
    made.extend(kept + [0] * 40)
    open_key = DOMAIN.open_block(made.parent(8), [0] * 8, "s")
    session = SessionContext(
        lineage=made,
        open_key=open_key,
        open_tokens=(0,) * 8,
        last_used_s=5.0,
        cuts=[blocks(1, 4)],
        cut_digest=digest_of(TOKENS[:128]),
        cut_conversation=DOMAIN.chain(TOKENS),
    )
    again = SessionContext.unpack(session.pack(), DOMAIN, 5.0)
    assert again == session
    assert (again.num_tokens, again.truncated_tokens) == (8 * 32 + 8, 96)
    more = kept + [0] * 200
    assert again.lineage.extend(more) == made.extend(more)


def test_a_session_saved_before_its_conversation_was_written_down_is_read():
    session = SessionContext(lineage=lineage(2), open_key=None, open_tokens=(), last_used_s=5.0, cuts=[blocks(1, 4)])
    *fields, conversation_keys, client_cuts, turns = msgspec.msgpack.decode(session.pack())
    assert (conversation_keys, client_cuts, turns) == ([], [], 0)
    assert SessionContext.unpack(msgspec.msgpack.encode(fields), DOMAIN, 5.0) == session
