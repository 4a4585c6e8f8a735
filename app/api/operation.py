"""Describes an endpoint in the decorator of its route and in the docstring below it, which /openapi.json and
docs/api.md show. The docstring is for callers, in Markdown.

    @router.post("/v1/things", **described("Make a thing", answers.Thing, body=ThingRequest))
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel

Model = type[BaseModel]
_KEY = "x-description"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    summary: str
    answer: Model | None  # None: a text, or nothing
    body: Model | None
    query: Model | None
    events: Model | None  # events of a stream, where the body asks for one


@dataclass(frozen=True, slots=True)
class Operation:
    method: str  # lower case
    path: str  # with {names}
    status: int  # status of a good answer
    detail: str  # one paragraph; may be empty
    described: Description


def described(
    summary: str,
    answer: Model | None,
    *,
    body: Model | None = None,
    query: Model | None = None,
    events: Model | None = None,
) -> dict[str, Any]:
    """Return the arguments for a route's decorator by which /openapi.json and docs/api.md describe the route. answer:
    model of the plain answer; None: a text, or nothing. body, query: models of the request's body and query. events:
    model of the events of a streamed answer. FastAPI's own API description is off."""
    return {"openapi_extra": {_KEY: Description(summary=summary, answer=answer, body=body, query=query, events=events)}}


def operations_of(router: APIRouter) -> Iterator[Operation]:
    """Yield every described path and method of a router, in the order of the code."""
    for route in router.routes:
        if isinstance(route, APIRoute) and (found := (route.openapi_extra or {}).get(_KEY)) is not None:
            path, detail = route.path.replace(":path}", "}"), " ".join(route.description.split())
            for method in sorted(route.methods or ()):
                yield Operation(method.lower(), path, route.status_code or 200, detail, found)
