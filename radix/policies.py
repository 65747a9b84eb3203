"""The eviction policies by the names that users know."""

from __future__ import annotations

from radix.adaptive import Adaptive
from radix.eviction import LFU, LRU, EvictionPolicy

POLICIES: tuple[EvictionPolicy, ...] = (LRU(), LFU(), Adaptive())


def policy_by_name(name: str) -> EvictionPolicy:
    """The policy that users call `name`.  Raises ValueError with the known names."""
    for policy in POLICIES:
        if policy.name == name:
            return policy
    raise ValueError(f"no eviction policy {name!r}; there are {', '.join(policy.name for policy in POLICIES)}")
