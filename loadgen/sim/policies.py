"""Eviction policies by name: the server's own, and what the papers may have compared theirs with."""

from collections.abc import Callable

from cache.policies import POLICIES as OURS
from cache.policies.base import EvictionPolicy
from loadgen.sim.first_come import FirstComePolicy

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {**OURS, "first-come": FirstComePolicy}
