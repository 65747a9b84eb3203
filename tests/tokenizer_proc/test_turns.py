"""Templates that keep each turn a prefix of the next, and those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import CHAT_TEMPLATE
from tests.worker_harness import Worker
from tokenizer_proc.template import ChatTemplate
from tokenizer_proc.turns import how_turns_part

THINKS_FIRST = CHAT_TEMPLATE.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
FORGETS_THOUGHTS = CHAT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
SAYS_THE_NUMBER = "{{ messages | length }} messages.\n" + CHAT_TEMPLATE
LAST_QUESTION_ONLY = "{{ messages[-1].content }}{% if add_generation_prompt %}:{% endif %}"


def parting(template: str) -> str | None:
    return how_turns_part(ChatTemplate({"default": template}, {}))


def test_a_template_that_says_everything_again_keeps_turns() -> None:
    assert parting(CHAT_TEMPLATE) is None


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (THINKS_FIRST, ("assistant\\n' turn 1", "'<think>\\nA reply.'", "turn 2 with 'A reply.<|im_end|>")),
        (FORGETS_THOUGHTS, ("turn 1 goes on with '<think>\\nA thought.", "turn 2 with '\\n\\nA reply.")),
        (SAYS_THE_NUMBER, ("after '' turn 1 goes on with '1 messages.", "'3 messages.")),
        (LAST_QUESTION_ONLY, ("turn 1 goes on with 'First question?", "turn 2 with 'Second question?")),
        ("{{ raise_exception('never') }}", ("refuses these messages: never",)),
    ],
)
def test_a_template_that_does_not_is_told_where_it_parts(template: str, words: tuple[str, ...]) -> None:
    found = parting(template)
    assert found is not None
    for word in words:
        assert word in found


def test_the_process_says_so_when_it_starts(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tests.tokenizer_proc.test_tokenizer_process import start

    def said(**settings: object) -> tuple[bool, str]:
        with start(tiny_model, **settings) as worker:
            assert isinstance(worker, Worker)
            extend = worker.wait_ready().facts["turns_extend"]
            worker.shut_down()
        return bool(extend), capfd.readouterr().err

    extend, log = said()
    assert extend
    assert log.count("each turn is a prefix of the next") == 1
    extend, log = said(chat_template=THINKS_FIRST)
    assert not extend
    assert log.count("a turn is not a prefix of the next") == 1
    assert "<think>" in log
    # One of several processes says it for all.
    assert "prefix of the next" not in said(chat_template=THINKS_FIRST, index=1)[1]
