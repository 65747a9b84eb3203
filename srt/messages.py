"""Every message that crosses a process border, in the order a request meets them.

One frame on a socket is one MessagePack-encoded tagged struct of this file.  Token ids travel as packed
little-endian int32 (`pack_ids` / `unpack_ids`), never as lists.  A request id (`rid`) names one sample: a
call that asks for n samples carries n rids.  Rids are made by the front and are unique for its lifetime;
names that clients choose never leave the front.

    front --Submit--> tokenizer --Generate--> scheduler --StepOutput--> detokenizer --TextOutput--> front
      |                   \\--Tokenized | Rejected--------------------------------------------------^ |
      \\--Abort | Call----------------> scheduler --SchedulerStats | CallReply-----------------------^
                                        scheduler <--StopFound-- detokenizer
                                        scheduler --CacheTree--> detokenizer --CacheTree--> front
    front --Remember--> every tokenizer
    every child --Ready | StartFailed--> front --Shutdown--> every child
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as packed little-endian int32."""
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_ids`.  Raises ValueError when the length is not a multiple of four bytes."""
    return array("i", packed).tolist()


# Between the parts of a `namespace`, the tenant first; see srt/namespaces.py.
NAMESPACE_SEPARATOR = "\x1f"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What decides the next token and where the output ends.  Ranges are checked where a client's input enters.

    `max_new_tokens` None means: as many as fit in the context.  `temperature` 0 is greedy; `top_k` -1 is off.
    Repetition penalty looks at prompt and output, presence and frequency penalty at the output alone.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False


SessionState = Literal["open", "waiting", "done"]


class SessionMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """The session that a request is part of, and how it goes on after the reply.

    open     nothing is known of that
    waiting  for a tool, if the reply ends by itself: the next request will come, and begin with all of this
    done     nothing more comes
    """

    id: str
    state: SessionState = "open"


class TextPrompt(msgspec.Struct, frozen=True, tag="text"):
    """Plain text; special tokens are added as the tokenizer's own configuration says."""

    text: str


class IdsPrompt(msgspec.Struct, frozen=True, tag="ids"):
    """Token ids as given by the client, packed."""

    ids: bytes


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat"):
    """Chat messages for the model's template, as raw JSON so that the front need not know the template's fields."""

    messages_json: bytes
    template_kwargs_json: bytes = b"{}"
    add_generation_prompt: bool = True


class PinWish(msgspec.Struct, frozen=True, omit_defaults=True):
    """The beginning of a prompt is to stay in the cache, until it has not been used for `ttl` seconds.

    From the front: its first `tokens` tokens, or the chat up to the end of message number `message`, or, with neither,
    all of the prompt.  For the scheduler the tokens are counted; None there: where the message ends cannot be told.
    """

    ttl: float
    tokens: int | None = None
    message: int | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """front -> tokenizer: one prompt, to be sampled once for every rid.  `seeds` has one entry for each rid."""

    rids: tuple[str, ...]
    prompt: TextPrompt | IdsPrompt | ChatPrompt
    sampling: SamplingParams
    seeds: tuple[int, ...]
    namespace: str = ""
    tenant: str = ""
    priority: int = 0
    # None: no logprobs; 0: of the chosen token; k: of the k most likely tokens too.
    logprobs: int | None = None
    # None: no prompt logprobs; else the first prompt position whose logprob is wanted (0 gives a null first).
    prompt_logprobs_from: int | None = None
    use_cache: bool = True
    session: SessionMark | None = None
    # Seconds from arrival to the first token that the client asks for; read by the deadline policy.
    ttft_target: float | None = None
    # Seconds from arrival after which the request ends, whatever it has by then.
    timeout: float | None = None
    pins: tuple[PinWish, ...] = ()
    # The request reads the cache and leaves nothing behind in it.
    no_store: bool = False


class TokenizeCall(msgspec.Struct, frozen=True, tag="tokenize"):
    """front -> tokenizer: only tokenize; answered by `Tokenized` with the ids."""

    rid: str
    prompt: TextPrompt | ChatPrompt


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized"):
    """tokenizer -> front: the prompt has been handed to the scheduler (or, for TokenizeCall, here are its ids).

    `message_starts`: for a chat, the token at which each message begins and, as one more entry, the one at which what
    follows the messages begins; packed, empty where that cannot be told.  `mark` names the prompt among the
    tokenizers, for `Remember`; empty where replies to it are not to be remembered.
    """

    rids: tuple[str, ...]
    prompt_tokens: int
    ids: bytes | None = None
    message_starts: bytes = b""
    mark: bytes = b""


class Remember(msgspec.Struct, frozen=True, tag="remember"):
    """front -> every tokenizer: what the model said after a prompt, so that a history that has this text again gets
    the very ids that were generated.

    `mark`: that of the prompt's `Tokenized`.  `ids`, packed, may go on behind `text` (a stop token, a stop string).
    Only prompts of the same tenant and namespace get them.
    """

    mark: bytes
    text: str
    ids: bytes
    namespace: str = ""
    tenant: str = ""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """tokenizer | scheduler -> front: these requests end here.

    `status` is the HTTP status, `param` the field at fault, `code` a stable word such as
    `context_length_exceeded`, `message` one sentence with the value found and what would be right.
    """

    rids: tuple[str, ...]
    status: int
    message: str
    param: str | None = None
    code: str | None = None


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """tokenizer -> scheduler: one sample of a tokenized prompt.

    Samples of one call share `group` (the first rid of the call), so that reports can tell them from strangers.
    """

    rid: str
    group: str
    prompt_ids: bytes
    sampling: SamplingParams
    seed: int
    namespace: str = ""
    tenant: str = ""
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    use_cache: bool = True
    session: SessionMark | None = None
    # Seconds from arrival to the first token that the client asks for; read by the deadline policy.
    ttft_target: float | None = None
    # Seconds from arrival after which the request ends, whatever it has by then.
    timeout: float | None = None
    # As in `Tokenized`: reports name the message in which reuse stopped.
    message_starts: bytes = b""
    pins: tuple[PinWish, ...] = ()
    no_store: bool = False


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request ended.  `matched`: the stop string or stop id; `message` and `status` go with abort and error."""

    reason: Literal["stop", "length", "abort", "error"]
    matched: str | int | None = None
    message: str | None = None
    status: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One token with its log probability and the most likely alternatives, best first.

    The scheduler fills ids and numbers; the detokenizer adds the tokens' bytes.  `logprob` is None for the
    first token of a prompt, which nothing predicts.
    """

    id: int
    logprob: float | None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    token: bytes = b""
    top_tokens: tuple[bytes, ...] = ()


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


class StreamOpen(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the detokenizer must know of a request; rides with its first output.

    `prompt_tail` holds the last few prompt ids, as context for tokenizers whose decoding depends on what
    stands before; where none of them has text, the output is decoded as if nothing stood before it.
    """

    prompt_tail: bytes
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    cache_report: CacheReport | None = None


class RequestTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a request's time in the scheduler went so far, in seconds.

    queue             from its arrival to its first admission
    prefill           from there to its first token, less what it was preempted in between
    preempted         from a retraction to the next admission, all of them together; `retractions` counts them
    scheduled_tokens  run through the model for it so far, those that were computed again included
    """

    queue: float = 0.0
    prefill: float = 0.0
    preempted: float = 0.0
    retractions: int = 0
    scheduled_tokens: int = 0


class TokenDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The new tokens of one request.  With `finish`, the request's last message.

    `ids` include the token that ended the output (EOS or stop token); `trailing_stop` then says that the last
    id is such a token, which is counted but never shown as text.
    """

    rid: str
    ids: bytes = b""
    open: StreamOpen | None = None
    finish: Finish | None = None
    trailing_stop: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # With the first delta after each admission, and with the finish.
    times: RequestTimes | None = None


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """scheduler -> detokenizer: everything one step brought.

    Requests that got a token, and of which there is nothing else to say, are in `rids`, with the tokens packed in
    `ids`; they come before the deltas, and a request may be in both.
    """

    deltas: tuple[TokenDelta, ...]
    rids: tuple[str, ...] = ()
    ids: bytes = b""


class StopFound(msgspec.Struct, frozen=True, tag="stop_found"):
    """detokenizer -> scheduler: a stop string was completed by output token number `output_tokens` (1-based).

    The client has been told already; the scheduler ends the request and keeps nothing beyond that token.
    """

    rid: str
    output_tokens: int


class TextDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New text of one request, valid UTF-8, ready to be shown.

    `ids` and `logprobs` are of the tokens whose text ends in this delta: a token that is held back, since a character
    or a possible stop string is not finished, comes with the rest of its text.  `completion_tokens`: tokens given
    out so far, through the one that completed a stop string; at the finish, all of them.  `prompt_tokens` and
    `cached_tokens` come with the first delta; later ones may leave them out.
    """

    rid: str
    text: str = ""
    ids: bytes = b""
    finish: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # As in `TokenDelta`.
    times: RequestTimes | None = None
    # With the first delta of a request that was admitted.
    cache_report: CacheReport | None = None


class TextOutput(msgspec.Struct, frozen=True, tag="text_output"):
    """detokenizer -> front: the text that one StepOutput brought."""

    deltas: tuple[TextDelta, ...]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """front -> scheduler: end this request (exact id), in whatever state it is; unknown ids are remembered briefly,
    since an abort may overtake its request."""

    rid: str


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


STEP_SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STEP_ROWS_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
STEP_TOKENS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SCHEDULING_SECONDS_BUCKETS = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005),
    *(0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5),
)


class SchedulerStats(msgspec.Struct, frozen=True, tag="stats"):
    """scheduler -> front: gauges and running totals since the scheduler started, at most a few times a second.

    Pages: free + cached + in use = total, where cached pages are those that no request holds: eviction could free them
    at once, but for those that pins keep.  `pages_pinned` are those of the `pins` pins, in use or not; `pins_yielded`
    pins were let go before their time to make room.
    `prompt_tokens` and `cached_tokens` count every request once, when it is first admitted.  `step_histogram` has
    one count for each bound of STEP_SECONDS_BUCKETS (steps that took at most so long and longer than the bound
    before), and one more for the longer ones; `rows_histogram`, `tokens_histogram` and `scheduling_histogram` are the
    same for the bounds of STEP_ROWS_BUCKETS, STEP_TOKENS_BUCKETS and SCHEDULING_SECONDS_BUCKETS.
    `scheduling_seconds` is processor time of the scheduler's loop: messages, planning, commit, sending.

    Disk: `disk_hits` requests got `disk_tokens` tokens from it, as their first admission's reports say; `disk_dropped`
    blocks were not written since the writer was behind or failing; `disk_errors` reads and writes failed; `disk_late`
    loads were not waited for to the end; there are `disk_blocks` files that can be used, and files of `disk_used_bytes`
    in all; `disk_loading` loads are under way.
    """

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_in_use: int
    page_size: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    evicted_tokens: int
    retractions: int
    aborts: int
    steps: int
    step_rows: int
    step_seconds: float
    plan_seconds: float
    step_tokens: int = 0
    scheduling_seconds: float = 0.0
    step_histogram: tuple[int, ...] = ()
    rows_histogram: tuple[int, ...] = ()
    tokens_histogram: tuple[int, ...] = ()
    scheduling_histogram: tuple[int, ...] = ()
    oldest_wait_seconds: float = 0.0
    # Nobody of the same priority and tenant who comes more than so many seconds later is admitted first.
    overtake_bound_seconds: float = 0.0
    # Retractions whose pages went to swap space.
    swaps: int = 0
    disk_hits: int = 0
    disk_tokens: int = 0
    disk_read_bytes: int = 0
    disk_writes: int = 0
    disk_written_bytes: int = 0
    disk_dropped: int = 0
    disk_errors: int = 0
    disk_late: int = 0
    disk_blocks: int = 0
    disk_used_bytes: int = 0
    disk_loading: int = 0
    pins: int = 0
    pages_pinned: int = 0
    pins_yielded: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """child -> front: the process serves.  `phases`: (name, seconds) of its start; `facts`: its settings."""

    role: str
    index: int
    pid: int
    phases: tuple[tuple[str, float], ...]
    facts: dict[str, str | int | float | bool] = {}


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """child -> front: the process cannot serve, and why, in one line."""

    role: str
    index: int
    message: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """front -> child: leave now."""


TokenizerInbox = Submit | TokenizeCall | Remember | Shutdown
SchedulerInbox = Generate | Abort | Call | StopFound | Shutdown
DetokenizerInbox = StepOutput | CacheTree | Shutdown
FrontInbox = Tokenized | Rejected | TextOutput | SchedulerStats | CallReply | CacheTree | Sessions | Ready | StartFailed
