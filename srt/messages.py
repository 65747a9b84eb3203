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

from srt.cache_messages import CacheReport, CacheTree, Call, CallReply, PinWish, SessionMark, Sessions
from srt.stats import SchedulerStats


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
