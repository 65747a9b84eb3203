"""The prefix cache: page pool, radix tree, eviction.  numpy only."""

from radix.adaptive import Adaptive
from radix.eviction import LFU, LRU, EvictionPolicy
from radix.explain import Eviction, EvictionLog, Outlined
from radix.forget import Forgotten
from radix.heads import PublicHeads
from radix.node import Hint
from radix.pins import Pin, Pinned, Pins
from radix.policies import policy_by_name
from radix.pool import PageError, PagePool
from radix.results import Insert, Lock, Match, StaleLock, StaleMatch
from radix.tree import RadixTree

__all__ = [
    "LFU",
    "LRU",
    "Adaptive",
    "Eviction",
    "EvictionLog",
    "EvictionPolicy",
    "Forgotten",
    "Hint",
    "Insert",
    "Lock",
    "Match",
    "Outlined",
    "PageError",
    "PagePool",
    "Pin",
    "Pinned",
    "Pins",
    "PublicHeads",
    "RadixTree",
    "StaleLock",
    "StaleMatch",
    "policy_by_name",
]
