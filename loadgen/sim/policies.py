"""Lists the server's eviction policies by name. "first-come" is one more: FIFO by each session's first save, which
comes closer to what AttentionStore publishes for FIFO."""

from reprise.cache.policies import POLICIES
from reprise.cache.policies.eviction_policy import PolicyFactory
from reprise.loadgen.sim.first_come import FirstComePolicy

SIMULATED_POLICIES: dict[str, PolicyFactory] = {**POLICIES, "first-come": lambda returns: FirstComePolicy()}
