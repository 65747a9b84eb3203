"""`--public-prefix`: what a file of shared beginnings becomes, and what it is refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sapwood.public_heads import resolve_with_heads
from srt.child import StartError
from srt.config import ServerConfig
from srt.messages import unpack_ids
from tests.tiny_model import make_tokenizer

SYSTEM = {"role": "system", "content": "You answer questions about trees, rivers and numbers, and nothing else."}


def heads(model: Path, folder: Path, *lines: Any, **config: Any) -> list[list[int]]:
    path = folder / "heads.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    settings = ServerConfig(model=str(model), max_total_tokens=1024, public_prefix=str(path), **config)
    return [unpack_ids(head) for head in resolve_with_heads(settings, model).public_heads]


def test_texts_messages_and_ids_are_tokenized_as_the_beginning_of_prompts(tiny_model: Path, tmp_path: Path) -> None:
    ids = list(range(20, 40))
    text = "Each year the tree grows a new ring, and the oldest rings turn into heartwood."
    found = heads(tiny_model, tmp_path, {"messages": [SYSTEM]}, "", {"prompt": text}, {"input_ids": ids})
    tokenizer = make_tokenizer()
    # No generation prompt: another message follows.
    chat = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n"
    assert found == [tokenizer.encode(chat).ids, tokenizer.encode(text).ids, ids]


def test_without_a_file_nothing_is_shared(tiny_model: Path) -> None:
    assert resolve_with_heads(ServerConfig(model=str(tiny_model), max_total_tokens=1024), tiny_model).public_heads == ()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((), "has 0 prefixes; it must have 1 to 1024"),
        (("not json",), "line 1: is not JSON"),
        (({"prompt": "long enough to be shared, since it has some words"}, {"model": "x"}), "line 2: has neither"),
        (({"prompt": "short"},), "line 1: has"),
        (({"messages": [{"role": "nobody"}]},), "line 1"),
    ],
)
def test_a_faulty_file_is_refused_in_one_line(tiny_model: Path, tmp_path: Path, lines: Any, words: str) -> None:
    with pytest.raises(StartError) as refusal:
        heads(tiny_model, tmp_path, *lines)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_it_says_nothing_without_a_cache(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--public-prefix"):
        heads(tiny_model, tmp_path, {"prompt": "x"}, disable_radix_cache=True)


def test_a_file_that_is_not_there_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = ServerConfig(model=str(tiny_model), max_total_tokens=1024, public_prefix=str(tmp_path / "none"))
    with pytest.raises(StartError, match="No such file"):
        resolve_with_heads(config, tiny_model)
