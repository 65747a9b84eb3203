"""Pins: what stays, for how long, how much of it, and who gives way."""

from __future__ import annotations

import pytest

from radix import PagePool, Pins, PublicHeads, RadixTree, StaleLock
from tests.radix.trees import matched_quietly, packed, put

PAGE = 4


def pinned_tree(num_pages: int = 16, share: float = 0.5) -> tuple[PagePool, RadixTree, Pins]:
    pool = PagePool(num_pages, PAGE)
    tree = RadixTree(pool)
    return pool, tree, Pins(tree, num_pages, PAGE, share)


def test_a_pinned_prefix_outlives_eviction_until_its_time_is_up() -> None:
    _pool, tree, pins = pinned_tree()
    run = list(range(6 * PAGE))
    put(_pool, tree, run)
    assert pins.pin("", packed(run[: 3 * PAGE]), 10) == (3 * PAGE, "")
    assert tree.evictable_pages == 3
    assert tree.evict(99) == 3
    assert matched_quietly(tree, run) == 3 * PAGE
    pins.expire(9.9)
    assert len(pins) == 1
    pins.expire(10.0)
    assert (len(pins), pins.expired, tree.evictable_pages) == (0, 1, 3)
    assert tree.evict(99) == 3


def test_every_use_of_all_of_it_begins_its_time_anew() -> None:
    _pool, tree, pins = pinned_tree()
    run = list(range(4 * PAGE))
    put(_pool, tree, run)
    pins.pin("", packed(run[: 2 * PAGE]), 10)
    (pin,) = pins
    for moment, tokens, expires in ((4.0, PAGE, 10.0), (5.0, 2 * PAGE - 2, 10.0), (6.0, 2 * PAGE - 1, 16.0)):
        pins.expire(moment)
        match = tree.match("", packed(run), tokens)
        lock = tree.lock(match)
        pins.used(lock, match.num_tokens)
        tree.unlock(lock)
        assert pin.expires == expires, f"{tokens} of {2 * PAGE} tokens used"
    assert pin.hits == 1
    pins.expire(15.9)
    assert list(pins) == [pin]
    assert pins.next_expiry == 16.0
    pins.expire(16.0)
    assert (len(pins), pins.next_expiry) == (0, None)


def test_pinning_again_keeps_the_later_end() -> None:
    _pool, tree, pins = pinned_tree()
    run = list(range(2 * PAGE))
    put(_pool, tree, run)
    pins.pin("", packed(run), 100)
    pins.expire(50.0)
    assert pins.pin("", packed(run), 10) == (2 * PAGE, "")
    (pin,) = pins
    assert (pin.expires, pin.ttl, pins.pages) == (100.0, 100, 2)
    pins.pin("", packed(run), 300)
    assert pin.expires == 350.0


def test_whole_pages_are_pinned_and_the_answer_says_so() -> None:
    _pool, tree, pins = pinned_tree()
    put(_pool, tree, list(range(10)))
    assert pins.pin("", packed(range(10)), 5) == (8, "page_border")
    assert pins.pin("", packed(range(3)), 5) == (0, "page_border")
    assert pins.pin("", packed([*range(8), 77, 77, 77, 77]), 5) == (8, "not_cached")
    assert pins.pin("other", packed(range(8)), 5) == (0, "not_cached")
    assert len(pins) == 1


def test_the_longest_part_from_the_root_that_fits_is_pinned() -> None:
    pool, tree, pins = pinned_tree(16, 0.25)
    run = list(range(6 * PAGE))
    put(pool, tree, run)
    assert pins.pin("", packed(run), 5) == (4 * PAGE, "namespace_share")
    # What is pinned already costs nothing more.
    assert pins.pin("", packed(run[: 2 * PAGE]), 5) == (2 * PAGE, "")
    branch = [*run[: 3 * PAGE], *range(100, 100 + PAGE)]
    put(pool, tree, branch)
    assert pins.pin("", packed(branch), 5) == (3 * PAGE, "namespace_share")
    assert pins.pages == tree.forest.pinned_pages[""] == 4
    pins.check()


def test_all_namespaces_together_have_a_share_too() -> None:
    pool, tree, pins = pinned_tree(16, 0.25)
    for name in ("a", "b", "c"):
        put(pool, tree, list(range(3 * PAGE)), name)
    outcomes = [pins.pin(name, packed(range(3 * PAGE)), 5) for name in ("a", "b", "c")]
    assert outcomes == [(3 * PAGE, ""), (3 * PAGE, ""), (2 * PAGE, "total_share")]
    assert pins.pages == pins.most_of_all == 8


