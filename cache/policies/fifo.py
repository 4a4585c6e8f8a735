"""Evicts first in, first out."""

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.policies.lru import LruPolicy


class FifoPolicy(LruPolicy):
    """A policy that evicts the oldest insert first; a hit does not count as a touch."""

    def touch(self, key: BlockKey) -> None:
        self._order.setdefault(key, None)
