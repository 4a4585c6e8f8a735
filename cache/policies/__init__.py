"""Eviction policies by name. The engine, the simulators and the property tests read this table
(`belady` is not in it: it needs the future). `cache.policy` in
app/settings/settings.py lists the names again, because the app does not import the cache; a test compares the two."""

from cache.policies.eviction_policy import PolicyFactory
from cache.policies.fifo import FifoPolicy
from cache.policies.lookahead import LookaheadPolicy
from cache.policies.lru import LruPolicy

POLICIES: dict[str, PolicyFactory] = {
    "lookahead": LookaheadPolicy,
    "lru": lambda returns: LruPolicy(),
    "fifo": lambda returns: FifoPolicy(),
}
