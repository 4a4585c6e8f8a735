import pytest

from cache.tiers.base import BlockMissing, TierFull
from cache.tiers.null import NullTier


def test_a_tier_that_is_turned_off_takes_nothing_has_nothing_and_forgives():
    tier = NullTier(name="dram")
    out = bytearray(b"untouched")
    with pytest.raises(TierFull, match="dram"):
        tier.write(b"key", memoryview(b"data"))
    with pytest.raises(BlockMissing, match="dram"):
        tier.read(b"key", memoryview(out))
    tier.delete(b"key")
    assert (tier.capacity_bytes, tier.used_bytes()) == (0, 0)
    assert out == b"untouched"
