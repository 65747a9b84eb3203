"""What the endpoints share: the front, the names that the model goes by, the requests that are alive."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import msgspec
from starlette.requests import Request

from srt.front import Front
from srt.http.body import decode, read_body
from srt.http.errors import ApiError, quoted
from srt.http.generation import LiveRequests
from srt.http.record import Recorder, keep_for_record

T = TypeVar("T")

LARGE_BODY_BYTES = 256 * 1024


def program_version() -> str:
    """The installed version, or "unknown" when the program runs without having been installed."""
    try:
        return version("sapwood")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Service:
    """One front and what its HTTP face knows besides."""

    front: Front
    live: LiveRequests = field(default_factory=LiveRequests)
    recorder: Recorder | None = None

    @property
    def model_name(self) -> str:
        """The name that clients call the model by."""
        return self.front.config.served_model_name or self.front.facts.name

    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: equal only where the same program serves the same model in the same way."""
        settings = (program_version(), self.front.facts, self.front.config.dtype, self.front.config.device)
        return f"fp_{hashlib.sha256(msgspec.json.encode(settings)).hexdigest()[:12]}"

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless `name` is the model that is served, or None."""
        if name is not None and name != self.model_name:
            message = f"The model {quoted(name)} is not served here; the model is {quoted(self.model_name)}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def read(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """The body of a request as a struct.  Raises ApiError."""
        body = await read_body(request, self.front.config.max_body_bytes)
        if self.recorder is not None:
            keep_for_record(request, self.recorder, body)
        if len(body) < LARGE_BODY_BYTES:
            return decode(body, decoder)
        # Explaining what is wrong with megabytes takes a second, which other requests shall not wait for.
        return await asyncio.to_thread(decode, body, decoder)
