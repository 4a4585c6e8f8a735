"""Eviction policies by name: the server's own, and those that the papers may have compared theirs with."""

from cache.policies import POLICIES as OURS
from cache.policies.eviction_policy import PolicyFactory
from loadgen.sim.first_come import FirstComePolicy

POLICIES: dict[str, PolicyFactory] = {**OURS, "first-come": lambda returns: FirstComePolicy()}
