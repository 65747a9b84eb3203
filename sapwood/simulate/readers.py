"""Reads traces: Mooncake block traces, Azure length traces, agentic sessions, and recordings of our own.

Plain or gzipped; which of the four a file is shows in its first line.  docs/simulator.md has an example of each.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from sapwood.simulate.trace import Keys, Piece, Space, Trace, TraceError, TraceRequest, key, plain

GZIP = b"\x1f\x8b"
# Tokens of a block of a Mooncake trace.
MOONCAKE_BLOCK = 512
# Sessions of an agentic trace have no common clock: they start so far apart.
SESSION_SECONDS = 60.0
# Block ids of a session are below this.
SESSION_BLOCKS = 2**24
# Blocks of the head that all sessions share lie in a session of their own.
HEAD_SESSION = 0


Seconds = Annotated[float, msgspec.Meta(ge=0)]
# A number that a key of `sapwood.simulate.trace` has room for.
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]


class MooncakeRow(msgspec.Struct):
    """One request.  `timestamp` in milliseconds; one id for each block of the input, the last partly filled."""

    timestamp: Seconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]


class AgentStep(msgspec.Struct):
    """One request of a session; `hash_runs`: [first id, count] of its whole blocks."""

    t: Seconds
    input: Tokens = msgspec.field(name="in")
    output: Tokens = msgspec.field(name="out")
    hash_runs: list[tuple[BlockId, BlockId]]
    think_time: float | None = None


class AgentSession(msgspec.Struct):
    """One session."""

    block_size: Tokens
    requests: list[AgentStep]
    tool_tokens: int = 0
    system_tokens: int = 0


class RecordedRow(msgspec.Struct, omit_defaults=True):
    """One request of a recording.

    `prompt`: [name, tokens] of each piece; equal names begin with equal tokens, and "output:N" is what row N answered.
    `arrival`: seconds; from the end of row `after`, where that is given.
    """

    arrival: Seconds
    prompt: Annotated[list[tuple[str, Tokens]], msgspec.Meta(min_length=1)]
    output_tokens: Tokens
    max_tokens: Tokens | None = None
    after: int | None = None
    tenant: str = ""
    priority: int = 0


RECORDING_HEAD = {"trace": "sapwood", "version": 1}


def read_trace(path: Path) -> Trace:
    """Read a trace of any of the kinds.  Raises TraceError."""
    try:
        packed = path.read_bytes()
        lines = (gzip.decompress(packed) if packed.startswith(GZIP) else packed).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not lines:
        raise TraceError(f"{path}: is empty")
    requests = list(_reader(path, lines[0])(path, lines))
    if not requests:
        raise TraceError(f"{path}: holds no requests")
    return Trace(path.name.removesuffix(".gz").rsplit(".", 1)[0], requests)


def _reader(path: Path, first: bytes) -> Callable[[Path, list[bytes]], Iterator[TraceRequest]]:
    if first.startswith(b"TIMESTAMP,"):
        return _azure
    try:
        row = json.loads(first)
    except ValueError:
        row = None
    if isinstance(row, dict):
        if "hash_ids" in row:
            return _mooncake
        if "requests" in row:
            return _agentic
        if row.get("trace") == RECORDING_HEAD["trace"]:
            if row.get("version") != RECORDING_HEAD["version"]:
                raise TraceError(f"{path}: a recording of version {row.get('version')}; this reads version 1")
            return _recording
    raise TraceError(f"{path}: neither a Mooncake, an Azure nor an agentic trace, nor a recording")


def _rows(path: Path, lines: list[bytes], kind: Any, first: int = 1) -> Iterator[tuple[int, Any]]:
    """(line number, row) of each line that is not blank."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines[first - 1 :], first):
        if line.strip():
            try:
                yield number, decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}:{number}: {error}") from None


def _mooncake(path: Path, lines: list[bytes]) -> Iterator[TraceRequest]:
    for index, (_, row) in enumerate(_rows(path, lines, MooncakeRow)):
        covered = min(row.input_length, len(row.hash_ids) * MOONCAKE_BLOCK)
        prompt = [Piece(_shared(row.hash_ids), MOONCAKE_BLOCK, 0, covered)]
        if covered < row.input_length:
            prompt.append(plain(Space.PRIVATE, index, row.input_length - covered))
        yield TraceRequest(row.timestamp / 1000, tuple(prompt), (plain(Space.OUTPUT, index, row.output_length),))


def _shared(numbers: list[int]) -> Keys:
    return np.array(numbers, dtype=np.uint64) + np.uint64(key(Space.SHARED, 0))


def _azure(path: Path, lines: list[bytes]) -> Iterator[TraceRequest]:
    begin: datetime | None = None
    for index, line in enumerate(lines[1:]):
        if not line.strip():
            continue
        try:
            stamp, context, generated = line.decode().split(",")
            moment = datetime.fromisoformat(stamp)
            prompt_tokens, output_tokens = int(context), int(generated)
        except ValueError as error:
            raise TraceError(f"{path}:{index + 2}: {error}") from None
        if prompt_tokens < 1 or output_tokens < 1:
            raise TraceError(f"{path}:{index + 2}: {prompt_tokens} tokens in, {output_tokens} out")
        begin = begin or moment
        arrival = (moment - begin).total_seconds()
        yield TraceRequest(
            arrival, (plain(Space.PRIVATE, index, prompt_tokens),), (plain(Space.OUTPUT, index, output_tokens),)
        )


