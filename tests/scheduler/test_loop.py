"""The scheduler's loop over real sockets, with the oracle in the executor's place."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from radix import PagePool, RadixTree
from scheduler.core import Scheduler
from scheduler.limits import Limits
from scheduler.policy import POLICIES
from scheduler.process import Loop, build_core
from srt.cache_messages import CacheTree, Call, CallReply
from srt.child import StartError
from srt.config import ModelFacts, SchedulerConfig
from srt.ipc import Inbox, Outbox
from srt.messages import (
    Abort,
    DetokenizerInbox,
    FrontInbox,
    Generate,
    Rejected,
    SchedulerInbox,
    Shutdown,
    TokenDelta,
    pack_ids,
    unpack_ids,
)
from srt.plan import Plan, StepHandle
from srt.stats import SchedulerStats
from tests.scheduler.oracle import Oracle, Stream, generate, message

PATIENCE_SECONDS = 20.0


class FailingOracle(Oracle):
    """Fails the steps whose prompt tokens include 666."""

    def launch(self, plan: Plan) -> StepHandle:
        """As the oracle does, but with an exception that shows when the step is waited for."""
        handle = super().launch(plan)
        return Failed() if 666 in plan.token_ids else handle


class Failed:
    """A step that raised."""

    def wait(self) -> Any:
        """Raise it."""
        raise RuntimeError("out of luck")


class Rim:
    """A running loop and the three sockets that a test holds the other ends of."""

    def __init__(self, folder: Path, overlap: bool) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        ends = {name: f"ipc://{folder}/{name}" for name in ("scheduler", "detokenizer", "front")}
        inbox: Inbox[SchedulerInbox] = Inbox(self.context, ends["scheduler"], SchedulerInbox)
        self.text: Inbox[Any] = Inbox(self.context, ends["detokenizer"], DetokenizerInbox)
        self.front: Inbox[Any] = Inbox(self.context, ends["front"], FrontInbox)
        self.scheduler = Outbox(self.context, ends["scheduler"])
        pool = PagePool(64, 4)
        self.pool = pool
        core = Scheduler(Limits(200, 32, 4), pool, RadixTree(pool), POLICIES["lpm"]())
        executor = FailingOracle(64, 4, 32, 4)
        text_out, front_out = Outbox(self.context, ends["detokenizer"]), Outbox(self.context, ends["front"])
        self._sockets = (inbox, self.text, self.front, self.scheduler, text_out, front_out)
        loop = Loop(core, executor, inbox, text_out, front_out, overlap)
        self.thread = threading.Thread(target=loop.run)
        self.thread.start()
        self.streams: dict[str, Stream] = defaultdict(Stream)

    def read_until_ended(self, *rids: str) -> None:
        """Collect outputs until all of `rids` have ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(self.streams[rid].ends for rid in rids):
            assert time.monotonic() < deadline, "no end in sight"
            self.text.wait(0.1)
            for output in self.text.drain():
                plain = [TokenDelta(rid, output.ids[4 * i : 4 * i + 4]) for i, rid in enumerate(output.rids)]
                for delta in (*plain, *output.deltas):
                    self.streams[delta.rid].deltas.append(delta)

    def front_message(self, kind: type[Any], where: Any = lambda message: True) -> Any:
        """The next message of a kind for which `where` holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            self.front.wait(0.1)
            for found in self.front.drain():
                if isinstance(found, kind) and where(found):
                    return found
        raise AssertionError(f"no {kind.__name__}")

    def close(self) -> None:
        """Shut the loop down."""
        self.scheduler.send(Shutdown())
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()
        for socket in self._sockets:
            socket.close()
        self.context.term()


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def rim(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rim]:
    running = Rim(tmp_path, request.param)
    yield running
    running.close()


def test_requests_go_in_and_tokens_come_out(rim: Rim) -> None:
    for index in range(6):
        rim.scheduler.send(message(f"r{index}", [index, 1, 2, 3], 7))
    rim.read_until_ended(*(f"r{index}" for index in range(6)))
    for index in range(6):
        assert rim.streams[f"r{index}"].ids == generate([index, 1, 2, 3], 7)


def test_idle_stats_say_that_nothing_runs_and_the_pool_is_whole(rim: Rim) -> None:
    rim.scheduler.send(message("a", [1, 2, 3, 4, 5, 6], 4))
    rim.read_until_ended("a")
    stats: SchedulerStats = rim.front_message(SchedulerStats, lambda s: s.output_tokens == 4 and not s.running)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert stats.pages_in_use == 0
    assert sum(stats.step_histogram) == stats.steps


def test_flush_answers_and_empties_the_cache(rim: Rim) -> None:
    rim.scheduler.send(message("a", [1, 2, 3, 4, 5, 6], 4))
    rim.read_until_ended("a")
    rim.front_message(SchedulerStats, lambda s: s.output_tokens == 4 and not s.running)
    rim.scheduler.send(Call("c1", "flush_cache"))
    reply: CallReply = rim.front_message(CallReply)
    assert (reply.call_id, reply.ok) == ("c1", True)
    rim.scheduler.send(message("b", [1, 2, 3, 4, 5, 6], 4))
    rim.read_until_ended("b")
    assert rim.streams["b"].cached_tokens == 0


def test_a_page_that_nobody_owns_is_found_by_a_check(rim: Rim) -> None:
    rim.scheduler.send(message("a", [1, 2, 3, 4, 5, 6], 4))
    rim.read_until_ended("a")
    rim.scheduler.send(Call("c1", "check"))
    sound: CallReply = rim.front_message(CallReply)
    assert (sound.call_id, sound.ok, sound.message) == ("c1", True, "")
    rim.pool.alloc(1)
    rim.scheduler.send(Call("c2", "check"))
    leaky: CallReply = rim.front_message(CallReply)
    assert (leaky.call_id, leaky.ok) == ("c2", False)
    assert leaky.message


def test_the_tree_is_told_to_the_detokenizer_and_not_to_the_front(rim: Rim) -> None:
    rim.scheduler.send(message("a", [1, 2, 3, 4, 5, 6], 4))
    rim.read_until_ended("a")
    rim.scheduler.send(Call("c2", "cache_tree", depth=3, max_nodes=10))
    assert rim.text.wait(PATIENCE_SECONDS)
    (tree,) = rim.text.drain()
    assert isinstance(tree, CacheTree)
    assert (tree.call_id, tree.page_size, tree.left_out) == ("c2", 4, 0)
    assert [unpack_ids(node.head)[:6] for node in tree.nodes] == [[1, 2, 3, 4, 5, 6]]
    assert [(node.users, node.tokens, node.pages) for node in tree.nodes] == [(0, 9, 3)]


def test_a_refused_request_is_told_to_the_front_directly(rim: Rim) -> None:
    rim.scheduler.send(message("long", list(range(300)), 4))
    rejected: Rejected = rim.front_message(Rejected)
    assert rejected.rids == ("long",)
    assert "300 tokens" in rejected.message


def test_a_step_that_raises_ends_its_requests_and_no_others(rim: Rim) -> None:
    rim.scheduler.send(message("bad", [666, 1], 4))
    rim.read_until_ended("bad")
    rim.scheduler.send(message("good", [5, 1], 4))
    rim.read_until_ended("good")
    finish = rim.streams["bad"].deltas[-1].finish
    assert finish is not None
    assert finish.reason == "error"
    assert "out of luck" in (finish.message or "")
    assert rim.streams["good"].ids == generate([5, 1], 4)


def test_an_abort_ends_a_stream_and_a_malformed_frame_ends_nothing(rim: Rim) -> None:
    rim.scheduler.send(message("a", [1, 2], 190))
    rim.scheduler.socket.send(b"\xc1 not a message")
    rim.scheduler.send(Abort("a"))
    rim.read_until_ended("a")
    assert rim.streams["a"].reason in ("abort", "length")
    rim.scheduler.send(message("b", [1, 2], 2))
    rim.read_until_ended("b")


def test_an_unknown_policy_is_one_line_with_the_known_ones(tmp_path: Path) -> None:
    facts = ModelFacts(path="", name="m", model_type="llama", vocab_size=9, context_length=99, eos_token_ids=(0,))
    config = SchedulerConfig(
        run_dir=str(tmp_path),
        model=facts,
        device="cpu",
        dtype="float32",
        threads=1,
        attention_backend="torch",
        page_size=4,
        num_pages=8,
        disable_radix_cache=False,
        schedule_policy="random",
        max_step_tokens=8,
        max_running_requests=2,
        max_queued_requests=None,
        overlap=True,
    )
    with pytest.raises(StartError, match="random: unknown, choose one of deadline, dfs-weight, fair, fcfs, lpm"):
        build_core(config)
    with pytest.raises(StartError, match="'random'; there are lru, lfu, adaptive"):
        build_core(msgspec.structs.replace(config, schedule_policy="fcfs", radix_eviction_policy="random"))


def test_a_generate_without_ids_is_refused_not_run(rim: Rim) -> None:
    empty = Generate(rid="e", group="e", prompt_ids=pack_ids([]), sampling=message("x", [1], 1).sampling, seed=0)
    rim.scheduler.send(empty)
    assert rim.front_message(Rejected).code == "empty_prompt"
