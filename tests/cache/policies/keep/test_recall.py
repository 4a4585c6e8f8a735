"""Tests which dropped blocks a message is about."""

from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.policies.keep.recall import choose

TOKENS = st.lists(st.integers(0, 40), max_size=12)


@given(
    dropped=st.dictionaries(st.integers(0, 30), TOKENS, max_size=12),
    kept=st.lists(TOKENS, max_size=8),
    query=TOKENS,
    most=st.integers(1, 6),
)
def test_only_dropped_blocks_come_back_and_no_more_than_may(dropped, kept, query, most):
    found = choose(list(dropped.items()), kept, query, most)
    assert len(set(found.places)) == len(found.places) <= most
    assert set(found.places) <= set(dropped)
    assert len(found.spared) == len(kept)
    related = {place for place, tokens in dropped.items() if set(tokens) & set(query)}
    assert all({*range(place - 3, place + 4)} & related for place in found.places)
    assert found == choose(list(reversed(dropped.items())), kept, query, most)


def blocks(*words):
    """A block with common tokens and a word of its own each; three of them stand together, then one alone."""
    return [(place, [1, 2, 3, word]) for place, word in zip((0, 1, 2, 9), words, strict=True)]


def test_a_hit_comes_first_and_brings_its_neighbours():
    dropped = blocks(10, 11, 12, 13)
    assert choose(dropped, [], [1, 11, 2], 4).places == [1, 2, 0]
    assert choose(dropped, [], [1, 11, 2], 2).places == [1, 2]
    assert choose(dropped, [], [13], 4).places == [9]


def test_words_that_all_share_are_about_nothing():
    found = choose(blocks(10, 11, 12, 13), [[1, 2]], [1, 2, 3, 99], 4)
    assert found == ([], [False])


def test_the_rarer_word_decides():
    dropped = blocks(10, 10, 12, 13)
    assert choose(dropped, [], [10, 12, 13], 1).places in ([2], [9])
    many = [(place, [10 if place in (0, 5) else 50 + place]) for place in range(20)]
    assert choose([*many, (30, [77])], [], [10, 77], 1).places == [30]


def test_what_has_much_less_to_do_with_it_stays_out():
    dropped = [(0, [11, 12, 13]), (5, [14, 20, 21]), (9, [15, 16, 22])]
    assert choose(dropped, [], [11, 12, 13, 14, 15, 16], 3).places == [0, 9]


def test_kept_blocks_around_what_the_message_is_about_are_spared():
    kept = [[1, 11], [1, 14], [1, 2], [1, 5], [1, 6]]
    found = choose(blocks(10, 11, 12, 13), kept, [11], 4)
    assert found.spared == [True, True, True, False, False]
    assert found.places[0] == 1
    assert choose(blocks(10, 11, 12, 13), [[11, 14, 15, 16]], [11, 14, 15, 16], 4).places == [], "it is there already"


def test_the_block_with_the_words_comes_before_those_that_have_more_around_them():
    dropped = [(0, [10]), (1, [20, 21, 22]), (2, [11]), (3, [12]), (4, [])]
    assert choose(dropped, [], [10, 11, 12, 20, 21, 22], 1).places == [1]
