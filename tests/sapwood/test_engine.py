"""The in-process Engine over fake workers: shapes, batches, streams, threads, shutdown."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sapwood import Engine, RequestFailed, StartError
from sapwood.items import chats_of, items_of, prompts_of
from srt.answer import RequestFailed as SameRequestFailed
from tests.srt.fakes import fake_command, fake_resolved

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_resolved(fake_resolved(), fake_command) as started:
        yield started


def running(engine: Engine) -> int:
    stats = engine.stats()
    assert stats is not None
    return stats.running


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_one_prompt_gives_one_reply_in_the_native_shape(engine: Engine) -> None:
    reply = engine.generate("abc", {"max_new_tokens": 7})
    assert reply["text"] == "abcabca"
    assert reply["output_ids"] == [97, 98, 99, 97, 98, 99, 97]
    meta = reply["meta_info"]
    assert set(meta) == {
        "id",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "cache_report",
        "queue_time",
        "prefill_time",
        "decode_time",
        "preempted_time",
        "retractions",
        "scheduled_tokens",
        "ttft",
        "tpot",
        "e2e_latency",
    }
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 7, 2)
    assert 0.0 < meta["ttft"] <= meta["ttft"] + meta["decode_time"] <= meta["e2e_latency"] < 60.0
    assert meta["tpot"] == pytest.approx(meta["decode_time"] / 6)
    assert (meta["queue_time"], meta["preempted_time"], meta["retractions"]) == (0.25, 0.0, 0)


def test_ids_and_chats_are_prompts_too(engine: Engine) -> None:
    assert engine.generate(input_ids=[100, 101], sampling_params={"max_new_tokens": 3})["text"] == "ded"
    both = engine.generate(input_ids=[[100], [101]], sampling_params={"max_new_tokens": 2})
    assert [reply["text"] for reply in both] == ["dd", "ee"]
    chat = [{"role": "user", "content": "hey"}]
    assert engine.chat(chat, {"max_new_tokens": 3})["text"] == "hey"
    assert [reply["text"] for reply in engine.chat([chat, chat], {"max_new_tokens": 1})] == ["h", "h"]


def test_every_item_of_a_batch_has_its_own_settings(engine: Engine) -> None:
    settings = [{"max_new_tokens": count} for count in range(1, 7)]
    replies = engine.generate(["abcdef"] * 6, settings)
    assert [reply["text"] for reply in replies] == ["abcdef"[:count] for count in range(1, 7)]


def test_samples_of_several_prompts_come_in_prompt_major_order(engine: Engine) -> None:
    replies = engine.generate(["seed", "x"], [{"n": 3, "seed": 7, "max_new_tokens": 1}, {"n": 2, "max_new_tokens": 1}])
    assert [reply["text"] for reply in replies] == ["7", "8", "9", "x", "x"]
    assert len({reply["meta_info"]["id"] for reply in replies}) == 5


def test_a_list_of_one_stays_a_list_and_an_empty_one_is_empty(engine: Engine) -> None:
    assert [reply["text"] for reply in engine.generate(["a"], {"max_new_tokens": 1})] == ["a"]
    assert engine.generate([], {}) == []


def test_more_prompts_than_can_be_on_their_way_at_once_all_come_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapwood.runs.MAX_AT_ONCE", 3)
    prompts = [f"{index} " for index in range(20)]
    replies = engine.generate(prompts, [{"max_new_tokens": len(prompt)} for prompt in prompts])
    assert [reply["text"] for reply in replies] == prompts


def test_a_bad_item_of_a_batch_is_named_and_the_others_end_with_it(engine: Engine) -> None:
    with pytest.raises(RequestFailed, match=r"^prompt\[2\]: 'refuse' is refused$") as caught:
        engine.generate(["a", "b", "refuse", "d"], {"max_new_tokens": None})
    assert caught.value.status == 400
    wait_until(lambda: running(engine) == 0)
    assert [reply["text"] for reply in engine.generate(["x", "y"], {"max_new_tokens": 1})] == ["x", "y"]


def test_a_bad_setting_is_named_before_anything_runs(engine: Engine) -> None:
    with pytest.raises(RequestFailed, match=r"^prompt\[1\]: temperature: must be at least 0") as caught:
        engine.generate(["a", "b"], [{"max_new_tokens": None}, {"temperature": -1}])
    assert (caught.value.param, running(engine)) == ("temperature", 0)
    with pytest.raises(RequestFailed, match="3 of them for 2 prompts"):
        engine.generate(["a", "b"], [{}, {}, {}])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"prompt": "a", "input_ids": [1]},
        {"prompt": ""},
        {"prompt": ["a", ""]},
        {"prompt": ["a", 3]},
        {"input_ids": []},
        {"input_ids": [[]]},
        {"input_ids": [1, 2**40]},
        {"input_ids": ["a"]},
        {"input_ids": [1.5]},
        {"prompt": "\ud800"},
        {"prompt": "a", "cache_salt": ""},
        {"prompt": "a", "return_logprob": True, "top_logprobs_num": 1000},
        {"prompt": "a", "sampling_params": {"no_such": 1}},
        {"prompt": "a", "sampling_params": {"temperature": "hot"}},
    ],
)
def test_what_is_no_prompt_is_refused(engine: Engine, arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestFailed) as caught:
        engine.generate(**arguments)
    assert caught.value.status == 400


def test_messages_that_are_no_json_are_refused() -> None:
    with pytest.raises(RequestFailed, match="messages"):
        chats_of([{"role": "user", "content": object()}], {})


def test_salted_prompts_have_a_namespace_of_their_own() -> None:
    from sapwood.items import Options

    prompts, single = prompts_of("a", None)
    (plain,) = items_of(prompts, single, None, Options(), 512)
    (salted,) = items_of(prompts, single, None, Options(cache_salt="s"), 512)
    assert (plain.ask.namespace, salted.ask.namespace) == ("", "\x1fsalt:s")


def test_a_stream_grows_to_the_whole_reply(engine: Engine) -> None:
    seen = ""
    for reply in engine.generate("abc", {"max_new_tokens": 100}, stream=True):
        assert "index" not in reply
        assert reply["text"].startswith(seen)
        seen = reply["text"]
    assert seen == ("abc" * 34)[:100]
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 100}
    assert len(reply["output_ids"]) == 100


def test_a_stream_of_several_says_which(engine: Engine) -> None:
    last: dict[int, str] = {}
    settings = [{"n": 2, "max_new_tokens": 3}, {"max_new_tokens": 40}]
    for reply in engine.generate(["ab", "xyz"], settings, stream=True):
        last[reply["index"]] = reply["text"]
    assert last == {0: "aba", 1: "aba", 2: ("xyz" * 14)[:40]}


@pytest.mark.parametrize("way", ["close", "drop", "with"])
def test_leaving_a_stream_ends_what_runs(engine: Engine, way: str) -> None:
    stream = engine.generate(["for ever", "and ever"], {"max_new_tokens": None}, stream=True)
    next(stream)
    wait_until(lambda: running(engine) == 2)
    if way == "close":
        stream.close()
        stream.close()
    elif way == "with":
        with stream:
            next(stream)
    else:
        del stream
        gc.collect()
    wait_until(lambda: running(engine) == 0)


def test_a_stream_fails_with_the_item_named(engine: Engine) -> None:
    stream = engine.generate(["for ever", "refuse"], {"max_new_tokens": None}, stream=True)
    with pytest.raises(RequestFailed, match=r"prompt\[1\]"):
        for _ in stream:
            pass
    wait_until(lambda: running(engine) == 0)


def test_async_calls_run_side_by_side_on_the_callers_loop(engine: Engine) -> None:
    async def scenario() -> None:
        calls = [engine.generate_async(f"p{i}", {"max_new_tokens": 2}) for i in range(20)]
        assert [reply["text"] for reply in await asyncio.gather(*calls)] == [f"p{i}"[:2] for i in range(20)]
        stream = await engine.generate_async("abc", {"max_new_tokens": 30}, stream=True)
        assert [reply["text"] async for reply in stream][-1] == "abc" * 10
        reply = await engine.chat_async([{"role": "user", "content": "hi"}], {"max_new_tokens": 2})
        assert reply["text"] == "hi"

    asyncio.run(scenario())


def test_cancelling_an_async_call_ends_what_runs(engine: Engine) -> None:
    async def scenario() -> None:
        whole = asyncio.ensure_future(engine.generate_async(["for ever"] * 3, {"max_new_tokens": None}))
        stream = await engine.generate_async("for ever", {"max_new_tokens": None}, stream=True)
        await anext(stream)
        while await asyncio.to_thread(running, engine) < 4:
            await asyncio.sleep(0.01)
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole
        await stream.aclose()
        while await asyncio.to_thread(running, engine):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_threads_share_an_engine(engine: Engine) -> None:
    texts: dict[int, list[str]] = {}

    def work(number: int) -> None:
        prompts = [f"{number}-{i}" for i in range(10)]
        texts[number] = [reply["text"] for reply in engine.generate(prompts, {"max_new_tokens": 3})]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: [f"{number}-{i}" for i in range(10)] for number in range(6)}


def test_tokenize_flush_and_facts(engine: Engine) -> None:
    assert engine.tokenize("ab") == [97, 98]
    assert engine.flush_cache()
    assert engine.facts.name == "fake"
    assert dict(engine.start_phases)["all ready"] > 0.0
    assert RequestFailed is SameRequestFailed


def test_engines_come_and_go_in_a_thread_without_leaving_anything(run_base: Path) -> None:
    def cycle() -> None:
        with Engine.from_resolved(fake_resolved(), fake_command) as engine:
            assert engine.generate("ab", {"max_new_tokens": 2})["text"] == "ab"

    counts = []
    for _ in range(5):
        thread = threading.Thread(target=cycle)
        thread.start()
        thread.join()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert len(set(counts)) == 1
    assert os.listdir(run_base) == []


def test_an_exception_inside_the_with_block_shuts_the_engine_down(run_base: Path) -> None:
    with pytest.raises(ZeroDivisionError), Engine.from_resolved(fake_resolved(), fake_command) as engine:
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("a")
    engine.shutdown()
    assert os.listdir(run_base) == []


def test_the_collector_may_end_a_stream_while_its_thread_is_handing_over_another_call(engine: Engine) -> None:
    stream = engine.generate("for ever", {"max_new_tokens": None}, stream=True)
    next(stream)
    streams = [stream]
    del stream

    def collected_inside_submit() -> None:
        with engine._host._lock:
            streams.clear()

    thread = threading.Thread(target=collected_inside_submit, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()
    wait_until(lambda: running(engine) == 0)


def test_an_engine_that_is_dropped_ends_its_processes(run_base: Path) -> None:
    engine = Engine.from_resolved(fake_resolved(), fake_command)
    del engine
    gc.collect()
    wait_until(lambda: os.listdir(run_base) == [])


def test_a_failed_start_leaves_nothing(run_base: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(StartError, match="has a hole"):
        Engine.from_resolved(fake_resolved(chat_template="cannot start"), fake_command)
    assert os.listdir(run_base) == []
    wait_until(lambda: not set(threading.enumerate()) - before)


PROGRAMS = {
    "drops the engine at the end": "engine.generate('a', {'max_new_tokens': 1}); del engine",
    "ends without shutdown": "engine.generate('a', {'max_new_tokens': 1})",
    "raises": "raise SystemExit(3)",
    "ends in the middle of a stream": "next(engine.generate('a', {'max_new_tokens': None}, stream=True))",
    "keeps a stream to the end": "s = engine.generate('a', {'max_new_tokens': None}, stream=True); next(s)",
    "forks": "import os\npid = os.fork()\nif pid == 0: raise SystemExit(0)\nassert os.waitpid(pid, 0)[1] == 0\n"
    "assert engine.generate('a', {'max_new_tokens': 1})['text'] == 'a'",
}


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_an_interpreter_ends_by_itself_whatever_is_still_open(run_base: Path, name: str) -> None:
    program = (
        "from tests.srt.fakes import fake_command, fake_resolved\nfrom sapwood import Engine\n"
        "engine = Engine.from_resolved(fake_resolved(), fake_command)\n" + PROGRAMS[name]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (3 if name == "raises" else 0, "")
    assert os.listdir(run_base) == []


def test_settings_that_there_are_not_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="no setting pagesize"):
        Engine("nowhere", pagesize=16)
    with pytest.raises(TypeError, match="page_size"):
        Engine("nowhere", page_size="sixteen")
    with pytest.raises(TypeError, match="either model or model_path"):
        Engine("nowhere", model_path="elsewhere")


def test_importing_the_package_loads_next_to_nothing() -> None:
    program = "import sys; before = set(sys.modules); import sapwood; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "sapwood"
    }
