"""The real server hurt in every way: killed workers, killed parents, signals in the middle of everything."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from tests import noise
from tests.system.served import Served, Streamed, is_alive, load, serving, wait_until

LONG = 1500


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run folder of a test's server is; short, since the path of a socket must be."""
    return tmp_path_factory.mktemp("r")


def assert_ended_well(results: list[Streamed]) -> None:
    for result in results:
        assert result.error is None
        assert (result.finish, result.done) == ("length", True)


@pytest.mark.parametrize("victim", ["scheduler", "tokenizer", "detokenizer"])
def test_when_a_worker_is_killed_under_load_every_stream_ends_and_the_next_request_works(
    tiny_model: Path, base: Path, victim: str
) -> None:
    with serving(tiny_model, base) as served:
        before = served.workers()
        assert set(before) == {"scheduler", "tokenizer", "detokenizer"}
        results = asyncio.run(load(served, 8, LONG, lambda: os.kill(before[victim], signal.SIGKILL)))
        for result in results:
            assert result.text
            if victim == "tokenizer":
                assert (result.finish, result.done, result.error) == ("length", True, None)
            else:
                assert result.error is not None
                assert f"the {victim} process died (killed by SIGKILL)" in result.error["message"]
        assert served.request().status_code == 200
        after = served.workers()
        assert after[victim] != before[victim]
        wait_until(served.is_whole)
        served.signal(signal.SIGTERM)
        code, errors = served.end()
        assert code == 0
        assert f"the {victim}" in errors.replace("-0", "")
        served.assert_nothing_is_left([*before.values(), *after.values()])


def test_a_worker_that_is_killed_again_and_again_comes_back_each_time(tiny_model: Path, base: Path) -> None:
    with serving(tiny_model, base) as served:
        expected = served.request().json()["choices"][0]["text"]
        for victim in ("detokenizer", "tokenizer", "scheduler", "detokenizer", "tokenizer"):
            pid = served.workers()[victim]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda victim=victim, pid=pid: served.workers().get(victim, pid) != pid)
            assert served.request().json()["choices"][0]["text"] == expected
        wait_until(served.is_whole)


def test_when_the_parent_is_killed_nothing_is_left_and_its_port_can_be_had_at_once(
    tiny_model: Path, base: Path
) -> None:
    port = 0
    for _ in range(3):
        with serving(tiny_model, base, port=port) as served:
            port = served.port
            pids = list(served.workers().values())
            results = asyncio.run(load(served, 4, LONG, lambda served=served: served.signal(signal.SIGKILL)))
            assert all(result.error is not None for result in results)
            served.assert_nothing_is_left(pids)


def test_sigterm_lets_streams_finish_and_refuses_new_requests_meanwhile(tiny_model: Path, base: Path) -> None:
    with serving(tiny_model, base, "--drain-seconds", "60") as served:
        pids = list(served.workers().values())
        refused: list[httpx.Response] = []

        def terminate() -> None:
            served.signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503)
            refused.append(served.request())

        results = asyncio.run(load(served, 4, LONG, terminate))
        assert_ended_well(results)
        assert [(reply.status_code, reply.json()["error"]["code"]) for reply in refused] == [(503, "shutting_down")]
        assert served.end()[0] == 0
        served.assert_nothing_is_left(pids)


def test_a_second_sigterm_ends_streams_at_once_with_an_error_event(tiny_model: Path, base: Path) -> None:
    with serving(tiny_model, base, "--drain-seconds", "600") as served:
        pids = list(served.workers().values())

        def terminate_twice() -> None:
            served.signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503)
            served.signal(signal.SIGTERM)

        for result in asyncio.run(load(served, 4, LONG, terminate_twice)):
            assert result.error is not None
            assert result.error["code"] == "shutting_down"
        assert served.end()[0] == 0
        served.assert_nothing_is_left(pids)


def test_streams_that_outlast_the_drain_are_cut_off_with_an_error_event(tiny_model: Path, base: Path) -> None:
    with serving(tiny_model, base, "--drain-seconds", "0.05") as served:
        pids = list(served.workers().values())
        results = asyncio.run(load(served, 4, LONG, lambda: served.signal(signal.SIGINT)))
        assert {result.error["code"] for result in results if result.error} == {"shutting_down"}
        code, errors = served.end()
        assert code == 0
        assert "requests are cut off" in errors
        served.assert_nothing_is_left(pids)


