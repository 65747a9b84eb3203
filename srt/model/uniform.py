"""One uniform number for each (seed, position): the whole randomness of sampling, without any state.

A counter-based generator in the manner of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011),
with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) as its mixing function.  Since the number depends
on nothing but its key, a request that is retracted and comes back, or runs in other company, draws the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BITS = 48


def uniforms(seeds: Iterable[int], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """A number for each seed (any int, taken modulo 2**64) and position (number of tokens before the sampled one).

    The numbers are odd multiples of 2**-49, so strictly between 0 and 1, and stay below 1 when multiplied by a
    sum and rounded.
    """
    keys = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(keys + _GAMMA) ^ (positions.astype(np.uint64) * _GAMMA + np.uint64(1)))
    return ((mixed >> np.uint64(64 - _BITS)).astype(np.float64) + 0.5) * 2.0**-_BITS


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
