"""Worker processes that die, do not start, do not leave; parents that are killed; what is left behind: nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from srt.child import StartError
from srt.config import Role
from srt.front import Ask, Front, RequestFailed
from srt.launch import LONGEST_PAUSE_SECONDS, describe_exit, pause_before_restart
from srt.messages import SamplingParams, TextPrompt
from tests.srt.fakes import fake_command, fake_front, fake_resolved, until

Run = Callable[[Any], Any]
FAKE_PARENT = Path(__file__).parent / "fake_parent.py"


def ask(text: str, tokens: int | None = None, n: int = 1) -> Ask:
    return Ask(TextPrompt(text), SamplingParams(max_new_tokens=tokens), n=n)


async def text_of(front: Front, text: str, tokens: int | None = None) -> str:
    (sample,) = await front.ask(ask(text, tokens)).collect()
    return sample.text


def is_alive(pid: int) -> bool:
    """True for a process that runs; one that only waits to be reaped by its parent has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pids: Sequence[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.02)


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_when_scheduler_or_detokenizer_is_killed_every_stream_ends_with_an_error_and_the_next_ask_works(
    run: Run, run_base: Path, victim: str
) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            streams = [asyncio.create_task(text_of(front, f"stream {i}")) for i in range(8)]
            await until(lambda: front.status().requests == 8)
            before = front.worker_pids()
            os.kill(before[victim], signal.SIGKILL)
            for stream in streams:
                with pytest.raises(RequestFailed) as caught:
                    await stream
                assert (caught.value.status, caught.value.code) == (503, "worker_died")
                assert f"the {victim} process died (killed by SIGKILL)" in caught.value.message
            assert await text_of(front, "again", 5) == "again"
            after = front.worker_pids()
            assert after[victim] != before[victim]
            assert {name: pid for name, pid in after.items() if name != victim} == {
                name: pid for name, pid in before.items() if name != victim
            }

            async def nothing_runs() -> bool:
                stats = await front.fresh_stats()
                return stats is not None and stats.running == 0

            await until(nothing_runs)

    run(scenario())


def test_when_a_tokenizer_is_killed_only_what_it_had_in_hand_ends(run: Run, run_base: Path) -> None:
    async def scenario() -> None:
        async with fake_front(tokenizer_workers=2) as front:
            stream = front.ask(ask("goes on"))
            await anext(reader := stream.__aiter__())
            waiting = [front.ask(ask("tokenizer sleeps")) for _ in range(2)]
            call = asyncio.create_task(front.tokenize(TextPrompt("tokenizer sleeps")))
            await asyncio.sleep(0)
            os.kill(front.worker_pids()["tokenizer-0"], signal.SIGKILL)
            await until(lambda: sum(answer.ended for answer in waiting) == 1)
            os.kill(front.worker_pids()["tokenizer-1"], signal.SIGKILL)
            for answer in waiting:
                with pytest.raises(RequestFailed, match="tokenizer process died"):
                    await answer.collect()
            with pytest.raises(RequestFailed, match="tokenizer process died"):
                await call
            assert not stream.ended
            assert (await anext(reader))[1].text
            stream.abort()
            assert await text_of(front, "again", 5) == "again"

    run(scenario())


@pytest.mark.parametrize("prompt", ["tokenizer dies", "scheduler dies"])
def test_a_prompt_that_kills_its_worker_ends_and_the_server_goes_on(run: Run, run_base: Path, prompt: str) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            with pytest.raises(RequestFailed, match="process died"):
                await text_of(front, prompt)
            assert await text_of(front, "fine", 4) == "fine"

    run(scenario())


def test_an_ask_that_comes_while_a_worker_starts_again_waits_for_it(run: Run, run_base: Path) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            os.kill(front.worker_pids()["scheduler"], signal.SIGKILL)
            await until(lambda: front.status().state == "restarting")
            with pytest.raises(RequestFailed, match="not there"):
                await front.flush_cache()
            held = [front.ask(ask(f"held {i}", 6)) for i in range(3)]
            given_up = front.ask(ask("given up"))
            given_up.abort()
            assert [(await answer.collect())[0].text for answer in held] == ["held 0", "held 1", "held 2"]
            await until(lambda: front.healthy)
            assert (await front.fresh_stats()).aborts == 0

    run(scenario())


