"""Pins: prefixes that stay in the tree, used or not, until their time is up.

    root --[ head, pinned ]--+--[ pinned too ]--[ not pinned ]         a pin ends on a page border and keeps the whole
                             +--[ not pinned ]                         path to the root, as the receipt of a lock does

- Every use of the whole of a pinned prefix by its namespace begins its time anew.
- A namespace pins no more than its share of the pool, and all of them together no more than theirs.  Of what does not
  fit, the longest part from the root on that fits is pinned.
- Pins are promises to keep what others do not need more: whoever owns the pool may let one go when it is stuck.

There is no clock: whoever calls says what time it is.  Expiry costs in proportion to what has expired (a pin that was
used meanwhile is looked at once for each of its times to live, at most).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from radix.node import TOKEN_BYTES, Node
from radix.results import Lock, Match, StaleLock
from radix.tree import RadixTree

DEFAULT_SHARE = 0.25
# All namespaces together pin no more than this share of the pool, or than one may alone if that is more.
TOTAL_SHARE = 0.5

# Why less was pinned than was asked for; "" for nothing less.
Shortfall = Literal["", "page_border", "not_cached", "namespace_share", "total_share"]


class Pinned(NamedTuple):
    """What came of a wish: so many tokens from the root on are pinned, and why not the others."""

    tokens: int
    shortfall: Shortfall


class Pin:
    """A pinned prefix.

    name     by which it can be let go
    asked    tokens that were to be pinned; more than there are when not all could be
    ttl      seconds from one use to the next for which it is kept
    expires  when its time is up, by the caller's clock
    hits     uses of the whole of it
    lock     its receipt
    """

    __slots__ = ("asked", "expires", "hits", "lock", "name", "ttl")

    def __init__(self, name: int, lock: Lock, asked: int, ttl: float, expires: float) -> None:
        self.name = name
        self.lock = lock
        self.asked = asked
        self.ttl = ttl
        self.expires = expires
        self.hits = 0

    @property
    def namespace(self) -> str:
        """Whose prefix it is."""
        return self.lock.namespace

    @property
    def pages(self) -> int:
        """Pages from the root on."""
        node = self.lock.node
        return node.start + len(node.pages)


class Pins:
    """The pins of one tree.  `max_share`: the part of the pool (0 to 1) that one namespace may pin."""

    def __init__(self, tree: RadixTree, num_pages: int, page_size: int, max_share: float = DEFAULT_SHARE) -> None:
        self._tree = tree
        self._forest = tree.forest
        self._page_size = page_size
        self.most_of_one = int(num_pages * max_share)
        self.most_of_all = int(num_pages * max(max_share, TOTAL_SHARE))
        # A public head may be pinned by several namespaces, and by each for another time.
        self._by_place: dict[tuple[Node, str], Pin] = {}
        # (no later than it expires, name, pin), one entry for each; entries of those that went are passed over.
        self._queue: list[tuple[float, int, Pin]] = []
        self._names = 0
        self._now = 0.0
        # Running totals: pins whose time was up, and pins that were let go to make room.
        self.expired = 0
        self.yielded = 0

    def __len__(self) -> int:
        return len(self._by_place)

    def __iter__(self) -> Iterator[Pin]:
        """In the order in which they were made."""
        return iter(self._by_place.values())

    @property
    def pages(self) -> int:
        """Pages that pins keep; each counts once."""
        return sum(self._forest.pinned_pages.values())

    @property
    def next_expiry(self) -> float | None:
        """No pin's time is up before this; None when there is none."""
        return self._queue[0][0] if self._by_place else None

    # Making, using, ending ---------------------------------------------------------------------------------------

    def pin(self, namespace: str, tokens: bytes, ttl: float) -> Pinned:
        """Pin what is cached of the run `tokens` (packed int32) for `ttl` seconds from now on.

        A prefix that is pinned already has the later of both ends, and the longer of both times to live.
        """
        asked = len(tokens) // TOKEN_BYTES
        whole = asked // self._page_size
        match = self._tree.match(namespace, tokens, whole * self._page_size, touch=False)
        shortfall: Shortfall = "" if whole * self._page_size == asked else "page_border"
        end = len(match.pages)
        if end < whole:
            shortfall = "not_cached"
        most, reason = self._most(namespace, match.kept_by_pins(), self._public_pages(tokens))
        if end > most:
            end, shortfall = most, reason
        if not end:
            return Pinned(0, shortfall)
        lock = self._keep(self._tree.match(namespace, tokens, end * self._page_size, touch=False))
        place = lock.node, namespace
        pin = self._by_place.get(place)
        if pin is not None:
            self._forest.unpin_path(lock.node)
            pin.asked = max(pin.asked, asked)
            pin.ttl = max(pin.ttl, ttl)
            pin.expires = max(pin.expires, self._now + ttl)
        else:
            self._names += 1
            pin = Pin(self._names, lock, asked, ttl, self._now + ttl)
            self._by_place[place] = pin
            heapq.heappush(self._queue, (pin.expires, pin.name, pin))
        return Pinned(end * self._page_size, shortfall)

    def _keep(self, match: Match) -> Lock:
        """A receipt on the matched pages, which are whole ones, at least one, and of this moment."""
        node, end = match.node, len(match.pages)
        assert node is not None, "there is nothing to pin"
        # The beginning of a branch has no pages: the head that it hangs from is all that is matched.
        while node.start >= end and node.parent is not None:
            node = node.parent
        if node.start + len(node.pages) != end:
            node = self._forest.split(node, end - node.start)
        self._forest.pin_path(node)
        return Lock(node, namespace=match.namespace)

    def _public_pages(self, tokens: bytes) -> int:
        return self._tree.public_tokens(tokens) // self._page_size

    def _most(self, namespace: str, here: int, public: int) -> tuple[int, Shortfall]:
        """How many pages of a run may be pinned, and what keeps it from being more.

        `here`: those that are pinned; `public`: those of a public head, which count for the namespace of the heads.
        """
        pinned = self._forest.pinned_pages
        most_of_all = here + max(self.most_of_all - self.pages, 0)
        most = max(here, public) + max(self.most_of_one - pinned[namespace], 0)
        if here < public:
            heads = here + max(self.most_of_one - pinned[self._tree.public_namespace], 0)
            most = heads if heads < public else most
        return (most, "namespace_share") if most < most_of_all else (most_of_all, "total_share")

    def used(self, lock: Lock, tokens: int) -> None:
        """A request with this receipt uses the first `tokens` tokens of its path: pins among them begin anew.

        The last token of a prompt is never taken from the cache, so it need not be among them.
        """
        if not self._by_place:
            return
        at: Node | None = lock.node
        while at is not None:
            if at.pins:
                pin = self._by_place.get((at, lock.namespace))
                if pin is not None and tokens + 1 >= pin.pages * self._page_size:
                    pin.hits += 1
                    pin.expires = max(pin.expires, self._now + pin.ttl)
            at = at.parent

    def expire(self, now: float) -> None:
        """It is `now`: let those go whose time is up.  To be called before anything that depends on the time."""
        self._now = now
        queue = self._queue
        while queue and queue[0][0] <= now:
            _, _, pin = heapq.heappop(queue)
            if not pin.lock.held:
                continue
            if pin.expires > now:
                heapq.heappush(queue, (pin.expires, pin.name, pin))
                continue
            self.expired += 1
            self.unpin(pin)

    def unpin(self, pin: Pin) -> None:
        """Let one go.  Its pages stay as long as they are used like any others.

        Raises StaleLock when that has been done before.
        """
        if not pin.lock.held:
            raise StaleLock("this pin has been let go already")
        pin.lock.held = False
        del self._by_place[pin.lock.node, pin.namespace]
        self._forest.unpin_path(pin.lock.node)
        if len(self._queue) > 2 * len(self._by_place) + 16:
            self._queue = [entry for entry in self._queue if entry[2].lock.held]
            heapq.heapify(self._queue)

    def give_way(self) -> bool:
        """Let go of the pin that would expire first, of those that end where only pins hold pages and none goes on.

        False when there is none: then no pin stands in anybody's way.
        """
        ends = Counter(node for node, _ in self._by_place)
        alone = [pin for pin in self if pin.lock.node.locks == ends[pin.lock.node]]
        if not alone:
            return False
        self.yielded += 1
        self.unpin(min(alone, key=lambda pin: (pin.expires, pin.name)))
        return True

    # Looking -----------------------------------------------------------------------------------------------------

    def find(self, name: int) -> Pin | None:
        """The pin of this name."""
        return next((pin for pin in self if pin.name == name), None)

    def of_prefix(self, namespace: str, tokens: bytes) -> list[Pin]:
        """The pins of prefixes that begin with `tokens`; also those that were asked to, and are shorter."""
        found = []
        for pin in self:
            if pin.namespace != namespace or pin.asked * TOKEN_BYTES < len(tokens):
                continue
            prefix = self.tokens(pin)
            if prefix.startswith(tokens[: len(prefix)]):
                found.append(pin)
        return found

    def tokens(self, pin: Pin) -> bytes:
        """The pinned tokens, packed."""
        return pin.lock.node.path_tokens()

    def seconds_left(self, pin: Pin) -> float:
        """For how long it is kept from the last `expire` on."""
        return pin.expires - self._now

    def idle_pages(self) -> int:
        """Pages that nobody but pins keeps."""
        seen: set[Node] = set()
        pages = 0
        for node, _ in self._by_place:
            at: Node | None = node
            while at is not None and at not in seen:
                seen.add(at)
                pages += len(at.pages) if at.locks == at.pins else 0
                at = at.parent
        return pages

    def check(self) -> None:
        """Every pin is in the tree, once, and waits for its end.  Raises AssertionError."""
        ends: Counter[Node] = Counter()
        for (node, namespace), pin in self._by_place.items():
            assert pin.namespace == namespace, "a pin is known by whose it is"
            assert pin.lock.held, "a pin has a receipt"
            assert pin.lock.node is node, "a pin is known by its node"
            at: Node | None = node
            while at is not None:
                ends[at] += 1
                at = at.parent
        assert sum(len(node.pages) for node in ends) == self.pages, "pages that pins keep"
        for node, count in ends.items():
            assert node.pins == count, f"a node has {node.pins} pins, but {count} go through it"
        waiting = {id(pin): moment for moment, _, pin in self._queue if pin.lock.held}
        assert len(waiting) == sum(pin.lock.held for _, _, pin in self._queue) == len(self._by_place), "one entry each"
        assert all(waiting[id(pin)] <= pin.expires for pin in self), "a pin would expire too late"
        assert all(count <= self.most_of_one for count in self._forest.pinned_pages.values()), "a namespace's share"
        assert self.pages <= self.most_of_all, "the share of all"
