"""Eviction policies by name; the settings, the simulator and the property tests find them here."""

from collections.abc import Callable

from cache.policies.base import EvictionPolicy
from cache.policies.fifo import FifoPolicy
from cache.policies.lookahead import LookaheadPolicy
from cache.policies.lru import LruPolicy

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lookahead": LookaheadPolicy,
    "lru": LruPolicy,
    "fifo": FifoPolicy,
}
