"""The chat format that Gemma files without a template get: its turns, the system's words, what is refused."""

from __future__ import annotations

import pytest

from srt.model.convert import GEMMA_CHAT
from tokenizer_proc.errors import PromptError
from tokenizer_proc.template import ChatTemplate

SYSTEM = {"role": "system", "content": " Be brief.\n"}
USER = {"role": "user", "content": "Hi "}
ASSISTANT = {"role": "assistant", "content": "Hello."}


@pytest.fixture
def template() -> ChatTemplate:
    return ChatTemplate({"default": GEMMA_CHAT}, {"bos_token": "<bos>"})


def test_turns_are_written_with_the_models_own_name_for_the_assistant(template: ChatTemplate) -> None:
    assert template.render([USER], add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    )
    assert template.render([USER, ASSISTANT, USER], add_generation_prompt=False) == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nHi<end_of_turn>\n"
    )


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_systems_words_stand_before_the_first_of_the_user_and_nowhere_else(
    template: ChatTemplate, role: str
) -> None:
    assert template.render([{**SYSTEM, "role": role}, USER, ASSISTANT, USER], add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize(
    "messages",
    [[ASSISTANT], [USER, USER], [USER, SYSTEM], [SYSTEM, ASSISTANT], [USER, {"role": "tool", "content": "7"}]],
)
def test_messages_out_of_turn_are_refused(template: ChatTemplate, messages: list[dict[str, str]]) -> None:
    with pytest.raises(PromptError, match="take turns") as caught:
        template.render(messages, add_generation_prompt=True)
    assert caught.value.param == "messages"
