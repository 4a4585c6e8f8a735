"""Tests what every scorer promises, and what each of them keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.cache.policies.keep.block_scorer import CutBlocks, with_guesses

BLOCK = st.lists(st.integers(0, 30), min_size=32, max_size=32)
MAYBE = st.one_of(st.none(), st.floats(-1, 5))


@st.composite
def cut_blocks(draw):
    tokens = draw(st.lists(BLOCK, max_size=20))
    known = st.lists(MAYBE, min_size=len(tokens), max_size=len(tokens))
    return CutBlocks(
        tokens=tokens, newest=draw(st.lists(st.integers(0, 30), max_size=9)), attention=draw(known)
    )  # fmt: skip


def blocks(tokens, *, newest=(), attention=()):
    return CutBlocks(tokens=tokens, newest=newest, attention=attention)


@pytest.mark.parametrize("name", BLOCK_SCORERS)
@given(known=cut_blocks())
def test_a_scorer_scores_every_block_or_none_and_the_same_again(name, known):
    scorer = BLOCK_SCORERS[name]()
    scores = scorer.score(known)
    assert scores is None or len(scores) == len(known.tokens)
    assert scores == BLOCK_SCORERS[name]().score(known) == scorer.score(known)


def test_oldest_leaves_the_choice_to_age():
    assert BLOCK_SCORERS["oldest"]().score(blocks([[1], [2]])) is None


def test_attended_wants_what_was_looked_at_and_guesses_the_rest():
    scorer = BLOCK_SCORERS["attended"]()
    assert scorer.score(blocks([[1], [2], [3]], attention=[0.5, None, 2.5])) == [0.5, 1.5, 2.5]
    assert scorer.score(blocks([[1], [2]], attention=[None, None])) is None


def episode(words, count, rng):
    return [rng.choices(words, k=32) for _ in range(count)]


@given(known=st.lists(MAYBE, max_size=9))
def test_a_guess_is_in_the_middle_of_what_is_known(known):
    guessed = with_guesses(known)
    values = [value for value in known if value is not None]
    if not values:
        assert guessed is None
        return
    assert [new for new, old in zip(guessed, known, strict=True) if old is not None] == values
    assert all(min(values) <= value <= max(values) for value in guessed)
