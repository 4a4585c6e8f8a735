import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BLOCK_TOKENS, KeyDomain, given_salt, is_exact, salt_of, token_bytes, typed_fields

FIELDS = st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=4), st.integers(-20, 300)), max_size=4)
TOKEN = st.integers(0, 2**32 - 1)
NAMES = {
    "secret": st.binary(max_size=80),
    "fingerprint": st.binary(max_size=20),
    "tenant": st.text(max_size=5),
    "salt": st.text(max_size=5),
}
DOMAINS = st.fixed_dictionaries(NAMES)


@given(salt=st.text(max_size=8).filter(lambda salt: not is_exact(salt)))
def test_exact_requests_have_a_domain_of_their_own(salt):
    exact, default = salt_of(salt, is_exact=True), salt_of(salt, is_exact=False)
    assert (is_exact(exact), is_exact(default)) == (True, False)
    assert given_salt(exact) == given_salt(default) == default == salt


def domain(**changes):
    return KeyDomain(**{"secret": b"secret", "fingerprint": b"model", "tenant": "me", "salt": "", **changes})


@given(left=FIELDS, right=FIELDS)
def test_typed_fields_are_equal_only_for_equal_tuples(left, right):
    same = [(type(value), value) for value in left] == [(type(value), value) for value in right]
    assert (typed_fields(*left) == typed_fields(*right)) == same


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("ab", "c"), ("a", "bc")),
        (("1",), (1,)),
        ((b"a",), ("a",)),
        (("", "a"), ("a", "")),
        ((), ("",)),
        ((12,), (1, 2)),
    ],
)
def test_fields_do_not_run_into_each_other(left, right):
    assert typed_fields(*left) != typed_fields(*right)


def test_a_lone_surrogate_from_a_json_body_is_a_name_like_any_other():
    assert typed_fields("\ud800") != typed_fields("\ud801")


@given(tokens=st.lists(TOKEN, max_size=5))
def test_token_bytes_are_little_endian_32_bit(tokens):
    assert token_bytes(tokens) == b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_is_refused(token):
    with pytest.raises(OverflowError):
        token_bytes([token])


@given(
    one=DOMAINS,
    changes=st.dictionaries(st.sampled_from(sorted(NAMES)), st.integers(0, 3), max_size=2),
    tokens=st.lists(TOKEN, min_size=32, max_size=32),
)
def test_equal_tokens_have_equal_keys_exactly_inside_a_domain(one, changes, tokens):
    other = {name: value[changes.get(name, 0) :] for name, value in one.items()}  # some lost their first letters
    left, right = KeyDomain(**one), KeyDomain(**other)
    same = one == other
    assert (left.root == right.root) == same
    assert (left.chain(tokens) == right.chain(tokens)) == same
    assert (left.open_block(left.root, [1], "s") == right.open_block(right.root, [1], "s")) == same


@pytest.mark.parametrize(
    "change",
    [
        {"secret": b"secreu"},
        {"secret": b"secret\0"},
        {"fingerprint": b"model2"},
        {"tenant": "you"},
        {"salt": "me"},
        {"tenant": "", "salt": "me"},
        {"tenant": "m", "salt": "e"},
    ],
)
def test_whatever_changes_opens_another_domain(change):
    assert domain().chain([1] * 32) != domain(**change).chain([1] * 32)


def test_every_byte_of_a_long_secret_counts():
    long = bytes(100)
    assert domain(secret=long).root != domain(secret=long[:-1] + b"\1").root
    assert domain(secret=long).root != domain(secret=long[:64]).root


@given(
    tokens=st.lists(st.integers(0, 1), max_size=5 * BLOCK_TOKENS),
    known=st.integers(0, 5),
    place=st.integers(0, 5 * BLOCK_TOKENS - 1),
)
def test_a_chain_continued_is_the_chain_from_scratch(tokens, known, place):
    keys = domain().chain(tokens)
    assert len(keys) == len(tokens) // BLOCK_TOKENS
    assert len(set(keys)) == len(keys), "equal blocks in different places are different"
    assert all(len(key) == 16 for key in keys)
    assert domain().chain(tokens, keys[:known]) == keys
    if place < len(tokens):
        edited = [*tokens[:place], 1 - tokens[place], *tokens[place + 1 :]]
        before = place // BLOCK_TOKENS
        assert domain().chain(edited)[:before] == keys[:before]
        assert not set(domain().chain(edited)[before:]) & set(keys), "whatever stands behind an edit is another block"


def test_an_open_block_belongs_to_its_session_its_tokens_and_its_prefix():
    names = domain()
    parent = names.chain([1] * 32)[0]
    keys = {
        names.open_block(names.root, [1], "s"),
        names.open_block(names.root, [1], "t"),
        names.open_block(names.root, [1, 1], "s"),
        names.open_block(parent, [1], "s"),
        names.open_block(names.root, [1] * 32, "s"),
        names.child(names.root, [1] * 32),
        names.root,
    }
    assert len(keys) == 7
