"""Converts a request for a response into the equivalent chat request."""

import hashlib
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from reprise.app.errors import ApiError, from_validation
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.schemas.offered import flat_name
from reprise.app.schemas.past.chat import custom_arguments
from reprise.app.schemas.responses import ResponseRequest

Item = dict[str, Any]

_SAME = (
    *("model", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls", "truncation", "metadata", "user"),
    *("safety_identifier", "service_tier", "priority", "prompt_cache_key", "prompt_cache_retention", "session_id"),
    *("prompt_cache_options", "cache_salt", "kv_quality", "timeout", "ttft_ms", "chat_template_kwargs"),
)
_ITEM_ID = re.compile(r"[a-z]+_([A-Za-z0-9]{1,64})([0-9a-f]{4}|i[0-9a-f]{3})")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"


def response_id_of(request_id: str) -> str:
    """Return the id of the response to a request. It is a hash of the request's id, so that a server which continues
    another server's answer gives it the same id."""
    digest = hashlib.blake2b(f"{request_id}/resp/0".encode(), digest_size=24)
    return f"resp_{digest.hexdigest()}"


def item_id(response_id: str, kind: str, place: int, *, is_input: bool = False) -> str:
    """Return the id of an item of a response. The response's id can be read from it (`response_of`). kind: the
    beginning of the id, such as "msg". place: index of the item in the response's output, or in its input if
    `is_input`."""
    return f"{kind}_{response_id.removeprefix('resp_')}{f'i{place:03x}' if is_input else f'{place:04x}'}"


def response_of(item_id: str) -> tuple[str, bool] | None:
    """Return (id of the response that an item belongs to, whether the item is in its input), read from the item's id.
    None if the id was not made by `item_id`."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else (f"resp_{found[1]}", found[2].startswith("i"))


def with_ids(items: Sequence[Item], make: Callable[[str, int], str]) -> list[Item]:
    """Return the items, with new ids for those that have none. make: returns an id, given a prefix such as "msg" and
    the item's index."""
    return [{"id": make(_PREFIXES[item["type"]], place), **item} for place, item in enumerate(items)]


def chat_request(request: ResponseRequest, items: list[Item]) -> ChatCompletionRequest:
    """Return the equivalent chat request. items: the history, then the items of the request itself. Raises ApiError."""
    body: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    messages = messages_of(items)
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
    body["messages"] = messages
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        body["tools"] = [tool.as_chat() for tool in request.tools]
    if request.tool_choice is not None:
        body["tool_choice"] = _tool_choice(request.tool_choice)
    if request.text is not None and (form := request.text.format) is not None:
        body["response_format"] = {"type": form.type}
        if form.type == "json_object" and form.schema_ is not None:
            body["response_format"]["schema"] = form.schema_
        elif form.type == "json_schema":
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
    if isinstance(value, dict) and value.get("type") in ("function", "custom") and isinstance(value.get("name"), str):
        namespace = value.get("namespace")
        name = flat_name(value["name"], namespace if isinstance(namespace, str) else None)
        return {"type": "function", "function": {"name": name}}
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and isinstance(value.get("tools"), list):
        tools = [_tool_choice(tool) for tool in value["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": tools}}
    return value


def renamed(error: ApiError) -> ApiError:
    """Change an error about the equivalent chat request so that it names the fields of the Responses API. Returns the
    error."""
    error.message = error.message.replace("your messages have", "your input has")
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
        if kind in ("function_call_output", "custom_tool_call_output"):
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
            if text := _text(item["content"] or item.get("summary", [])):
                open_answer["reasoning_content"] = text
        else:
            arguments = custom_arguments(item["input"]) if kind == "custom_tool_call" else item["arguments"]
            function = {"name": flat_name(item["name"], item.get("namespace")), "arguments": arguments}
            call = {"id": item["call_id"], "type": "function", "function": function}
            open_answer.setdefault("tool_calls", []).append(call)
    return messages


def _text(content: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in content)
