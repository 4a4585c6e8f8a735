"""GET /openapi.json. Bodies are parsed and answers written by hand, so the description is built here from the request
models and from the answer models that the tests check."""

import functools
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.api.reprise.cache import CachePage, ClearRequest
from app.api.reprise.sessions import Page, SessionPatch
from app.api.responses.route import ItemPage
from app.schemas import answers
from app.schemas.chat import ChatCompletionRequest
from app.schemas.completions import CompletionRequest
from app.schemas.messages import CountTokensRequest, MessagesRequest
from app.schemas.responses import ConversationRequest, ItemsRequest, ResponseRequest
from app.schemas.tokens import DetokenizeRequest, TokenizeRequest
from app.version import version

Model = type[BaseModel]
router = APIRouter()


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    answer: Model | None  # None: plain text or no body
    body: Model | None = None
    query: Model | None = None
    events: Model | None = None  # the events of the stream, if the body can ask for one
    status: int = 200


def _both(method: str, path: str, *rest: Any) -> list[Operation]:
    """The operation with and without the prefix /v1."""
    return [Operation(method, path, *rest), Operation(method, f"/v1{path}", *rest)]


OPERATIONS = [
    Operation("post", "/v1/chat/completions", "Answer a chat", answers.ChatCompletion, ChatCompletionRequest,
              events=answers.ChatCompletionChunk),
    Operation("post", "/v1/chat/completions/input_tokens", "Count a chat's tokens", answers.InputTokens,
              ChatCompletionRequest),
    Operation("post", "/v1/completions", "Continue a text, or score one", answers.Completion, CompletionRequest,
              events=answers.Completion),
    Operation("post", "/v1/responses", "Create a response", answers.ResponseObject, ResponseRequest,
              events=answers.ResponseEvent),
    Operation("post", "/v1/responses/input_tokens", "Count a response's prompt tokens", answers.InputTokens,
              ResponseRequest),
    Operation("get", "/v1/responses/{response_id}", "Get a stored response", answers.ResponseObject),
    Operation("delete", "/v1/responses/{response_id}", "Delete a response", answers.DeletedObject),
    Operation("post", "/v1/responses/{response_id}/cancel", "Cancel a response in the background",
              answers.ResponseObject),
    Operation("get", "/v1/responses/{response_id}/input_items", "List a response's input items", answers.ItemList,
              query=ItemPage),
    Operation("post", "/v1/conversations", "Create a conversation", answers.ConversationObject, ConversationRequest),
    Operation("get", "/v1/conversations/{conversation_id}", "Get a conversation", answers.ConversationObject),
    Operation("post", "/v1/conversations/{conversation_id}", "Change a conversation's metadata",
              answers.ConversationObject, ConversationRequest),
    Operation("delete", "/v1/conversations/{conversation_id}", "Delete a conversation", answers.DeletedObject),
    Operation("get", "/v1/conversations/{conversation_id}/items", "List a conversation's items", answers.ItemList,
              query=ItemPage),
    Operation("post", "/v1/conversations/{conversation_id}/items", "Add items to a conversation", answers.ItemList,
              ItemsRequest),
    Operation("get", "/v1/conversations/{conversation_id}/items/{item_id}", "Get an item", answers.OutputItem),
    Operation("delete", "/v1/conversations/{conversation_id}/items/{item_id}", "Delete an item",
              answers.ConversationObject),
    Operation("post", "/v1/messages", "Answer a chat in Anthropic's form", answers.AnthropicMessage, MessagesRequest,
              events=answers.MessageEvent),
    Operation("post", "/v1/messages/count_tokens", "Count a message's prompt tokens", answers.InputTokens,
              CountTokensRequest),
    *_both("post", "/tokenize", "Convert a text or a chat to tokens", answers.Tokens, TokenizeRequest),
    *_both("post", "/detokenize", "Convert tokens to text", answers.Text, DetokenizeRequest),
    Operation("get", "/v1/models", "List the model and its aliases", answers.ModelList),
    Operation("get", "/v1/models/{name}", "Get a model", answers.Model),
    Operation("get", "/v1/sessions", "List the conversations in the cache", answers.SessionList, query=Page),
    Operation("get", "/v1/sessions/{session_id}", "Get a conversation's cache state", answers.Session),
    Operation("patch", "/v1/sessions/{session_id}", "Pin a conversation or set its time to live", answers.Session,
              SessionPatch),
    Operation("delete", "/v1/sessions/{session_id}", "Remove a conversation from every tier", None, status=204),
    Operation("post", "/v1/sessions/{session_id}/prefetch", "Load a conversation's KV", answers.Session, status=202),
    Operation("get", "/v1/cache/stats", "Show the cache's contents and counters", answers.CacheStatsObject),
    Operation("get", "/v1/cache/sessions", "List all tenants' conversations", answers.CacheSessionList,
              query=CachePage),
    Operation("delete", "/v1/cache/sessions/{tenant}/{session_id}", "Remove any tenant's conversation", None,
              status=204),
    Operation("post", "/v1/cache/clear", "Remove the KV of all conversations", answers.CacheCleared, ClearRequest),
    Operation("get", "/v1/scheduler", "Show the queue", answers.SchedulerObject),
    *_both("get", "/health", "Check that the server is alive", answers.Health),
    Operation("get", "/ready", "Check that the server takes requests", answers.ReadyStatus),
    Operation("get", "/version", "Show the versions", answers.Version),
    Operation("get", "/metrics", "Show metrics in Prometheus text format", None),
]  # fmt: skip


def describe(version: str) -> dict[str, Any]:
    """Build the OpenAPI document."""
    wanted: list[tuple[Model, Any]] = [(answers.Error, "validation"), (answers.AnthropicError, "validation")]
    for operation in OPERATIONS:
        models = (operation.answer, operation.body, operation.events)
        wanted += [(model, "validation") for model in models if model is not None]
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
    is_anthropic = operation.path.startswith("/v1/messages")
    error = schemas[answers.AnthropicError if is_anthropic else answers.Error]
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": schemas[operation.answer]}
    elif operation.status == 200:
        content["text/plain"] = {"schema": {"type": "string"}}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-schema": schemas[operation.events]}
    good: dict[str, Any] = {"description": "Done"} | ({"content": content} if content else {})
    bad = {"content": {"application/json": {"schema": error}}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}_{operation.path.strip('/').replace('/', '_').translate(_PLAIN)}",
        "responses": {
            str(operation.status): good,
            "4XX": {"description": "The request cannot be served as sent", **bad},
            "5XX": {"description": "The server failed or is overloaded; see Retry-After", **bad},
        },
    }
    if parameters := [*_path_parameters(operation.path), *_query_parameters(operation.query)]:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[operation.body]}},
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
