"""Evicts first in, first out."""

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.policies.lru import LruPolicy


class FifoPolicy(LruPolicy):
    """A policy that evicts the block that entered the tier first; being used does not keep it."""

    def touch(self, key: BlockKey) -> None:
        self._order.setdefault(key, None)
