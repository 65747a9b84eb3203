"""The arrows between the rooms: who may import whom, read from the source of every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = ("sapwood", "scheduler", "radix", "tokenizer_proc", "detokenizer_proc", "srt")
RIM = {"scheduler/process.py", "scheduler/tier_setup.py", "scheduler/__main__.py"}


def modules() -> list[Path]:
    return sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, as a dotted name, at any depth of the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # `from srt import ipc` imports srt.ipc.
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def allowed(path: str, name: str) -> bool:
    """Whether the module at `path` (relative to the repository) may import `name`."""
    room = path.split("/")[0]
    if is_within(name, "torch") and not path.startswith("srt/model/"):
        return False
    if not is_within(name, *ROOMS) or is_within(name, room):
        return not (path.startswith("radix/") and is_within(name, "zmq", "socket", "msgspec"))
    if room == "scheduler" and path not in RIM:
        return is_within(name, "radix", "srt.messages", "srt.cache_messages", "srt.stats", "srt.plan")
    return {
        "sapwood": is_within(name, "scheduler", "srt"),
        "scheduler": is_within(name, "srt", "radix"),
        "tokenizer_proc": is_within(name, "srt") and not is_within(name, "srt.model", "srt.http"),
        "detokenizer_proc": is_within(name, "srt") and not is_within(name, "srt.model", "srt.http"),
        "srt": False,
        "radix": False,
    }[room]


def test_there_is_something_to_check() -> None:
    assert {path.relative_to(REPOSITORY).parts[0] for path in modules()} == set(ROOMS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    relative = str(path.relative_to(REPOSITORY))
    broken = [name for name in imports(path) if not allowed(relative, name)]
    assert not broken, f"{relative} imports {broken}"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("scheduler/core.py", "torch"),
        ("scheduler/core.py", "srt.ipc"),
        ("scheduler/core.py", "sapwood"),
        ("srt/front.py", "scheduler.core"),
        ("srt/front.py", "torch.nn"),
        ("radix/tree.py", "srt.messages"),
        ("radix/tree.py", "zmq"),
        ("radix/tree.py", "socket"),
        ("tokenizer_proc/__main__.py", "srt.model.config"),
        ("detokenizer_proc/__main__.py", "srt.http.app"),
        ("sapwood/engine.py", "radix"),
    ],
)
def test_the_check_sees_a_broken_rule(path: str, name: str) -> None:
    assert not allowed(path, name)
