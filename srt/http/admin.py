"""The endpoints that do not generate: health, models, what the server is and does, and what can be done to it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srt.http.auth import tenant_of
from srt.http.connection import json_reply
from srt.http.errors import ApiError, bad_request
from srt.http.generation import faults_named
from srt.http.metrics import Metrics
from srt.http.openai_chat import chat_prompt
from srt.http.prometheus import CONTENT_TYPE
from srt.http.schema import AbortRequest, TokenizeRequest
from srt.http.service import Service, program_version
from srt.messages import ChatPrompt, TextPrompt

_abort_decoder = msgspec.json.Decoder(AbortRequest)
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)


class Admin:
    """The handlers, with what they answer from."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._started = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while new requests are taken and every process is up, else 503; asks nobody, so it is never slow."""
        status = self._service.front.status()
        return json_reply({"status": status.state, "workers": status.workers}, 200 if status.state == "ok" else 503)

    async def models(self, request: Request) -> Response:
        """The one model, as a list."""
        return json_reply({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model by its name.  Raises ApiError 404 for another name."""
        self._service.check_model(request.path_params["model"])
        return json_reply(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "sapwood",
            "root": self._service.front.facts.path,
            "max_model_len": self._service.front.facts.context_length,
        }

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges for Prometheus."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def server_info(self, request: Request) -> Response:
        """Settings, model, processes and the scheduler's last report.  No API key is told."""
        front = self._service.front
        config = msgspec.to_builtins(front.config)
        config["api_key"] = None if front.config.api_key is None else "set"
        return json_reply(
            {
                "version": program_version(),
                "config": config,
                "model": front.facts,
                "status": front.status(),
                "workers": {
                    name: {**front.worker_facts.get(name, {}), "pid": pid} for name, pid in front.worker_pids().items()
                },
                "start_phases": front.start_phases,
                "scheduler": front.stats,
            }
        )

    async def flush_cache(self, request: Request) -> Response:
        """Empty the prefix cache.  Raises ApiError 409 while requests hold parts of it."""
        with faults_named(lambda param: param):
            reply = await self._service.front.flush_cache()
        if not reply.ok:
            raise ApiError(409, reply.message or "The cache is in use by running requests.", code="cache_in_use")
        return json_reply({"success": True, "message": reply.message or "The cache was flushed."})

    async def check(self, request: Request) -> Response:
        """Whether every page, lock and queue adds up, recounted now; takes time in proportion to what is cached."""
        with faults_named(lambda param: param):
            reply = await self._service.front.check()
        return json_reply({"consistent": reply.ok, "fault": reply.message or None})

    async def abort_request(self, request: Request) -> Response:
        """End the requests that go by exactly this id; one that has ended, or never was, is no error."""
        fields = await self._service.read(request, _abort_decoder)
        return json_reply({"success": True, "aborted": self._service.live.abort(tenant_of(request), fields.rid)})

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text, or of messages after the chat template."""
        fields = await self._service.read(request, _tokenize_decoder)
        self._service.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise bad_request("prompt", "Exactly one of prompt and messages must be given.")
        prompt: TextPrompt | ChatPrompt
        if fields.prompt is not None:
            prompt = TextPrompt(fields.prompt)
        else:
            prompt = chat_prompt(fields.messages or [], fields.chat_template_kwargs)
        with faults_named(lambda param: param):
            tokens = await self._service.front.tokenize(prompt)
        return json_reply(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self._service.front.facts.context_length}
        )
