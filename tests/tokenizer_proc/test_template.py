"""Chat templates: where they are found, what they may use, and what is said when they fail."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from srt.child import StartError
from tokenizer_proc.errors import PromptError
from tokenizer_proc.template import ChatTemplate, load_chat_template

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    return template.render(messages or USER, True, variables)


def test_templates_have_what_they_are_written_for() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}") == "<s>hiTrue"
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}
    assert render("{{ x | tojson }}", x={"k": "<ß&'>"}) == '{"k": "<ß&\'>"}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    assert render("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}") == "2"


def test_blocks_leave_no_white_space_behind() -> None:
    assert render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"


def test_absent_tools_are_none_and_absent_variables_undefined() -> None:
    assert render("{{ tools is none }} {{ documents is none }} {{ other is defined }}") == "True True False"


def test_variables_of_the_client_come_before_special_tokens() -> None:
    assert render("{{ bos_token }}{{ enable_thinking }}", bos_token="X", enable_thinking=False) == "XFalse"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_variables_that_the_server_sets_cannot_be_given(name: str) -> None:
    with pytest.raises(PromptError) as caught:
        ChatTemplate({"default": ""}, {}).render(USER, True, {name: 1})
    assert caught.value.param == "chat_template_kwargs"
    assert name in caught.value.message


def test_what_a_template_says_against_the_messages_reaches_the_client() -> None:
    with pytest.raises(PromptError) as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in caught.value.message
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ 'a' + messages[0].missing }}",
        "{{ 'a' + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10000000) | length }}",
    ],
)
def test_a_template_that_fails_is_an_error_of_the_request_and_nothing_worse(source: str) -> None:
    with pytest.raises(PromptError) as caught:
        render(source)
    assert caught.value.param == "messages"
    assert "Error" not in caught.value.message
    assert "Traceback" not in caught.value.message


def test_the_template_for_tools_is_used_when_there_are_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render(USER, True) == "plain"
    assert template.render(USER, True, {"tools": []}) == "plain"
    assert template.render(USER, True, {"tools": [{"type": "function"}]}) == "tools"


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(PromptError, match="--chat-template") as caught:
        ChatTemplate({}, {}).render(USER, True)
    assert caught.value.code == "no_chat_template"


def write(folder: Path, config: object | None = None, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "C"}, {}, "C"),
        ({"chat_template": [{"name": "default", "template": "L"}, {"name": "rag", "template": "R"}]}, {}, "L"),
        ({"chat_template": [{"name": "only", "template": "O"}]}, {}, "O"),
        ({"chat_template": "C"}, {"chat_template_jinja": "F"}, "F"),
        (None, {"chat_template_json": '{"chat_template": "J"}'}, "J"),
        (None, {"chat_template_jinja": "F", "additional_chat_templates__tool_use_jinja": "T"}, "F"),
    ],
)
def test_the_template_of_a_model_folder(tmp_path: Path, config: object, files: dict[str, str], expected: str) -> None:
    template = load_chat_template(write(tmp_path, config, **files), None)
    assert template.render(USER, True) == expected


def test_additional_templates_are_known_by_name(tmp_path: Path) -> None:
    files = {"chat_template_jinja": "F", "additional_chat_templates__tool_use_jinja": "T"}
    template = load_chat_template(write(tmp_path, None, **files), None)
    assert template.names == ("default", "tool_use")
    assert template.render(USER, True, {"tools": [1]}) == "T"


def test_a_template_given_at_the_start_comes_first_as_text_or_file(tmp_path: Path) -> None:
    folder = write(tmp_path, {"chat_template": "C", "eos_token": {"content": "</s>"}})
    assert load_chat_template(folder, "{{ eos_token }}!").render(USER, True) == "</s>!"
    file = tmp_path / "mine.jinja"
    file.write_text("file {{ messages[0].role }}")
    assert load_chat_template(folder, str(file)).render(USER, True) == "file user"


def test_special_tokens_of_older_folders_are_read_too(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": None, "eos_token": "new"},
        special_tokens_map_json='{"bos_token": {"content": "<s>"}, "eos_token": "old"}',
    )
    assert load_chat_template(folder, None).render(USER, True) == "<s>new"


@pytest.mark.parametrize(
    ("config", "override", "says"),
    [
        ({"chat_template": "{% if %}"}, None, "line 1"),
        ({}, "no/such/file", "no/such/file"),
    ],
)
def test_a_template_that_cannot_be_used_stops_the_start(
    tmp_path: Path, config: object, override: str | None, says: str
) -> None:
    with pytest.raises(StartError, match=says):
        load_chat_template(write(tmp_path, config), override)


def test_a_configuration_that_is_not_json_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="tokenizer_config"):
        load_chat_template(write(tmp_path, None, tokenizer_config_json="{"), None)
