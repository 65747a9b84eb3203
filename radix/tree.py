"""The radix tree: which runs of tokens have their KV in which pages.

    namespace "a"                      every namespace has a root and pages of its own
      [pages 0-3] -+- [4-9] -- [10, 11 (5 of 16 rows)]      an edge is a run of whole pages; a leaf may end in a
                   |                                        partly filled page, its tail
                   +- [12-14]          siblings differ somewhere in their first page

- The tree is one owner of each of its pages (`PagePool.share`); whoever has a page in its table is another.
- A receipt of `lock` keeps the path to its node from being evicted.  Hold one as long as you hold pages of the
  tree: then everything that is not locked can really be freed, and `evictable_pages` is exact.
- Nodes split where runs part and where a lock ends, so that nothing is locked that is not needed.
- Declared public heads have pages that all namespaces share; see `radix.heads`.
- A leaf that nobody but the inserting request holds grows in place: a conversation stays one node.
- Each operation costs in proportion to the pages it touches, and to the logarithm of the number of leaves.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from radix.audit import check_forest, draw_forest
from radix.eviction import LRU, EvictionPolicy, Reuse
from radix.explain import Outlined, following, outline
from radix.forest import Forest
from radix.forget import Forgotten, forget
from radix.heads import PublicHeads
from radix.node import TOKEN_BYTES, Hint, Node
from radix.pool import PagePool, page_run
from radix.results import Insert, Lock, Match, StaleLock, StaleMatch
from radix.walk import Stop, walk, walk_public

# on_evict(namespace, prefix, pages): `pages` are about to leave the tree under pressure; they hold the KV of the last
# tokens of `prefix` (packed, from the first token of the path on), beginning on a page border.  What is wanted of
# them must be copied before the call returns.  The tree must not be changed from inside.
OnEvict = Callable[[str, bytes, Sequence[int]], None]


class RadixTree:
    """A prefix cache over the pages of `pool`.  One thread at a time.

    on_evict: called with every run that leaves under pressure; None for nobody.  heads: what all namespaces share.
    """

    def __init__(
        self,
        pool: PagePool,
        policy: EvictionPolicy | None = None,
        on_evict: OnEvict | None = None,
        heads: PublicHeads | None = None,
    ) -> None:
        self._forest = Forest(pool, policy or LRU())
        self._pool = pool
        self._page_size = pool.page_size
        self._page_bytes = pool.page_size * TOKEN_BYTES
        # May be set later too, by whoever owns the tree.
        self.on_evict = on_evict
        self._tick = 0
        self._heads = heads or PublicHeads()
        # For each namespace, receipts on public heads alone.
        self._guests: Counter[str] = Counter()

    # Match, lock, unlock ------------------------------------------------------------------------------------------

    def match(self, namespace: str, tokens: bytes, limit: int, touch: bool = True) -> Match:
        """The longest known prefix of `tokens` (packed int32), `limit` tokens at most.  Never changes the structure.

        With `touch`, the nodes of which every page is of use count as used now.
        """
        end = limit * TOKEN_BYTES
        stop = self._walk(namespace, tokens if len(tokens) <= end else tokens[: max(end, 0)])
        if stop is None:
            return Match(0, array("q"), None, 0, namespace, None, 0)
        node, inside, whole, rows, pages = stop
        partial = None
        used = node
        if inside is not None:
            if rows:
                partial = inside.pages[whole]
                if whole + 1 == len(inside.pages):
                    used = inside
            node = inside
        if touch:
            self._touch(used, 1)
        if not pages and not rows:
            return Match(0, array("q"), None, 0, namespace, None, 0)
        return Match(len(pages) * self._page_size + rows, pages, partial, rows, namespace, node, node.generation)

    def following(self, namespace: str, tokens: bytes, count: int) -> tuple[int, bytes]:
        """How many leading tokens are known, and up to `count` tokens that the cache has after them."""
        stop = self._walk(namespace, tokens)
        return (0, b"") if stop is None else following(stop, self._page_size, count)

    @property
    def public_namespace(self) -> str:
        """Where the pages of declared heads are."""
        return self._heads.namespace

    def public_tokens(self, tokens: bytes) -> int:
        """How many leading tokens of a run (packed) lie in pages that all namespaces share."""
        return self._heads.pages(tokens) * self._page_size

    def _walk(self, namespace: str, tokens: bytes) -> Stop | None:
        """Where a run of a namespace stops to be known; None when nothing of the namespace is there."""
        public = self._heads.pages(tokens) if self._heads.any else 0
        if public:
            root = self._forest.roots.get(self._heads.namespace)
            return walk_public(root, namespace, tokens, self._page_size, public)
        root = self._forest.roots.get(namespace)
        return None if root is None else walk(root, tokens, self._page_size)

    def lock(self, match: Match) -> Lock:
        """Keep what was matched, its partial page included, until the receipt is given back.

        Raises StaleMatch, changing nothing, when some of it has left the tree since.  An empty match gives a
        receipt too: it keeps the namespace from being flushed.
        """
        node = match.node
        uses = 0
        reuse: Reuse | None = None
        if node is None:
            node = self._forest.root(match.namespace)
        elif node.generation != match.generation:
            raise StaleMatch(f"the pages of a match of {match.num_tokens} tokens have been evicted since")
        else:
            end = len(match.pages) + (match.partial_page is not None)
            # A node that was split since covers only the lower part of what it covered then.
            while node.start >= end and node.parent is not None:
                node = node.parent
            used = end - node.start
            reuse = self._forest.leaves.reuse(node, used, self._tick)
            if len(node.children) < 2 and 2 * used >= len(node.pages):
                uses = node.uses + 1
            if used != len(node.pages):
                node = self._part(node, used)
        self._forest.lock_path(node)
        if node.namespace != match.namespace:
            self._guests[match.namespace] += 1
        return Lock(node, uses, reuse, match.namespace)

    def _part(self, node: Node, whole: int) -> Node:
        """Split a node whose first `whole` pages alone are used now.  Returns these."""
        upper = self._forest.split(node, whole)
        # `match` could not touch the upper part alone, which is now a node.
        self._touch(upper, 0)
        upper.uses += 1
        if node.hint is Hint.NONE and node.ends and len(node.pages) <= whole:
            node.hint = Hint.PASSED
            self._forest.leaves.changed(node)
        return upper

    def unlock(self, lock: Lock) -> None:
        """Give a receipt back.  Raises StaleLock when that has been done before."""
        if not lock.held:
            raise StaleLock("this lock has been given back already")
        lock.held = False
        if self._guests:
            self._leave_head(lock)
        self._forest.unlock_path(lock.node)

    def _leave_head(self, lock: Lock) -> None:
        """A receipt is given back: count it no longer, if it is one on a public head alone."""
        if lock.namespace != lock.node.namespace:
            self._guests[lock.namespace] -= 1
            if not self._guests[lock.namespace]:
                del self._guests[lock.namespace]

    def touch(self, match: Match) -> None:
        """What `match` would have done with `touch`: for those who look first and decide then.

        To be called before anything else changes the structure.
        """
        if match.node is not None:
            self._touch(match.last_whole, 1)

    def _touch(self, node: Node, hits: int) -> None:
        """The path to this node is used now: one tick for all of it, so that no part looks older than what is below."""
        self._tick = tick = self._tick + 1
        at: Node | None = node
        while at is not None:
            at.tick = tick
            at.hits += hits
            at = at.parent

    # Insert -------------------------------------------------------------------------------------------------------

    def insert(
        self, namespace: str, tokens: bytes, pages: Sequence[int], lock: Lock | None = None, reply: int = 0
    ) -> Insert:
        """Make the KV of `tokens` (packed int32) known; it lies in `pages`, the last of which may be partly filled.

        The tree shares the pages that it takes, and takes none where it holds the same run already.  With `lock`,
        that receipt is given back for one on the whole inserted path; the part both have in common stays locked
        throughout.  A tail that has become the beginning of something longer goes, unless another receipt holds it;
        one that is the beginning of something present is not taken.

        `reply`: how many tokens at the end are the reply to the rest, for the eviction policy.

        Raises ValueError when the number of pages does not fit the tokens, StaleLock when the receipt has been given
        back or is another namespace's, PageError when a page is free; nothing is changed then.
        """
        num_tokens = len(tokens) // TOKEN_BYTES
        if len(tokens) % TOKEN_BYTES or len(pages) != -(-num_tokens // self._page_size):
            raise ValueError(
                f"{len(tokens)} bytes of tokens do not fill {len(pages)} pages of {self._page_size} tokens: "
                f"all pages but the last must be full, and the last not empty"
            )
        if lock is not None and not (lock.held and lock.namespace == namespace):
            raise StaleLock("this lock has been given back already, or is another namespace's")
        if not pages:
            return Insert(array("q"), 0, lock)
        public = self._heads.pages(tokens) if self._heads.any else 0
        if public:
            stop, have = self._into_head(namespace, tokens, pages, lock, public)
        else:
            root = self._forest.roots.get(namespace) or Node(namespace, b"", array("q"), 0, None)
            stop = walk(root, tokens, self._page_size, closest=False)
            have = len(stop.pages)
        known = stop.pages
        new_tokens = 0
        if len(known) * self._page_size + stop.rows == num_tokens:
            end = self._known_end(stop, lock is not None)
        else:
            end = self._grow(stop, tokens, pages, lock)
        if have * self._page_size + stop.rows * (have == len(known)) < num_tokens:
            new_tokens = num_tokens - have * self._page_size
        self._touch(end, 0)
        if lock is not None or new_tokens:
            self._used(end, tokens, have if new_tokens else None, lock, reply)
        if lock is not None:
            lock = self._move_lock(lock, end)
        elif new_tokens and end.entry is None:
            self._forest.leaves.add(end)
        full = len(tokens) // self._page_bytes
        if len(known) < full:
            known += page_run(pages[len(known) : full])
        return Insert(known, new_tokens, lock)

    def _into_head(
        self, namespace: str, tokens: bytes, pages: Sequence[int], lock: Lock | None, public: int
    ) -> tuple[Stop, int]:
        """Make the first `public` pages of a run known, which are a head's, and the branch where the rest goes.

        Returns where the whole run stops then, and how many of its pages were known before.
        """
        name, cut = self._heads.namespace, public * self._page_bytes
        root = self._forest.roots.get(name) or Node(name, b"", array("q"), 0, None)
        stop = walk(root, tokens[:cut], self._page_size, closest=False)
        have = len(stop.pages)
        if have == public:
            end = self._known_end(stop, True)
        else:
            end = self._grow(stop, tokens[:cut], pages[:public], lock)
            stop.pages.extend(page_run(pages[have:public]))
        if len(tokens) <= cut:
            return Stop(end, None, 0, 0, stop.pages), have
        branch = self._forest.branch(end, namespace)
        rest = walk(branch, tokens[cut:], self._page_size, closest=False)
        return rest._replace(pages=stop.pages + rest.pages), have if have < public else public + len(rest.pages)

    def _used(self, end: Node, tokens: bytes, known: int | None, lock: Lock | None, reply: int) -> None:
        """Note what the eviction policy wants to know of an inserted run.  `known`: pages that were here; None: all."""
        leaves = self._forest.leaves
        if known is not None:
            end.uses = leaves.returns(end.namespace, tokens, known, self._page_bytes, self._tick)
        if lock is not None:
            end.uses = max(end.uses, lock.uses)
            if lock.reuse is not None:
                leaves.learn(lock.reuse)
                lock.reuse = None
        if reply:
            end.reply = reply
        end.hint = Hint.NONE
        if end.entry is not None:
            leaves.changed(end)

    def _known_end(self, stop: Stop, exact: bool) -> Node:
        """The last node of a run that is all there; with `exact`, one that ends where the run ends, to the page."""
        if stop.inside is None:
            return stop.node
        end = stop.whole + (stop.rows > 0)
        if end == len(stop.inside.pages):
            return stop.inside
        return self._forest.split(stop.inside, end) if exact else stop.node

    def _grow(self, stop: Stop, tokens: bytes, pages: Sequence[int], lock: Lock | None) -> Node:
        """Take the pages of a run that are new, as a longer leaf or another one.  Returns the leaf."""
        forest = self._forest
        node, inside, whole, rows, known = stop
        fresh = page_run(pages[len(known) :])
        self._pool.share(fresh)
        rest = tokens[len(known) * self._page_bytes :]
        if inside is not None and whole:
            all_of_it = whole * self._page_bytes + rows * TOKEN_BYTES == len(inside.key)
            if all_of_it and self._only_holder(inside, lock):
                forest.extend(inside, rest, fresh, whole)
                return inside
            return forest.attach(forest.split(inside, whole), rest, fresh)
        if node.num_tails:
            self._drop_tails(node, rest, lock)
        if node.parent is None:
            forest.roots[node.namespace] = node
        elif node.pages and node.ends and self._only_holder(node, lock):
            forest.extend(node, rest, fresh, len(node.pages))
            return node
        return forest.attach(node, rest, fresh)

    def _only_holder(self, leaf: Node, lock: Lock | None) -> bool:
        """Whether no receipt but this one keeps the leaf; what grows then is locked by nobody who does not need it."""
        return leaf.locks == (lock is not None and lock.node is leaf)

    def _drop_tails(self, node: Node, rest: bytes, lock: Lock | None) -> None:
        """Drop the tails under `node` that are beginnings of the run `rest`, which follows now."""
        for end in range(TOKEN_BYTES, min(len(rest), self._page_bytes), TOKEN_BYTES):
            tail = node.children.get(rest[:end])
            if tail is None or not self._only_holder(tail, lock):
                continue
            if lock is not None and tail.locks:
                # The receipt goes on to hold the path above; the insertion that is under way moves it from there.
                self._forest.lock_path(node)
                self._forest.unlock_path(tail)
                lock.node = node
            self._forest.remove(tail)

    def _move_lock(self, lock: Lock, end: Node) -> Lock:
        """Give a receipt back for one on the path to `end`, which is locked before anything is unlocked."""
        old = lock.node
        lock.held = False
        if self._guests:
            self._leave_head(lock)
        if end.namespace != lock.namespace:
            self._guests[lock.namespace] += 1
        at = end
        while at is not old and at.parent is not None:
            at = at.parent
        if at is old:
            self._forest.lock_path(end, above=old)
        else:
            self._forest.lock_path(end)
            self._forest.unlock_path(old)
        return Lock(end, lock.uses, namespace=lock.namespace)

    # Hints --------------------------------------------------------------------------------------------------------

    def hint(self, namespace: str, tokens: bytes, hint: Hint) -> bool:
        """Tell the eviction policy what is known of the future of the run `tokens` (packed int32).

        It holds until the run is used or grows.  False, and nothing is noted, when the last full page of the run is
        not here, or is part of something longer: then others need it.
        """
        stop = self._walk(namespace, tokens)
        if stop is None:
            return False
        node, inside, whole, rows, pages = stop
        node = inside if inside is not None and (whole or rows) else node
        full = len(tokens) // self._page_bytes
        here = node.start + len(node.key) // self._page_bytes
        # The last pages of both may be filled in part, and differently.
        if node.namespace != namespace or not node.pages or not node.ends or len(pages) < full or here > full:
            return False
        node.hint = hint
        self._forest.leaves.changed(node)
        return True

    # Evict, flush -------------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Free at least `num_pages` pages if that can be done, and return how many became free.

        The cheapest leaf goes first; of the last one only the pages that are needed, from its end.  Pages that
        somebody else still owns leave the tree without becoming free, and are not counted.
        """
        freed = 0
        while freed < num_pages:
            leaf = self._forest.leaves.cheapest(self._tick)
            if leaf is None:
                break
            freed += self._shrink(leaf, num_pages - freed)
        return freed

    def _shrink(self, leaf: Node, wanted: int) -> int:
        """Evict `wanted` pages from the end of a leaf, or all of it.  Returns how many became free."""
        kept = max(len(leaf.pages) - wanted, 0)
        self._forest.leaves.leaves_pages(leaf, kept, self._page_bytes)
        if self.on_evict is not None:
            self.on_evict(leaf.namespace, leaf.path_tokens(), leaf.pages[kept:])
        if kept:
            return self._forest.trim(leaf, kept)
        parent = leaf.parent
        freed = self._forest.remove(leaf)
        if parent is not None:
            self._forest.prune(parent)
        return freed

    def flush(self, namespace: str | None = None) -> bool:
        """Empty the tree, or one namespace of it.  Refuses, returning False, while a receipt is out there.

        Since a request holds a receipt from its admission on, nothing can be inserted later that was computed
        before the flush; matches from before are stale.
        """
        roots = self._forest.roots
        doomed = list(roots.values()) if namespace is None else self._forest.tops(namespace)
        if any(top.locks for top in doomed) or (namespace is not None and self._guests[namespace]):
            return False
        for top in doomed:
            self._forest.clear(top)
        return True

    def forget(self, namespace: str, tokens: bytes) -> Forgotten:
        """Forget the runs of a namespace that begin with `tokens` (packed int32; empty: all), but for what is held.

        Of these tokens themselves, what nothing else goes on from goes too, unless it lies in a public head.
        """
        return forget(self._forest, namespace, tokens)

    @property
    def receipts(self) -> int:
        """Locks that are out and are no pins."""
        return sum(root.locks - root.pins for root in self._forest.roots.values())

    # Counters and inspection --------------------------------------------------------------------------------------

    @property
    def forest(self) -> Forest:
        """The nodes, for those of this room who hold them in their own way."""
        return self._forest

    @property
    def num_pages(self) -> int:
        """Pages that the tree owns."""
        return self._forest.num_pages

    @property
    def locked_pages(self) -> int:
        """Pages that receipts keep."""
        return self._forest.locked_pages

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` can free, all in all: those of unlocked nodes.

        No locked node is below an unlocked one, so all of these can go, leaf by leaf.  They really become free as
        long as everyone who has a page of the tree in a table holds a lock on it.
        """
        return self._forest.num_pages - self._forest.locked_pages

    @property
    def num_nodes(self) -> int:
        """Nodes, roots not counted; never more than `num_pages`."""
        return self._forest.num_nodes

    @property
    def version(self) -> int:
        """Grows whenever the structure changes; as long as it does not, a match stays the best one."""
        return self._forest.version

    def namespaces(self) -> list[str]:
        """The namespaces that hold pages or receipts."""
        return list(dict.fromkeys([*self._forest.roots, *self._forest.branches]))

    @property
    def tick(self) -> int:
        """The counter of walks, which nodes are stamped with when they are used."""
        return self._tick

    def outline(
        self, namespaces: Iterable[str], depth: int, max_nodes: int, head_tokens: int
    ) -> tuple[list[Outlined], int]:
        """The upper levels of these namespaces, see `radix.explain.outline`.  Touches nothing."""
        tops = [top for name in namespaces for top in self._forest.tops(name)]
        return outline(tops, depth, max_nodes, head_tokens)

    def owned(self) -> Iterator[Sequence[int]]:
        """The tree's pages, a list for each node: its part of the owners that `PagePool.check` asks for."""
        return (node.pages for node in self._forest.nodes())

    def check(self, locks: Iterable[Lock] | None = None) -> None:
        """Recompute everything that is counted or sorted.  Raises AssertionError with a drawing of the tree.

        `locks`: all receipts that are out, if the caller knows them; else lock counts are only checked for order.
        """
        try:
            check_forest(self._forest, None if locks is None else [lock.node for lock in locks])
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.dump()}") from error

    def dump(self) -> str:
        """The tree, drawn: one line for each node, with its pages, its first tokens, locks, hits and last use."""
        return draw_forest(self._forest)
