"""A thin HTTP server over OpenVINO GenAI's continuous batching, which has none of its own.

    PYTHON openvino_server.py --model FOLDER --port 8101 --threads 2 [--kv-blocks 96] [--no-prefix-cache]

Runs in the Python environment that has `openvino-genai`, hence with the standard library alone.  Speaks as much of
OpenAI's API as `benchmarks.client` uses: streamed completions and chat completions, greedy, of a fixed length.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openvino_genai

# Tokens of KV in a block, on the CPU.
BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Request:
    """A prompt's ids, of shape (1, n), and where its output goes."""

    ids: Any
    max_tokens: int
    # Ids as they come; None after the last, or instead of it a sentence that says what went wrong.
    pieces: queue.Queue[list[int] | str | None]

    @property
    def blocks(self) -> int:
        """Blocks of KV that its prompt fills."""
        return -(-int(self.ids.shape[1]) // BLOCK_TOKENS)


class Batcher:
    """One thread that steps the pipeline; requests are added from others, and read their tokens from queues.

    The pipeline takes blocks for the cached head of a request when it is handed over, not when its turn comes, and lets
    them go only when it ends.  Where the heads of those that wait fill the pool, the ones whose turn it is can get no
    block; the pipeline then gives up everything it was handed.  So requests wait here, in order, and are handed over
    while the prompts in the pipeline fit its pool together; for room that outputs take, it preempts.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = arguments.prefix_cache
        if arguments.kv_blocks:
            scheduler.num_kv_blocks = arguments.kv_blocks
        else:
            scheduler.cache_size = arguments.kv_gb
        # A pool given in gigabytes is taken to be larger than any benchmark needs.
        self._free_blocks = arguments.kv_blocks or sys.maxsize
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            arguments.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": arguments.threads}
        )
        self.tokenizer = self._pipeline.get_tokenizer()
        self._arrivals: queue.Queue[Request] = queue.Queue()
        self._next_id = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, text: str, max_tokens: int) -> Request:
        """Add a request; its `pieces` tell what becomes of it."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).input_ids
        request = Request(ids, max_tokens, queue.Queue())
        self._arrivals.put(request)
        return request

    def _run(self) -> None:
        try:
            self._step_forever()
        except BaseException:
            # Clients see their connections close instead of waiting for ever.
            traceback.print_exc()
            os._exit(1)

    def _step_forever(self) -> None:
        waiting: collections.deque[Request] = collections.deque()
        live: list[tuple[Any, Request]] = []
        while True:
            while not self._arrivals.empty() or not (waiting or live):
                waiting.append(self._arrivals.get())
            # One that fits no pool is handed over alone, to be refused.
            while waiting and (waiting[0].blocks <= self._free_blocks or not live):
                live.append((self._hand_over(waiting[0]), waiting.popleft()))
            self._pipeline.step()
            live = [entry for entry in live if self._deliver(*entry)]

    def _hand_over(self, request: Request) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = request.max_tokens, True, False
        self._free_blocks -= request.blocks
        self._next_id += 1
        return self._pipeline.add_request(self._next_id, request.ids, config)

    def _deliver(self, handle: Any, request: Request) -> bool:
        """Pass on what has come; false when no more will."""
        # Asked first: what a request that has ended left to read is then all there.
        status = handle.get_status()
        while handle.can_read():
            for output in handle.read().values():
                if output.generated_ids:
                    request.pieces.put(list(output.generated_ids))
        if status == openvino_genai.GenerationStatus.RUNNING:
            return True
        self._free_blocks += request.blocks
        finished = status == openvino_genai.GenerationStatus.FINISHED
        request.pieces.put(None if finished else f"the pipeline ended the request with {status}")
        return False


class Handler(BaseHTTPRequestHandler):
    """The routes."""

    protocol_version = "HTTP/1.1"
    batcher: Batcher

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """/health and /v1/models."""
        body = json.dumps({"data": [{"id": "openvino"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """/v1/completions and /v1/chat/completions, streamed."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        chat = "messages" in body
        text = (
            self.batcher.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
            if chat
            else body["prompt"]
        )
        request = self.batcher.submit(text, body["max_tokens"])
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        ids: list[int] = []
        told = ""
        while (piece := request.pieces.get()) is not None:
            if isinstance(piece, str):
                self._send({"error": {"message": piece}})
                break
            ids += piece
            said = self.batcher.tokenizer.decode(ids)
            # An unfinished character is held back.
            if not said.endswith("\ufffd") and len(said) > len(told):
                delta, told = said[len(told) :], said
                self._send({"choices": [{"index": 0, "delta": {"content": delta}} if chat else {"text": delta}]})
        usage = {"prompt_tokens": int(request.ids.shape[1]), "completion_tokens": len(ids)}
        self._send({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _send(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event | {"created": int(time.time())}).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    """Takes many clients at once."""

    request_queue_size = 512
    daemon_threads = True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-gb", type=int, default=2)
    parser.add_argument("--kv-blocks", type=int, default=0)
    parser.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false")
    arguments = parser.parse_args()
    Handler.batcher = Batcher(arguments)
    Server(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
