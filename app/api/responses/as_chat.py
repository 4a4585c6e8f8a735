"""Converts a request for a response into the equivalent chat request."""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from reprise.app.errors import ApiError, from_validation
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.schemas.responses import Item as InputItem
from reprise.app.schemas.responses import ResponseRequest

Item = dict[str, Any]

_SAME = (
    *("model", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls", "truncation", "metadata", "user"),
    *("safety_identifier", "service_tier", "priority", "prompt_cache_key", "prompt_cache_retention", "session_id"),
    *("prompt_cache_options", "cache_salt", "kv_quality", "timeout", "ttft_ms", "chat_template_kwargs"),
)
_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"


def id_within(request_id: str, kind: str, place: int = 0) -> str:
    """Return the id of the answer to a request, or of the item at index `place` of the answer. kind: how the id begins,
    such as "resp". A server that continues another server's answer gives the same ids."""
    digest = hashlib.blake2b(f"{request_id}/{kind}/{place}".encode(), digest_size=24)
    return f"{kind}_{digest.hexdigest()}"


def items_with_ids(items: Sequence[InputItem]) -> list[Item]:
    """Return items in the form in which they are stored and listed, with ids."""
    prefixes = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    stored = [item.as_stored() for item in items]
    return [{"id": new_id(prefixes[item["type"]]), **item} for item in stored]


def chat_request(request: ResponseRequest, items: list[Item]) -> ChatCompletionRequest:
    """Return the chat request that is equivalent. items: the history and then the request's own items. Raises
    ApiError."""
    body: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    messages = messages_of(items)
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
    body["messages"] = messages
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        body["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
            for tool in request.tools
        ]
    if request.tool_choice is not None:
        body["tool_choice"] = _tool_choice(request.tool_choice)
    if request.text is not None and (form := request.text.format) is not None:
        body["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            given = {"name": form.name, "schema": form.schema_, "strict": form.strict}
            body["response_format"]["json_schema"] = given
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if wants_logprobs(request):
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    try:
        return ChatCompletionRequest.model_validate(body)
    except ValidationError as error:
        raise renamed(from_validation(error)) from None


def wants_logprobs(request: ResponseRequest) -> bool:
    return request.top_logprobs is not None or "message.output_text.logprobs" in (request.include or ())


def _tool_choice(value: Any) -> Any:
    """Convert a tool choice. Here a function's name is a field of the choice; in a chat request it is a field of a
    nested object."""
    if isinstance(value, dict) and value.get("type") == "function" and "name" in value:
        return {"type": "function", "function": {"name": value["name"]}}
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and isinstance(value.get("tools"), list):
        tools = [_tool_choice(tool) for tool in value["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": tools}}
    return value


def renamed(error: ApiError) -> ApiError:
    """Rewrite an error about the chat request with the field names of the Responses API."""
    for chat_name, name in _NAMES.items():
        if error.param is not None and error.param.startswith(chat_name):
            error.message = error.message.replace(chat_name, name)
            error.param = error.param.replace(chat_name, name, 1)
    return error


def messages_of(items: list[Item]) -> list[dict[str, Any]]:
    """Convert items to chat messages. Consecutive thoughts, texts and calls of the assistant become one message."""
    messages: list[dict[str, Any]] = []
    open_answer: dict[str, Any] | None = None
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            open_answer = None
            continue
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text(item["content"])})
            open_answer = None
            continue
        # A thought begins a new answer; so does a text that follows another answer's text.
        follows_text = kind == "message" and open_answer is not None and open_answer["content"] is not None
        if open_answer is None or kind == "reasoning" or (follows_text and not open_answer.get("tool_calls")):
            open_answer = {"role": "assistant", "content": None}
            messages.append(open_answer)
        if kind == "message":
            open_answer["content"] = (open_answer["content"] or "") + _text(item["content"])
        elif kind == "reasoning":
            if text := _text(item["content"]):
                open_answer["reasoning_content"] = text
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            open_answer.setdefault("tool_calls", []).append(call)
    return messages


def _text(content: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in content)
