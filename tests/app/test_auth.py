import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.auth import LOCAL_TENANT, Keyring, load_tenant_secret


def test_each_key_is_a_tenant_of_its_own():
    keyring = Keyring(api_keys=("sk-alpha-1", "sk-beta-22"))
    alpha, beta = keyring.tenant("Bearer sk-alpha-1"), keyring.tenant("bearer sk-beta-22")
    assert alpha is not None
    assert beta is not None
    assert alpha != beta
    assert "sk-alpha" not in alpha
    assert alpha == Keyring(api_keys=("sk-alpha-1",)).tenant("Bearer sk-alpha-1")  # also after a restart


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "sk-alpha-1", "Basic sk-alpha-1", "Bearer sk-alpha-", "Bearer sk-alpha-1x"],
)
def test_anything_else_opens_nothing(header):
    assert Keyring(api_keys=("sk-alpha-1",)).tenant(header) is None


def test_without_keys_everybody_is_local():
    assert Keyring(api_keys=()).tenant(None) == Keyring(api_keys=()).tenant("Bearer whatever") == LOCAL_TENANT


def test_the_secret_survives_and_is_ours_alone(tmp_path):
    directory = tmp_path / "state"
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(load_tenant_secret, [directory] * 32))
    assert len(secrets) == 1  # servers that start at once agree
    assert len(secrets.pop()) == 32
    assert stat.S_IMODE((directory / "tenant_secret").stat().st_mode) == 0o600
    assert [path.name for path in directory.iterdir()] == ["tenant_secret"]


def test_a_damaged_secret_is_refused(tmp_path):
    (tmp_path / "tenant_secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged"):
        load_tenant_secret(tmp_path)
