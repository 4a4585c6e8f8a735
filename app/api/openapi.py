"""GET /openapi.json. Bodies are parsed and answers written by hand, so the description is built here. It consists of
the models of the requests, and of models of the answers, which only the tests compare with real answers."""

import functools
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from pydantic.json_schema import models_json_schema

from reprise.app.api.chat import route as chat
from reprise.app.api.completions import route as completions
from reprise.app.api.messages import route as messages
from reprise.app.api.operation import Model, Operation, operations_of
from reprise.app.api.reprise import cache, events, fleet, models, ops, page, sessions, tokens
from reprise.app.api.responses import conversations
from reprise.app.api.responses import route as responses
from reprise.app.schemas.answers.shared import AnthropicError, Error
from reprise.app.version import version

router = APIRouter()

MODULES = (
    chat,
    completions,
    responses,
    conversations,
    messages,
    tokens,
    models,
    sessions,
    cache,
    fleet,
    ops,
    events,
    page,
)
"""All modules with a router, in the order of the document. Routes that are not described serve the page alone."""

OPERATIONS = [operation for module in MODULES for operation in operations_of(module.router)]


def describe(version: str) -> dict[str, Any]:
    """Build the OpenAPI document."""
    wanted: list[tuple[Model, Any]] = [(Error, "validation"), (AnthropicError, "validation")]
    for operation in OPERATIONS:
        used = (operation.described.answer, operation.described.body, operation.described.events)
        wanted += [(model, "validation") for model in used if model is not None]
    refs, definitions = models_json_schema(list(dict.fromkeys(wanted)), ref_template="#/components/schemas/{model}")
    schemas: dict[Any, Any] = {model: schema for (model, _), schema in refs.items()}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Reprise",
            "version": version,
            "description": "An OpenAI-compatible LLM server that keeps the KV cache of conversations.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(operation: Operation, schemas: dict[Model, Any]) -> dict[str, Any]:
    said = operation.described
    is_anthropic = operation.path.startswith("/v1/messages")
    error = schemas[AnthropicError if is_anthropic else Error]
    content: dict[str, Any] = {}
    if said.answer is not None:
        content["application/json"] = {"schema": schemas[said.answer]}
    elif operation.status == 200:
        content["text/plain"] = {"schema": {"type": "string"}}
    if said.events is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-schema": schemas[said.events]}
    good: dict[str, Any] = {"description": "Done"} | ({"content": content} if content else {})
    bad = {"content": {"application/json": {"schema": error}}}
    described: dict[str, Any] = {
        "summary": said.summary,
        "operationId": f"{operation.method}_{operation.path.strip('/').replace('/', '_').translate(_PLAIN)}",
        "responses": {
            str(operation.status): good,
            "4XX": {"description": "The request cannot be served as sent", **bad},
            "5XX": {"description": "The server failed or is overloaded; see Retry-After", **bad},
        },
    }
    if operation.detail:
        described["description"] = operation.detail
    if parameters := [*_path_parameters(operation.path), *_query_parameters(said.query)]:
        described["parameters"] = parameters
    if said.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[said.body]}},
        }
    return described


_PLAIN = str.maketrans({"{": None, "}": None, ".": "_"})


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(model: Model | None) -> list[dict[str, Any]]:
    if model is None:
        return []
    properties = model.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]


@router.get("/openapi.json")
async def openapi() -> Response:
    return Response(_document(), media_type="application/json")


@functools.cache
def _document() -> bytes:
    return msgspec.json.encode(describe(version()))
