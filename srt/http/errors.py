"""Errors as HTTP clients see them: one exception, one JSON shape, one table of types.

The shape is OpenAI's, on every route: {"error": {"message", "type", "param", "code"}}.  `param` names the field at
fault as a path into the body (`messages[2].content`), `code` is a stable word that programs may test.
"""

from __future__ import annotations

import json
from typing import Any

# The official clients choose their exception class by status; the type is for people and logs.
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

# A value quoted in a message is cut to this many characters.
QUOTED_CHARACTERS = 60


class ApiError(Exception):
    """A request ends here with an HTTP status and a sentence for the client.

    `retry_after`: seconds after which it makes sense to try again, sent as the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object that tells of this error, in a reply or in the middle of a stream."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def all_headers(self) -> dict[str, str]:
        """The headers that go with the reply."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        return headers


def bad_request(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 about one field.  The message says which value was found and what would be right."""
    return ApiError(400, message, param=param, code=code)


def quoted(value: object) -> str:
    """A value from a request as it may stand in a message: JSON, on one line, cut when long.

    The encoder is asked piece by piece, so a value of megabytes costs no more than a short one.
    """
    text = json.dumps(value[: QUOTED_CHARACTERS * 2], ensure_ascii=False) if isinstance(value, str) else ""
    if not text:
        for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
            text += piece
            if len(text) > QUOTED_CHARACTERS:
                break
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[: QUOTED_CHARACTERS - 3]}..."
