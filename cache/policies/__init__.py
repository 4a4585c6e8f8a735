"""Lists the eviction policies by name. The engine, the simulators and the property tests read this table (`belady` is
not in it: it needs the future). `cache.policy` in app/settings/sections.py lists the names again, because the app does
not import the cache; a test compares the two."""

from reprise.cache.policies.eviction_policy import PolicyFactory
from reprise.cache.policies.fifo import FifoPolicy
from reprise.cache.policies.lookahead import LookaheadPolicy
from reprise.cache.policies.lru import LruPolicy

POLICIES: dict[str, PolicyFactory] = {
    "lookahead": LookaheadPolicy,
    "lru": lambda returns: LruPolicy(),
    "fifo": lambda returns: FifoPolicy(),
}
