"""Public heads: one set of pages for all namespaces, and behind it nothing that two of them share."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from radix import LRU, Adaptive, EvictionPolicy, Hint, Lock, PagePool, PublicHeads, RadixTree, StaleMatch
from tests.radix.trees import matched, packed, put, settle

PUBLIC = "\x1fpublic"
HEAD = list(range(100, 110))
PAGE = 4
# The whole pages of the head.
SHARED = 8


def headed(num_pages: int = 100, *heads: list[int]) -> tuple[PagePool, RadixTree]:
    pool = PagePool(num_pages, PAGE)
    declared = PublicHeads(PUBLIC, [packed(head) for head in heads or (HEAD,)], PAGE)
    return pool, RadixTree(pool, heads=declared)


def test_a_head_is_shared_and_what_follows_is_not() -> None:
    pool, tree = headed()
    put(pool, tree, [*HEAD, 1, 2, 3, 4, 5, 6], "alice")
    assert matched(tree, [*HEAD, 1, 2, 3, 4, 5, 6], "alice") == 16
    assert matched(tree, [*HEAD, 1, 2, 3, 4, 5, 6], "bob") == SHARED
    put(pool, tree, [*HEAD, 1, 2, 3, 4, 5, 6], "bob")
    assert tree.num_pages == 2 + 2 * 2
    assert matched(tree, [*HEAD, 1, 2, 3, 4, 5, 6], "bob") == 16
    settle(pool, tree)


def test_what_begins_otherwise_is_as_if_there_were_no_head() -> None:
    pool, tree = headed()
    put(pool, tree, [1, *HEAD, 2], "alice")
    assert matched(tree, [1, *HEAD, 2], "bob") == 0
    assert matched(tree, [1, *HEAD, 2], "alice") == 12
    assert tree.namespaces() == ["alice"]
    settle(pool, tree)


def test_part_of_a_head_is_shared_to_the_page_whoever_leaves_it_where() -> None:
    pool, tree = headed()
    put(pool, tree, HEAD[:6], "alice")
    assert matched(tree, HEAD, "bob") == 4
    put(pool, tree, [*HEAD[:5], 9, 9, 9, 9], "bob")
    assert matched(tree, [*HEAD[:5], 9, 9, 9, 9], "alice") == 5
    assert matched(tree, [*HEAD[:5], 9, 9, 9, 9], "carol") == 4
    put(pool, tree, HEAD, "carol")
    # The rows of the head's next page are public as well.
    assert matched(tree, [*HEAD[:6], 9], "dave") == 6
    settle(pool, tree)


def test_a_page_that_a_head_ends_in_belongs_to_whoever_filled_it() -> None:
    pool, tree = headed()
    put(pool, tree, HEAD, "alice")
    assert matched(tree, HEAD, "alice") == 10
    assert matched(tree, HEAD, "bob") == SHARED


def test_heads_may_begin_alike() -> None:
    longer = [*HEAD[:8], 7, 7, 7, 7]
    pool, tree = headed(100, HEAD, longer)
    put(pool, tree, [*longer, 1], "alice")
    put(pool, tree, [*HEAD, 1, 1], "alice")
    assert matched(tree, [*longer, 1], "bob") == 12
    assert matched(tree, [*HEAD, 1, 1], "bob") == 8
    assert matched(tree, [*HEAD, 1, 1], "alice") == 12
    assert matched(tree, [*longer, 1], "alice") == 13
    settle(pool, tree)


def test_a_head_outlives_what_goes_on_from_it_and_can_be_evicted_then() -> None:
    pool, tree = headed()
    put(pool, tree, [*HEAD, 1, 2, 3, 4, 5, 6], "alice")
    matched(tree, HEAD, "bob")
    for left in range(3, -1, -1):
        assert tree.evict(1) == 1
        assert tree.num_pages == left
        settle(pool, tree)
    assert tree.namespaces() == []


def test_a_tenants_reports_end_at_its_own() -> None:
    pool, tree = headed()
    put(pool, tree, [*HEAD, 1, 2, 3, 4], "alice")
    assert tree.following("bob", packed([*HEAD, 9]), 4) == (8, b"")
    assert tree.following("bob", packed(HEAD[:4]), 8) == (4, packed(HEAD[4:8]))
    assert tree.following("alice", packed([*HEAD, 9]), 4) == (10, packed([1, 2, 3, 4]))
    put(pool, tree, [*HEAD, 5], "bob")
    (alices,), _ = tree.outline(["alice"], 10, 10, 9)
    assert (alices.namespace, alices.head, alices.tokens) == ("alice", packed([*HEAD[8:], 1, 2, 3, 4]), 6)
    (public,), _ = tree.outline([PUBLIC], 10, 10, 9)
    assert (public.tokens, public.children) == (8, 0)
    assert sorted(tree.namespaces()) == [PUBLIC, "alice", "bob"]


def test_a_flush_takes_a_tenants_branches_and_leaves_the_rest() -> None:
    pool, tree = headed()
    put(pool, tree, [*HEAD, 1, 2, 3], "alice")
    put(pool, tree, [8, 8, 8, 8, 8], "alice")
    put(pool, tree, [*HEAD, 1, 2, 3], "bob")
    assert tree.flush("alice")
    assert matched(tree, [*HEAD, 1, 2, 3], "alice") == SHARED
    assert matched(tree, [*HEAD, 1, 2, 3], "bob") == 13
    settle(pool, tree)
    assert tree.flush(PUBLIC)
    assert tree.num_pages == 0
    settle(pool, tree)


def test_a_flush_waits_for_a_request_that_holds_the_head_alone() -> None:
    pool, tree = headed()
    put(pool, tree, HEAD[:8], "alice")
    lock = tree.lock(tree.match("bob", packed([*HEAD, 1]), 11))
    assert not tree.flush("bob")
    assert not tree.flush(PUBLIC)
    assert not tree.flush()
    assert tree.flush("alice")
    tree.unlock(lock)
    assert tree.flush("bob")
    assert tree.flush()
    settle(pool, tree)


def test_a_hint_about_a_head_is_nobodys_to_give() -> None:
    pool, tree = headed()
    put(pool, tree, HEAD[:8], "alice")
    assert not tree.hint("alice", packed(HEAD[:8]), Hint.DONE)
    put(pool, tree, [*HEAD, 1, 2], "alice")
    assert tree.hint("alice", packed([*HEAD, 1, 2]), Hint.DONE)
    assert not tree.hint("bob", packed([*HEAD, 1, 2]), Hint.DONE)


Tokens = tuple[int, ...]
NUM_PAGES = 30


@dataclass
class Running:
    namespace: str
    tokens: Tokens
    table: list[int]
    lock: Lock


class HeadsMachine(RuleBasedStateMachine):
    """Random prompts of three namespaces: pages hold what they should, and only heads are found across namespaces."""

    policy: EvictionPolicy = LRU()

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, PAGE)
        self.heads = [(0,) * 9, (0,) * 4 + (1,) * 8, (2, 1, 0, 1) * 2]
        declared = PublicHeads(PUBLIC, [packed(head) for head in self.heads], PAGE)
        self.tree = RadixTree(self.pool, self.policy, self.evicted, declared)
        # What is in each page, and who wrote it first.
        self.content: dict[int, tuple[Tokens, str]] = {}
        self.running: list[Running] = []

    def evicted(self, namespace: str, prefix: bytes, pages: object) -> None:
        assert isinstance(pages, array)
        tokens = tuple(array("i", prefix))
        end = -(-len(tokens) // PAGE)
        assert (self.public(tokens) >= end) == (namespace == PUBLIC)
        for index, page in zip(range(end - len(pages), end), pages, strict=True):
            row = tokens[index * PAGE : (index + 1) * PAGE]
            assert self.content[page][0][: len(row)] == row

    def public(self, tokens: Tokens) -> int:
        """Leading pages that are a head's."""
        most = 0
        for head in self.heads:
            same = next((i for i, (a, b) in enumerate(zip(head, tokens, strict=False)) if a != b), None)
            most = max(most, (min(len(head), len(tokens)) if same is None else same) // PAGE)
        return most

    prompts = st.tuples(
        st.sampled_from([(), (0,) * 9, (0,) * 4 + (1,) * 8, (2, 1, 0, 1) * 2, (0,) * 4]),
        st.lists(st.integers(0, 2), max_size=14),
    )

    @rule(namespace=st.sampled_from("abc"), prompt=prompts, how=st.sampled_from(["keep", "grow", "once", "abort"]))
    def admit(self, namespace: str, prompt: tuple[Tokens, list[int]], how: str) -> None:
        tokens = (*prompt[0], *prompt[1])
        if not tokens:
            return
        match = self.tree.match(namespace, packed(tokens), len(tokens))
        for index, page in enumerate(match.pages):
            row, writer = self.content[page]
            assert row == tokens[index * PAGE : (index + 1) * PAGE]
            assert writer == namespace or index < self.public(tokens), "another tenant's page was found"
        if match.partial_page is not None:
            row, writer = self.content[match.partial_page]
            begin = len(match.pages) * PAGE
            assert row[: match.partial_rows] == tokens[begin : match.num_tokens]
            upto = (*tokens[:begin], *row)
            assert writer == namespace or self.public(upto) * PAGE == len(upto), "another tenant's rows were found"
        lock = self.tree.lock(match)
        self.pool.share(match.pages)
        table = list(match.pages)
        needed = -(-len(tokens) // PAGE) - len(table)
        if needed > self.pool.num_free:
            self.tree.evict(needed - self.pool.num_free)
        fresh = self.pool.alloc(needed)
        if fresh is None:
            self.tree.unlock(lock)
            self.pool.release(table)
            return
        for place, page in enumerate(fresh, start=len(table)):
            self.content[page] = (tokens[place * PAGE : (place + 1) * PAGE], namespace)
        request = Running(namespace, tokens, table + list(fresh), lock)
        self.running.append(request)
        if how == "abort":
            return
        if how == "once":
            self.tree.insert(namespace, packed(tokens), request.table)
            self.leave(len(self.running) - 1)
            return
        for end in ([len(tokens) // 2 // PAGE * PAGE] if how == "grow" else []) + [len(tokens)]:
            if end >= match.num_tokens // PAGE * PAGE:
                self.publish(request, end)

    def publish(self, request: Running, end: int) -> None:
        done = self.tree.insert(
            request.namespace, packed(request.tokens[:end]), request.table[: -(-end // PAGE)], request.lock
        )
        assert done.lock is not None
        request.lock = done.lock
        self.pool.share([new for old, new in zip(request.table, done.pages, strict=False) if old != new])
        self.pool.release([old for old, new in zip(request.table, done.pages, strict=False) if old != new])
        request.table[: len(done.pages)] = done.pages
        found = self.tree.match(request.namespace, packed(request.tokens), end, touch=False).num_tokens
        assert found == end, "what has been inserted is not found"

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        request = self.running.pop(which % len(self.running))
        self.tree.unlock(request.lock)
        self.pool.release(request.table)

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        evictable = self.tree.evictable_pages
        assert self.tree.evict(count) == min(count, evictable)

    @rule(namespace=st.sampled_from(["a", "b", PUBLIC, None]))
    def flush(self, namespace: str | None) -> None:
        done = self.tree.flush(namespace)
        held = [request.namespace for request in self.running]
        if namespace in ("a", "b"):
            assert done == (namespace not in held)
        elif namespace is None:
            assert done == (not held)
        if done and namespace is not None:
            assert namespace not in self.tree.namespaces()

    @rule(namespace=st.sampled_from("abc"), prompt=prompts)
    def keep_a_match(self, namespace: str, prompt: tuple[Tokens, list[int]]) -> None:
        tokens = (*prompt[0], *prompt[1])
        match = self.tree.match(namespace, packed(tokens), len(tokens))
        self.tree.evict(3)
        try:
            lock = self.tree.lock(match)
        except StaleMatch:
            return
        again = self.tree.match(namespace, packed(tokens), len(tokens), touch=False)
        assert (again.pages, again.num_tokens) == (match.pages, match.num_tokens)
        self.tree.check([*(request.lock for request in self.running), lock])
        self.tree.unlock(lock)

    @invariant()
    def everything_adds_up(self) -> None:
        self.tree.check([request.lock for request in self.running])
        self.pool.check([*self.tree.owned(), *(request.table for request in self.running)])

    def teardown(self) -> None:
        while self.running:
            self.leave(0)
        cached = self.tree.num_pages
        assert self.tree.evict(NUM_PAGES) == cached
        self.tree.check([])
        assert self.pool.num_free == NUM_PAGES
        assert self.tree.namespaces() == []


@pytest.mark.parametrize("policy", [LRU(), Adaptive()], ids=["lru", "adaptive"])
def test_random_tenants_share_heads_alone(policy: EvictionPolicy) -> None:
    machine = type("Machine", (HeadsMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
