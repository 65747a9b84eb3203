"""Request bodies in files: OpenAI's chat and completions, the native one, and lines that wrap a body.

Reading is more liberal than the server: what another server takes (tools, say) can be looked at here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from srt.child import StartError
from srt.messages import ChatPrompt, IdsPrompt, TextPrompt, pack_ids

# A role of newer clients, and what templates know it as.
SYSTEM_ROLES = {"developer": "system"}


@dataclass(frozen=True)
class Body:
    """One prompt of a request.  `name` says which in reports; `fields` is the body that it came from."""

    name: str
    fields: dict[str, Any]
    prompt: TextPrompt | IdsPrompt | ChatPrompt

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of a chat; none for another prompt."""
        return self.fields["messages"] if isinstance(self.prompt, ChatPrompt) else []


def read_body(path: Path) -> Body:
    """The body in a JSON file; of several prompts the first.  Raises StartError in one line."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise StartError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartError(f"{path}: is not JSON: {error}") from error
    return bodies_in(found, str(path))[0]


def read_lines(path: Path) -> Iterator[Body]:
    """The bodies in a JSONL file, numbered from 1.  Raises StartError that names the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise StartError(f"{path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StartError(f"{path}, line {number}: is not JSON: {error}") from error
        yield from bodies_in(found, f"{path}, line {number}", str(number))


def bodies_in(found: Any, where: str, name: str = "") -> list[Body]:
    """The prompts of a body, or of an object that has one under "body" (a recorded request, a batch line).

    Raises StartError for what is no request.
    """
    fields = found.get("body", found) if isinstance(found, dict) else None
    if not isinstance(fields, dict):
        raise StartError(f"{where}: is no request body")
    messages = fields.get("messages")
    if messages is not None:
        if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
            raise StartError(f"{where}: messages must be a list of at least one message")
        return [Body(name, fields, chat_prompt(fields))]
    given = next((fields[key] for key in ("prompt", "text", "input_ids") if fields.get(key) is not None), None)
    try:
        prompts = _prompts(given)
    except OverflowError:
        raise StartError(f"{where}: has a number that is no token id") from None
    if not prompts:
        raise StartError(f"{where}: has neither messages nor a prompt")
    names = [name] if len(prompts) == 1 else [f"{name}[{place}]" for place in range(len(prompts))]
    return [Body(one, fields, prompt) for one, prompt in zip(names, prompts, strict=True)]


def chat_prompt(fields: dict[str, Any]) -> ChatPrompt:
    """The prompt of a chat, with its tools where the template has a place for them."""
    messages = [
        {**message, "role": SYSTEM_ROLES.get(str(message.get("role")), message.get("role"))}
        for message in fields["messages"]
    ]
    variables = dict(fields.get("chat_template_kwargs") or {})
    if fields.get("tools"):
        variables["tools"] = fields["tools"]
    return ChatPrompt(msgspec.json.encode(messages), msgspec.json.encode(variables))


def _prompts(given: Any) -> list[TextPrompt | IdsPrompt]:
    if isinstance(given, str):
        return [TextPrompt(given)] if given else []
    if not isinstance(given, list) or not given:
        return []
    if all(isinstance(item, int) for item in given):
        return [IdsPrompt(pack_ids(given))]
    return [prompt for item in given for prompt in _prompts(item)]
