"""The real process over real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from srt.config import DetokenizerConfig
from srt.messages import Finish, StartFailed, StepOutput, StopFound, StreamOpen, TextOutput, TokenDelta, pack_ids
from tests.small_tokenizers import byte_fallback, save_tokenizer
from tests.worker_harness import PATIENCE_SECONDS, Worker, model_facts, new_run_dir

MEMORY_LIMIT = 150 * 1024 * 1024


def start(folder: Path) -> Worker:
    return Worker(
        "detokenizer_proc", "detokenizer", DetokenizerConfig(run_dir=new_run_dir(), model=model_facts(folder))
    )


@pytest.fixture
def worker(tiny_model: Path) -> Iterator[Worker]:
    with start(tiny_model) as worker:
        yield worker


def send_text(worker: Worker, rid: str, ids: list[int], stop: tuple[str, ...] = ()) -> None:
    for place, token_id in enumerate(ids):
        opening = StreamOpen(b"", stop=stop) if place == 0 else None
        finish = Finish("length") if place == len(ids) - 1 else None
        worker.send(StepOutput((TokenDelta(rid, pack_ids([token_id]), opening, finish),)))


def text_until_finish(worker: Worker) -> tuple[str, Finish]:
    text = ""
    while True:
        (output,) = worker.from_worker("front")
        assert isinstance(output, TextOutput)
        for delta in output.deltas:
            text += delta.text
            if delta.finish is not None:
                return text, delta.finish


def test_it_streams_stops_survives_bad_frames_and_leaves_when_told(worker: Worker, tiny_model: Path) -> None:
    ready = worker.wait_ready()
    assert (ready.role, ready.pid, ready.facts["decoding"]) == ("detokenizer", worker.process.pid, "bytes")
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    send_text(worker, "a", tokenizer.encode("the tree 🌳 你好").ids)
    assert text_until_finish(worker) == ("the tree 🌳 你好", Finish("length"))

    for frame in (b"", b"nonsense", b"\x81\xa4type\xa4none", b"\xc1" * 1000):
        worker.send_frame(frame)
    send_text(worker, "b", tokenizer.encode("say STOP now").ids, stop=("STOP",))
    assert text_until_finish(worker) == ("say ", Finish("stop", "STOP"))
    (found,) = worker.from_worker("scheduler")
    assert isinstance(found, StopFound)
    assert found.rid == "b"

    worker.interrupt()
    send_text(worker, "c", tokenizer.encode("still here").ids)
    assert text_until_finish(worker)[0] == "still here"
    assert worker.shut_down() == 0


def test_it_is_small_and_has_no_torch(worker: Worker, tiny_model: Path) -> None:
    worker.wait_ready()
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    for number in range(50):
        send_text(worker, f"r{number}", tokenizer.encode("word after word " * 20).ids)
        text_until_finish(worker)
    assert worker.resident_bytes() < MEMORY_LIMIT
    assert "torch" not in worker.mapped_files()
    assert "transformers" not in worker.mapped_files()


@pytest.mark.real
def test_it_is_small_with_the_real_vocabulary(real_model: Path) -> None:
    with start(real_model) as worker:
        worker.wait_ready()
        tokenizer = Tokenizer.from_file(str(real_model / "tokenizer.json"))
        text = "Words, numbers 12345 and trees 🌳. " * 50
        send_text(worker, "r", tokenizer.encode(text).ids)
        assert text_until_finish(worker)[0] == text
        assert worker.resident_bytes() < MEMORY_LIMIT
        assert "torch" not in worker.mapped_files()


def test_other_tokenizers_are_decoded_in_windows(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    with start(save_tokenizer(tokenizer, tmp_path / "model")) as worker:
        assert worker.wait_ready().facts["decoding"] == "windows"
        send_text(worker, "a", tokenizer.encode("the tree 🌳").ids)
        assert text_until_finish(worker)[0] == "the tree 🌳"
        assert "torch" not in worker.mapped_files()
        assert worker.resident_bytes() < MEMORY_LIMIT


def test_it_goes_and_cleans_up_when_its_parent_is_gone(worker: Worker) -> None:
    worker.wait_ready()
    worker.abandon()
    assert worker.process.wait(PATIENCE_SECONDS) == 1
    deadline = time.monotonic() + PATIENCE_SECONDS
    while Path(worker.run_dir).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(worker.run_dir).exists()


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
def test_without_a_usable_tokenizer_it_says_so_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with start(tmp_path) as worker:
        (failed,) = worker.from_worker("front")
        assert isinstance(failed, StartFailed)
        assert "tokenizer.json" in failed.message
        assert "\n" not in failed.message
        assert worker.process.wait(PATIENCE_SECONDS) == 1
