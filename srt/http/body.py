"""From the bytes of a request to a checked struct, with errors that name the field at fault.

The fast way is one strict msgspec decode.  Only when it fails is the body read again, leniently, to find out where
the fault is and which value stands there: JSON itself knows neither NaN nor lone surrogates, so the strict decoder
can only say that the text is broken.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import Request

from srt.http.errors import ApiError, bad_request, quoted

T = TypeVar("T")

# Longer runs of digits are not numbers that any field could mean; turning them into an int takes quadratic time.
MAX_INTEGER_DIGITS = 400

_AT_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_EXPECTED = re.compile(r"^Expected `([^`]*)`")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")

_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class BodyTooLarge(ApiError):
    """The body is longer than the limit.  Raised before more than the limit has been kept in memory."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            413,
            f"The request body is larger than {limit} bytes, the most this server takes (--max-body-bytes).",
            code="request_too_large",
        )


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, at most `limit` bytes.

    Raises BodyTooLarge at the first byte beyond the limit (at once when a Content-Length admits to it), and ApiError
    when the content is not declared to be JSON.  The declaration is asked for because a web page of another origin can
    make a browser send anything else to a local server without asking it first.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(limit)
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        found = f"not {quoted(content_type)}" if content_type else "and there is none"
        raise bad_request("Content-Type", f"The Content-Type header must be application/json, {found}.")
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The connection was closed before the whole body had arrived.", param="body")
        body += message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLarge(limit)
        if not message.get("more_body", False):
            return bytes(body)


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The struct in a body.  Raises ApiError (400) that names the field, the value found and what would be right."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        explain(body, error)


def parse_raw(raw: msgspec.Raw) -> Any:
    """The value of a part of a body that was set aside undecoded."""
    return _parse_leniently(bytes(raw))


def explain(body: bytes, error: Exception) -> NoReturn:
    """Raise the ApiError that tells what is wrong with a body that the strict decoder refused."""
    value = _parse_leniently(body)
    _refuse_what_json_cannot_say(value)
    if not isinstance(error, msgspec.ValidationError):
        raise bad_request("body", f"The request body is not valid JSON: {error}.")
    text = str(error)
    at = _AT_PATH.search(text)
    path, text = (at.group(1), text[: at.start()]) if at else ("", text)
    if unknown := _UNKNOWN.match(text):
        name = _join(path.removeprefix("."), unknown.group(1))
        raise bad_request(name, f"Unknown field {quoted(name)}: it is not part of this endpoint.", "unknown_field")
    if missing := _MISSING.match(text):
        name = _join(path.removeprefix("."), missing.group(1))
        raise bad_request(name, f"The field {quoted(name)} is required and is missing.", "missing_field")
    name, found = _look_up(value, path)
    raise bad_request(name, _describe(name, found, text))


def _parse_leniently(body: bytes) -> Any:
    """The body as Python's more liberal parser reads it, or an ApiError when it is no JSON by any standard."""
    if not body.strip():
        raise bad_request("body", "The request body is empty; it must be a JSON object.")
    try:
        return json.loads(body.decode(), parse_int=_parse_integer)
    except UnicodeDecodeError as error:
        raise bad_request("body", f"The request body is not valid UTF-8 (at byte {error.start}).") from None
    except RecursionError:
        raise bad_request("body", "The request body is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise bad_request("body", f"The request body is not valid JSON: {error}.") from None


def _parse_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_INTEGER_DIGITS else math.copysign(math.inf, float(digits[0] + "1"))


def _refuse_what_json_cannot_say(value: Any) -> None:
    for path, found in _walk(value):
        if isinstance(found, float) and not math.isfinite(found):
            raise bad_request(path, f"{path} must be a finite number, not {quoted(found)}.")
        if isinstance(found, str) and not _is_unicode(found):
            raise bad_request(path, f"{path} has half of a surrogate pair, which is no character: {quoted(found)}.")


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and every value below `value`, with its path, in the order of the text.  Iterative: depth is free."""
    stack = [("", value)]
    while stack:
        path, found = stack.pop()
        if isinstance(found, dict):
            for key in found:
                yield path or "body", key
            stack.extend((_join(path, key), found[key]) for key in reversed(found))
        elif isinstance(found, list):
            stack.extend((f"{path}[{i}]", found[i]) for i in reversed(range(len(found))))
        else:
            yield path or "body", found


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _join(path: str, name: str) -> str:
    """`a[0]` and `b` as `a[0].b`, in characters that every encoder takes."""
    clean = name.encode("utf-8", "backslashreplace").decode() or '""'
    return f"{path}.{clean}" if path else clean


def _look_up(value: Any, path: str) -> tuple[str, Any]:
    """The name and the value at a decoder's path.  `[...]` is some key of an object: the object is named."""
    name = ""
    for key, index in _STEP.findall(path):
        if index == "...":
            break
        try:
            value = value[key] if key else value[int(index)]
        except (KeyError, IndexError, TypeError):
            break
        name = _join(name, key) if key else f"{name}[{index}]"
    return name or "body", value


def _describe(name: str, found: Any, text: str) -> str:
    what = "The request body" if name == "body" else name
    expected = _EXPECTED.match(text)
    if expected is None:
        return f"{what} is not valid: {text[:1].lower()}{text[1:]}, found {quoted(found)}."
    kinds = [kind for kind in expected.group(1).split(" | ") if kind != "null"]
    return f"{what} must be {' or '.join(_NAMES.get(kind, kind) for kind in kinds)}, not {quoted(found)}."
