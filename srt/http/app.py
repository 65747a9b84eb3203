"""The HTTP face as an application: which path is answered by what, and errors in one shape on all of them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from srt.api_keys import read_api_keys, warn_if_readable
from srt.front import Front
from srt.http.admin import Admin
from srt.http.auth import KeyCheck
from srt.http.body import BodyTooLarge
from srt.http.cache import explain, tree
from srt.http.cache_admin import flush, pins, prewarm, unpin, unpin_one
from srt.http.connection import INTERNAL_ERROR, ClientGone, LingeringReply, error_reply
from srt.http.errors import ApiError, quoted
from srt.http.metrics import Metrics
from srt.http.native import generate
from srt.http.openai_chat import chat_completions
from srt.http.openai_completions import completions
from srt.http.record import Recorder
from srt.http.service import Service, program_version
from srt.http.sessions import flush_session, session, sessions, tell

Handler = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("sapwood.http")

# Nobody reads the reply to a client that has gone; the status is the one that proxies log for it.
CLIENT_CLOSED_REQUEST = 499


def create_app(front: Front) -> FastAPI:
    """The application on top of a front, which it neither starts nor stops."""
    record = front.config.record
    service = Service(front, recorder=None if record is None else Recorder(record))
    admin = Admin(service, Metrics(front, service.model_name))
    # Pages that load their scripts from elsewhere have no place in a server that may run without a network.
    app = FastAPI(title="Sapwood", version=program_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    routes: list[tuple[str, str, Handler, str]] = [
        ("POST", "/v1/chat/completions", partial(chat_completions, service), "Answer a conversation"),
        ("POST", "/v1/completions", partial(completions, service), "Continue one prompt or many"),
        ("POST", "/generate", partial(generate, service), "Continue prompts, native shape"),
        ("GET", "/v1/models", admin.models, "List the model"),
        ("GET", "/v1/models/{model:path}", admin.model, "Describe the model"),
        ("GET", "/health", admin.health, "Tell whether requests are served"),
        ("GET", "/metrics", admin.metrics, "Metrics in the Prometheus text format"),
        ("GET", "/server_info", admin.server_info, "Settings and state of the server"),
        ("GET", "/cache/explain/{request_id:path}", partial(explain, service), "Why a request missed the cache"),
        ("GET", "/cache/pins", partial(pins, service), "What is pinned in the prefix cache"),
        ("DELETE", "/cache/pins/{pin}", partial(unpin_one, service), "Let go of a pin"),
        ("POST", "/cache/unpin", partial(unpin, service), "Let go of pins, by id or prefix"),
        ("POST", "/cache/flush", partial(flush, service), "Forget cached prefixes, by prefix or cache_salt"),
        ("POST", "/cache/prewarm", partial(prewarm, service), "Put a prefix into the cache"),
        ("GET", "/cache/tree", partial(tree, service), "What is in the prefix cache"),
        ("GET", "/cache/check", admin.check, "Recount the pages"),
        ("GET", "/cache/sessions", partial(sessions, service), "Sessions and what the cache has of them"),
        ("GET", "/cache/sessions/{session_id}", partial(session, service), "One session"),
        ("POST", "/cache/sessions/{session_id}", partial(tell, service), "Tell how a session goes on"),
        ("POST", "/cache/sessions/{session_id}/flush", partial(flush_session, service), "Forget a session"),
        ("POST", "/flush_cache", admin.flush_cache, "Empty the prefix cache"),
        ("POST", "/abort_request", admin.abort_request, "End a request by its id"),
        ("POST", "/tokenize", admin.tokenize, "Token ids of a text or a conversation"),
    ]
    for method, path, handler, summary in routes:
        app.add_api_route(
            path, _endpoint(handler), methods=[method], summary=summary, response_class=Response, name=path
        )
    app.add_exception_handler(HTTPException, _on_http_exception)
    keys = read_api_keys(front.config)
    if keys is not None:
        warn_if_readable(front.config)
        app.add_middleware(KeyCheck, keys=keys)
    return app


def _endpoint(handler: Handler) -> Handler:
    """The handler with every way it can fail turned into a reply."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except BodyTooLarge as error:
            return LingeringReply(error)
        except ApiError as error:
            return error_reply(error)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception:
            log.exception("%s %s failed", request.method, request.url.path)
            return error_reply(INTERNAL_ERROR)

    return endpoint


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: a path that is not there, a method that the path does not take."""
    assert isinstance(error, HTTPException)
    where = quoted(f"{request.method} {request.url.path}")
    headers = dict(error.headers or {})
    messages = {
        404: f"There is no route {where}.",
        405: f"The route does not take this method: {where}; it takes {headers.get('Allow', 'another')}.",
    }
    codes = {404: "route_not_found", 405: "method_not_allowed"}
    message = messages.get(error.status_code, str(error.detail))
    code = codes.get(error.status_code)
    return error_reply(ApiError(error.status_code, message, code=code, headers=headers))
