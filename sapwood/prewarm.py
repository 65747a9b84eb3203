"""`--prewarm FILE`: prefixes that are in the cache before the first request comes.

A line is a body of POST /cache/prewarm: `text`, `input_ids` or `messages` (with `chat_template_kwargs`), and if wanted
`pin`, `cache_control` marks, `cache_salt` and `priority`; beside them `tenant`, the name of whose prefix it is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from srt.answer import Ask, RequestFailed
from srt.child import StartError
from srt.front import Front

log = logging.getLogger("sapwood.prewarm")

FLAG = "--prewarm"


def read_prewarm(path: str | None, vocab_size: int) -> list[tuple[str, Ask]]:
    """What is to be asked for each line, with the words for its place.  Raises StartError that names the line."""
    if path is None:
        return []
    # The bodies are those of HTTP, which takes a moment to load.
    from srt.http.body import decode
    from srt.http.errors import ApiError
    from srt.http.prewarm import prewarm_ask
    from srt.http.schema import PrewarmLine

    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise StartError(f"{FLAG} {path}: {error.strerror or error}") from error
    decoder = msgspec.json.Decoder(PrewarmLine)
    asks = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{FLAG} {path}, line {number}"
        try:
            fields = decode(line, decoder)
            asks.append((where, prewarm_ask(fields, fields.tenant, vocab_size)[0]))
        except (ApiError, ValueError) as error:
            raise StartError(f"{where}: {error}") from None
    if not asks:
        raise StartError(f"{FLAG} {path}: has no line")
    return asks


async def prewarm(front: Front, asks: Sequence[tuple[str, Ask]]) -> None:
    """Compute the prefixes one after the other, and tell in the log what came of it.  Raises StartError."""
    prompt = cached = pinned = 0
    for where, ask in asks:
        try:
            answer = front.ask(ask)
            await answer.collect()
        except RequestFailed as failure:
            raise StartError(f"{where}: {failure.message}") from None
        prompt += answer.prompt_tokens
        cached += answer.cached_tokens
        for pin in () if answer.cache_report is None else answer.cache_report.pins:
            pinned += pin.pinned
            if pin.pinned < pin.asked and pin.shortfall != "page_border":
                log.warning("%s: %d of %d tokens are pinned (%s)", where, pin.pinned, pin.asked, pin.shortfall)
    if asks:
        text = "prewarmed %d prefixes of %d tokens: %d were cached, %d were computed; %d tokens were pinned"
        log.info(text, len(asks), prompt, cached, prompt - cached, pinned)
