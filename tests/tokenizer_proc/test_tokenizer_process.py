"""The real process over real sockets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from srt.config import TokenizerConfig
from srt.messages import (
    ChatPrompt,
    Generate,
    Rejected,
    SamplingParams,
    StartFailed,
    Submit,
    TextPrompt,
    TokenizeCall,
    Tokenized,
    unpack_ids,
)
from tests.worker_harness import PATIENCE_SECONDS, Worker, model_facts, new_run_dir

MEMORY_LIMIT = 150 * 1024 * 1024


def start(folder: Path, index: int = 0, **settings: Any) -> Worker:
    context_length = settings.pop("context_length", 2048)
    facts = model_facts(folder, context_length, vocab_size=settings.pop("vocab_size", 512))
    config = TokenizerConfig(
        run_dir=new_run_dir(), index=index, model=facts, max_prompt_tokens=context_length - 1, **settings
    )
    return Worker("tokenizer_proc", f"tokenizer-{index}", config)


@pytest.fixture
def worker(tiny_model: Path) -> Iterator[Worker]:
    with start(tiny_model, index=2) as worker:
        yield worker


def submit(rid: str, text: str) -> Submit:
    return Submit((rid,), TextPrompt(text), SamplingParams(), (0,))


def test_it_tokenizes_refuses_survives_bad_frames_and_leaves_when_told(worker: Worker, tiny_model: Path) -> None:
    ready = worker.wait_ready()
    assert (ready.role, ready.index, ready.pid) == ("tokenizer", 2, worker.process.pid)
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    worker.send(Submit(("a", "b"), TextPrompt("the tree"), SamplingParams(), (1, 2)))
    first, second = worker.from_worker("scheduler", 2)
    assert isinstance(first, Generate)
    assert unpack_ids(first.prompt_ids) == unpack_ids(second.prompt_ids) == tokenizer.encode("the tree").ids
    assert worker.from_worker("front") == [Tokenized(("a", "b"), len(tokenizer.encode("the tree").ids))]

    for frame in (b"", b"nonsense", b"\x81\xa4type\xa4none", b"\xc1" * 1000):
        worker.send_frame(frame)
    worker.send(submit("c", ""))
    (refused,) = worker.from_worker("front")
    assert isinstance(refused, Rejected)
    assert (refused.rids, refused.status) == (("c",), 400)

    worker.interrupt()
    worker.send(TokenizeCall("d", ChatPrompt(b'[{"role": "user", "content": "hi"}]')))
    (answer,) = worker.from_worker("front")
    assert isinstance(answer, Tokenized)
    assert tokenizer.decode(unpack_ids(answer.ids or b""), skip_special_tokens=False).endswith("assistant\n")
    assert worker.shut_down() == 0


def test_a_template_can_be_given(tiny_model: Path) -> None:
    with start(tiny_model, chat_template="{{ messages[0].content }}!") as worker:
        worker.wait_ready()
        worker.send(TokenizeCall("d", ChatPrompt(b'[{"role": "user", "content": "hi"}]')))
        (answer,) = worker.from_worker("front")
        tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
        assert tokenizer.decode(unpack_ids(answer.ids)) == "hi!"


def check_small(worker: Worker, prompts: list[str]) -> None:
    worker.wait_ready()
    for number, text in enumerate(prompts):
        worker.send(submit(f"r{number}", text))
    worker.from_worker("front", len(prompts))
    # Memory of the last prompt goes back to the system after the answer is out.
    worker.send(TokenizeCall("last", TextPrompt("a")))
    worker.from_worker("front")
    assert worker.resident_bytes() < MEMORY_LIMIT
    assert "torch" not in worker.mapped_files()
    assert "transformers" not in worker.mapped_files()


def test_it_is_small_and_has_no_torch(worker: Worker) -> None:
    check_small(worker, ["word after word " * 50] * 50 + ["word " * 20_000] * 3)


@pytest.mark.real
def test_it_is_small_with_the_real_vocabulary_even_after_the_longest_texts(real_model: Path) -> None:
    with start(real_model, context_length=8192, vocab_size=49152) as worker:
        check_small(worker, ["Words, numbers 12345 and trees 🌳. " * 200] * 20 + ["one two three " * 45_000] * 3)


def test_ten_megabytes_are_refused_at_once(worker: Worker) -> None:
    worker.wait_ready()
    begin = time.monotonic()
    worker.send(submit("r", "word " * 2_000_000))
    messages = json.dumps([{"role": "user", "content": "word " * 2_000_000}]).encode()
    worker.send(Submit(("s",), ChatPrompt(messages), SamplingParams(), (0,)))
    for answer in worker.from_worker("front", 2):
        assert isinstance(answer, Rejected)
        assert answer.code == "context_length_exceeded"
    assert time.monotonic() - begin < PATIENCE_SECONDS


def test_it_goes_and_cleans_up_when_its_parent_is_gone(worker: Worker) -> None:
    worker.wait_ready()
    worker.abandon()
    assert worker.process.wait(PATIENCE_SECONDS) == 1
    deadline = time.monotonic() + PATIENCE_SECONDS
    while Path(worker.run_dir).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(worker.run_dir).exists()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": "{}"}, "tokenizer.json"),
        ({"tokenizer.json": None, "chat_template.jinja": "{% if %}"}, "chat template"),
    ],
)
def test_it_says_in_one_line_why_it_cannot_start(
    tmp_path: Path, tiny_model: Path, files: dict[str, str | None], says: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text((tiny_model / name).read_text() if content is None else content)
    with start(tmp_path) as worker:
        (failed,) = worker.from_worker("front")
        assert isinstance(failed, StartFailed)
        assert says in failed.message
        assert worker.process.wait(PATIENCE_SECONDS) == 1
