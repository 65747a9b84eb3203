"""`--public-prefix FILE`: the beginnings of prompts that all tenants share, as token ids.

A line is a request body as `sapwood explain` and `lint` take it: `{"messages": [...]}`, of which the template's text
without a generation prompt counts, `{"prompt": "..."}`, or `{"input_ids": [...]}`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from sapwood.bodies import Body, read_lines
from sapwood.offline import OfflineTokenizer
from srt.answer import RequestFailed
from srt.child import StartError
from srt.config import ServerConfig
from srt.messages import ChatPrompt, IdsPrompt, TextPrompt, pack_ids
from srt.resolve import Resolved, resolve

FLAG = "--public-prefix"
MAX_HEADS = 1024


def resolve_with_heads(config: ServerConfig, folder: Path) -> Resolved:
    """As `srt.resolve.resolve`, with the declared heads tokenized.  Raises StartError."""
    resolved = resolve(config, folder)
    if config.public_prefix is None:
        return resolved
    return replace(resolved, public_heads=read_heads(config, folder))


def read_heads(config: ServerConfig, folder: Path) -> tuple[bytes, ...]:
    """The packed ids of each head in the file.  Raises StartError that names the line."""
    assert config.public_prefix is not None
    bodies = list(read_lines(Path(config.public_prefix).expanduser()))
    if not 1 <= len(bodies) <= MAX_HEADS:
        raise StartError(f"{FLAG} {config.public_prefix}: has {len(bodies)} prefixes; it must have 1 to {MAX_HEADS}")
    with OfflineTokenizer(folder, config.chat_template) as tokenizer:
        found = tokenizer.tokenize([_open_ended(body) for body in bodies])
    heads = []
    for body, tokens in zip(bodies, found, strict=True):
        where = f"{FLAG} {config.public_prefix}, line {body.name}"
        if isinstance(tokens, RequestFailed):
            raise StartError(f"{where}: {tokens.message}")
        if len(tokens.ids) < config.page_size:
            raise StartError(
                f"{where}: has {len(tokens.ids)} tokens; only whole pages of {config.page_size} can be shared"
            )
        heads.append(pack_ids(tokens.ids))
    return tuple(heads)


def _open_ended(body: Body) -> TextPrompt | IdsPrompt | ChatPrompt:
    """The prompt as the beginning of others: a chat goes on with another message."""
    prompt = body.prompt
    return msgspec.structs.replace(prompt, add_generation_prompt=False) if isinstance(prompt, ChatPrompt) else prompt
