"""The scheduler's core under random arrivals, steps, aborts, pins and tiny pools, beside outputs computed alone."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler import cache_calls
from scheduler.policy import POLICIES
from srt.cache_messages import Call, PinWish
from srt.messages import pack_ids
from tests.scheduler.bench import Bench
from tests.scheduler.oracle import generate

# Few heads and few tokens, so that prompts share prefixes of every length.
HEADS = [[7] * 40, [7] * 9 + [8] * 30, [9, 9, 9] + [7] * 20, list(range(30))]


class SchedulerMachine(RuleBasedStateMachine):
    """Every request ends once with the right tokens, nothing leaks, budgets hold, nobody starves."""

    @initialize(
        pages=st.integers(8, 40),
        page_size=st.sampled_from([1, 2, 4, 16]),
        step_tokens=st.integers(4, 40),
        rows=st.integers(1, 4),
        overlap=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        mean=st.sampled_from([1.0, 10.0, 256.0]),
        use_cache=st.sampled_from([True, True, True, False]),
        swap_pages=st.sampled_from([0, 0, 3, 100]),
        preemption=st.sampled_from(["auto", "recompute", "swap"]),
        heads=st.sampled_from([(), (), HEADS[:1], [HEADS[1][:20], HEADS[0][:12], HEADS[3]]]),
        share=st.sampled_from([0.25, 0.25, 1.0]),
    )
    def start(
        self,
        pages: int,
        page_size: int,
        step_tokens: int,
        rows: int,
        overlap: bool,
        policy: str,
        mean: float,
        use_cache: bool,
        swap_pages: int,
        preemption: str,
        heads: list[list[int]],
        share: float,
    ) -> None:
        self.settings = {
            "pages": pages,
            "page_size": page_size,
            "step_tokens": step_tokens,
            "rows": rows,
            "overlap": overlap,
            "policy": policy,
            "use_cache": use_cache,
            "swap_pages": swap_pages,
            "preemption": preemption,
            "heads": heads,
            "max_pinned_share": share,
            "context": 80,
        }
        self.mean = mean
        self.begin()

    def begin(self) -> None:
        """A new server."""
        self.bench = Bench(**self.settings)  # type: ignore[arg-type]
        self.bench.core.growth.mean_tokens = self.mean
        self.expected: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.stopped: dict[str, int] = {}

    @rule(
        head=st.sampled_from(HEADS),
        cut=st.integers(1, 40),
        tail=st.lists(st.integers(0, 3), max_size=6),
        max_new=st.integers(0, 20),
        stop=st.lists(st.integers(0, 49), max_size=2),
        namespace=st.sampled_from(["", "", "other", "third"]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        pins=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 200)), max_size=2),
        no_store=st.sampled_from([False, False, True]),
    )
    def arrive(
        self,
        head: list[int],
        cut: int,
        tail: list[int],
        max_new: int,
        stop: list[int],
        namespace: str,
        priority: int,
        pins: list[tuple[int, int]],
        no_store: bool,
    ) -> None:
        rid = f"r{len(self.expected)}"
        prompt = head[:cut] + tail
        seed = 1 if namespace else 0
        room = min(80, self.bench.pool.num_pages * self.bench.pool.page_size + 1) - len(prompt)
        wishes = tuple(PinWish(ttl / 100, tokens) for tokens, ttl in pins)
        asked = {"stop_ids": stop, "namespace": namespace, "priority": priority, "pins": wishes, "no_store": no_store}
        self.bench.send(rid, prompt, max_new, seed=seed, **asked)
        if room < 1:
            assert rid in self.bench.rejected
        self.expected[rid] = generate(prompt, min(max_new, max(room, 0)), frozenset(stop), seed)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()
            self.bench.core.check()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.expected:
            rid = data.draw(st.sampled_from(sorted(self.expected)))
            if not self.bench.streams[rid].ends and rid not in self.stopped:
                self.aborted.add(rid)
            self.bench.abort(rid)

    @rule(data=st.data())
    def find_stop_string(self, data: st.DataObject) -> None:
        open_ones = [rid for rid, s in self.bench.streams.items() if s.ids and not s.ends and rid not in self.stopped]
        if open_ones:
            rid = data.draw(st.sampled_from(sorted(open_ones)))
            count = data.draw(st.integers(1, len(self.bench.streams[rid].ids)))
            self.bench.stop_found(rid, count)
            self.stopped[rid] = count

    @rule()
    def flush(self) -> None:
        self.bench.core.flush()

    @rule(head=st.sampled_from(HEADS), cut=st.integers(0, 40), namespace=st.sampled_from(["", "other"]))
    def forget(self, head: list[int], cut: int, namespace: str) -> None:
        call = Call("call", "forget", namespace, namespace, pack_ids(head[:cut]))
        holdings = self.bench.core.holdings
        # Those of others whose time is up at this moment go as well.
        now = self.bench.now
        pins = [pin for pin in holdings.pins if pin.namespace != namespace and pin.expires > now]
        assert cache_calls.forget(holdings, self.bench.core.sessions, call, now).ok
        assert [pin for pin in holdings.pins if pin.namespace != namespace] == pins

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pins = self.bench.core.holdings.pins
        if len(pins):
            pins.unpin(data.draw(st.sampled_from(list(pins))))

    @invariant()
    def counters_are_right(self) -> None:
        if hasattr(self, "bench"):
            self.bench.core.check()
            self.bench.check_flight()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        self.check_replies()
        self.bench.assert_whole()

    def check_replies(self) -> None:
        """All requests have ended, each as it should."""
        for rid, expected in self.expected.items():
            stream = self.bench.streams[rid]
            if rid in self.bench.rejected:
                assert not stream.deltas
            elif rid in self.stopped:
                assert stream.ids[: self.stopped[rid]] == expected[: self.stopped[rid]]
                assert stream.ends == 0
            elif rid in self.aborted:
                assert stream.ends == 1
                assert stream.ids == expected[: len(stream.ids)]
            else:
                assert stream.ends == 1
                assert stream.ids == expected


SchedulerMachine.TestCase.settings = settings(
    max_examples=2000, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
