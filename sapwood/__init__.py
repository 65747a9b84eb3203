"""The face: command line, in-process Engine, clients.

`import sapwood` loads nothing else; what the names below stand for is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sapwood.engine import Engine
    from srt.answer import RequestFailed
    from srt.child import StartError

__all__ = ["Engine", "RequestFailed", "StartError"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from sapwood.engine import Engine

        return Engine
    if name == "RequestFailed":
        from srt.answer import RequestFailed

        return RequestFailed
    if name == "StartError":
        from srt.child import StartError

        return StartError
    raise AttributeError(f"module 'sapwood' has no attribute {name!r}")
