"""A thin HTTP server over OpenVINO GenAI's continuous batching, which has none of its own.

    PYTHON openvino_server.py --model FOLDER --port 8101 --threads 2 [--kv-blocks 96] [--no-prefix-cache]

Runs in the Python environment that has `openvino-genai`, hence with the standard library alone.  Speaks as much of
OpenAI's API as `benchmarks.client` uses: streamed completions and chat completions, greedy, of a fixed length.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openvino_genai


class Batcher:
    """One thread that steps the pipeline; requests are added from others, and read their tokens from queues."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = arguments.prefix_cache
        if arguments.kv_blocks:
            scheduler.num_kv_blocks = arguments.kv_blocks
        else:
            scheduler.cache_size = arguments.kv_gb
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            arguments.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": arguments.threads}
        )
        self.tokenizer = self._pipeline.get_tokenizer()
        self._arrivals: queue.Queue[tuple[Any, int, queue.Queue[list[int] | None]]] = queue.Queue()
        self._next_id = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, text: str, max_tokens: int) -> tuple[int, queue.Queue[list[int] | None]]:
        """Add a request: the number of its prompt's tokens, and a queue of pieces of output ids, None at the end."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).input_ids
        pieces: queue.Queue[list[int] | None] = queue.Queue()
        self._arrivals.put((ids, max_tokens, pieces))
        return int(ids.shape[1]), pieces

    def _run(self) -> None:
        live: list[tuple[Any, queue.Queue[list[int] | None]]] = []
        while True:
            while not self._arrivals.empty() or not live:
                ids, max_tokens, pieces = self._arrivals.get()
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
                live.append((self._pipeline.add_request(self._next_id, ids, config), pieces))
                self._next_id += 1
            self._pipeline.step()
            live = [entry for entry in live if self._deliver(*entry)]

    @staticmethod
    def _deliver(handle: Any, pieces: queue.Queue[list[int] | None]) -> bool:
        while handle.can_read():
            for output in handle.read().values():
                if output.generated_ids:
                    pieces.put(list(output.generated_ids))
        if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
            return True
        pieces.put(None)
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
        prompt_tokens, pieces = self.batcher.submit(text, body["max_tokens"])
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        ids: list[int] = []
        told = ""
        while (piece := pieces.get()) is not None:
            ids += piece
            said = self.batcher.tokenizer.decode(ids)
            # An unfinished character is held back.
            if not said.endswith("\ufffd") and len(said) > len(told):
                delta, told = said[len(told) :], said
                self._send({"choices": [{"index": 0, "delta": {"content": delta}} if chat else {"text": delta}]})
        self._send({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids)}})
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
