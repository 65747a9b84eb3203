"""Chat messages as clients send them, checked and brought into the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tokenizer_proc.errors import PromptError

SURROGATES = range(0xD800, 0xE000)


def read_messages(messages_json: bytes) -> list[dict[str, Any]]:
    """The messages of a chat, ready for a template.

    Content becomes one string: text parts are joined, so that a chat gives the same prompt however its text was cut
    into parts, and null (allowed for an assistant that only called tools) becomes the empty string.  Fields that are
    null are left out.  Arguments of earlier tool calls, which clients send as JSON text, become objects, since
    templates write them out themselves.  Raises PromptError naming the field.
    """
    messages = _decode(messages_json, "messages")
    if not isinstance(messages, list):
        raise PromptError("messages must be a list", param="messages")
    if not messages:
        raise PromptError("messages must not be empty", param="messages")
    return [_read_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def read_template_variables(template_kwargs_json: bytes) -> dict[str, Any]:
    """The client's own template variables.  Raises PromptError when they are not an object."""
    variables = _decode(template_kwargs_json, "chat_template_kwargs")
    if not isinstance(variables, dict):
        raise PromptError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    return variables


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise PromptError(f"{where} must be an object with a role and content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise PromptError(f"{where}.role must be a string such as 'user'", param=f"{where}.role")
    read = {name: value for name, value in message.items() if value is not None}
    read["content"] = _read_content(message.get("content"), role, f"{where}.content")
    if isinstance(read.get("tool_calls"), list):
        read["tool_calls"] = [_read_tool_call(call) for call in read["tool_calls"]]
    return read


def _read_content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise PromptError(f"{where} must be a string or a list of text parts; null is for assistants", param=where)
    if not isinstance(content, list):
        raise PromptError(f"{where} must be a string or a list of text parts", param=where)
    return "".join(_read_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise PromptError(f"{where} must be an object such as {{'type': 'text', 'text': ...}}", param=where)
    if part.get("type") != "text":
        raise PromptError(f"{where}.type {part.get('type')!r} is not supported: only 'text' is", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise PromptError(f"{where}.text must be a string", param=f"{where}.text")
    return text


def _read_tool_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, ValueError, RecursionError):
        # What a model once wrote need not be JSON; the template then gets it as the text it is.
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _decode(text: bytes, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise PromptError(f"{param} is nested too deeply", param=param) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise _malformed(text, param) or PromptError(f"{param} is not JSON: {error}", param=param) from error


def _malformed(text: bytes, param: str) -> PromptError | None:
    """The error for JSON that is well formed but holds half of a surrogate pair, which no text encoding can carry."""
    try:
        found = _find_surrogate(json.loads(text), param)
    except (ValueError, RecursionError):
        return None
    if found is None:
        return None
    where, value = found
    return PromptError(f"{where} holds a lone surrogate (\\u{value:04x}), which is not a character", param=where)


def _find_surrogate(value: Any, where: str) -> tuple[str, int] | None:
    """The first string that holds a surrogate: its path and the surrogate."""
    if isinstance(value, str):
        return next(((where, ord(character)) for character in value if ord(character) in SURROGATES), None)
    children: list[tuple[str, Any]] = []
    if isinstance(value, list):
        children = [(f"{where}[{place}]", item) for place, item in enumerate(value)]
    elif isinstance(value, dict):
        children = [pair for key, item in value.items() for pair in ((where, key), (f"{where}.{key}", item))]
    return next((found for path, item in children if (found := _find_surrogate(item, path)) is not None), None)
