"""The text in cache reports and trees, for every family of tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from detokenizer_proc.core import DetokenizerCore
from detokenizer_proc.process import make_core
from srt.cache_messages import CacheNode, CacheReport, CacheTree
from srt.messages import StepOutput, StreamOpen, TokenDelta, pack_ids
from tests.small_tokenizers import FAMILIES, byte_level, save_tokenizer


def report_for(before: list[int], cached: list[int], prompt: list[int]) -> CacheReport:
    return CacheReport(
        cached_tokens=5,
        computed_tokens=9,
        reason="diverged",
        position=5,
        before=pack_ids(before),
        cached_next=pack_ids(cached),
        prompt_next=pack_ids(prompt),
    )


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_a_report_gets_the_text_on_both_sides(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    tokenizer = make()
    core = make_core(save_tokenizer(tokenizer, tmp_path))
    before, cached, prompt = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in ("the tree", "grows water", "9 apples")
    )
    report = report_for(before, cached, prompt)
    delta = TokenDelta("r", pack_ids(before), StreamOpen(b"", cache_report=report), cached_tokens=5)
    later = TokenDelta("r", pack_ids(prompt))
    texts, _ = core.step(StepOutput((delta, later)))
    told = texts.deltas[0].cache_report
    assert told is not None
    assert (told.before_text, told.cached_text, told.prompt_text) == tuple(
        tokenizer.decode(ids, skip_special_tokens=False) for ids in (before, cached, prompt)
    )
    assert (told.position, told.reason, told.cached_next) == (5, "diverged", pack_ids(cached))
    assert texts.deltas[1].cache_report is None


def one_core(tmp_path: Path) -> DetokenizerCore:
    return make_core(save_tokenizer(byte_level(), tmp_path))


def test_parts_of_characters_and_ids_without_a_token_break_nothing(tmp_path: Path) -> None:
    core = one_core(tmp_path)
    octopus = byte_level().encode("🐙").ids
    assert len(octopus) > 1
    report = report_for(octopus[1:], [*octopus, 500_000, -3], [])
    delta = TokenDelta("r", pack_ids(octopus), StreamOpen(b"", cache_report=report))
    told = core.step(StepOutput((delta,)))[0].deltas[0].cache_report
    assert told is not None
    assert (told.before_text.strip("\ufffd"), told.cached_text, told.prompt_text) == ("", "🐙", "")


def test_special_tokens_are_shown(tmp_path: Path) -> None:
    core = one_core(tmp_path)
    node = CacheNode("", -1, 3, 1, pack_ids([1, *byte_level().encode("the tree").ids, 2]), 0, 0, 0.0, 0)
    told = core.tree(CacheTree("c", (node,), 16, 4))
    assert [n.text for n in told.nodes] == ["<|im_start|>the tree<|im_end|>"]
    assert (told.call_id, told.left_out) == ("c", 4)
