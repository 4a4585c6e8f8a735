"""Finds the tools of a request that this server can offer to its model, in all dialects. Others are left out and named
in the answer's `Warning` header: coding agents send tools that run on their provider's servers along with their own."""

from collections.abc import Collection
from typing import Any

from reprise.app.schemas.past.parts import Losses

SEPARATOR = "__"


def offered(tools: object, losses: Losses, kinds: Collection[str]) -> object:
    """Return a list of tools with those of the given `kinds` alone; `losses` gets the names of the others. Tools in a
    namespace are put beside the others, with its name. A malformed tool stays as it is, so that the schema refuses
    it."""
    if not isinstance(tools, list):
        return tools
    found: list[object] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and "namespace" in kinds and not tool.get("tools"):
            losses.add("tools", kind)  # it has nothing to offer
        elif kind == "namespace" and "namespace" in kinds and isinstance(tool.get("tools"), list):
            inner = offered(tool["tools"], losses, [kind for kind in kinds if kind != "namespace"])
            assert isinstance(inner, list)
            found += [{**one, "namespace": tool.get("name")} if isinstance(one, dict) else one for one in inner]
        elif not isinstance(kind, str) or kind in kinds:
            found.append(tool)
        else:
            losses.add("tools", kind)
    return found


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model sees a tool: with its namespace before it, if it has one."""
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


def settled_tools(body: dict[str, Any], losses: Losses, kinds: Collection[str]) -> dict[str, Any]:
    """Return a body with those of its tools that can be offered to the model; see `offered`."""
    return {**body, "tools": offered(body["tools"], losses, kinds)} if isinstance(body.get("tools"), list) else body
