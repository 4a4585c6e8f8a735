import pytest

from reprise.app.tenancy.configured_keys import make_keyring
from reprise.app.tenancy.key_file import add_key
from reprise.app.tenancy.keyring import LOCAL_TENANT, Key, KeyLimits, Keyring, digest_of
from tests.app.fakes import make_settings


def keyring_of(*keys: str) -> Keyring:
    return Keyring([Key(digest_of(key)) for key in keys])


def test_each_key_is_a_tenant_of_its_own():
    keyring = keyring_of("sk-alpha-1", "sk-beta-22")
    alpha, beta = keyring.tenant("Bearer sk-alpha-1"), keyring.tenant("bearer sk-beta-22")
    assert alpha is not None
    assert beta is not None
    assert alpha != beta
    assert "sk-alpha" not in alpha
    assert alpha == keyring_of("sk-alpha-1").tenant("Bearer sk-alpha-1")  # also after a restart


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "sk-alpha-1", "Basic sk-alpha-1", "Bearer sk-alpha-", "Bearer sk-alpha-1x"],
)
def test_anything_else_opens_nothing(header):
    assert keyring_of("sk-alpha-1").tenant(header) is None


def test_without_keys_everybody_is_local():
    assert keyring_of().tenant(None) == keyring_of().tenant("Bearer whatever") == LOCAL_TENANT
    assert keyring_of().is_admin(LOCAL_TENANT)


def test_keys_from_settings_and_file_are_one_ring(tmp_path):
    path = tmp_path / "keys.toml"
    key = add_key(path, "alice", admin=False)
    other = add_key(path, "root", admin=True)
    settings = make_settings(
        tmp_path,
        server={"keys_file": str(path), "api_keys": "sk-from-settings", "admin_keys": "sk-admin-settings"},
        limits={"key_requests_per_minute": 5},
    )
    keyring = make_keyring(settings)
    tenants = [keyring.tenant(f"Bearer {name}") for name in (key, other, "sk-from-settings", "sk-admin-settings")]
    assert None not in tenants
    assert len(set(tenants)) == len(keyring) == 4
    assert [keyring.is_admin(tenant) for tenant in tenants] == [False, True, False, True]
    assert {keyring.limits(tenant) for tenant in tenants} == {KeyLimits(requests_per_minute=5)}
    assert not keyring.is_admin("somebody")


def test_without_keys_the_limits_are_everybodys(tmp_path):
    keyring = make_keyring(make_settings(tmp_path, limits={"key_cache_gib": 0.5, "key_sessions": 3}))
    assert keyring.limits(LOCAL_TENANT) == KeyLimits(sessions=3, cache_bytes=1 << 29)
