import pytest

from tests.cache.storage.disk_helpers import make_tier


@pytest.fixture
def tier(tmp_path):
    tier = make_tier(tmp_path)
    tier.open()
    yield tier
    tier.close()
