"""What breaks a prefix: from the place where two prompts part to a kind of difference with a name.

Kinds that vary from request to request can be moved behind everything that stays the same (`move_to_end`); then the
rest is a prefix again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MONTH = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*"
DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:\s?[AaPp]\.?[Mm]\.?)?"
# What varies, the most telling first.
VARYING: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("id", re.compile(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b")),
    (
        "date or time",
        re.compile(
            rf"\b\d{{4}}-\d{{2}}-\d{{2}}(?:[T ]{TIME}(?:Z|[+-]\d{{2}}:?\d{{2}})?)?"
            rf"|\b(?:{DAY},?\s+)?(?:\d{{1,2}}\.?\s+{MONTH}|{MONTH}\s+\d{{1,2}})(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?"
            rf"(?:,?\s+(?:at\s+)?{TIME})?|\b\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}\b|\b{TIME}\b|\b{DAY}\b"
        ),
    ),
    ("id", re.compile(r"\b(?=[0-9A-Za-z_-]*\d)(?=[0-9A-Za-z_-]*[A-Za-z])[0-9A-Za-z]+(?:[_-][0-9A-Za-z]+)*\b")),
    ("number", re.compile(r"\b\d+(?:\.\d+)?\b")),
)
MOVABLE = frozenset(kind for kind, _ in VARYING) | {"whitespace", "tool order"}
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Break:
    """One difference.  `message`: index in the chat, None outside of messages; the texts are of the earlier request
    and of this one."""

    kind: str
    message: int | None
    role: str
    earlier_text: str
    text: str

    @property
    def where(self) -> str:
        """The part of a request that it is in."""
        return self.role if self.message is None else f"messages[{self.message}] ({self.role})"


def find_break(earlier: dict[str, Any], fields: dict[str, Any]) -> Break | None:
    """The first difference between two bodies, other than that one of them ends; None where there is none in what is
    looked at here (the template may make differences of its own)."""
    tools, before = fields.get("tools") or [], earlier.get("tools") or []
    if tools != before:
        same = sorted(map(_canonical, tools)) == sorted(map(_canonical, before))
        return Break("tool order" if same else "tools", None, "tools", _names(before), _names(tools))
    if fields.get("messages") is None:
        return _text_break(_plain(earlier), _plain(fields), None, "prompt")
    for index, (old, new) in enumerate(zip(earlier.get("messages") or [], fields["messages"], strict=False)):
        role = str(new.get("role"))
        if old.get("role") != new.get("role"):
            return Break("role", index, role, str(old.get("role")), role)
        found = _text_break(content_of(old), content_of(new), index, role)
        if found is not None:
            return found
        if old != new:
            return Break("other fields", index, role, _canonical(old), _canonical(new))
    switches, switched = earlier.get("chat_template_kwargs") or {}, fields.get("chat_template_kwargs") or {}
    if switches != switched:
        return Break("template variables", None, "chat_template_kwargs", _canonical(switches), _canonical(switched))
    return None


def content_of(message: dict[str, Any]) -> str:
    """The text of a message, its parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _plain(fields: dict[str, Any]) -> str:
    given = fields.get("prompt") or fields.get("text") or ""
    return given if isinstance(given, str) else ""


def _text_break(old: str, new: str, message: int | None, role: str) -> Break | None:
    if old == new:
        return None
    shorter = min(len(old), len(new))
    place = next((at for at in range(shorter) if old[at] != new[at]), shorter)
    for kind, pattern in VARYING:
        first, second = _match_around(pattern, old, place), _match_around(pattern, new, place)
        if first is not None and second is not None:
            return Break(kind, message, role, first, second)
    if "".join(old.split()) == "".join(new.split()):
        kind = "whitespace"
    else:
        kind = "longer text" if place == shorter else "other text"
    begin = max(0, place - SHOWN_CHARACTERS // 3)
    return Break(kind, message, role, old[begin : begin + SHOWN_CHARACTERS], new[begin : begin + SHOWN_CHARACTERS])


def _match_around(pattern: re.Pattern[str], text: str, place: int) -> str | None:
    """The match of a pattern that holds this character, or ends right before it."""
    return next((match[0] for match in pattern.finditer(text) if match.start() <= place <= match.end()), None)


def _canonical(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _names(tools: Iterable[Any]) -> str:
    return ", ".join(str((tool.get("function") or tool).get("name")) for tool in tools if isinstance(tool, dict))


def move_to_end(fields: dict[str, Any], breaks: Sequence[Break]) -> dict[str, Any]:
    """The body with what these breaks vary in taken out of its place and put behind the last message (or prompt);
    white space made single, and tools sorted by name, where that broke prefixes."""
    changed = dict(fields)
    if any(found.kind == "tool order" for found in breaks) and isinstance(fields.get("tools"), list):
        changed["tools"] = sorted(fields["tools"], key=_canonical)
    moved: list[str] = []
    if isinstance(fields.get("messages"), list):
        messages = [dict(message) for message in fields["messages"]]
        for index, message in enumerate(messages):
            kinds = {found.kind for found in breaks if found.message == index}
            if kinds:
                message["content"] = _without(content_of(message), kinds, moved)
        if moved:
            messages[-1]["content"] = " ".join([content_of(messages[-1]), *moved])
        changed["messages"] = messages
    else:
        kinds = {found.kind for found in breaks if found.message is None}
        name = "prompt" if isinstance(fields.get("prompt"), str) else "text"
        if kinds and isinstance(fields.get(name), str):
            changed[name] = " ".join([_without(fields[name], kinds, moved), *moved])
    return changed


def _without(text: str, kinds: set[str], moved: list[str]) -> str:
    """The text without what varies; what was taken out is added to `moved`."""
    for kind, pattern in VARYING:
        if kind in kinds:
            moved += [match[0] for match in pattern.finditer(text)]
            text = pattern.sub("", text)
    return " ".join(text.split()) if kinds else text
