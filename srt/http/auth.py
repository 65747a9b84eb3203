"""The API key: asked for on every route but /health, before anything else is looked at."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from srt.http.connection import error_reply
from srt.http.errors import ApiError

# Where the tenant stands in an ASGI scope, for keys that belong to different ones.
TENANT = "sapwood.tenant"

OPEN_PATHS = frozenset({"/health"})


def tenant_of(request: Request) -> str:
    """Whose request it is.  Without keys, and with one key for all, everybody is the same tenant."""
    return str(request.scope.get(TENANT, ""))


class KeyCheck:
    """ASGI middleware that lets a request through when it carries `Authorization: Bearer <key>`.

    The word Bearer may be written in any case, as HTTP has it; the key may not.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_right(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
            param="Authorization",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error_reply(error)(scope, receive, send)

    def _is_right(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Compared in constant time, so that the key cannot be guessed a letter at a time.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key)