def test_without_a_share_nothing_is_pinned() -> None:
    pool, tree, pins = pinned_tree(16, 0.0)
    put(pool, tree, list(range(PAGE)))
    assert pins.pin("", packed(range(PAGE)), 5) == (0, "namespace_share")
    assert tree.locked_pages == 0


def test_who_would_expire_first_gives_way_if_that_helps() -> None:
    pool, tree, pins = pinned_tree(16, 1.0)
    head, late, soon = list(range(PAGE)), [*range(PAGE), *[50] * PAGE], [*range(PAGE), *[60] * PAGE]
    put(pool, tree, late)
    put(pool, tree, soon)
    pins.pin("", packed(head), 1)
    pins.pin("", packed(late), 9)
    pins.pin("", packed(soon), 5)
    left = []
    while pins.give_way():
        left.append([pin.expires for pin in pins])
    # The head would expire first, but letting it go frees nothing while something longer is pinned.
    assert left == [[1, 9], [1], []]
    assert (pins.yielded, pins.pages) == (3, 0)


def test_a_pin_in_use_does_not_give_way() -> None:
    pool, tree, pins = pinned_tree()
    run = list(range(2 * PAGE))
    put(pool, tree, run)
    pins.pin("", packed(run), 9)
    lock = tree.lock(tree.match("", packed(run), len(run)))
    assert not pins.give_way()
    assert pins.idle_pages() == 0
    tree.unlock(lock)
    assert pins.idle_pages() == 2
    assert pins.give_way()


def test_a_conversation_that_goes_on_from_a_pin_leaves_it_alone() -> None:
    pool, tree, pins = pinned_tree()
    run = list(range(2 * PAGE))
    put(pool, tree, run)
    pins.pin("", packed(run), 9)
    put(pool, tree, [*run, *[7] * PAGE])
    (pin,) = pins
    assert pins.tokens(pin) == packed(run)
    assert tree.evict(9) == 1
    pins.check()


def test_many_renewals_keep_the_queue_short() -> None:
    pool, tree, pins = pinned_tree()
    for number in range(1000):
        run = [number] * PAGE
        put(pool, tree, run)
        pins.expire(float(number))
        assert pins.pin("", packed(run), 100_000)[0] == PAGE
        for pin in pins.of_prefix("", packed(run)):
            pins.unpin(pin)
        tree.evict(1)
    assert len(pins._queue) <= 16
    pins.check()


def test_a_pin_is_let_go_once() -> None:
    pool, tree, pins = pinned_tree()
    put(pool, tree, [1] * PAGE)
    pins.pin("", packed([1] * PAGE), 5)
    (pin,) = pins
    pins.unpin(pin)
    with pytest.raises(StaleLock):
        pins.unpin(pin)


def test_pins_are_found_by_what_they_were_asked_to_pin() -> None:
    pool, tree, pins = pinned_tree(16, 0.25)
    run = list(range(6 * PAGE))
    put(pool, tree, run)
    pins.pin("", packed(run), 5)
    (pin,) = pins
    for length in (0, 1, PAGE, 4 * PAGE, 5 * PAGE, 6 * PAGE):
        assert pins.of_prefix("", packed(run[:length])) == [pin], length
    assert pins.of_prefix("", packed([*run, 1])) == []
    assert pins.of_prefix("", packed([9])) == []
    assert pins.of_prefix("other", b"") == []
    assert pins.find(pin.name) is pin
    assert pins.find(99) is None


def test_forgetting_a_prefix_takes_what_begins_with_it_and_what_nobody_else_needs() -> None:
    pool, tree, _pins = pinned_tree(32)
    head = list(range(2 * PAGE))
    for end in ([20] * PAGE + [1] * 3, [20] * PAGE + [2] * 3, [30] * PAGE):
        put(pool, tree, [*head, *end])
    assert tree.forget("", packed([*head, 20, 20])) == (3, 0)
    assert matched_quietly(tree, [*head, *[20] * PAGE]) == 2 * PAGE
    assert matched_quietly(tree, [*head, *[30] * PAGE]) == 3 * PAGE
    assert tree.forget("", packed([*head, 99])) == (0, 0)
    assert tree.forget("", packed([*head, 30])) == (3, 0)
    assert tree.num_pages == 0
    assert tree.namespaces() == []
    tree.check()


