"""Eviction policies by name; the settings, the simulator and the property tests read this table."""

from cache.policies.eviction_policy import PolicyFactory
from cache.policies.fifo import FifoPolicy
from cache.policies.lookahead import LookaheadPolicy
from cache.policies.lru import LruPolicy

POLICIES: dict[str, PolicyFactory] = {
    "lookahead": LookaheadPolicy,
    "lru": lambda returns: LruPolicy(),
    "fifo": lambda returns: FifoPolicy(),
}
