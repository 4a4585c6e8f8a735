"""Tests how texts are compared by their tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.policies.keep.words import WordWeights, cosine

TOKENS = st.lists(st.integers(0, 20), max_size=40)


@given(texts=st.lists(TOKENS, min_size=1, max_size=6), a=TOKENS, b=TOKENS)
def test_a_cosine_is_one_of_itself_and_symmetric(texts, a, b):
    words = WordWeights(texts)
    one, two = words.vector(a), words.vector(b)
    assert cosine(one, two) == pytest.approx(cosine(two, one))
    assert -1e-9 <= cosine(one, two) <= 1 + 1e-9
    assert cosine(one, one) == pytest.approx(1 if a else 0)


def test_what_only_one_text_has_weighs_more_than_what_all_have():
    words = WordWeights([[1, 2], [1, 3], [1, 4]])
    assert words.rarity(2) > 5 * words.rarity(1)
    assert words.rarity(9) > words.rarity(2)
    assert cosine(words.vector([1, 2]), words.vector([2, 5])) > cosine(words.vector([1, 2]), words.vector([1, 5]))


def test_a_vector_has_no_more_tokens_than_it_may_and_those_with_weight():
    words = WordWeights([list(range(200)), list(range(100))])
    vector = words.vector(range(200))
    assert len(vector) == 96
    assert min(vector) >= 100
