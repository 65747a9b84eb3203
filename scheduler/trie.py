"""Requests ordered as a depth-first walk of the trie of their prompts, the heaviest branch first.

Sorted token sequences are a trie laid flat: two neighbours part at the end of their common prefix.  So one pass over
the sorted requests with a stack of open branches builds it; nothing here recurses, since a trie may be as deep as a
conversation is long.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.request import Request, common_prefix_tokens


@dataclass(slots=True)
class Branch:
    """Everything that shares its first `depth` tokens.  `weight`: requests below."""

    depth: int
    children: list[Branch | Request] = field(default_factory=list)
    weight: int = 0


def depth_first(requests: list[Request]) -> list[Request]:
    """`requests` in the order of the walk; among branches of equal weight the one with the earliest arrival first."""
    ordered = sorted(requests, key=lambda r: (r.message.namespace, r.key, r.order))
    root = Branch(-1)
    stack = [root]
    for index, request in enumerate(ordered):
        following = ordered[index + 1] if index + 1 < len(ordered) else None
        shared = -1
        if following is not None and following.message.namespace == request.message.namespace:
            shared = common_prefix_tokens(request.key, following.key)
        child: Branch | Request = request
        # The request belongs to the deepest branch open that both it and a neighbour share.
        if shared > stack[-1].depth:
            stack.append(Branch(shared))
        stack[-1].children.append(child)
        while stack[-1].depth > shared:
            closed = stack.pop()
            closed.weight = sum(_weight(part) for part in closed.children)
            if shared > stack[-1].depth:
                stack.append(Branch(shared))
            stack[-1].children.append(closed)
    return _walk(root)


def _weight(part: Branch | Request) -> int:
    return part.weight if isinstance(part, Branch) else 1


def _earliest(part: Branch | Request) -> int:
    while isinstance(part, Branch):
        part = part.children[0]
    return part.order


def _walk(root: Branch) -> list[Request]:
    result: list[Request] = []
    stack: list[Branch | Request] = [root]
    while stack:
        part = stack.pop()
        if isinstance(part, Branch):
            part.children.sort(key=lambda child: (_weight(child), -_earliest(child)))
            stack.extend(part.children)
        else:
            result.append(part)
    return result
