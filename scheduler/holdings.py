"""The one place where requests take pages and give them back.

A page has one reference for every owner: each request that has it in its table, and the tree if the tree holds
it.  A page becomes free when its last owner lets go, so it never matters who lets go first.

    table of a request:   | tree's, matched | tree's, published | its own, full | its own, partly filled |
                          0              cached at            cached          computed (floor)          computed
                                         admission

While a step is in flight it may read or write every page that was in its plan.  Pages that a request loses in
that time (it ended, or the tree had the same run already) rest in limbo until that step has been committed.  So a
free page is in no step in flight, and whoever takes it may fill it at once.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from radix import Forgotten, Lock, PagePool, Pins, RadixTree
from scheduler.no_tier import NoTier
from scheduler.pins import pin_prompt
from scheduler.request import Request
from scheduler.swap import SwapSpace
from scheduler.tier import DiskTier

# (source page, destination page, rows): rows to copy before the step that computes on top of them.
Copy = tuple[int, int, int]
# (namespace, tokens of a run from its beginning, packed, first token that changed)
Change = Callable[[str, bytes, int], None]


class Holdings:
    """Pages of all requests, over one pool and one tree.  Without `use_cache` nothing is matched or published.

    `tier`: where the tree's pages are kept too, and come back from.
    """

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree,
        use_cache: bool,
        tier: DiskTier | NoTier | None = None,
        swap: SwapSpace | None = None,
        pins: Pins | None = None,
    ) -> None:
        self.pool = pool
        self.tree = tree
        self.use_cache = use_cache
        self.tier = tier or NoTier()
        self.swap = swap
        self.pins = Pins(tree, pool.num_pages, pool.page_size) if pins is None else pins
        self.evicted_pages = 0
        # Called when the tree has taken tokens `[start, end)` of a run, and when it is about to lose them.
        self.on_publish: list[Change] = []
        self.on_evict: list[Change] = []
        # Called when parts of the tree have been forgotten.
        self.on_forget: list[Callable[[], None]] = []
        tree.on_evict = self._on_evict
        self._limbo: deque[tuple[int, list[int]]] = deque()
        self.tier.attach(self)

    @property
    def page_size(self) -> int:
        """Token slots of a page."""
        return self.pool.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    @property
    def available(self) -> int:
        """Pages that can be had now: the free ones and those that eviction would free."""
        return self.pool.num_free + self.tree.evictable_pages

    def caches(self, request: Request) -> bool:
        """Whether the request takes from the cache."""
        return self.use_cache and request.message.use_cache

    def stores(self, request: Request) -> bool:
        """Whether the request gives to the cache."""
        return self.use_cache and request.message.use_cache and not request.message.no_store

    def _on_evict(self, namespace: str, prefix: bytes, pages: Sequence[int]) -> None:
        # Only the last page of a run may be partly filled, and it goes first.
        start = (self.pages_for(len(prefix) // 4) - len(pages)) * self.page_size
        for listener in self.on_evict:
            listener(namespace, prefix, start)

    def match_length(self, request: Request) -> int:
        """Tokens of the request that are cached now.  A hint only: nothing is locked or touched."""
        return self.tree.match(request.message.namespace, request.key, request.match_limit, touch=False).num_tokens

    def admit(self, request: Request, reserve_pages: int) -> list[Copy] | None:
        """Take what is cached of the request's known tokens, if the rest of them and `reserve_pages` can be had too.

        Returns the copies to make first (the matched rows of a page that is shared only in part), or None, and
        nothing has changed, when there is not enough room.
        """
        # A request that stays out of the cache matches nothing.
        caches = self.caches(request)
        limit = request.match_limit if caches else 0
        while True:
            # Who is not admitted has used nothing.
            match = self.tree.match(request.message.namespace, request.key, limit, touch=False)
            full = len(match.pages)
            # What the match locks cannot be evicted any more.
            room = self.available - (match.num_pages - match.kept_by_locks())
            if self.pages_for(request.known) - full + reserve_pages <= room:
                break
            # The page to copy from is locked beside its copy.  A request that runs alone must fit in spite of that, so
            # it does with less: first without that page, then without the cache.
            if match.partial_page is not None:
                limit = full * self.page_size
            elif reserve_pages == 0 and full > 0:
                limit = 0
            else:
                return None
        if caches:
            self.tree.touch(match)
            request.lock = self.tree.lock(match)
            self.pins.used(request.lock, match.num_tokens)
        self.pool.share(match.pages)
        request.table.extend(match.pages)
        request.cached = full * self.page_size
        request.computed = request.planned = request.cached
        copies: list[Copy] = []
        swapped_in = self._swap_in(request, match.num_tokens)
        if match.partial_page is None:
            return copies
        if not swapped_in and self.grow(request, request.cached + 1):
            copies.append((match.partial_page, int(request.table.pages[full]), match.partial_rows))
            request.computed = request.planned = match.num_tokens
            self.pool.share([match.partial_page])
            request.copied_from = match.partial_page
        elif not self.stores(request):
            self._lock_whole_pages(request)
        return copies

    def _swap_in(self, request: Request, matched: int) -> bool:
        """Bring back what swap space has of the request beyond what is matched."""
        swapped = 0 if self.swap is None else self.swap.num_tokens(request.rid)
        if self.swap is None or swapped <= matched or not self.grow(request, swapped):
            return False
        first = request.cached // self.page_size
        self.swap.restore(request.rid, first, request.table.pages[first:].tolist())
        request.computed = request.planned = swapped
        return True

    def swap_out(self, request: Request) -> bool:
        """Copy what the request has computed to swap space.  False when there is none, or no room in it."""
        pages = request.table.pages[: self.pages_for(request.computed)].tolist()
        return self.swap is not None and self.swap.store(request.rid, pages, request.computed)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the request's table hold `num_tokens` tokens, evicting if need be.  False, unchanged, if impossible."""
        needed = self.pages_for(num_tokens) - request.table.num_pages
        if needed <= 0:
            return True
        pages = self.take_pages(needed)
        if pages is None:
            return False
        request.table.extend(pages)
        return True

    def take_pages(self, count: int) -> array[int] | None:
        """Free pages, evicting if need be, with the caller as owner.  None when there are not so many."""
        while True:
            short = count - self.pool.num_free
            if short > 0:
                self.evicted_pages += self.tree.evict(short)
            pages = self.pool.alloc(count)
            if pages is not None or not self.tier.drop_saves():
                return pages

    def publish(self, request: Request, num_tokens: int, in_flight_step: int | None) -> None:
        """Give the tree the full pages among the first `num_tokens` computed tokens.

        Where the tree has the same run already, the request is pointed at the tree's pages, and its duplicates
        go back (after `in_flight_step`, which may still use them).  From here on the request's lock is on the
        published pages alone: a page that it copied rows from may go.  When all of the prompt is computed, what the
        request wants pinned is.
        """
        if self.stores(request):
            self._publish(request, num_tokens, in_flight_step)
        elif request.copied_from is not None:
            self._lock_whole_pages(request)
            self._let_go(self._copy_source(request), in_flight_step)
        if request.pins_due and num_tokens >= request.prompt_tokens:
            pin_prompt(request, self.pins, self.stores(request))

    def _publish(self, request: Request, num_tokens: int, in_flight_step: int | None) -> None:
        end = max(num_tokens // self.page_size * self.page_size, request.cached)
        if end == request.cached and request.copied_from is None:
            return
        tree_pages = self._insert(request, end)
        self._adopt(request, tree_pages, request.cached // self.page_size, in_flight_step)
        request.cached = end
        self._let_go(self._copy_source(request), in_flight_step)

    def _lock_whole_pages(self, request: Request) -> None:
        """A page that is shared in part is not needed (any more): lock the pages alone that are shared whole.

        A request that gives to the cache has this done when it publishes its next page.
        """
        assert request.lock is not None
        match = self.tree.match(request.message.namespace, request.key, request.cached, touch=False)
        before, request.lock = request.lock, self.tree.lock(match)
        self.tree.unlock(before)

    def _copy_source(self, request: Request) -> list[int]:
        """Take from a request the page that it copied rows from, if it has one."""
        page, request.copied_from = request.copied_from, None
        return [] if page is None else [page]

    def _insert(self, request: Request, num_tokens: int) -> Sequence[int]:
        """Give the tree the first tokens, move the lock to them, and return the tree's pages for the full ones."""
        namespace, tokens = request.message.namespace, request.tokens[:num_tokens].tobytes()
        pages = request.table.pages[: self.pages_for(num_tokens)].tolist()
        reply = max(num_tokens - request.prompt_tokens, 0)
        insert = self.tree.insert(namespace, tokens, pages, request.lock, reply)
        request.lock = insert.lock
        if insert.new_tokens:
            for listener in self.on_publish:
                listener(namespace, tokens, num_tokens - insert.new_tokens)
        self.tier.save(request, tokens, insert.pages)
        return insert.pages

    def insert_loaded(self, namespace: str, tokens: bytes, pages: Sequence[int], lock: Lock) -> Lock:
        """Give the tree a run that came back from the lower tier.  `lock` is given back for the one returned."""
        insert = self.tree.insert(namespace, tokens, pages, lock)
        if insert.new_tokens:
            for listener in self.on_publish:
                listener(namespace, tokens, len(tokens) // 4 - insert.new_tokens)
        assert insert.lock is not None
        return insert.lock

    def _adopt(self, request: Request, tree_pages: Sequence[int], first: int, in_flight_step: int | None) -> None:
        duplicates = []
        for index in range(first, len(tree_pages)):
            page = tree_pages[index]
            if page != request.table.pages[index]:
                self.pool.share([page])
                duplicates.append(request.table.repoint(index, page))
        self._let_go(duplicates, in_flight_step)

    def release(self, request: Request, keep_tokens: int, in_flight_step: int | None) -> None:
        """Take everything from a request.  The tree gets its first `keep_tokens` tokens, the partly filled page too."""
        if keep_tokens > request.cached and self.stores(request):
            self._insert(request, keep_tokens)
        if request.lock is not None:
            self.tree.unlock(request.lock)
            request.lock = None
        self._let_go(request.table.take_all() + self._copy_source(request), in_flight_step)
        request.cached = request.computed = request.planned = request.promised = 0

    def _let_go(self, pages: list[int], in_flight_step: int | None) -> None:
        if not pages:
            return
        if in_flight_step is None:
            self.pool.release(pages)
        else:
            self._limbo.append((in_flight_step, pages))

    def settle(self, step: int) -> None:
        """A step has been committed: what rested for it is let go."""
        while self._limbo and self._limbo[0][0] <= step:
            self.pool.release(self._limbo.popleft()[1])

    def flush(self) -> bool:
        """Forget everything, pins and the lower tier included.  False, unchanged, while anybody holds a part of it."""
        if self.tree.receipts:
            return False
        for pin in list(self.pins):
            self.pins.unpin(pin)
        self.tree.flush()
        self.tier.flush()
        return True

    def pin_stats(self) -> dict[str, int]:
        """Fields of SchedulerStats."""
        return {"pins": len(self.pins), "pages_pinned": self.pins.pages, "pins_yielded": self.pins.yielded}

    def forget(self, namespace: str, tokens: bytes) -> Forgotten:
        """Forget the runs of a namespace that begin with `tokens` (packed), as far as nobody holds them.

        The lower tier is to be told besides, of all namespaces that are concerned.
        """
        forgotten = self.tree.forget(namespace, tokens)
        for listener in self.on_forget:
            listener()
        return forgotten

    def check(self, requests: list[Request]) -> None:
        """Recompute every counter.  Raises AssertionError when one is off."""
        if self.swap is not None:
            self.swap.check({request.rid for request in requests if not request.table.num_pages})
        self.tree.check()
        self.pins.check()
        self.tier.check()
        self.pool.check(self._owners(requests))

    def _owners(self, requests: list[Request]) -> Iterator[Sequence[int]]:
        yield from self.tree.owned()
        yield from self.tier.owned()
        for request in requests:
            yield request.table.pages.tolist()
            if request.copied_from is not None:
                yield [request.copied_from]
        for _, pages in self._limbo:
            yield pages