def _agentic(path: Path, lines: list[bytes]) -> Iterator[TraceRequest]:
    """Sessions start SESSION_SECONDS apart; inside one, each request comes a pause after the answer to the one before.

    The tool and system tokens at the head of every session are one text, as they are in a deployment.
    """
    first = 0
    for session, (line, row) in enumerate(_rows(path, lines, AgentSession), 1):
        head = (row.tool_tokens + row.system_tokens) // row.block_size
        keys = [_session_keys(path, line, session, step, head) for step in row.requests]
        texts = _session_texts(keys, row, first)
        for index, step in enumerate(row.requests):
            arrival, after = (session - 1) * SESSION_SECONDS, None
            if index:
                after = first + index - 1
                since = step.t - row.requests[index - 1].t
                arrival = max(0.0, since if step.think_time is None else min(step.think_time, since))
            yield TraceRequest(arrival, *texts[index], after=after)
        first += len(row.requests)


def _session_keys(path: Path, line: int, session: int, step: AgentStep, head: int) -> Keys:
    numbers: list[int] = []
    for begin, count in step.hash_runs:
        if begin + count >= SESSION_BLOCKS:
            raise TraceError(f"{path}:{line}: a run of {count} blocks from {begin}")
        numbers += range(begin, begin + count)
    keys = _shared(numbers) + np.uint64(session * SESSION_BLOCKS)
    keys[:head] = _shared(list(range(min(head, len(keys))))) + np.uint64(HEAD_SESSION * SESSION_BLOCKS)
    return keys


def _session_texts(
    keys: list[Keys], row: AgentSession, first: int
) -> list[tuple[tuple[Piece, ...], tuple[Piece, ...]]]:
    """(prompt, output) of each request.

    Only whole blocks have ids.  Where the next request goes on from this one, the rest of this prompt and its answer
    are what the next one has in that place, which is found from the last request back to the first.
    """
    texts: list[tuple[tuple[Piece, ...], tuple[Piece, ...]]] = [((), ())] * len(keys)
    following, following_tokens = np.empty(0, dtype=np.uint64), 0
    for index in range(len(keys) - 1, -1, -1):
        step, block = row.requests[index], row.block_size
        text = keys[index][: step.input // block]
        known = len(text) * block
        if following_tokens >= step.input and np.array_equal(following[: len(text)], text):
            text, known = following, following_tokens
        end = min(step.input, known)
        answered = min(step.output, known - end)
        before = step.input // block
        prompt = [
            Piece(text[: -(-end // block)], block, 0, end),
            plain(Space.PRIVATE, first + index, step.input - end),
        ]
        output = [
            Piece(text[before : -(-(end + answered) // block)], block, end - before * block, answered),
            plain(Space.OUTPUT, first + index, step.output - answered),
        ]
        texts[index] = tuple(p for p in prompt if p.length), tuple(p for p in output if p.length)
        following, following_tokens = text[: -(-end // block)], end
    return texts


def _recording(path: Path, lines: list[bytes]) -> Iterator[TraceRequest]:
    names: dict[str, int] = {}
    ends: list[int] = []
    for index, (line, row) in enumerate(_rows(path, lines, RecordedRow, first=2)):
        prompt = tuple(_recorded_piece(path, line, name, tokens, names, ends) for name, tokens in row.prompt)
        if row.after is not None and not 0 <= row.after < index:
            raise TraceError(f"{path}:{line}: comes after row {row.after}, which is not before it")
        yield TraceRequest(
            arrival=row.arrival,
            prompt=prompt,
            output=(plain(Space.OUTPUT, index, row.output_tokens),),
            max_new_tokens=row.max_tokens,
            after=row.after,
            tenant=row.tenant,
            priority=row.priority,
        )
        ends.append(row.output_tokens)


def _recorded_piece(path: Path, line: int, name: str, tokens: int, names: dict[str, int], ends: list[int]) -> Piece:
    if name.startswith("output:"):
        number = name.removeprefix("output:")
        if not number.isdigit() or int(number) >= len(ends) or tokens > ends[int(number)]:
            raise TraceError(f"{path}:{line}: {tokens} tokens of {name!r}, which no row before answered")
        return plain(Space.OUTPUT, int(number), tokens)
    return plain(Space.SHARED, names.setdefault(name, len(names)), tokens)


def write_recording(path: Path, rows: list[RecordedRow]) -> None:
    """Write a recording that `read_trace` reads."""
    lines = [msgspec.json.encode(RECORDING_HEAD), *map(msgspec.json.encode, rows)]
    path.write_bytes(b"\n".join(lines) + b"\n")