@pytest.mark.parametrize("moment", ["starting", "prefill", "decode"])
def test_sigterm_to_the_whole_group_leaves_nothing_behind(tiny_model: Path, base: Path, moment: str) -> None:
    if moment == "starting":
        served = Served(tiny_model, base)
        wait_until(lambda: len(served.workers()) == 3)
        pids = list(served.workers().values())
        os.killpg(served.process.pid, signal.SIGTERM)
        code, errors = served.end()
        assert (code, errors) == (0, "")
        served.assert_nothing_is_left(pids)
        return
    with serving(tiny_model, base, "--drain-seconds", "0", "--chunked-prefill-size", "16") as served:
        pids = list(served.workers().values())

        def group() -> None:
            os.killpg(served.process.pid, signal.SIGTERM)

        if moment == "decode":
            asyncio.run(load(served, 8, LONG, group))
        else:
            thread = threading.Thread(target=lambda: served.request("many words " * 150, 100))
            thread.start()
            wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 200)
            group()
            thread.join()
        assert served.end()[0] == 0
        served.assert_nothing_is_left(pids)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--chat-template", "no/such/template"), "no/such/template"),
    ],
)
def test_a_worker_that_cannot_start_is_told_in_one_line_and_nothing_is_left(
    tiny_model: Path, base: Path, flags: tuple[str, ...], said: str
) -> None:
    code, errors = Served(tiny_model, base, *flags).end()
    assert code == 1
    assert len(errors.splitlines()) == 1
    assert errors.startswith("sapwood serve: ")
    assert said in errors
    assert os.listdir(base) == []


def test_no_reply_is_missing_when_the_queue_overflows(tiny_model: Path, base: Path) -> None:
    async def send_all(served: Served) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60.0) as client:
            body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
            return await asyncio.gather(
                *(
                    client.post(f"{served.url}/v1/completions", json={**body, "prompt": f"Prompt {index}"})
                    for index in range(50)
                )
            )

    flags = ("--max-running-requests", "2", "--max-queued-requests", "4", "--tokenizer-workers", "2")
    with serving(tiny_model, base, *flags) as served:
        replies = asyncio.run(send_all(served))
        assert len(replies) == 50
        refused = [reply for reply in replies if reply.status_code != 200]
        assert {reply.status_code for reply in refused} <= {429, 503}
        assert len(refused) >= 30
        for reply in refused:
            assert float(reply.headers["retry-after"]) > 0
            assert reply.json()["error"]["message"]
        wait_until(served.is_whole)
        assert served.request().status_code == 200


def test_leaving_a_stream_at_any_moment_does_not_harm_the_next_turn(tiny_model: Path, base: Path) -> None:
    messages = [{"role": "user", "content": "Tell me about trees. " * 20}]
    choice = random.Random(3)

    def turn(served: Served, tokens: int) -> dict[str, object]:
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0}
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60.0)
        assert reply.status_code == 200, reply.text
        answer: dict[str, object] = reply.json()
        return answer

    with serving(tiny_model, base, "--chunked-prefill-size", "32") as served:
        expected = turn(served, 8)
        for _ in range(20):
            body = {"messages": messages, "max_tokens": 1000, "stream": True, "ignore_eos": True, "temperature": 0}
            with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60.0) as reply:
                lines = reply.iter_lines()
                for _ in range(choice.randrange(12)):
                    next(lines)
            again = turn(served, 8)
            assert again["choices"] == expected["choices"]
            assert again["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]  # type: ignore[index]
        wait_until(served.is_whole)


def test_health_answers_while_long_prompts_are_computed(tiny_model: Path, base: Path) -> None:
    with serving(tiny_model, base, "--chunked-prefill-size", "64") as served:
        threads = [
            threading.Thread(target=served.request, args=(f"{index} " + "long words " * 300, 4)) for index in range(20)
        ]
        for thread in threads:
            thread.start()
        statuses = []
        while any(thread.is_alive() for thread in threads):
            statuses.append(httpx.get(f"{served.url}/health", timeout=60.0).status_code)
        assert set(statuses) == {200}
        for thread in threads:
            thread.join()
        wait_until(served.is_whole)


def test_a_malformed_frame_on_a_workers_socket_is_dropped(tiny_model: Path, base: Path) -> None:
    with serving(tiny_model, base) as served:
        before = served.workers()
        (run_dir,) = base.iterdir()
        context: zmq.Context[Any] = zmq.Context()
        for name in ("front", "scheduler", "tokenizer-0", "detokenizer"):
            socket = context.socket(zmq.PUSH)
            endpoint = f"ipc://{run_dir}/{name}.sock"
            socket.connect(endpoint)
            for frame in (b"", b"\xff" * 100, os.urandom(1000)):
                socket.send(frame)
            socket.close(1000)
            # A connection that speaks another language.
            noise.write(endpoint, b"\xff" * 100)
        context.term()
        assert served.request().status_code == 200
        assert served.workers() == before
        assert all(is_alive(pid) for pid in before.values())


def test_text_workers_hold_no_torch_and_stay_small(tiny_model: Path, base: Path) -> None:
    with serving(tiny_model, base) as served:
        served.request()
        for role in ("tokenizer", "detokenizer"):
            pid = served.workers()[role]
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
            status = Path(f"/proc/{pid}/status").read_text()
            resident = int(status.split("VmRSS:")[1].split()[0])
            assert resident < 150 * 1024
