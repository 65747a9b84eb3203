"""The prefix cache: page pool, radix tree, eviction.  numpy only."""

from radix.eviction import LFU, LRU, EvictionPolicy, policy_by_name
from radix.explain import Eviction, EvictionLog, Outlined
from radix.pool import PageError, PagePool
from radix.results import Insert, Lock, Match, StaleLock, StaleMatch
from radix.tree import RadixTree

__all__ = [
    "LFU",
    "LRU",
    "Eviction",
    "EvictionLog",
    "EvictionPolicy",
    "Insert",
    "Lock",
    "Match",
    "Outlined",
    "PageError",
    "PagePool",
    "RadixTree",
    "StaleLock",
    "StaleMatch",
    "policy_by_name",
]
