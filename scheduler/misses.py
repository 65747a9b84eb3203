"""Why the reuse of a prefix stopped where it did: the report that goes with every first output."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from radix import Eviction, EvictionLog, RadixTree
from scheduler.request import Request
from srt.cache_messages import CacheReport
from srt.messages import NAMESPACE_SEPARATOR

# Tokens shown on both sides of the place where reuse stopped.
SHOWN_TOKENS = 8


def tenant_of(namespace: str) -> str:
    """Whose namespace it is."""
    return namespace.split(NAMESPACE_SEPARATOR)[0]


class Misses:
    """Explains matches.  Keeps a bounded log of what was evicted."""

    def __init__(self, tree: RadixTree, page_size: int) -> None:
        self._tree = tree
        self._log = EvictionLog(page_size)
        # The reason for which pages are being evicted, as of the plan that is being made, and the tenant it is for.
        self.pressure = ("", "")
        self.now = 0.0

    def evicted(self, namespace: str, tokens: bytes, start: int) -> None:
        """Tokens `[start, end)` of a run are about to leave."""
        self._log.add(namespace, tokens, start, Eviction(self.now, *self.pressure))

    def report(self, request: Request, caches: bool, server_caches: bool) -> CacheReport:
        """For a request that has just been admitted."""
        position = request.computed
        tokens = request.key
        prompt_next = tokens[4 * position : 4 * (position + SHOWN_TOKENS)]
        before = tokens[4 * max(0, position - SHOWN_TOKENS) : 4 * position]
        cached_next = b""
        evicted_seconds_ago = None
        detail = ""
        if not caches:
            reason = "bypassed"
            detail = "the request asked for it" if server_caches else "the radix cache is disabled"
        elif position >= request.match_limit:
            reason = "all_cached"
            if request.match_limit < request.known - 1:
                reason = "logprobs"
        else:
            namespace = request.message.namespace
            _, cached_next = self._tree.following(namespace, tokens, SHOWN_TOKENS)
            eviction = self._log.find(namespace, tokens, position)
            if eviction is None and position < self._tree.public_tokens(tokens):
                eviction = self._log.find(self._tree.public_namespace, tokens, position)
            if eviction is not None:
                reason = "evicted"
                evicted_seconds_ago = self.now - eviction.at
                # What others ask for is not told, not even how long it is.
                detail = eviction.reason if eviction.whom == request.message.tenant else "room was needed"
            elif self._elsewhere(namespace, tokens) > position:
                reason = "other_namespace"
            elif cached_next:
                reason = "diverged"
            else:
                reason = "extended" if position else "first_seen"
        message, message_offset = _message_at(request.message.message_starts, position)
        return CacheReport(
            cached_tokens=position,
            disk_tokens=request.disk_tokens,
            computed_tokens=request.known - position,
            reason=reason,  # type: ignore[arg-type]
            position=position,
            cached_next=cached_next,
            prompt_next=prompt_next,
            before=before,
            evicted_seconds_ago=evicted_seconds_ago,
            detail=detail,
            message=message,
            message_offset=message_offset,
        )

    def _elsewhere(self, namespace: str, tokens: bytes) -> int:
        """The longest match in the other namespaces of the same tenant; other tenants' are nobody's business."""
        tenant = tenant_of(namespace)
        others = (other for other in self._tree.namespaces() if other != namespace)
        mine = (other for other in others if tenant_of(other) == tenant)
        return max((self._tree.following(other, tokens, 0)[0] for other in mine), default=0)


def _message_at(packed_starts: bytes, position: int) -> tuple[str, int]:
    """The name of the message that a token is part of, and its place in it."""
    starts = array("i", packed_starts)
    index = bisect_right(starts, position) - 1
    if index < 0:
        return "", 0
    name = f"messages[{index}]" if index + 1 < len(starts) else "generation_prompt"
    return name, position - starts[index]
