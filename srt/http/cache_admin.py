"""The endpoints that change a tenant's part of the cache, or look at its pins: pins, unpin, flush, prewarm."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srt.cache_messages import CachePin
from srt.http.auth import tenant_of
from srt.http.cache import flushed
from srt.http.connection import json_reply
from srt.http.errors import ApiError, bad_request, quoted
from srt.http.generation import Batch, Prompted, cache_namespace, faults_named, whole
from srt.http.prewarm import prefix_place, prefix_prompt, prewarm_ask, prewarmed
from srt.http.schema import FlushRequest, PrefixFields, PrewarmRequest, UnpinRequest
from srt.http.service import Service
from srt.messages import IdsPrompt, pack_ids, unpack_ids
from srt.namespaces import shown

_unpin_decoder = msgspec.json.Decoder(UnpinRequest)
_flush_decoder = msgspec.json.Decoder(FlushRequest)
_prewarm_decoder = msgspec.json.Decoder(PrewarmRequest)


async def pins(service: Service, request: Request) -> Response:
    """The pins of the client's tenant.  Raises ApiError."""
    with faults_named(lambda param: param):
        found = await service.front.cache_pins(tenant_of(request))
    page_bytes = service.front.kv_bytes_per_page
    told = [_pin_fields(pin, found.page_size, page_bytes) for pin in found.pins]
    return json_reply({"pins": told, "max_tokens_of_a_namespace": found.pin_limit, "page_size": found.page_size})


def _pin_fields(pin: CachePin, page_size: int, page_bytes: int) -> dict[str, Any]:
    return {
        "id": pin.name,
        "namespace": shown(pin.namespace),
        "tokens": pin.tokens,
        "asked_tokens": pin.asked,
        "bytes": pin.tokens // page_size * page_bytes,
        "ttl_seconds": pin.ttl,
        "expires_in_seconds": round(pin.seconds_left, 3),
        "hits": pin.hits,
        "text": pin.text,
        "end_text": pin.tail_text,
        "token_ids": unpack_ids(pin.head),
    }


async def unpin_one(service: Service, request: Request) -> Response:
    """DELETE /cache/pins/{id}.  Raises ApiError 404 where there is no such pin."""
    given = request.path_params["pin"]
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise bad_request("id", f"id must be the number of a pin, not {quoted(given)}.")
    return await _unpin_by_name(service, request, int(given))


async def unpin(service: Service, request: Request) -> Response:
    """Let go of the pin with an id, or of those of the prefixes that begin with a text, messages or ids."""
    fields = await service.read(request, _unpin_decoder)
    if fields.id is not None:
        if prefix_place(fields) is not None or fields.cache_salt is not None:
            raise bad_request("id", "id names one pin; it goes with no other field.")
        return await _unpin_by_name(service, request, fields.id)
    tokens, namespace = await _named_prefix(service, request, fields)
    with faults_named(lambda param: param):
        reply = await service.front.change_cache("unpin", tenant_of(request), namespace, tokens)
    return json_reply({"unpinned": reply.counts["pins"]})


async def _unpin_by_name(service: Service, request: Request, name: int) -> Response:
    with faults_named(lambda param: param):
        reply = await service.front.change_cache("unpin", tenant_of(request), pin=name)
    if not reply.ok:
        raise ApiError(404, f"There is no pin {name}; GET /cache/pins lists them.", param="id", code="pin_not_found")
    return json_reply({"unpinned": 1})


async def flush(service: Service, request: Request) -> Response:
    """Forget what begins with a text, messages or ids; or the runs of a session; a namespace; all of the tenant's.

    Raises ApiError.
    """
    fields = await service.read(request, _flush_decoder)
    if fields.session is not None and (prefix_place(fields) is not None or fields.cache_salt is not None):
        raise bad_request("session", "session names what it has in the cache; it goes with no other field.")
    tokens, namespace = await _named_prefix(service, request, fields)
    with faults_named(lambda param: param):
        reply = await service.front.change_cache(
            "forget", tenant_of(request), namespace, tokens, session=fields.session
        )
    if not reply.ok:
        message = f"There is nothing of a session {quoted(fields.session)}; GET /cache/sessions lists them."
        raise ApiError(404, message, param="session", code="session_not_found")
    return json_reply(flushed(reply.counts, service.front.kv_bytes_per_page))


async def prewarm(service: Service, request: Request) -> Response:
    """Compute a prefix, unless it is cached, and give out no token.  Raises ApiError."""
    fields = await service.read(request, _prewarm_decoder)
    ask, place = prewarm_ask(fields, tenant_of(request), service.front.facts.vocab_size)
    batch = Batch(service.front, service.live, [Prompted(ask, place, secrets.token_hex(16))], _field_name)
    await whole(request, batch)
    return json_reply(prewarmed(batch.answers[0]))


def _field_name(param: str | None) -> str | None:
    return "cache_salt" if param == "namespace" else param


async def _named_prefix(service: Service, request: Request, fields: PrefixFields) -> tuple[bytes, str | None]:
    """The packed tokens of the prefix that a body names (none: all), and the namespace (None: all of the tenant's)."""
    tenant = tenant_of(request)
    if prefix_place(fields) is None:
        return b"", None if fields.cache_salt is None else cache_namespace(tenant, fields.cache_salt)
    namespace = cache_namespace(tenant, fields.cache_salt)
    prompt, _ = prefix_prompt(fields, service.front.facts.vocab_size)
    if isinstance(prompt, IdsPrompt):
        return prompt.ids, namespace
    with faults_named(lambda param: _field_name("text" if param == "prompt" else param)):
        return pack_ids(await service.front.tokenize(prompt)), namespace
