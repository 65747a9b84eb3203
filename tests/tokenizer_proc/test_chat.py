"""Chat messages are checked field by field, and one chat has one prompt however its text is cut into parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_proc.chat import read_messages, read_template_variables
from tokenizer_proc.errors import PromptError


def read(*messages: Any) -> list[dict[str, Any]]:
    return read_messages(json.dumps(messages).encode())


def refusal(messages_json: bytes) -> PromptError:
    with pytest.raises(PromptError) as caught:
        read_messages(messages_json)
    return caught.value


def test_content_in_parts_is_the_joined_string() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read({"role": "user", "content": parts}) == read({"role": "user", "content": "one two"})
    assert read({"role": "user", "content": parts[:1]})[0]["content"] == "one "
    assert read({"role": "user", "content": []})[0]["content"] == ""


@given(st.lists(st.text(), max_size=5))
def test_parts_join_to_the_same_chat_whatever_they_hold(texts: list[str]) -> None:
    parts = [{"type": "text", "text": text} for text in texts]
    message = {"role": "user", "content": "".join(texts)}
    try:
        expected = read(message)
    except PromptError:
        return  # half a surrogate pair
    assert read({"role": "user", "content": parts}) == expected


def test_null_content_is_for_assistants() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    read_back = read({"role": "assistant", "content": None, "tool_calls": [call], "refusal": None})
    assert read_back[0]["content"] == ""
    assert "refusal" not in read_back[0]
    assert read({"role": "assistant", "tool_calls": [call]})[0]["content"] == ""
    error = refusal(b'[{"role": "assistant", "content": "a"}, {"role": "user", "content": null}]')
    assert error.param == "messages[1].content"


def test_arguments_of_tool_calls_become_objects_for_the_template() -> None:
    def arguments(text: Any) -> Any:
        call = {"type": "function", "function": {"name": "f", "arguments": text}}
        (message,) = read({"role": "assistant", "content": "", "tool_calls": [call]})
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"city": "Köln"}') == {"city": "Köln"}
    assert arguments({"city": "Köln"}) == {"city": "Köln"}
    assert arguments("{broken") == "{broken"
    assert arguments("[1]") == "[1]"


@pytest.mark.parametrize("call", [None, 3, {}, {"function": None}, {"function": {"arguments": 1}}])
def test_odd_tool_calls_are_left_to_the_template(call: Any) -> None:
    assert read({"role": "assistant", "content": "", "tool_calls": [call]})[0]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("messages_json", "param", "says"),
    [
        (b"[]", "messages", "empty"),
        (b"{}", "messages", "list"),
        (b'"hi"', "messages", "list"),
        (b"[1]", "messages[0]", "object"),
        (b"[null]", "messages[0]", "object"),
        (b'[{"content": "a"}]', "messages[0].role", "role"),
        (b'[{"role": "", "content": "a"}]', "messages[0].role", "role"),
        (b'[{"role": 7, "content": "a"}]', "messages[0].role", "role"),
        (b'[{"role": "user"}]', "messages[0].content", "content"),
        (b'[{"role": "user", "content": 5}]', "messages[0].content", "string"),
        (b'[{"role": "user", "content": {"type": "text"}}]', "messages[0].content", "string"),
        (b'[{"role": "user", "content": ["a"]}]', "messages[0].content[0]", "object"),
        (b'[{"role": "user", "content": [{"type": "text"}]}]', "messages[0].content[0].text", "string"),
        (
            b'[{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url", "image_url": 1}]}]',
            "messages[1].content[0].type",
            "'image_url'",
        ),
        (
            b'[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]',
            "messages[0].content[1].type",
            "'input_audio'",
        ),
        (b"[", "messages", "JSON"),
        (b"", "messages", "JSON"),
        (b"\xff", "messages", "JSON"),
        (b"[NaN]", "messages", "JSON"),
        (b'[{"role": "user", "content": "\\ud800 hi"}]', "messages[0].content", "\\ud800"),
        (
            b'[{"role": "user", "content": [{"type": "text", "text": "\\udc00"}]}]',
            "messages[0].content[0].text",
            "udc00",
        ),
        (b'[{"role": "user", "content": "a", "\\ud800": 1}]', "messages[0]", "\\ud800"),
        (b"[" * 100_000, "messages", "deep"),
    ],
)
def test_refusals_name_the_field(messages_json: bytes, param: str, says: str) -> None:
    error = refusal(messages_json)
    assert error.param == param
    assert says in error.message
    assert "\n" not in error.message


def test_a_valid_surrogate_pair_is_a_character() -> None:
    assert read_messages(b'[{"role": "user", "content": "\\ud83d\\ude00"}]')[0]["content"] == "😀"


@pytest.mark.parametrize("text", [b"[]", b"1", b"{", b"null"])
def test_template_variables_must_be_an_object(text: bytes) -> None:
    with pytest.raises(PromptError) as caught:
        read_template_variables(text)
    assert caught.value.param == "chat_template_kwargs"
