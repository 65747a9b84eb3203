"""POST /generate: the native endpoint, in the shape that users of SGLang know.

One prompt (`text`, or `input_ids` as one list) with one sample is answered by an object; a list of prompts, or
several samples, by a list of objects in prompt-major order.  A stream sends the same objects again and again, each
with everything so far; where there are several, `index` says which.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srt.answer import Ask, Prompt
from srt.http.auth import tenant_of
from srt.http.connection import DONE, event, json_reply
from srt.http.errors import bad_request, quoted
from srt.http.generation import Batch, Prompted, cache_namespace, faults_named, streamed, whole
from srt.http.pins import wishes_of
from srt.http.prompts import read_prompts
from srt.http.schema import GenerateRequest, refuse_unsupported
from srt.http.service import Service
from srt.http.sessions import session_of
from srt.messages import SamplingParams
from srt.native_reply import NativeLogprobs, NativeReply
from srt.sampling_rules import NativeSampling, sampling_from_native

MAX_RID_CHARACTERS = 256
OTHER_NAMES = {"namespace": "cache_salt", "top_logprobs": "top_logprobs_num"}

_decoder = msgspec.json.Decoder(GenerateRequest)


@dataclass(frozen=True)
class _Wanted:
    """What the replies for one prompt are to say of log probabilities.  `start`: from this prompt token on; -1: of
    none of the prompt."""

    logprobs: NativeLogprobs | None
    start: int


async def generate(service: Service, request: Request) -> Response:
    """Answer each prompt, whole or as a stream.  Raises ApiError."""
    fields = await service.read(request, _decoder)
    refuse_unsupported(fields)
    prompts, single = _prompts(fields, service.front.facts.vocab_size)
    count = len(prompts)
    samplings = _samplings(fields, count)
    wanted = _wanted(fields, count)
    rids = _rids(fields, count, single)
    prompted = [
        Prompted(_ask(tenant_of(request), fields, prompt, sampling, want), place, rid)
        for (place, prompt), sampling, want, rid in zip(prompts, samplings, wanted, rids, strict=True)
    ]
    batch = Batch(service.front, service.live, prompted, _field_name)
    replies = [
        [NativeReply(rid, answer, index, want.logprobs) for index in range(sampling.n)]
        for rid, answer, sampling, want in zip(rids, batch.answers, samplings, wanted, strict=True)
    ]
    several = not single or samplings[0].n > 1
    if fields.stream:
        return await streamed(request, batch, _events(batch, replies, several))
    bodies = [
        reply.take(delta)
        for prompt_replies, deltas in zip(replies, await whole(request, batch), strict=True)
        for reply, delta in zip(prompt_replies, deltas, strict=True)
    ]
    return json_reply(bodies if several else bodies[0])


async def _events(batch: Batch, replies: Sequence[Sequence[NativeReply]], several: bool) -> AsyncGenerator[bytes, None]:
    firsts = list(accumulate((len(of_prompt) for of_prompt in replies), initial=0))
    async for prompt, sample, delta in batch.read():
        body = replies[prompt][sample].take(delta)
        if delta.ids or delta.text or delta.finish is not None:
            yield event({**body, "index": firsts[prompt] + sample} if several else body)
    yield DONE


def _prompts(fields: GenerateRequest, vocab_size: int) -> tuple[list[tuple[str, Prompt]], bool]:
    """The prompts with their places, and whether there is one that was not given in a list of prompts."""
    if (fields.text is None) == (fields.input_ids is None):
        raise bad_request("text", "Exactly one of text and input_ids must be given.")
    name, given = ("text", fields.text) if fields.text is not None else ("input_ids", fields.input_ids)
    assert given is not None
    if name == "input_ids" and given and isinstance(given[0], str):
        raise bad_request("input_ids[0]", f"input_ids[0] must be a token id, not {quoted(given[0])}.")
    prompts = read_prompts(given, name, vocab_size)
    return [*prompts], prompts[0][0] == name


def _field_name(param: str | None) -> str | None:
    """The endpoint's name of a field that the runtime calls `param`."""
    if param in SamplingParams.__struct_fields__ or param == "n":
        return f"sampling_params.{param}"
    return param if param is None else OTHER_NAMES.get(param, param)


def _samplings(fields: GenerateRequest, count: int) -> list[NativeSampling]:
    samplings = []
    for index, given in enumerate(_for_each(fields.sampling_params, count, "sampling_params")):
        place = f"sampling_params[{index}]" if isinstance(fields.sampling_params, list) else "sampling_params"
        with faults_named(partial("{}.{}".format, place)):
            samplings.append(sampling_from_native(given))
    return samplings


def _wanted(fields: GenerateRequest, count: int) -> list[_Wanted]:
    logprobs = _for_each(fields.return_logprob, count, "return_logprob")
    starts = _for_each(fields.logprob_start_len, count, "logprob_start_len")
    tops = _for_each(fields.top_logprobs_num, count, "top_logprobs_num")
    wanted = []
    for one, start, top in zip(logprobs, starts, tops, strict=True):
        if start is not None and start < -1:
            raise bad_request("logprob_start_len", f"logprob_start_len must be at least -1 (none), not {start}.")
        asked = NativeLogprobs(top or 0, bool(fields.return_text_in_logprobs)) if one else None
        wanted.append(_Wanted(asked, -1 if start is None else start))
    return wanted


def _rids(fields: GenerateRequest, count: int, single: bool) -> list[str]:
    if fields.rid is None:
        return [secrets.token_hex(16) for _ in range(count)]
    if isinstance(fields.rid, str) and not single:
        raise bad_request("rid", "rid must be a list with one id for each prompt when prompts come in a list.")
    rids = _for_each(fields.rid, count, "rid")
    if len(set(rids)) < count:
        raise bad_request("rid", "rid must name each prompt differently, but an id is in the list twice.")
    for rid in rids:
        if not rid or len(rid) > MAX_RID_CHARACTERS:
            raise bad_request("rid", f"rid must have 1 to {MAX_RID_CHARACTERS} characters, not {len(rid)}.")
    return rids


def _for_each(given: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt: a list as it is (ApiError when it has another length), anything else for all."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise bad_request(name, f"{name} must have one entry for each of the {count} prompts, not {len(given)}.")
    return given


def _ask(tenant: str, fields: GenerateRequest, prompt: Prompt, sampling: NativeSampling, wanted: _Wanted) -> Ask:
    return Ask(
        prompt=prompt,
        sampling=sampling.params,
        n=sampling.n,
        seed=sampling.seed,
        namespace=cache_namespace(tenant, fields.cache_salt),
        tenant=tenant,
        priority=fields.priority or 0,
        ttft_target=fields.ttft_target,
        tpot_target=fields.tpot_target,
        timeout=fields.timeout,
        pins=wishes_of(fields.pin),
        no_store=bool(fields.no_store),
        session=session_of(fields.session),
        logprobs=None if wanted.logprobs is None else wanted.logprobs.top,
        prompt_logprobs_from=None if wanted.logprobs is None or wanted.start < 0 else wanted.start,
    )
