"""The benchmark beside other engines: what fails counts in no figure, and OpenVINO's wrapper guards its pool."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.client import Client, Reply
from benchmarks.comparison import Result, table
from benchmarks.runs import Run, run_once
from benchmarks.servers import Server
from benchmarks.workloads import WORKLOADS

POOL_BLOCKS = 8
RUNNING, FINISHED, IGNORED = "RUNNING", "FINISHED", "IGNORED"


@dataclass
class Handle:
    """A request in the pipeline below."""

    blocks: int
    left: int
    status: str = RUNNING
    unread: list[int] = field(default_factory=list)

    def get_status(self) -> str:
        return self.status

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        read, self.unread = self.unread, []
        return {0: SimpleNamespace(generated_ids=read)}


class Pipeline:
    """Gives up all it was handed when that does not fit its pool, as OpenVINO's does when it can schedule nothing."""

    def __init__(self, model: str, scheduler: Any, device: str, properties: dict[str, int]) -> None:
        self._pool = scheduler.num_kv_blocks
        self._handles: list[Handle] = []

    def get_tokenizer(self) -> Any:
        def encode(text: str, add_special_tokens: bool) -> Any:
            return SimpleNamespace(input_ids=SimpleNamespace(shape=(1, len(text.split()))))

        return SimpleNamespace(encode=encode, decode=lambda ids: "x" * len(ids))

    def add_request(self, number: int, ids: Any, config: Any) -> Handle:
        self._handles.append(Handle(-(-ids.shape[1] // 32), config.max_new_tokens))
        return self._handles[-1]

    def step(self) -> None:
        fits = sum(handle.blocks for handle in self._handles) <= self._pool
        for handle in self._handles:
            if fits:
                handle.unread.append(7)
                handle.left -= 1
            handle.status = IGNORED if not fits else RUNNING if handle.left else FINISHED
        self._handles = [handle for handle in self._handles if handle.status == RUNNING]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The wrapper, over the pipeline above."""
    package: Any = ModuleType("openvino_genai")
    package.SchedulerConfig = package.GenerationConfig = SimpleNamespace
    package.GenerationStatus = SimpleNamespace(RUNNING=RUNNING, FINISHED=FINISHED, IGNORED=IGNORED)
    package.ContinuousBatchingPipeline = Pipeline
    monkeypatch.setitem(sys.modules, "openvino_genai", package)
    monkeypatch.delitem(sys.modules, "benchmarks.openvino_server", raising=False)
    wrapper: Any = importlib.import_module("benchmarks.openvino_server")
    monkeypatch.delitem(sys.modules, "benchmarks.openvino_server")
    arguments = argparse.Namespace(prefix_cache=True, kv_blocks=POOL_BLOCKS, model="m", threads=1)
    monkeypatch.setattr(wrapper.Handler, "batcher", wrapper.Batcher(arguments), raising=False)
    listener = wrapper.Server(("127.0.0.1", 0), wrapper.Handler)
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    yield Server(f"http://127.0.0.1:{listener.server_address[1]}", "m", 0.0, [])
    listener.shutdown()
    listener.server_close()
    thread.join()


def ask(server: Server, prompts: list[int], max_tokens: int) -> list[Reply]:
    """Prompts of so many words, all at once."""

    async def all_of_them() -> list[Reply]:
        client = Client(server.base_url, server.model, timeout=60.0)
        try:
            return await asyncio.gather(*(client.complete("a " * words, max_tokens) for words in prompts))
        finally:
            await client.close()

    return asyncio.run(all_of_them())


def test_more_requests_than_the_pool_holds_are_all_answered_in_full(server: Server) -> None:
    replies = ask(server, [100] * 24, 16)
    assert [reply.error for reply in replies] == [None] * 24
    assert {(reply.completion_tokens, reply.text) for reply in replies} == {(16, "x" * 16)}


def test_a_request_that_fits_no_pool_fails_and_spares_the_others(server: Server) -> None:
    fits, refused, fits_too = ask(server, [32 * POOL_BLOCKS, 32 * POOL_BLOCKS + 1, 40], 4)
    assert (fits.error, fits_too.error) == (None, None)
    assert refused.error is not None
    assert IGNORED in refused.error


@pytest.mark.parametrize(("words", "said"), [(33 * POOL_BLOCKS, "1 of 1 requests failed"), (10, None)])
def test_a_workload_with_a_failed_request_is_no_run(
    server: Server, monkeypatch: pytest.MonkeyPatch, words: int, said: str | None
) -> None:
    async def workload(client: Client, _: Any) -> list[Reply]:
        return [await client.complete("a " * words, 4)]

    monkeypatch.setitem(WORKLOADS, "one", workload)
    texts: Any = None
    if said is None:
        assert run_once(server, "one", texts).replies[0].completion_tokens == 4
    else:
        with pytest.raises(RuntimeError, match=said):
            run_once(server, "one", texts)


def test_a_short_reply_is_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # This pipeline says that it has finished, two tokens early.
    add = Pipeline.add_request

    def add_short(self: Pipeline, number: int, ids: Any, config: Any) -> Handle:
        config.max_new_tokens -= 2
        return add(self, number, ids, config)

    monkeypatch.setattr(Pipeline, "add_request", add_short)
    assert [reply.error for reply in ask(server, [10], 6)] == ["4 of 6 tokens came"]


def run_of(seconds: float) -> Run:
    reply = Reply(text="x", prompt_tokens=10, completion_tokens=2, first_token=0.1, end=0.2)
    return Run(seconds, [reply])


def test_rounds_that_were_not_completed_are_in_the_table_and_in_no_ratio() -> None:
    ours, peer, broken = Result(), Result(), Result()
    for seconds in (1.0, 1.0, 1.0):
        ours.add(run_of(seconds), 0.0)
    peer.add(run_of(2.0), 0.0)
    peer.fail("58 of 64 requests failed")
    peer.add(run_of(4.0), 0.0)
    for _ in range(3):
        broken.fail("no text")
    rows = {("w", "sapwood"): ours, ("w", "peer"): peer, ("w", "broken"): broken}
    lines = table(rows, {"w": 0.5})
    assert "  peer             1 of 3 runs not completed: 58 of 64 requests failed" in lines
    assert "  broken           3 of 3 runs not completed: no text" in lines
    assert [line for line in lines if "throughput" in line] == ["  sapwood / peer: 3.00x throughput"]
    assert not any(line.startswith("  broken") and " s " in line for line in lines)
