"""Sessions over HTTP: the field of a request, and the endpoints that list them and are told how they go on."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srt.cache_messages import Session, SessionMark, SessionState
from srt.http.auth import tenant_of
from srt.http.cache import flushed, number_of
from srt.http.connection import json_reply
from srt.http.errors import ApiError, bad_request, quoted
from srt.http.generation import faults_named
from srt.http.schema import SessionField, SessionStateRequest
from srt.http.service import Service
from srt.namespaces import shown

DEFAULT_SESSIONS = 100
MAX_SESSIONS = 1000
MAX_ID_CHARACTERS = 256
STATES: tuple[SessionState, ...] = get_args(SessionState)

_state_decoder = msgspec.json.Decoder(SessionStateRequest)


def session_of(given: str | SessionField | None) -> SessionMark | None:
    """The session that a request says it is part of.  Raises ApiError."""
    if given is None:
        return None
    if isinstance(given, str):
        return SessionMark(_checked(given, "session"))
    state = "open" if given.state is None else given.state
    return SessionMark(_checked(given.id, "session.id"), _state(state, "session.state"))


def _checked(name: str, param: str) -> str:
    if not (0 < len(name) <= MAX_ID_CHARACTERS and name.isprintable() and "/" not in name):
        raise bad_request(
            param, f"{param} must be 1 to {MAX_ID_CHARACTERS} printable characters without a slash, not {quoted(name)}."
        )
    return name


def _state(given: str, param: str) -> SessionState:
    for state in STATES:
        if given == state:
            return state
    raise bad_request(param, f"{param} must be one of {', '.join(STATES)}, not {quoted(given)}.")


async def sessions(service: Service, request: Request) -> Response:
    """The client's sessions, those used last first.  Raises ApiError."""
    limit = number_of(request, "limit", DEFAULT_SESSIONS, MAX_SESSIONS)
    with faults_named(lambda param: param):
        found = await service.front.sessions(tenant_of(request), limit)
    return json_reply({"sessions": [_fields(one) for one in found.sessions], "total": found.total})


async def session(service: Service, request: Request) -> Response:
    """One session.  Raises ApiError 404 for one that is not known (any more)."""
    name = request.path_params["session_id"]
    with faults_named(lambda param: param):
        found = await service.front.sessions(tenant_of(request), 1, name)
    return json_reply(_only(found.sessions, name))


async def tell(service: Service, request: Request) -> Response:
    """Take in how a session goes on.  Raises ApiError 404 for one that is not known (any more)."""
    name = request.path_params["session_id"]
    fields = await service.read(request, _state_decoder)
    state = _state(fields.state, "state")
    with faults_named(lambda param: param):
        found = await service.front.set_session_state(tenant_of(request), name, state)
    return json_reply(_only(found.sessions, name))


async def flush_session(service: Service, request: Request) -> Response:
    """Forget a session, and what the cache has for it alone.  Raises ApiError 404 for one that is not known."""
    name = request.path_params["session_id"]
    with faults_named(lambda param: param):
        reply = await service.front.change_cache("forget", tenant_of(request), session=name)
    if not reply.ok:
        raise _unknown(name)
    return json_reply(flushed(reply.counts, service.front.kv_bytes_per_page))


def _unknown(name: str) -> ApiError:
    message = f"There is no session {quoted(name)}; one begins with a request that names it."
    return ApiError(404, message, param="session_id", code="session_not_found")


def _only(found: tuple[Session, ...], name: str) -> dict[str, Any]:
    if not found:
        raise _unknown(name)
    return _fields(found[0])


def _fields(one: Session) -> dict[str, Any]:
    return {
        "id": one.id,
        "state": one.state,
        "running": one.running,
        "age_seconds": round(one.age_seconds, 3),
        "tokens": max((run.tokens for run in one.runs), default=0),
        "cached_tokens": max((run.cached_tokens for run in one.runs), default=0),
        "runs": [
            {"namespace": shown(run.namespace), "tokens": run.tokens, "cached_tokens": run.cached_tokens}
            for run in one.runs
        ],
    }
