"""What is asked and told about the prefix cache across process borders: calls, trees, pins, sessions, reports."""

from __future__ import annotations

from typing import Literal

import msgspec

SessionState = Literal["open", "waiting", "done"]


class PinWish(msgspec.Struct, frozen=True, omit_defaults=True):
    """The beginning of a prompt is to stay in the cache, until it has not been used for `ttl` seconds.

    From the front: its first `tokens` tokens, or the chat up to the end of message number `message`, or, with neither,
    all of the prompt.  For the scheduler the tokens are counted; None there: where the message ends cannot be told.
    """

    ttl: float
    tokens: int | None = None
    message: int | None = None


class SessionMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """The session that a request is part of, and how it goes on after the reply.

    open     nothing is known of that
    waiting  for a tool, if the reply ends by itself: the next request will come, and begin with all of this
    done     nothing more comes
    """

    id: str
    state: SessionState = "open"


class PinReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of a PinWish: of the first `asked` tokens the first `pinned` are pinned, for `ttl` seconds.

    shortfall  why not all: page_border      the others do not fill a page
                            not_cached       the others are not in the cache
                            namespace_share, total_share   one namespace, or all together, may not pin more
                            bypassed         the request, or the server, does not use the cache
                            unknown_place    the template does not let it be told where the message ends
    message    the message up to whose end, or None
    """

    asked: int
    pinned: int
    ttl: float
    shortfall: Literal[
        "", "page_border", "not_cached", "namespace_share", "total_share", "bypassed", "unknown_place"
    ] = ""
    message: int | None = None


class CacheReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the reuse of a prompt's prefix stopped, and why.

    cached_tokens     tokens taken from the cache; the other `computed_tokens` of the prompt were computed
    disk_tokens       how many of the cached tokens were loaded from disk for this request
    reason            all_cached       only the last token was left, which is always computed
                      first_seen       nothing with this beginning has been cached, as far as is remembered
                      diverged         the cache goes on with other tokens: `cached_next` instead of `prompt_next`
                      extended         the cache ends here: the prompt goes on where what is cached ends
                      evicted          what comes next was cached, and was evicted `evicted_seconds_ago`
                      other_namespace  another namespace of the same tenant has more of it
                      bypassed         the request, or the server, does not use the cache
                      logprobs         prompt logprobs from here on were asked for, so it had to be computed
    position          the first token that was not reused
    message, message_offset   the message of the chat which that token belongs to, as `messages[3]`, and its place in
                      it; `generation_prompt` behind the last one; empty for prompts that are no chat
    cached_next, prompt_next   packed ids of a few tokens from there on, on both sides
    cached_text, prompt_text, before_text   the same as text, and what stands before; filled by the detokenizer
    """

    cached_tokens: int
    computed_tokens: int
    reason: Literal[
        "all_cached", "first_seen", "diverged", "extended", "evicted", "other_namespace", "bypassed", "logprobs"
    ]
    position: int
    cached_next: bytes = b""
    prompt_next: bytes = b""
    before: bytes = b""
    evicted_seconds_ago: float | None = None
    detail: str = ""
    cached_text: str = ""
    prompt_text: str = ""
    before_text: str = ""
    message: str = ""
    message_offset: int = 0
    disk_tokens: int = 0
    pins: tuple[PinReport, ...] = ()


class Call(msgspec.Struct, frozen=True, tag="call"):
    """front -> scheduler: a question or command, answered by one CallReply with the same `call_id`."""

    call_id: str
    what: Literal[
        "flush_cache",
        "stats",
        "cache_tree",
        "cache_pins",
        "unpin",
        "forget",
        "check",
        "sessions",
        "session_state",
    ]
    # For those that concern the cache of a tenant, of which the first two are answered by a CacheTree: whose it is.
    tenant: str = ""
    # For unpin and forget: the prefixes of one namespace of the tenant's, or (None) of each, that begin with these
    # packed tokens; or the pin of this name; or, to forget, the runs of a `session`.
    namespace: str | None = None
    tokens: bytes = b""
    pin: int | None = None
    # For cache_tree: how much of it.
    depth: int = 0
    max_nodes: int = 0
    # For sessions and session_state, answered by Sessions: whose (see `tenant`), which one (None: all), how many at
    # most, and what it is in from now on.
    session: str | None = None
    max_sessions: int = 0
    state: SessionState = "open"


class CallReply(msgspec.Struct, frozen=True, tag="call_reply"):
    """scheduler -> front: the answer to a Call.  `ok` False comes with a message that says why."""

    call_id: str
    ok: bool
    message: str = ""
    # What came of an unpin or forget, by what is counted.
    counts: dict[str, int] = {}


class CacheNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run of cached tokens.

    parent         its place in the list of nodes; -1 for a run that begins a prompt
    tokens, pages  of the run
    head, text     its first few tokens: packed ids, and the same as text, filled by the detokenizer
    users          requests that use it now
    pins           pins that keep it
    hits           matches that went through it
    age_seconds    since it was last used
    children       runs that follow; fewer of them may be in the list
    """

    namespace: str
    parent: int
    tokens: int
    pages: int
    head: bytes
    users: int
    hits: int
    age_seconds: float
    children: int
    tier: str = "device"
    text: str = ""
    pins: int = 0


class CachePin(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pinned prefix.

    name           by which it can be let go
    tokens         that are pinned, and `asked` that were to be
    ttl            seconds after each use; `seconds_left` of them
    hits           uses of all of it since it was pinned
    head, tail     its first and its last few tokens: packed ids; text, tail_text: the same, filled by the detokenizer
    """

    name: int
    namespace: str
    tokens: int
    asked: int
    ttl: float
    seconds_left: float
    hits: int
    head: bytes
    tail: bytes
    text: str = ""
    tail_text: str = ""


class CacheTree(msgspec.Struct, frozen=True, tag="cache_tree"):
    """scheduler -> detokenizer -> front: the answer to a Call for the tree; parents come before their children.

    `left_out`: nodes that are there and not in the list.  The answer to a Call for the pins has those alone, and the
    `pin_limit`: tokens that the pins of a namespace may keep.
    """

    call_id: str
    nodes: tuple[CacheNode, ...]
    page_size: int
    left_out: int = 0
    pins: tuple[CachePin, ...] = ()
    pin_limit: int = 0


class SessionRun(msgspec.Struct, frozen=True):
    """The tokens of one ended request of a session, and how many of them are in the cache now."""

    namespace: str
    tokens: int
    cached_tokens: int


class Session(msgspec.Struct, frozen=True):
    """One session: its state, requests of it that have not ended, seconds since the last one came or ended, and the
    runs that it may go on from, the last one first."""

    id: str
    state: SessionState
    running: int
    age_seconds: float
    runs: tuple[SessionRun, ...]


class Sessions(msgspec.Struct, frozen=True, tag="sessions"):
    """scheduler -> front: the answer to a Call about sessions; `total`: how many the tenant has."""

    call_id: str
    sessions: tuple[Session, ...]
    total: int
