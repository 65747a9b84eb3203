"""The in-process Engine over the real processes and a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sapwood import Engine, RequestFailed, StartError

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"threads": 1, "max_total_tokens": 8192, "dtype": "float32"}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, **SMALL) as started:
        yield started


def is_whole(engine: Engine) -> bool:
    stats = engine.stats()
    assert stats is not None
    pages = stats.pages_free + stats.pages_cached == stats.pages_total
    return pages and stats.running == stats.waiting == stats.pages_in_use == 0


def wait_until_whole(engine: Engine) -> None:
    deadline = time.monotonic() + 30.0
    while not is_whole(engine):
        assert time.monotonic() < deadline, engine.stats()
        time.sleep(0.02)


def test_a_batch_gives_each_item_what_it_gets_alone(engine: Engine) -> None:
    prompts = [f"The tree number {index} stands by the river" for index in range(6)]
    settings: list[dict[str, Any]] = [
        {"max_new_tokens": 1, "temperature": 0},
        {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True},
        {"max_new_tokens": 30, "temperature": 0.9, "seed": 7, "top_k": 20},
        {"max_new_tokens": 20, "temperature": 1.5, "seed": 8, "repetition_penalty": 1.3},
        {"max_new_tokens": 12, "temperature": 0, "stop": ["e", "a"]},
        {"max_new_tokens": 6, "temperature": 0, "logit_bias": {"70": 100}},
    ]
    together = engine.generate(prompts, settings)
    for prompt, setting, reply in zip(prompts, settings, together, strict=True):
        alone = engine.generate(prompt, setting)
        assert reply["output_ids"] == alone["output_ids"]
        assert reply["text"] == alone["text"]
        assert reply["meta_info"]["finish_reason"] == alone["meta_info"]["finish_reason"]


def test_a_prompt_that_is_too_long_fails_the_batch_by_name_and_leaves_nothing_running(engine: Engine) -> None:
    prompts = ["one", "two", "word " * 5000, "four"]
    with pytest.raises(RequestFailed, match=r"^prompt\[2\]: ") as caught:
        engine.generate(prompts, {"max_new_tokens": 1000, "ignore_eos": True})
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    replies = engine.generate(["five", "six"], {"max_new_tokens": 3, "ignore_eos": True})
    assert [len(reply["output_ids"]) for reply in replies] == [3, 3]
    wait_until_whole(engine)


def test_the_second_turn_of_a_chat_finds_the_first_in_the_cache(engine: Engine) -> None:
    assert engine.flush_cache()
    messages = [{"role": "user", "content": "Which trees grow by the river, and how old are they?"}]
    first = engine.chat(messages, {"max_new_tokens": 16, "temperature": 0})
    assert first["meta_info"]["cached_tokens"] == 0
    messages += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "And which do not?"}]
    second = engine.chat(messages, {"max_new_tokens": 4, "temperature": 0})
    history = first["meta_info"]["prompt_tokens"] - 4
    assert second["meta_info"]["cached_tokens"] >= history


def test_ids_that_were_generated_are_found_again_to_the_last_token(engine: Engine) -> None:
    prompt = engine.tokenize("Every token of this is to be found again.")
    first = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 21, "ignore_eos": True})
    more = [*prompt, *first["output_ids"], 11, 12]
    second = engine.generate(input_ids=more, sampling_params={"max_new_tokens": 1})
    assert second["meta_info"]["cached_tokens"] == len(prompt) + 20


def test_a_call_with_samples_reports_what_was_cached_before_it(engine: Engine) -> None:
    assert engine.flush_cache()
    replies = engine.generate("A prompt that nobody has sent before", {"n": 4, "max_new_tokens": 8, "seed": 1})
    assert len({tuple(reply["output_ids"]) for reply in replies}) > 1
    assert min(reply["meta_info"]["cached_tokens"] for reply in replies) == 0
    again = engine.generate("A prompt that nobody has sent before", {"n": 4, "max_new_tokens": 8, "seed": 1})
    assert [reply["output_ids"] for reply in again] == [reply["output_ids"] for reply in replies]
    assert all(reply["meta_info"]["cached_tokens"] > 0 for reply in again)


def test_log_probabilities_come_in_the_native_shape(engine: Engine) -> None:
    reply = engine.generate(
        "The tree",
        {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = reply["meta_info"]
    assert [token_id for _, token_id, _ in meta["output_token_logprobs"]] == reply["output_ids"]
    assert "".join(text for _, _, text in meta["output_token_logprobs"]).encode() == reply["text"].encode()
    assert [len(tops) for tops in meta["output_top_logprobs"]] == [2, 2, 2]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(logprob <= 0.0 for logprob, _, _ in meta["input_token_logprobs"][1:])


def test_a_stream_joined_is_the_whole_reply(engine: Engine) -> None:
    settings = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    *_, last = engine.generate("Seven apples", settings, stream=True)
    whole = engine.generate("Seven apples", settings)
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])


def test_a_salt_has_a_cache_of_its_own(engine: Engine) -> None:
    assert engine.flush_cache()
    prompt, settings = "A secret that is long enough to be cached " * 4, {"max_new_tokens": 1}

    def cached(salt: str | None) -> int:
        reply = engine.generate(prompt, settings, cache_salt=salt)
        return int(reply["meta_info"]["cached_tokens"])

    assert [cached("a"), cached("b"), cached(None)] == [0, 0, 0]
    assert min(cached("a"), cached("b"), cached(None)) > 0


def test_leaving_streams_gives_every_page_back(engine: Engine) -> None:
    for _ in range(10):
        stream = engine.generate(["leave me", "and me"], {"max_new_tokens": 1500, "ignore_eos": True}, stream=True)
        next(stream)
        stream.close()
    wait_until_whole(engine)


def test_engines_come_and_go_in_a_thread_and_leave_nothing(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    numbers = [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
    handlers = [signal.getsignal(n) for n in numbers]
    outputs: list[list[int]] = []
    descriptors: list[int] = []

    def cycle(fail: bool) -> None:
        try:
            with Engine(tiny_model, **SMALL) as engine:
                reply = engine.generate("Again and again", {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True})
                outputs.append(reply["output_ids"])
                assert not fail
        except AssertionError:
            assert fail

    for number in range(5):
        thread = threading.Thread(target=cycle, args=(number == 2,))
        thread.start()
        thread.join()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert len(outputs) == 5
    assert all(output == outputs[0] for output in outputs)
    assert len(set(descriptors)) == 1
    assert [signal.getsignal(n) for n in numbers] == handlers
    assert os.listdir(base) == []


def test_a_model_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    for model in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(StartError) as caught:
            Engine(model)
        assert "\n" not in str(caught.value)


def test_a_program_that_forgets_to_shut_down_ends_by_itself(tiny_model: Path) -> None:
    program = (
        "from sapwood import Engine\n"
        f"engine = Engine({str(tiny_model)!r}, threads=1, max_total_tokens=4096)\n"
        "print(engine.generate('a', {'max_new_tokens': 2, 'ignore_eos': True})['meta_info']['completion_tokens'])\n"
        "stream = engine.generate('for ever', {'max_new_tokens': None, 'ignore_eos': True}, stream=True)\n"
        "next(stream)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