def test_what_is_held_is_not_forgotten() -> None:
    pool, tree, pins = pinned_tree()
    run = list(range(4 * PAGE))
    put(pool, tree, run)
    lock = tree.lock(tree.match("", packed(run), 3 * PAGE))
    pins.pin("", packed(run[:PAGE]), 5)
    assert tree.forget("", b"") == (1, 3)
    tree.unlock(lock)
    assert tree.forget("", packed(run[:2])) == (2, 1)
    tree.check()
    assert not tree.flush()
    pins.give_way()
    assert tree.flush()
    assert tree.num_pages == 0


def headed_tree() -> tuple[PagePool, RadixTree, Pins]:
    """Two pages that all namespaces share."""
    pool = PagePool(32, PAGE)
    tree = RadixTree(pool, heads=PublicHeads("public", [packed(range(2 * PAGE))], PAGE))
    return pool, tree, Pins(tree, 32, PAGE, 0.25)


def test_namespaces_pin_a_public_head_each_for_itself() -> None:
    pool, tree, pins = headed_tree()
    runs = {name: [*range(2 * PAGE), *[50 + place] * PAGE] for place, name in enumerate("ab")}
    for name, run in runs.items():
        put(pool, tree, run, name)
        assert pins.pin(name, packed(run[: 2 * PAGE]), 10 + len(pins)) == (2 * PAGE, "")
        assert pins.pin(name, packed(run), 20) == (3 * PAGE, "")
    assert tree.forest.pinned_pages == {"public": 2, "a": 1, "b": 1}
    tree.check([pin.lock for pin in pins])
    pins.check()
    assert tree.evict(99) == 0
    # One namespace's use is nothing to the other's pins.
    lock = tree.lock(tree.match("a", packed(runs["a"]), 3 * PAGE))
    pins.expire(5.0)
    pins.used(lock, 3 * PAGE)
    tree.unlock(lock)
    assert [(pin.namespace, pin.hits) for pin in pins] == [("a", 1), ("a", 1), ("b", 0), ("b", 0)]
    for pin in pins.of_prefix("a", packed(range(PAGE))):
        pins.unpin(pin)
    assert tree.forest.pinned_pages == {"public": 2, "b": 1}
    pins.check()
    assert [pins.give_way() for _ in range(3)] == [True, True, False]
    assert tree.locked_pages == 0


def test_two_pins_at_one_place_both_give_way() -> None:
    pool, tree, pins = headed_tree()
    run = list(range(2 * PAGE))
    put(pool, tree, run, "a")
    for name in "ab":
        assert pins.pin(name, packed(run), 5) == (2 * PAGE, "")
    assert [pins.give_way() for _ in range(3)] == [True, True, False]
    assert tree.evictable_pages == 2


def test_the_heads_have_a_share_of_their_own() -> None:
    pool = PagePool(16, PAGE)
    tree = RadixTree(pool, heads=PublicHeads("public", [packed(range(3 * PAGE))], PAGE))
    pins = Pins(tree, 16, PAGE, 2 / 16)
    run = list(range(6 * PAGE))
    put(pool, tree, run, "a")
    assert pins.pin("a", packed(run), 5) == (2 * PAGE, "namespace_share")
    assert tree.forest.pinned_pages == {"public": 2}
    pins.check()


def test_forgetting_leaves_public_heads_and_other_namespaces_alone() -> None:
    pool, tree, _pins = headed_tree()
    head = list(range(2 * PAGE))
    for name in "ab":
        put(pool, tree, [*head, *[7] * PAGE, *[8] * PAGE], name)
        put(pool, tree, [*head[:PAGE], *[9] * PAGE], name)
        put(pool, tree, [5] * PAGE, name)
    assert tree.num_pages == 2 + 2 * 4
    assert tree.forget("a", packed([*head, 7])) == (2, 0)
    assert tree.forget("a", packed(head[:PAGE])) == (1, 0)
    assert tree.forget("a", b"") == (1, 0)
    assert tree.forget("a", b"") == (0, 0)
    assert tree.namespaces() == ["public", "b"]
    assert tree.num_pages == 2 + 4
    tree.check([])
