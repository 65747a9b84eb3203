"""Tree, pool and pins against a naive model: random requests, insertions, evictions, pins and flushes, checked after
every step.

The model knows what was written to each page (`content`) and which runs of tokens must, or may, be known.  Pages are
written the way a scheduler does it: only by the one request that owns them, rows copied from a partly matched page.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from radix import LFU, LRU, Adaptive, EvictionPolicy, Hint, Lock, Match, PagePool, Pins, RadixTree, StaleMatch

NUM_PAGES = 40
NAMESPACES = ("", "salted")
Tokens = tuple[int, ...]

namespaces = st.sampled_from(NAMESPACES)


def packed(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


@dataclass
class Request:
    """A running request: its tokens, the pages of its table, how many of them are the tree's, and its receipt."""

    namespace: str
    tokens: Tokens
    table: list[int]
    shared: int
    lock: Lock


class TreeMachine(RuleBasedStateMachine):
    page_size = 4
    policy: EvictionPolicy = LRU()

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, self.page_size)
        self.tree = RadixTree(self.pool, self.policy, on_evict=self.evicted)
        self.pins = Pins(self.tree, NUM_PAGES, self.page_size, 0.4)
        self.now = 0.0
        self.content: dict[int, Tokens] = {}
        # The end of every page in the tree, as the tokens of the path up to it: those that must be there, and tails
        # that may have gone since something longer took their place.
        self.must: set[tuple[str, Tokens]] = set()
        self.may: set[tuple[str, Tokens]] = set()
        self.requests: list[Request] = []
        self.hints: list[tuple[Match, Tokens]] = []
        self.history: list[Tokens] = [()]

    # What the machine can do -----------------------------------------------------------------------------------------

    def tokens_from(self, base: int, cut: int, runs: list[tuple[int, int]]) -> Tokens:
        """Part of something seen before, and then runs of (token, how often)."""
        start = self.history[base % len(self.history)]
        tokens = start[: cut % (len(start) + 1)] + tuple(token for token, times in runs for _ in range(times))
        tokens = tokens[: NUM_PAGES // 3 * self.page_size]
        if len(self.history) < 30:
            self.history.append(tokens)
        return tokens

    def evicted(self, namespace: str, prefix: bytes, pages: Sequence[int]) -> None:
        tokens = tuple(array("i", prefix))
        end = -(-len(tokens) // self.page_size)
        for index, page in zip(range(end - len(pages), end), pages, strict=True):
            upto = tokens[: (index + 1) * self.page_size]
            assert self.content[page][: len(upto) - index * self.page_size] == upto[index * self.page_size :]
            assert (namespace, upto) in self.must | self.may, "something was evicted that was never inserted"
            self.must.discard((namespace, upto))
            self.may.discard((namespace, upto))

    def known(self, namespace: str, tokens: Tokens, ends: set[tuple[str, Tokens]]) -> int:
        return max((common(tokens, end) for name, end in ends if name == namespace), default=0)

    def check_match(self, match: Match, tokens: Tokens) -> None:
        """The pages hold exactly the tokens that they are said to hold."""
        for index, page in enumerate(match.pages):
            begin = index * self.page_size
            assert self.content[page][: self.page_size] == tokens[begin : begin + self.page_size]
        begin = len(match.pages) * self.page_size
        assert match.num_tokens == begin + match.partial_rows
        assert (match.partial_page is None) == (match.partial_rows == 0)
        if match.partial_page is not None:
            assert self.content[match.partial_page][: match.partial_rows] == tokens[begin : match.num_tokens]

    def matched(self, namespace: str, tokens: Tokens, limit: int, touch: bool) -> Match:
        before = self.tree.version
        match = self.tree.match(namespace, packed(tokens), limit, touch)
        assert self.tree.version == before
        seen = tokens[:limit]
        assert self.known(namespace, seen, self.must) <= match.num_tokens
        assert match.num_tokens <= self.known(namespace, seen, self.must | self.may)
        self.check_match(match, tokens)
        return match

    def grab(self, count: int) -> list[int] | None:
        """Pages for a request, evicting what is needed; None only when there really are not enough."""
        short = count - self.pool.num_free
        if short > 0:
            promised = self.tree.evictable_pages
            freed = self.tree.evict(short)
            assert freed >= min(short, promised)
        pages = self.pool.alloc(count)
        return None if pages is None else list(pages)

    def write(self, request: Request, begin: int) -> None:
        """Compute the request's tokens from `begin` on."""
        for index in range(begin // self.page_size, len(request.table)):
            page = request.table[index]
            assert self.pool.refcount(page) == 1, "a shared page is written"
            first = index * self.page_size
            kept = self.content.get(page, ())[: max(begin - first, 0)]
            row = request.tokens[first : first + self.page_size]
            self.content[page] = kept + row[len(kept) :]

    def note_inserted(self, namespace: str, tokens: Tokens) -> None:
        for end in range(self.page_size, len(tokens) + self.page_size, self.page_size):
            self.must.add((namespace, tokens[:end]))
        for name, end in list(self.must):
            if name == namespace and len(end) % self.page_size and len(end) < len(tokens) and end == tokens[: len(end)]:
                self.must.discard((name, end))
                self.may.add((name, end))
        tail = len(tokens) % self.page_size
        if tail and any(
            name == namespace and len(end) > len(tokens) and end[: len(tokens)] == tokens for name, end in self.must
        ):
            self.must.discard((namespace, tokens))
            self.may.add((namespace, tokens))

    def publish(self, request: Request, length: int, keep_lock: bool) -> None:
        """Insert the first `length` tokens of a request and point its table at the tree's pages."""
        count = -(-length // self.page_size)
        given = request.table[:count]
        before = self.tree.num_pages
        result = self.tree.insert(
            request.namespace, packed(request.tokens[:length]), given, request.lock if keep_lock else None
        )
        assert len(result.pages) == length // self.page_size
        assert 0 <= result.new_tokens <= length
        for index, page in enumerate(result.pages):
            begin = index * self.page_size
            assert self.content[page][: self.page_size] == request.tokens[begin : begin + self.page_size]
        if not result.new_tokens:
            assert self.tree.num_pages <= before
        duplicates = [mine for mine, page in zip(given, result.pages, strict=False) if mine != page]
        self.pool.share([page for mine, page in zip(given, result.pages, strict=False) if mine != page])
        request.table[: len(result.pages)] = result.pages
        self.pool.release(duplicates)
        if keep_lock:
            assert result.lock is not None
            request.lock = result.lock
            request.shared = len(result.pages)
        self.note_inserted(request.namespace, request.tokens[:length])

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        self.tree.unlock(request.lock)
        self.pool.release(request.table)

    # Rules -------------------------------------------------------------------------------------------------------

    @rule(namespace=namespaces, base=st.integers(0, 99), hint=st.sampled_from(Hint))
    def tell_a_hint(self, namespace: str, base: int, hint: Hint) -> None:
        self.tree.hint(namespace, packed(self.history[base % len(self.history)]), hint)

    @rule(
        namespace=namespaces,
        base=st.integers(0, 29),
        cut=st.integers(0, 200),
        runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), max_size=3),
        spare=st.integers(0, 3),
    )
    def admit(self, namespace: str, base: int, cut: int, runs: list[tuple[int, int]], spare: int) -> None:
        tokens = self.tokens_from(base, cut, runs)
        match = self.matched(namespace, tokens, max(len(tokens) - spare, 0), True)
        lock = self.tree.lock(match)
        self.tree.check()
        table = list(match.pages)
        self.pool.share(table)
        fresh = self.grab(-(-len(tokens) // self.page_size) - len(table))
        if fresh is None:
            self.tree.unlock(lock)
            self.pool.release(table)
            return
        if match.partial_page is not None and fresh:
            self.content[fresh[0]] = self.content[match.partial_page][: match.partial_rows]
        request = Request(namespace, tokens, table + fresh, len(table), lock)
        if len(tokens) > match.num_tokens:
            self.write(request, match.num_tokens)
        elif fresh:
            assert match.partial_page is not None
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9), share=st.floats(0, 1))
    def publish_full_pages(self, which: int, share: float) -> None:
        request = self.requests[which % len(self.requests)]
        full = len(request.tokens) // self.page_size
        pages = request.shared + round((full - request.shared) * share)
        self.publish(request, pages * self.page_size, True)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9), runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=2))
    def decode(self, which: int, runs: list[tuple[int, int]]) -> None:
        request = self.requests[which % len(self.requests)]
        more = tuple(token for token, times in runs for _ in range(times))
        fresh = self.grab(-(-(len(request.tokens) + len(more)) // self.page_size) - len(request.table))
        if fresh is None:
            return
        begin = len(request.tokens)
        request.tokens += more
        request.table += fresh
        if more:
            # A full table page that others share is never written again; the last, partly filled one is ours.
            self.write(request, begin)
        self.history[which % len(self.history)] = request.tokens

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9), how=st.sampled_from(["with lock", "without lock", "full pages", "abort"]))
    def finish(self, which: int, how: str) -> None:
        request = self.requests[which % len(self.requests)]
        if how != "abort":
            length = len(request.tokens)
            if how == "full pages":
                length -= length % self.page_size
            self.publish(request, length, how == "with lock")
        self.leave(request)

    @rule(namespace=namespaces, base=st.integers(0, 29), cut=st.integers(0, 200), touch=st.booleans())
    def look(self, namespace: str, base: int, cut: int, touch: bool) -> None:
        tokens = self.tokens_from(base, 0 if cut == 0 else len(self.history[base % len(self.history)]), [])
        match = self.matched(namespace, tokens, cut, touch)
        self.hints.append((match, tokens))

    @precondition(lambda self: self.hints)
    @rule(which=st.integers(0, 99))
    def lock_an_old_match(self, which: int) -> None:
        match, tokens = self.hints.pop(which % len(self.hints))
        try:
            lock = self.tree.lock(match)
        except StaleMatch:
            return
        self.check_match(match, tokens)
        assert self.tree.locked_pages >= len(match.pages)
        self.tree.evict(NUM_PAGES)
        self.check_match(match, tokens)
        assert self.matched(match.namespace, tokens, match.num_tokens, False).num_tokens == match.num_tokens
        self.tree.unlock(lock)

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        free = self.pool.num_free
        evictable = self.tree.evictable_pages
        freed = self.tree.evict(count)
        assert freed == self.pool.num_free - free
        assert freed == min(count, evictable)

    @rule(namespace=st.sampled_from([*NAMESPACES, None]))
    def flush(self, namespace: str | None) -> None:
        doomed = [name for name in NAMESPACES if namespace in (name, None)]
        locked = any(request.namespace in doomed for request in [*self.requests, *self.pins])
        assert self.tree.flush(namespace) == (not locked)
        if locked:
            return
        for name in doomed:
            assert name not in self.tree.namespaces()
        self.must = {(name, end) for name, end in self.must if name not in doomed}
        self.may = {(name, end) for name, end in self.may if name not in doomed}
        if namespace is None:
            assert self.tree.num_pages == self.tree.num_nodes == 0

    @rule(namespace=namespaces, base=st.integers(0, 29), ttl=st.integers(1, 20))
    def pin(self, namespace: str, base: int, ttl: int) -> None:
        tokens = self.history[base % len(self.history)]
        before = {pin.name: self.pins.tokens(pin) for pin in self.pins}
        known = self.tree.match(namespace, packed(tokens), len(tokens), touch=False).num_tokens
        held = self.tree.forest.pinned_pages[namespace], self.pins.pages
        tokens_pinned, shortfall = self.pins.pin(namespace, packed(tokens), ttl)
        whole = min(known, len(tokens)) // self.page_size * self.page_size
        assert tokens_pinned % self.page_size == 0
        assert tokens_pinned <= whole
        assert (tokens_pinned == len(tokens)) == (shortfall == "")
        if shortfall == "page_border":
            assert tokens_pinned == len(tokens) // self.page_size * self.page_size
        elif shortfall == "not_cached":
            assert tokens_pinned == whole
        elif shortfall:
            # It is the longest part that fits: the share is full to the page.
            share = held[0] if shortfall == "namespace_share" else held[1]
            now = self.tree.forest.pinned_pages[namespace] if shortfall == "namespace_share" else self.pins.pages
            most = self.pins.most_of_one if shortfall == "namespace_share" else self.pins.most_of_all
            assert now == max(most, share)
        after = {pin.name: self.pins.tokens(pin) for pin in self.pins}
        assert before.items() <= after.items()
        if tokens_pinned:
            assert packed(tokens[:tokens_pinned]) in after.values()

    @rule(seconds=st.integers(0, 15))
    def time_goes_by(self, seconds: int) -> None:
        self.now += seconds
        kept = {pin.name for pin in self.pins if pin.expires > self.now}
        self.pins.expire(self.now)
        assert {pin.name for pin in self.pins} == kept

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9))
    def use_a_pin(self, which: int) -> None:
        request = self.requests[which % len(self.requests)]
        length = request.shared * self.page_size
        self.pins.used(request.lock, length)
        for pin in self.pins:
            prefix = tuple(array("i", self.pins.tokens(pin)))
            if pin.namespace == request.namespace and len(prefix) <= length and request.tokens[: len(prefix)] == prefix:
                assert pin.expires >= self.now + pin.ttl

    @precondition(lambda self: len(self.pins))
    @rule(which=st.integers(0, 9), how=st.sampled_from(["unpin", "give way"]))
    def let_a_pin_go(self, which: int, how: str) -> None:
        before = self.tree.evictable_pages
        if how == "unpin":
            self.pins.unpin(list(self.pins)[which % len(self.pins)])
        elif self.pins.give_way():
            assert self.tree.evictable_pages > before
        assert self.tree.evictable_pages >= before

    @rule(namespace=namespaces, base=st.integers(0, 29), cut=st.integers(0, 60), unpin=st.booleans())
    def forget(self, namespace: str, base: int, cut: int, unpin: bool) -> None:
        tokens = self.history[base % len(self.history)][:cut]
        if unpin:
            for pin in self.pins.of_prefix(namespace, packed(tokens)):
                self.pins.unpin(pin)
        kept = [array("i", self.pins.tokens(pin)) for pin in self.pins if pin.namespace == namespace]
        kept += [array("i", r.tokens[: r.shared * self.page_size]) for r in self.requests if r.namespace == namespace]
        before = self.tree.num_pages
        forgotten = self.tree.forget(namespace, packed(tokens))
        assert before - self.tree.num_pages == forgotten.pages
        for run in kept:
            assert self.tree.match(namespace, run.tobytes(), len(run), touch=False).num_tokens == len(run)
        begins = 0
        for ends in (self.must, self.may):
            for name, end in list(ends):
                if name != namespace or self.known_now(name, end):
                    begins += name == namespace and end[: len(tokens)] == tokens and ends is self.must
                    continue
                assert end[: len(tokens)] == tokens or tokens[: len(end)] == end, "something else was forgotten"
                ends.discard((name, end))
        assert begins <= forgotten.kept

    def known_now(self, namespace: str, tokens: Tokens) -> bool:
        return self.tree.match(namespace, packed(tokens), len(tokens), touch=False).num_tokens == len(tokens)

    # What always holds ------------------------------------------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        self.tree.check([request.lock for request in self.requests] + [pin.lock for pin in self.pins])
        self.pins.check()
        self.pool.check([*self.tree.owned(), *(request.table for request in self.requests)])
        assert self.tree.num_nodes <= self.tree.num_pages
        assert len(self.must) <= self.tree.num_pages <= len(self.must) + len(self.may)

    def teardown(self) -> None:
        for request in list(self.requests):
            self.leave(request)
        assert self.tree.locked_pages == self.pins.pages == self.pins.idle_pages()
        self.now += 100
        self.pins.expire(self.now)
        assert len(self.pins) == self.tree.locked_pages == 0
        cached = self.tree.num_pages
        assert self.tree.evict(NUM_PAGES) == cached
        assert self.tree.num_pages == 0
        assert self.pool.num_free == NUM_PAGES
        assert self.tree.namespaces() == []


@pytest.mark.parametrize(
    ("page_size", "policy"), [(1, LRU()), (4, LRU()), (4, LFU()), (16, LRU()), (1, Adaptive()), (4, Adaptive())]
)
def test_tree_and_pool_agree_with_a_naive_model(page_size: int, policy: EvictionPolicy) -> None:
    machine = type("Machine", (TreeMachine,), {"page_size": page_size, "policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
