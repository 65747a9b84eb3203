"""SGLang's own Python radix cache behind the benchmark's interface, with its own page allocator.

Needs `sglang` with all that its imports ask for; tried with 0.5.23.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


class SglangCycle:
    """One request's way through SGLang's `RadixCache`, as its scheduler drives it."""

    name = "sglang"

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        common = {"dtype": torch.float16, "device": "cpu", "kvcache": None, "need_sort": False}
        self.allocator: Any
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(size=num_tokens, **common)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                size=num_tokens // page_size * page_size, page_size=page_size, **common
            )
        self.cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
            )
        )

    def prepare(self, ids: array[int], prompt: int) -> tuple[array[int], array[int]]:
        """Containers as the scheduler has them: all ids, and the prompt but for its last."""
        whole = array("q", ids)
        return whole, whole[: prompt - 1]

    def match(self, request: tuple[array[int], array[int]]) -> int:
        """Match only."""
        return int(self.cache.match_prefix(MatchPrefixParams(key=RadixKey(request[1]))).device_prefix_len)

    def start(self, request: tuple[array[int], array[int]]) -> tuple[int, Any]:
        """Match, lock, and take slots for the rest, evicting if there are too few."""
        cache = self.cache
        found = cache.match_prefix(MatchPrefixParams(key=RadixKey(request[1])))
        node = found.last_device_node
        slots = cache.path_device_indices(node)
        cache.inc_lock_ref(node)
        hit = len(slots)
        size = self.page_size
        needed = -(-(len(request[0]) - hit) // size) * size
        short = needed - self.allocator.available_size()
        if short > 0:
            cache.evict(EvictParams(num_tokens=short))
        fresh = self.allocator.alloc(needed)
        assert fresh is not None, "the benchmark's pool is too small"
        return hit, (request[0], node, hit, torch.cat((slots, fresh)))

    def finish(self, state: Any) -> None:
        """Insert prompt and output, free duplicates and the tail, unlock."""
        ids, node, hit, slots = state
        whole = len(ids) // self.page_size * self.page_size
        result = self.cache.insert(InsertParams(key=RadixKey(ids), value=slots[:whole].to(torch.int64, copy=True)))
        self.allocator.free_segment(slots[hit : result.prefix_len], start_pos=hit)
        self.allocator.free_segment(slots[whole:], start_pos=whole)
        self.cache.dec_lock_ref(node)
