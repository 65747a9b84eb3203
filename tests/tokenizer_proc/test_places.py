"""Where messages stand in a rendered prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny_model import CHAT_TEMPLATE
from tokenizer_proc.places import message_starts
from tokenizer_proc.template import ChatTemplate

LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set head = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% set head = false %}{% endif %}{% for m in rest %}"
    "{% if m.role == 'user' %}<s>[INST] {% if loop.first and head %}<<SYS>>\n{{ head }}\n<</SYS>>\n\n{% endif %}"
    "{{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1].lstrip('\n') }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "How are you? 🐙"},
    {"role": "assistant", "content": "Well.\n\n"},
    {"role": "user", "content": "Good"},
]


def parts_of(template: str, messages: list[dict[str, Any]], gen: bool = True) -> list[str] | None:
    """The rendered prompt, cut where messages begin."""
    renderer = ChatTemplate({"default": template}, {})
    rendered = renderer.render(messages, gen)
    starts = message_starts(messages, rendered, lambda marked: renderer.render(marked, False))
    if starts is None:
        return None
    parts = [rendered[begin:end] for begin, end in zip(starts, [*starts[1:], len(rendered)], strict=True)]
    assert "".join(parts) == rendered
    return parts


def test_each_message_has_its_header_and_its_end() -> None:
    assert parts_of(CHAT_TEMPLATE, CHAT) == [
        *(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT),
        "<|im_start|>assistant\n",
    ]
    assert parts_of(CHAT_TEMPLATE, CHAT, gen=False) == [
        *(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT),
        "",
    ]


def test_templates_that_strip_move_or_cut_contents_are_followed() -> None:
    assert parts_of(LLAMA_2, CHAT) == [
        "<s>[INST] <<SYS>>\n  Be brief.\n",
        "\n<</SYS>>\n\nHow are you? 🐙 [/INST]",
        " Well.",
        " </s><s>[INST] Good [/INST]",
        "",
    ]
    thought = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}]
    assert parts_of(THINKING, [*thought, {"role": "user", "content": "c"}]) == [
        "<user>a</>",
        "<assistant>b</>",
        "<user>c</>",
        "<assistant><think>\n",
    ]


def test_messages_without_content_still_have_a_place() -> None:
    messages = [{"role": "user", "content": ""}, {"role": "user", "content": " "}, {"role": "user", "content": "x"}]
    parts = parts_of(CHAT_TEMPLATE, messages)
    assert parts is not None
    assert len(parts) == 4
    assert "x<|im_end|>" in parts[2]


def test_what_cannot_be_told_is_not_told() -> None:
    counts = "{% for m in messages %}{{ m.content | length }} {{ m.content }}{% endfor %}"
    assert parts_of(counts, CHAT) is None
    assert parts_of(CHAT_TEMPLATE, [{"role": "user", "content": "\uf8f0\uf8f2"}]) is None


@pytest.mark.parametrize("count", [1, 2, 11, 101])
def test_many_messages_keep_their_numbers(count: int) -> None:
    messages = [{"role": "user", "content": f"number {index}"} for index in range(count)]
    parts = parts_of(CHAT_TEMPLATE, messages)
    assert parts is not None
    assert [f"number {index}<|im_end|>" in part for index, part in enumerate(parts[:-1])] == [True] * count
