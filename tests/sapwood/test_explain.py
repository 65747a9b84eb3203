"""`sapwood explain`: two requests compared without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sapwood.cli import main
from sapwood.offline import OfflineTokenizer
from srt.answer import RequestFailed
from srt.child import StartError
from srt.messages import ChatPrompt, IdsPrompt, TextPrompt, pack_ids
from tests.tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()
TALK = [
    {"role": "system", "content": "You answer questions about trees."},
    {"role": "user", "content": "Which tree is this?"},
    {"role": "assistant", "content": "It is an oak."},
    {"role": "user", "content": "How old is it?"},
]


def run(tiny_model: Path, tmp_path: Path, a: Any, b: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    for name, body in (("a.json", a), ("b.json", b)):
        (tmp_path / name).write_text(body if isinstance(body, str) else json.dumps(body))
    code = main(["explain", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--model", str(tiny_model)])
    captured = capsys.readouterr()
    return code, captured.out if code != 2 else captured.err


def test_a_next_turn_extends_the_one_before(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(tiny_model, tmp_path, {"messages": TALK[:2]}, {"messages": TALK, "model": "any"}, capsys)
    assert code == 0
    assert "B extends A" in text
    assert "of messages[2] (assistant)" in text
    assert "B:      'It is an oak." in text
    assert run(tiny_model, tmp_path, {"messages": TALK}, {"messages": TALK}, capsys)[0] == 0
    code, text = run(tiny_model, tmp_path, {"messages": TALK}, {"messages": TALK[:2]}, capsys)
    assert code == 1
    assert "B ends where A goes on" in text


def test_the_first_token_that_differs_is_named_with_its_message(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = [*TALK[:2], {**TALK[2], "content": "It is a beech."}, TALK[3]]
    code, text = run(tiny_model, tmp_path, {"messages": TALK}, {"messages": changed}, capsys)
    assert code == 1
    ids = [
        TOKENIZER.encode("".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in talk)).ids
        for talk in (TALK, changed)
    ]
    place = next(place for place, (x, y) in enumerate(zip(*ids, strict=False)) if x != y)
    assert f"They part at token {place}: in A token " in text
    assert text.count("of messages[2] (assistant)") == 2
    assert "n oak" in text
    assert "beech" in text


def test_texts_ids_and_native_bodies_are_compared_too(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = TOKENIZER.encode("The tree grows").ids
    assert run(tiny_model, tmp_path, {"prompt": "The tree"}, {"text": "The tree grows"}, capsys)[0] == 0
    assert run(tiny_model, tmp_path, {"prompt": [ids]}, {"input_ids": [*ids, 5]}, capsys)[0] == 0
    code, text = run(tiny_model, tmp_path, {"prompt": "The tree"}, {"prompt": "A tree"}, capsys)
    assert code == 1
    assert "share the first 0" in text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{nonsense", "is not JSON"),
        ("[]", "is no request body"),
        ({"model": "x"}, "neither messages nor a prompt"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string"),
        ({"prompt": [2**40]}, "no token id"),
    ],
)
def test_what_is_no_request_is_one_line_and_code_2(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: Any, words: str
) -> None:
    code, text = run(tiny_model, tmp_path, {"prompt": "fine"}, body, capsys)
    assert code == 2
    assert words in text
    assert "b.json" in text
    assert text.count("\n") == 1


def test_the_offline_tokenizer_is_the_servers(tiny_model: Path) -> None:
    with OfflineTokenizer(tiny_model) as tokenizer:
        chat = ChatPrompt(json.dumps(TALK).encode())
        given = [TextPrompt("The tree"), chat, IdsPrompt(pack_ids([4, 5])), TextPrompt(""), chat]
        text, talk, ids, empty, again = tokenizer.tokenize(given)
        assert not isinstance(text, RequestFailed)
        assert text.ids == TOKENIZER.encode("The tree").ids
        assert not isinstance(talk, RequestFailed)
        assert talk == again
        assert tokenizer.text(talk.ids).endswith("<|im_start|>assistant\n")
        parts = [tokenizer.text(talk.ids[start:]) for start in talk.message_starts]
        heads = [f"<|im_start|>{message['role']}\n{message['content']}" for message in TALK]
        assert len(parts) == len(heads) + 1
        assert all(part.startswith(head) for part, head in zip(parts, heads, strict=False))
        assert parts[-1] == "<|im_start|>assistant\n"
        assert not isinstance(ids, RequestFailed)
        assert ids.ids == [4, 5]
        assert isinstance(empty, RequestFailed)


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    with pytest.raises(StartError, match=r"tokenizer\.json"), OfflineTokenizer(tmp_path) as tokenizer:
        tokenizer.tokenize([TextPrompt("x")])
