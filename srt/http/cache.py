"""The endpoints that tell of the prefix cache: why a request missed, and what there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from srt.cache_messages import CacheNode, CacheTree
from srt.cache_report import report_fields
from srt.http.auth import tenant_of
from srt.http.connection import json_reply
from srt.http.errors import ApiError, bad_request, quoted
from srt.http.explanations import MAX_EXPLAINED_PROMPTS
from srt.http.generation import faults_named
from srt.http.service import Service
from srt.messages import unpack_ids
from srt.namespaces import shown

DEFAULT_DEPTH = 4
# Each level is two levels of JSON, and readers of JSON have their limits.
MAX_DEPTH = 64
DEFAULT_NODES = 500
MAX_NODES = 10_000


async def explain(service: Service, request: Request) -> Response:
    """Why a request's reuse stopped where it did.  Raises ApiError 404 for one that is not known (any more)."""
    rid = request.path_params["request_id"]
    prompts = service.live.explanations.find(tenant_of(request), rid)
    if prompts is None:
        raise ApiError(
            404,
            f"There is no report of a request {quoted(rid)}; the last {MAX_EXPLAINED_PROMPTS} prompts have one.",
            param="request_id",
            code="request_not_found",
        )
    told = [
        {"place": place, "prompt_tokens": prompt.prompt_tokens, "cache_report": report_fields(prompt.cache_report)}
        for place, prompt in prompts
    ]
    return json_reply({"id": rid, "prompts": told})


async def tree(service: Service, request: Request) -> Response:
    """What the client's tenant has in the cache.  Raises ApiError."""
    depth = number_of(request, "depth", DEFAULT_DEPTH, MAX_DEPTH)
    limit = number_of(request, "limit", DEFAULT_NODES, MAX_NODES)
    with faults_named(lambda param: param):
        found = await service.front.cache_tree(tenant_of(request), depth, limit)
    return json_reply(tree_fields(found, service.front.kv_bytes_per_page))


def tree_fields(found: CacheTree, page_bytes: int) -> dict[str, Any]:
    """The JSON object of a tree: runs within runs."""
    top: list[dict[str, Any]] = []
    nodes: list[dict[str, Any]] = []
    for node in found.nodes:
        fields = _node_fields(node, page_bytes)
        nodes.append(fields)
        if node.parent < 0:
            top.append({"namespace": shown(node.namespace), **fields})
        else:
            nodes[node.parent]["children"].append(fields)
    return {
        "page_size": found.page_size,
        "bytes_per_page": page_bytes,
        "nodes": len(nodes),
        "left_out": found.left_out,
        "runs": top,
    }


def _node_fields(node: CacheNode, page_bytes: int) -> dict[str, Any]:
    return {
        "text": node.text,
        "token_ids": unpack_ids(node.head),
        "tokens": node.tokens,
        "pages": node.pages,
        "bytes": node.pages * page_bytes,
        "tier": node.tier,
        "users": node.users,
        "pins": node.pins,
        "hits": node.hits,
        "age_seconds": round(node.age_seconds, 3),
        "num_children": node.children,
        "children": [],
    }


def flushed(counts: Mapping[str, int], page_bytes: int) -> dict[str, Any]:
    """What has been forgotten, for the client."""
    return {
        "flushed_pages": counts["pages"],
        "flushed_bytes": counts["pages"] * page_bytes,
        "kept_pages": counts["kept_pages"],
        "unpinned": counts["pins"],
        "message": "Requests that run hold the pages that were kept." if counts["kept_pages"] else None,
    }


def number_of(request: Request, name: str, default: int, most: int) -> int:
    """A query parameter that is a whole number from 1 to `most`.  Raises ApiError."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= most):
        raise bad_request(name, f"{name} must be a whole number from 1 to {most}, not {quoted(given)}.")
    return int(given)
