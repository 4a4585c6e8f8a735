import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.fleet.keys import BadSeal, Keys, SessionName

SECRET = bytes(range(32))
NAMES = st.builds(SessionName, tenant=st.text(max_size=4), session_id=st.text(max_size=4), salt=st.text(max_size=4))


@given(a=NAMES, b=NAMES)
def test_two_sessions_share_a_key_only_if_they_are_the_same(a, b):
    keys = Keys(SECRET)
    first, second = (keys.session(name, fingerprint="ff") for name in (a, b))
    assert (first.record == second.record) == (a == b)
    assert (first.name == second.name) == ((a.tenant, a.session_id) == (b.tenant, b.session_id))
    assert (first.tenant == second.tenant) == (a.tenant == b.tenant)


def test_another_secret_makes_other_names():
    name = SessionName("alice", "chat")
    ours, theirs = Keys(SECRET), Keys(bytes(32))
    assert ours.check != theirs.check
    assert ours.session(name, fingerprint="ff").member != theirs.session(name, fingerprint="ff").member


@given(data=st.binary(max_size=40), place=st.integers(0, 55), flip=st.integers(1, 255))
def test_a_seal_breaks_with_any_bit_and_in_any_other_place(data, place, flip):
    keys = Keys(SECRET)
    sealed = keys.seal(data, key="here")
    assert keys.unseal(sealed, key="here") == data
    broken = bytearray(sealed)
    broken[place % len(sealed)] ^= flip
    for bad, key in ((bytes(broken), "here"), (sealed, "there"), (sealed[:-1], "here"), (b"", "here")):
        with pytest.raises(BadSeal):
            keys.unseal(bad, key=key)
    with pytest.raises(BadSeal):
        Keys(bytes(32)).unseal(sealed, key="here")
