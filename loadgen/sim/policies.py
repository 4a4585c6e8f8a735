"""Lists the server's eviction policies by name, and one more with which the papers may have compared theirs."""

from reprise.cache.policies import POLICIES
from reprise.cache.policies.eviction_policy import PolicyFactory
from reprise.loadgen.sim.first_come import FirstComePolicy

SIMULATED_POLICIES: dict[str, PolicyFactory] = {**POLICIES, "first-come": lambda returns: FirstComePolicy()}
