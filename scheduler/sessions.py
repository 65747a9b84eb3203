"""Sessions: what clients say of the future of their conversations, and the runs of tokens that it concerns.

A request that names a session leaves its run there when it ends.  The next one goes on from it, or it does not: then
the earlier run is a branch that nobody follows any more, and the tree is told so.  Requests that run side by side are
branches of one session and leave each other alone.

What is kept is bounded, and only ever a hint: a session that is forgotten costs nothing but the hint.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from radix import Hint, RadixTree
from scheduler.request import Request
from srt.cache_messages import Call, Session, SessionRun, SessionState
from srt.cache_messages import Sessions as Told
from srt.messages import Finish

MAX_SESSIONS = 4096
# Of one session, the last ones.
MAX_RUNS = 64
# Packed tokens of all runs.
MAX_BYTES = 64 * 2**20

HINTS: dict[SessionState, Hint] = {"open": Hint.NONE, "waiting": Hint.WAITING, "done": Hint.DONE}


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens of an ended request whose KV went into the tree, packed; `ended`: its place among all that ended."""

    namespace: str
    tokens: bytes
    ended: int


@dataclass(slots=True)
class Book:
    """What is known of one session."""

    used_at: float
    state: SessionState = "open"
    runs: list[Run] = field(default_factory=list)
    # Requests that have not ended, each with the place among ended ones that was reached when it came.
    running: dict[str, int] = field(default_factory=dict)


class Sessions:
    """The sessions of all tenants, those used last at the end."""

    def __init__(self, tree: RadixTree, max_sessions: int = MAX_SESSIONS, max_bytes: int = MAX_BYTES) -> None:
        self._tree = tree
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._books: OrderedDict[tuple[str, str], Book] = OrderedDict()
        self._bytes = 0
        self._ended = 0

    def began(self, request: Request, now: float) -> None:
        """A request has been taken."""
        mark = request.message.session
        if mark is None:
            return
        key = (request.message.tenant, mark.id)
        book = self._books.setdefault(key, Book(now))
        book.used_at = now
        book.running[request.rid] = self._ended
        self._books.move_to_end(key)
        self._trim()

    def ended(self, request: Request, kept: int, finish: Finish | None, now: float) -> None:
        """A request has ended, and the tree has the first `kept` of its tokens.

        `finish` None: a stop string ended it.
        """
        mark = request.message.session
        book = None if mark is None else self._books.get((request.message.tenant, mark.id))
        if mark is None or book is None or request.rid not in book.running:
            return
        began = book.running.pop(request.rid)
        book.used_at = now
        if kept:
            self._ended += 1
            self._continue(book, Run(request.message.namespace, request.tokens[:kept].tobytes(), self._ended), began)
        # A reply that was cut off waits for nothing, and one that never began leaves things as they were.
        stopped = finish is None or finish.reason == "stop"
        if kept or mark.state == "done":
            book.state = mark.state if stopped or mark.state == "done" else "open"
            self._hint(book)
        if not (book.runs or book.running):
            del self._books[request.message.tenant, mark.id]
        self._trim()

    def _continue(self, book: Book, run: Run, began: int) -> None:
        """Take in a run; what had ended when its request came and is not its beginning is superseded."""
        kept = []
        for old in book.runs:
            if old.ended > began:
                kept.append(old)
            elif not (old.namespace == run.namespace and run.tokens.startswith(old.tokens)):
                self._tree.hint(old.namespace, old.tokens, Hint.DONE)
        before = sum(len(old.tokens) for old in book.runs)
        book.runs = [*kept, run][-MAX_RUNS:]
        self._bytes += sum(len(one.tokens) for one in book.runs) - before

    def _hint(self, book: Book) -> None:
        for run in book.runs:
            self._tree.hint(run.namespace, run.tokens, HINTS[book.state])

    def tell(self, tenant: str, name: str, state: SessionState, now: float) -> bool:
        """Somebody says how a session goes on.  False when it is not known (any more)."""
        book = self._books.get((tenant, name))
        if book is None:
            return False
        book.state, book.used_at = state, now
        self._books.move_to_end((tenant, name))
        self._hint(book)
        return True

    def answer(self, call: Call, now: float) -> Told:
        """What there is to say of a tenant's sessions, after taking in what the caller says of one."""
        most = call.max_sessions
        if call.what == "session_state" and call.session is not None:
            self.tell(call.tenant, call.session, call.state, now)
            most = 1
        return Told(call.call_id, self.shown(call.tenant, most, now, call.session), self.count(call.tenant))

    def runs(self, tenant: str, name: str) -> list[Run]:
        """The runs of a session; none for one that is not known."""
        book = self._books.get((tenant, name))
        return [] if book is None else list(book.runs)

    def forget(self, tenant: str, name: str) -> None:
        """Forget the runs of a session; what of it still runs goes on."""
        book = self._books.get((tenant, name))
        if book is not None:
            self._bytes -= sum(len(run.tokens) for run in book.runs)
            book.runs = []
            if not book.running:
                del self._books[tenant, name]

    def count(self, tenant: str) -> int:
        """Sessions of a tenant."""
        return sum(owner == tenant for owner, _ in self._books)

    def shown(self, tenant: str, most: int, now: float, name: str | None = None) -> tuple[Session, ...]:
        """Sessions of a tenant, those used last first, `most` at most; with a name that one alone."""
        found: list[Session] = []
        names = reversed(self._books) if name is None else [(tenant, name)]
        for owner, one in names:
            if len(found) == most:
                break
            if owner == tenant and (owner, one) in self._books:
                found.append(self._shown(one, self._books[owner, one], now))
        return tuple(found)

    def _shown(self, name: str, book: Book, now: float) -> Session:
        runs = tuple(
            SessionRun(
                namespace=run.namespace,
                tokens=len(run.tokens) // 4,
                cached_tokens=self._tree.match(run.namespace, run.tokens, len(run.tokens) // 4, touch=False).num_tokens,
            )
            for run in reversed(book.runs)
        )
        return Session(name, book.state, len(book.running), now - book.used_at, runs)

    def _trim(self) -> None:
        """Forget those used longest ago that are too many; what still runs stays."""
        while len(self._books) > self._max_sessions or self._bytes > self._max_bytes:
            idle = next((key for key, book in self._books.items() if not book.running), None)
            if idle is None:
                return
            self.forget(*idle)

    def check(self) -> None:
        """Recompute what is counted.  Raises AssertionError."""
        held = sum(len(run.tokens) for book in self._books.values() for run in book.runs)
        assert self._bytes == held, f"{self._bytes} bytes of runs, should be {held}"
        assert all(book.running or book.runs for book in self._books.values()), "a session of which nothing is left"
