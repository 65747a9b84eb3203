"""The waiting requests: in which order they are looked at, and which of them had better wait a little longer.

Everything here is kept up to date as things change, so that a plan costs nothing for those that it does not look at:

- The order is the policy's; in most of them a request moves only when its match changes.
- A match changes only where the tree changes.  Waiting requests are also sorted by their tokens: those that share more
  than the first `start` tokens with a changed run stand side by side, and only they are visited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sortedcontainers import SortedKeyList

from scheduler.holdings import Holdings
from scheduler.policy import Policy
from scheduler.request import Request, common_prefix_tokens

# Requests that share so many tokens, which one of them computes now, do not compute them twice: the others wait.  They
# wait to the end of what is shared, since the rest of it takes no longer to come than to compute it again.
SHARE_TOKENS = 32


class WaitingQueue:
    """Requests that are not admitted yet, or were retracted."""

    def __init__(self, holdings: Holdings, policy: Policy) -> None:
        self._holdings = holdings
        self._policy = policy
        # In order of arrival, but for retracted ones, which come back at the end.
        self._requests: dict[str, Request] = {}
        self._by_tokens: dict[str, SortedKeyList[Request]] = {}
        self._stale: dict[str, Request] = {}
        self._of_tenant: Counter[str] = Counter()
        # Who gives way first when the queue is full: the least urgent, and of those the newest.  Retracted requests
        # have been admitted, and stay.
        self._sheddable: SortedKeyList[Request] = SortedKeyList(key=lambda r: (r.message.priority, -r.order))
        holdings.on_publish.append(self._published)
        holdings.on_evict.append(self._evicted)
        holdings.on_forget.append(self._forgotten)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def ordered(self, now: float) -> Iterator[Request]:
        """In the policy's order.  Those yielded already may be removed on the way."""
        self.refresh()
        return self._policy.ordered(now)

    def add(self, request: Request) -> None:
        """A request arrives, or comes back."""
        request.awaits = None
        if self._policy.uses_matches and self._holdings.caches(request):
            request.hint_tokens = self._holdings.match_length(request)
            namespace = request.message.namespace
            if namespace not in self._by_tokens:
                self._by_tokens[namespace] = SortedKeyList(key=lambda waiting: waiting.key)
            self._by_tokens[namespace].add(request)
        self._requests[request.rid] = request
        self._of_tenant[request.message.tenant] += 1
        if not request.retractions:
            self._sheddable.add(request)
        self._policy.add(request)

    def remove(self, request: Request) -> None:
        """Raises KeyError when the request does not wait."""
        del self._requests[request.rid]
        self._policy.remove(request)
        self._of_tenant[request.message.tenant] -= 1
        if not self._of_tenant[request.message.tenant]:
            del self._of_tenant[request.message.tenant]
        if not request.retractions:
            self._sheddable.remove(request)
        self._stale.pop(request.rid, None)
        self._holdings.tier.leave(request)
        neighbours = self._by_tokens.get(request.message.namespace)
        if neighbours is not None and request in neighbours:
            neighbours.remove(request)
            if not neighbours:
                del self._by_tokens[request.message.namespace]

    def count(self, tenant: str) -> int:
        """Waiting requests of a tenant."""
        return self._of_tenant[tenant]

    def least(self) -> Request | None:
        """Who gives way when the queue is full; None when nobody may."""
        return self._sheddable[0] if self._sheddable else None

    def arrived_before(self, moment: float) -> list[Request]:
        """Requests that have waited since before `moment` for their first admission."""
        late = []
        for request in self._requests.values():
            if request.retractions:
                continue
            if request.arrival >= moment:
                break
            late.append(request)
        return late

    def oldest_wait(self, now: float) -> float:
        """Seconds since the arrival of whoever has waited longest."""
        return max((now - request.arrival for request in self._requests.values()), default=0.0)

    # ---- matches -------------------------------------------------------------------------------------------

    def _published(self, namespace: str, tokens: bytes, start: int) -> None:
        """The tree has taken tokens `[start, end)` of a run."""
        tree = self._holdings.tree
        for request, shared in self._sharing(namespace, tokens, start):
            # What parts from a head at another page hangs from another place than the run that it shares more with.
            if tree.public_tokens(tokens) != tree.public_tokens(request.key):
                self._stale[request.rid] = request
            else:
                self._set_hint(request, max(request.hint_tokens, min(shared, request.match_limit)))
        self._head_changed(namespace, tokens, start)

    def _evicted(self, namespace: str, tokens: bytes, start: int) -> None:
        """Tokens `[start, end)` of a run are about to leave the tree; another run may match as far, or nearly."""
        for request, _ in self._sharing(namespace, tokens, start):
            self._stale[request.rid] = request
        self._head_changed(namespace, tokens, start)

    def _head_changed(self, namespace: str, tokens: bytes, start: int) -> None:
        """Where part of a public head has come or is about to go, it does so for the other namespaces too."""
        public = self._holdings.tree.public_tokens(tokens)
        if start >= public:
            return
        for name in self._by_tokens:
            if name != namespace:
                for request, _ in self._sharing(name, tokens[: 4 * public], start):
                    self._stale[request.rid] = request

    def _forgotten(self) -> None:
        """Parts of the tree are gone, on demand: any match may be shorter."""
        if self._by_tokens:
            self._stale.update(self._requests)

    def refresh(self) -> None:
        """Match those again that have lost something to eviction."""
        for request in self._stale.values():
            self._set_hint(request, self._holdings.match_length(request))
        self._stale.clear()

    def _set_hint(self, request: Request, tokens: int) -> None:
        if tokens != request.hint_tokens:
            old, request.hint_tokens = request.hint_tokens, tokens
            self._policy.moved(request, old)

    def _sharing(self, namespace: str, tokens: bytes, start: int) -> list[tuple[Request, int]]:
        """Waiting requests that share more than `start` leading tokens with `tokens`, and how many they share."""
        neighbours = self._by_tokens.get(namespace)
        if neighbours is None:
            return []
        middle = neighbours.bisect_key_left(tokens)
        found = []
        for places in (range(middle, len(neighbours)), range(middle - 1, -1, -1)):
            for place in places:
                request = neighbours[place]
                shared = common_prefix_tokens(tokens, request.key)
                if shared <= start:
                    break
                found.append((request, shared))
        return found

    def forget_matches(self) -> None:
        """The cache is empty."""
        self._stale.clear()
        for request in self._requests.values():
            self._set_hint(request, 0)

    def check(self) -> None:
        """Every match and every place in the order is what it would be if it were computed now.

        Raises AssertionError.
        """
        self.refresh()
        assert sum(map(len, self._by_tokens.values())) in (0, sum(map(self._holdings.caches, self)))
        self._policy.check()
        assert self._of_tenant == Counter(request.message.tenant for request in self), "waiting requests by tenant"
        assert len(self._sheddable) == sum(not request.retractions for request in self), "who may give way"
        for request in self:
            if self._policy.uses_matches and self._holdings.caches(request):
                actual = self._holdings.match_length(request)
                assert request.hint_tokens == actual, f"{request.rid}: match {request.hint_tokens}, should be {actual}"

    # ---- sharing what is being computed ---------------------------------------------------------------------

    def awaits_shared_prefix(self, request: Request, running: list[Request]) -> bool:
        """Whether a running request is about to publish more of a prefix that both share than is cached now."""
        if not self._holdings.caches(request):
            return False
        if request.awaits is not None:
            other, reach = request.awaits
            if other.slot is not None and other.cached < reach:
                return True
            request.awaits = None
        page_size = self._holdings.page_size
        matched: int | None = None
        for other in running:
            will_publish = len(other.key) // 4 // page_size * page_size
            if other.cached >= will_publish or not self._holdings.stores(other):
                continue
            common = request.match_limit
            if other.message.namespace != request.message.namespace:
                common = min(common, self._holdings.tree.public_tokens(request.key))
                if common < SHARE_TOKENS:
                    continue
            if matched is None:
                exact = self._policy.uses_matches and not self._stale
                matched = request.hint_tokens if exact else self._holdings.match_length(request)
            needed = max(matched + 1, SHARE_TOKENS)
            reach = min(common, will_publish)
            last = slice(4 * (needed - 1), 4 * needed)
            # Strangers mostly differ there, which is seen faster than how much they share.
            if reach >= needed and request.key[last] == other.key[last]:
                reach = min(reach, common_prefix_tokens(request.key, other.key))
                if reach >= needed:
                    request.awaits = (other, min(will_publish, -(-reach // page_size) * page_size))
                    return True
        return False
