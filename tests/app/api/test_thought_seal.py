from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.api.thought_seal import ThoughtSeal

SEAL = ThoughtSeal(b"secret" * 5)


@given(st.text())
def test_a_thought_comes_back_as_it_was(thought):
    seal = SEAL.seal(thought)
    assert ThoughtSeal(b"secret" * 5).open(seal) == SEAL.open(seal) == thought.encode("utf-8", "replace").decode()
    assert seal == SEAL.seal(thought)
    assert seal.isascii()


@pytest.mark.parametrize("sealed", ["", "x", "Zm9v", "ä", "EqQBCgIYAhIM", ThoughtSeal(b"another").seal("Hm.")])
def test_what_another_server_sealed_is_not_opened(sealed):
    assert SEAL.open(sealed) is None


@given(st.integers(0), st.sampled_from("ABC+/xyz"))
def test_what_was_changed_is_not_opened(place, letter):
    seal = SEAL.seal("Hm. So be it.")
    place %= len(seal.rstrip("="))
    changed = seal[:place] + letter + seal[place + 1 :]
    assert SEAL.open(changed) in ((None,) if SEAL.seal("Hm. So be it.") != changed else ("Hm. So be it.",))


def test_the_key_is_not_the_secret_itself(tmp_path: Path):
    assert b"secret" not in SEAL._key
