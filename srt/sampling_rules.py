"""The ranges of what a request may ask for, checked where a client's input enters, and the native spelling.

Every refusal is a RequestFailed 400 that names the parameter, the value found and what would be right.  NaN and
the infinities are in no range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from srt.answer import Ask, Prompt, RequestFailed
from srt.messages import ChatPrompt, IdsPrompt, SamplingParams, TextPrompt

MAX_SAMPLES = 128
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 4096
MAX_STOP_IDS = 1024
MAX_NEW_TOKENS = 2**31 - 1
MAX_TOP_LOGPROBS = 128
# Ten years: no timeout, for whoever must write one.
MAX_SECONDS = 3.2e8
# Places of one prompt that can be pinned, and for how long.
MAX_PINS = 8
MAX_PIN_SECONDS = 30 * 24 * 3600.0
MAX_NAME_CHARACTERS = 512
MAX_PROMPT_BYTES = 64 * 1024 * 1024


def refuse(param: str, message: str) -> RequestFailed:
    """The refusal of one parameter."""
    return RequestFailed(400, f"{param}: {message}", param=param, code="invalid_value")


def check_sampling(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """The parameters as the sampler takes them, when every one is in its range; else RequestFailed 400 with `param`.

    temperature          0 <= t <= 100; 0 is greedy
    top_p                0 < p <= 1
    top_k                -1 or 0 (off) or >= 1; the whole vocabulary or more comes back as -1
    min_p                0 <= p <= 1
    repetition_penalty   0 < r <= 100
    frequency_penalty, presence_penalty   -2 <= p <= 2
    logit_bias           at most 1,024 ids of the vocabulary, each -100 <= b <= 100
    stop                 at most 16 strings, none empty, each at most 4,096 characters
    stop_token_ids       at most 1,024 ids of the vocabulary
    max_new_tokens       >= 0 or None; min_new_tokens >= 0 and not above max_new_tokens
    """
    check_number("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    check_number("top_p", params.top_p, 0.0, 1.0, above_low=True)
    check_number("min_p", params.min_p, 0.0, 1.0)
    check_number("repetition_penalty", params.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, above_low=True)
    check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    check_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    if params.top_k < -1:
        raise refuse("top_k", f"must be -1 or 0 (off) or at least 1, but it is {params.top_k}")
    if params.max_new_tokens is not None:
        check_number("max_new_tokens", params.max_new_tokens, 0, MAX_NEW_TOKENS)
    most = MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    check_number("min_new_tokens", params.min_new_tokens, 0, most)
    _check_bias(params.logit_bias, vocab_size)
    _check_stops(params.stop)
    if len(params.stop_token_ids) > MAX_STOP_IDS:
        raise refuse("stop_token_ids", f"at most {MAX_STOP_IDS} ids, but there are {len(params.stop_token_ids)}")
    for token_id in params.stop_token_ids:
        _check_id("stop_token_ids", token_id, vocab_size)
    if params.top_k == 0 or params.top_k >= vocab_size:
        return msgspec.structs.replace(params, top_k=-1)
    return params


def check_number(param: str, value: float, low: float, high: float, above_low: bool = False) -> None:
    """Raise RequestFailed unless `low <= value <= high` (`low < value` with `above_low`).  NaN is refused."""
    if math.isfinite(value) and low <= value <= high and not (above_low and value == low):
        return
    least = f"above {low:g}" if above_low else f"at least {low:g}"
    raise refuse(param, f"must be {least} and at most {high:g}, but it is {value:g}")


def check_samples(n: int) -> int:
    """The number of samples of one call, when it is 1 to 128.  Raises RequestFailed 400."""
    if 1 <= n <= MAX_SAMPLES:
        return n
    raise refuse("n", f"must be at least 1 and at most {MAX_SAMPLES}, but it is {n}")


def check_prompt(prompt: Prompt) -> None:
    """Raise RequestFailed when a prompt can cross no process border: 413 for its size, 400 for broken text."""
    match prompt:
        case TextPrompt(text=text):
            size = len(text)
            if not is_unicode(text):
                raise refuse("prompt", "holds half of a surrogate pair, which is no Unicode text")
        case IdsPrompt(ids=ids):
            size = len(ids)
            if size % 4:
                raise refuse("input_ids", "packed token ids take four bytes each")
        case ChatPrompt(messages_json=messages, template_kwargs_json=kwargs):
            size = len(messages) + len(kwargs)
    if size > MAX_PROMPT_BYTES:
        message = f"the prompt has {size} bytes, more than the {MAX_PROMPT_BYTES} that can be taken"
        raise RequestFailed(413, message, param="prompt", code="prompt_too_large")


def check_ask(ask: Ask, vocab_size: int) -> SamplingParams:
    """Check all of an ask that can be checked before its prompt is tokenized; the sampling parameters to use.

    Raises RequestFailed 400 or 413 with `param` named.
    """
    check_samples(ask.n)
    check_prompt(ask.prompt)
    for param, name in (("namespace", ask.namespace), ("tenant", ask.tenant)):
        if len(name) > MAX_NAME_CHARACTERS or not is_unicode(name):
            raise refuse(param, f"must be Unicode text of at most {MAX_NAME_CHARACTERS} characters")
    check_number("priority", ask.priority, -(2**31), 2**31 - 1)
    _check_pins(ask)
    bounds = (("ttft_target", ask.ttft_target), ("tpot_target", ask.tpot_target), ("timeout", ask.timeout))
    for param, seconds in bounds:
        if seconds is not None:
            check_number(param, seconds, 0, MAX_SECONDS, above_low=True)
    if ask.logprobs is not None:
        check_number("top_logprobs", ask.logprobs, 0, MAX_TOP_LOGPROBS)
    if ask.prompt_logprobs_from is not None:
        check_number("logprob_start_len", ask.prompt_logprobs_from, 0, 2**31 - 1)
    return check_sampling(ask.sampling, vocab_size)


def _check_pins(ask: Ask) -> None:
    if len(ask.pins) > MAX_PINS:
        raise refuse("pin", f"at most {MAX_PINS} places of a prompt can be pinned, but there are {len(ask.pins)}")
    for wish in ask.pins:
        check_number("pin.ttl_seconds", wish.ttl, 0, MAX_PIN_SECONDS, above_low=True)
        if wish.tokens is not None:
            check_number("pin.tokens", wish.tokens, 1, 2**31 - 1)
    if ask.pins and ask.no_store:
        raise refuse("no_store", "is true, and something is to be pinned; what is not stored cannot be")


def _check_id(param: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise refuse(param, f"token id {token_id} is not in the vocabulary of {vocab_size} tokens")


def _check_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    if len(bias) > MAX_BIASED_TOKENS:
        raise refuse("logit_bias", f"at most {MAX_BIASED_TOKENS} tokens, but there are {len(bias)}")
    for token_id, value in bias.items():
        _check_id("logit_bias", token_id, vocab_size)
        if not (math.isfinite(value) and -MAX_BIAS <= value <= MAX_BIAS):
            raise refuse("logit_bias", f"must be between -100 and 100, but for token {token_id} it is {value:g}")


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise refuse("stop", f"at most {MAX_STOP_STRINGS} strings, but there are {len(stops)}")
    for stop in stops:
        if not stop:
            raise refuse("stop", "a stop string must not be empty")
        if len(stop) > MAX_STOP_STRING_CHARACTERS:
            raise refuse("stop", f"a stop string has at most {MAX_STOP_STRING_CHARACTERS} characters, not {len(stop)}")
        if not is_unicode(stop):
            raise refuse("stop", "a stop string holds half of a surrogate pair, which is no Unicode text")


def is_unicode(text: str) -> bool:
    """True when the text can be written as UTF-8; lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Native names (SGLang's) beside ours, as (native name, our field).
_NUMBERS = (
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("repetition_penalty", "repetition_penalty"),
    ("frequency_penalty", "frequency_penalty"),
    ("presence_penalty", "presence_penalty"),
)
_INTEGERS = (("top_k", "top_k"), ("max_new_tokens", "max_new_tokens"), ("min_new_tokens", "min_new_tokens"))
_SWITCHES = ("ignore_eos", "skip_special_tokens", "no_stop_trim")
_OTHERS = ("stop", "stop_token_ids", "logit_bias", "n", "seed", "sampling_seed")
NATIVE_DEFAULT_NEW_TOKENS = 128


class NativeSampling:
    """What a native `sampling_params` object says: the parameters, and the two that belong to the call."""

    def __init__(self, params: SamplingParams, n: int, seed: int | None) -> None:
        self.params = params
        self.n = n
        self.seed = seed


def sampling_from_native(given: Mapping[str, Any] | None) -> NativeSampling:
    """Read a `sampling_params` object in SGLang's names.

    `max_new_tokens` is 128 when it is not given, as SGLang has it; null means as many as fit.  `seed` and
    `sampling_seed` are one parameter.  Null elsewhere means: the default.  Raises RequestFailed 400 for an unknown
    name and for a value of the wrong type; ranges are the matter of `check_sampling`.
    """
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise refuse("sampling_params", f"must be an object, not {_kind(given)}")
    known = {native for native, _ in (*_NUMBERS, *_INTEGERS)} | set(_SWITCHES) | set(_OTHERS)
    for name in given:
        if name not in known:
            # Shown as ASCII: a name may be anything, half of a surrogate pair too.
            shown = ascii(name)[1:-1][:100] or "sampling_params"
            raise refuse(
                shown, f"there is no sampling parameter {ascii(name)[:100]}; there are {', '.join(sorted(known))}"
            )
    fields: dict[str, Any] = {"max_new_tokens": NATIVE_DEFAULT_NEW_TOKENS}
    for native, ours in _NUMBERS:
        if given.get(native) is not None:
            fields[ours] = _number(native, given[native])
    for native, ours in _INTEGERS:
        if given.get(native) is not None:
            fields[ours] = _integer(native, given[native])
    if "max_new_tokens" in given and given["max_new_tokens"] is None:
        fields["max_new_tokens"] = None
    for name in _SWITCHES:
        if given.get(name) is not None:
            fields[name] = _switch(name, given[name])
    fields["stop"] = _stops(given.get("stop"))
    fields["stop_token_ids"] = _ids("stop_token_ids", given.get("stop_token_ids"))
    fields["logit_bias"] = _bias(given.get("logit_bias"))
    n = 1 if given.get("n") is None else _integer("n", given["n"])
    seeds = [_integer(name, given[name]) for name in ("seed", "sampling_seed") if given.get(name) is not None]
    if len(set(seeds)) > 1:
        raise refuse("sampling_seed", f"is {seeds[1]}, but seed, which means the same, is {seeds[0]}")
    return NativeSampling(SamplingParams(**fields), check_samples(n), seeds[0] if seeds else None)


def _kind(value: object) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _number(param: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise refuse(param, "is too large a number") from None
    raise refuse(param, f"must be a number, not {_kind(value)}")


def _integer(param: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if -(2**63) <= value < 2**63:
            return value
        raise refuse(param, "is too large a number")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    raise refuse(param, f"must be an integer, not {_kind(value)}")


def _switch(param: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise refuse(param, f"must be true or false, not {_kind(value)}")


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple):
        for stop in value:
            if not isinstance(stop, str):
                raise refuse("stop", f"must be a string or a list of strings, but the list holds {_kind(stop)}")
        return tuple(value)
    raise refuse("stop", f"must be a string or a list of strings, not {_kind(value)}")


def _ids(param: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(_integer(param, item) for item in value)
    raise refuse(param, f"must be a list of token ids, not {_kind(value)}")


def _bias(value: object) -> dict[int, float]:
    """`logit_bias` as JSON has it: an object whose keys are token ids, as strings or as integers."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse("logit_bias", f"must be an object from token id to number, not {_kind(value)}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        try:
            token_id = int(key) if isinstance(key, str) else _integer("logit_bias", key)
        except ValueError:
            raise refuse("logit_bias", f"{str(key)[:40]!r} is not a token id") from None
        bias[token_id] = _number("logit_bias", number)
    return bias