def test_an_ask_gives_up_when_the_worker_does_not_come_back(
    run: Run, run_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("srt.front.HOLD_SECONDS", 0.3)
    broken = False

    def command(role: Role, settings: Path, watch_fd: int) -> Sequence[str]:
        return [sys.executable, "-c", "raise SystemExit(5)"] if broken else fake_command(role, settings, watch_fd)

    async def scenario() -> None:
        nonlocal broken
        front = Front(fake_resolved(), command)
        await front.start()
        broken = True
        os.kill(front.worker_pids()["detokenizer"], signal.SIGKILL)
        await until(lambda: front.status().state == "restarting")
        with pytest.raises(RequestFailed) as caught:
            await text_of(front, "in vain")
        assert (caught.value.status, caught.value.code) == (503, "worker_died")
        assert caught.value.retry_after is not None
        broken = False
        await until(lambda: front.healthy)
        assert await text_of(front, "back", 4) == "back"
        await front.stop()

    run(scenario())


def test_totals_do_not_fall_when_the_scheduler_starts_again(run: Run, run_base: Path) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            await text_of(front, "x", 70)
            first = await front.fresh_stats()
            os.kill(front.worker_pids()["scheduler"], signal.SIGKILL)
            await until(lambda: front.status().state == "restarting")
            assert front.stats is not None
            assert front.stats.output_tokens == first.output_tokens == 70
            await until(lambda: front.healthy)
            await text_of(front, "x", 30)
            assert (await front.fresh_stats()).output_tokens == 100

    run(scenario())


def test_pauses_between_restarts_grow_from_nothing_to_a_bound() -> None:
    pauses = [pause_before_restart(failures) for failures in range(1, 40)]
    assert pauses[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert pauses == sorted(pauses)
    assert max(pauses) == LONGEST_PAUSE_SECONDS


def test_how_a_process_ended_is_told_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-200) == "killed by signal 200"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("cannot start", "the chat template has a hole"),
        ("dies while starting", r"the tokenizer-0 process ended while starting \(exit code 7\)"),
    ],
)
def test_a_worker_that_cannot_start_fails_the_start_in_one_line_and_leaves_nothing(
    run: Run, run_base: Path, template: str, said: str
) -> None:
    async def scenario() -> None:
        front = Front(fake_resolved(chat_template=template), fake_command)
        with pytest.raises(StartError, match=said) as caught:
            await front.start()
        assert "\n" not in str(caught.value)
        assert front.worker_pids() == {}

    run(scenario())
    assert os.listdir(run_base) == []


def test_no_executable_fails_the_start_in_one_line(run: Run, run_base: Path) -> None:
    async def scenario() -> None:
        front = Front(fake_resolved(), lambda role, settings, fd: ["/nowhere/python"])
        with pytest.raises(StartError, match="cannot start the scheduler process"):
            await front.start()

    run(scenario())
    assert os.listdir(run_base) == []


def test_cancelling_the_start_leaves_nothing(run: Run, run_base: Path) -> None:
    async def scenario() -> None:
        front = Front(fake_resolved(), lambda role, settings, fd: [sys.executable, "-c", "input()"])
        start = asyncio.create_task(front.start())
        await until(lambda: bool(os.listdir(run_base)))
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    run(scenario())
    assert os.listdir(run_base) == []


def test_a_worker_that_does_not_leave_is_killed(run: Run, run_base: Path) -> None:
    pids: list[int] = []

    async def scenario() -> None:
        front = Front(fake_resolved(chat_template="never leaves"), fake_command)
        await front.start()
        pids.extend(front.worker_pids().values())
        await front.stop(grace_seconds=0.2)

    run(scenario())
    assert not any(is_alive(pid) for pid in pids)
    assert os.listdir(run_base) == []


@pytest.mark.parametrize("attempt", range(3))
def test_when_the_parent_is_killed_the_workers_leave_and_take_their_folder_with_them(
    run_base: Path, attempt: int
) -> None:
    with subprocess.Popen([sys.executable, str(FAKE_PARENT)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = list(json.loads(parent.stdout.readline()).values())
        assert len(pids) == 4
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
    wait_until_gone(pids)
    assert sorted(str(path) for path in run_base.rglob("*")) == []


def test_signals_to_the_whole_group_do_not_reach_the_workers(run_base: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, str(FAKE_PARENT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )
    assert parent.stdout is not None
    with parent.stdout:
        pids = list(json.loads(parent.stdout.readline()).values())
        os.killpg(parent.pid, signal.SIGINT)
        try:
            parent.wait(60.0)
        finally:
            parent.kill()
    wait_until_gone(pids)
    assert os.listdir(run_base) == []


def test_workers_ignore_the_signals_that_are_the_parents_to_handle(run: Run, run_base: Path) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            before = front.worker_pids()
            for pid in before.values():
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGTERM)
            assert await text_of(front, "unmoved", 7) == "unmoved"
            assert front.worker_pids() == before

    run(scenario())


def test_starting_and_stopping_again_and_again_leaks_no_descriptor_and_no_thread(run: Run, run_base: Path) -> None:
    async def cycle() -> tuple[int, int]:
        async with fake_front() as front:
            assert await text_of(front, "x", 3) == "xxx"
        await until(lambda: not any(t.name.startswith("wait-") for t in threading.enumerate()))
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    async def scenario() -> None:
        first = await cycle()
        for _ in range(4):
            assert await cycle() == first

    run(scenario())
    assert os.listdir(run_base) == []


def test_two_fronts_live_side_by_side_and_in_threads(run_base: Path) -> None:
    texts: dict[int, str] = {}

    async def scenario(number: int) -> None:
        async with fake_front() as front:
            texts[number] = await text_of(front, f"front {number}", 7)

    threads = [threading.Thread(target=lambda n=n: asyncio.run(scenario(n))) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: f"front {n}" for n in range(3)}
    assert os.listdir(run_base) == []


def test_no_signal_handler_is_touched(run: Run, run_base: Path) -> None:
    numbers = [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]

    async def scenario() -> None:
        before = [signal.getsignal(n) for n in numbers]
        async with fake_front() as front:
            await text_of(front, "x", 1)
            assert [signal.getsignal(n) for n in numbers] == before

    run(scenario())
