"""A model's chat template: where it stands, and the sandboxed jinja environment that renders it.

Templates are written for the environment of the `transformers` library, so the names and filters of that one are
here too.  A template comes with the model and is not trusted: the sandbox is immutable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from srt.child import StartError
from tokenizer_proc.errors import PromptError

# What the caller passes beside the client's own template variables.
RESERVED_NAMES = frozenset({"messages", "add_generation_prompt"})


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; serving renders them as is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: jinja's own filter would escape `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def make_environment() -> jinja2.Environment:
    """The environment that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """The templates of one model (`default`, and perhaps `tool_use`) with its special tokens.

    Raises StartError when a template is not valid jinja.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = make_environment()
        self._sources = tuple(sources.values())
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise StartError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """The templates there are."""
        return tuple(self._templates)

    def mentions(self, text: str) -> bool:
        """Whether one of the templates has this text in its source."""
        return any(text in source for source in self._sources)

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt text of a chat.  `variables` are the client's own (tools, documents, switches).

        Raises PromptError when there is no template, or when it refuses the messages or fails on them.
        """
        given = dict(variables or {})
        for name in sorted(RESERVED_NAMES & given.keys()):
            raise PromptError(f"{name!r} cannot be given as a template variable", param="chat_template_kwargs")
        template = self._choose(given.get("tools"))
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **self._special_tokens, **given},
            )
        except jinja2.TemplateError as error:
            raise PromptError(f"the chat template refuses these messages: {error}", param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise PromptError(f"the chat template fails on these messages: {error}", param="messages") from error

    def _choose(self, tools: Any) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        raise PromptError(
            "this model has no chat template: use the completions endpoint, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )


def load_chat_template(model_path: Path, override: str | None) -> ChatTemplate:
    """The chat template of a model folder; `override` is a template file or the text of a template.

    In order: the override, chat_template.jinja (with additional_chat_templates/), chat_template.json, the
    `chat_template` of tokenizer_config.json (one text, or a list of named ones).  A model may have none.
    Raises StartError when what is there cannot be read.
    """
    config = _read_json(model_path / "tokenizer_config.json")
    legacy_tokens = _read_json(model_path / "special_tokens_map.json")
    special_tokens = _special_tokens({**legacy_tokens, **{k: v for k, v in config.items() if v is not None}})
    if override is not None:
        return ChatTemplate({"default": _override_text(override)}, special_tokens)
    return ChatTemplate(_template_sources(model_path, config), special_tokens)


def _template_sources(model_path: Path, config: dict[str, Any]) -> dict[str, str]:
    sources: dict[str, str] = {}
    file = model_path / "chat_template.jinja"
    if file.is_file():
        sources["default"] = _read_text(file)
        for extra in sorted((model_path / "additional_chat_templates").glob("*.jinja")):
            sources[extra.stem] = _read_text(extra)
        return sources
    declared = _read_json(model_path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(declared, str):
        sources["default"] = declared
    elif isinstance(declared, dict):
        sources.update({str(name): str(text) for name, text in declared.items()})
    elif isinstance(declared, list):
        sources.update({str(entry["name"]): str(entry["template"]) for entry in declared if isinstance(entry, dict)})
    return sources


def _override_text(override: str) -> str:
    """The text of a template given as text or as the path of a file."""
    if "{" in override or "\n" in override:
        return override
    path = Path(override).expanduser()
    if not path.is_file():
        raise StartError(f"--chat-template: there is no file {override!r}")
    return _read_text(path)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that templates may name (`bos_token`, ...), each written as text or as an object with `content`."""
    tokens = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise StartError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
