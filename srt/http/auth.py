"""API keys: asked for on every route but /health, before anything else is looked at; they say whose request it is."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from srt.api_keys import ApiKeys, Holder
from srt.http.connection import error_reply
from srt.http.errors import ApiError

# Where the holder of a request's key stands in its ASGI scope.
HOLDER = "sapwood.holder"

OPEN_PATHS = frozenset({"/health"})
# What these tell, or do, concerns every tenant.
OPERATOR_PATHS = frozenset({"/metrics", "/server_info", "/flush_cache", "/cache/check"})

NOBODYS_KEY = ApiError(
    401,
    "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
    param="Authorization",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)


def holder_of(request: Request) -> Holder:
    """Who sends a request.  Where no key is asked for, everybody is the operator."""
    holder: Holder = request.scope.get(HOLDER, Holder())
    return holder


def tenant_of(request: Request) -> str:
    """Whose request it is.  Without keys, and with one key for all, everybody is the same tenant."""
    return holder_of(request).tenant


class KeyCheck:
    """ASGI middleware that lets a request through when it carries `Authorization: Bearer <key>`.

    The word Bearer may be written in any case, as HTTP has it; the key may not.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with 401, or 403 where it takes the operator's key."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        holder = self._holder(Headers(scope=scope))
        if holder is None:
            await error_reply(NOBODYS_KEY)(scope, receive, send)
        elif scope["path"] in OPERATOR_PATHS and not holder.operator:
            message = f"{scope['path']} concerns the whole server; it takes the operator's key (--api-key)."
            error = ApiError(403, message, param="Authorization", code="operator_only")
            await error_reply(error)(scope, receive, send)
        else:
            scope[HOLDER] = holder
            await self._app(scope, receive, send)

    def _holder(self, headers: Headers) -> Holder | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return self._keys.holder(given.strip().encode()) if scheme.lower() == "bearer" else None
