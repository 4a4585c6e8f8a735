"""Converts a request in Anthropic's form into the equivalent chat request."""

import json
from typing import Any

from pydantic import ValidationError

from reprise.app.api.thought_seal import ThoughtSeal
from reprise.app.errors import from_validation
from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.app.schemas.messages import (
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from reprise.app.schemas.past.parts import Losses

BILLING = "x-anthropic-billing-header:"
_SAME = ("model", "session_id", "cache_salt", "kv_quality", "chat_template_kwargs")
_SAME_OF_ANSWERS = ("stream", "temperature", "top_p", "top_k", "seed", "timeout", "ttft_ms", "max_tokens")


def chat_request(request: CountTokensRequest, seal: ThoughtSeal, losses: Losses) -> ChatCompletionRequest:
    """Return the equivalent chat request. seal: opens the thoughts that come back only in a sealed form
    (`ThoughtSeal`). losses: takes the names of parts that cannot be read. Raises ApiError if the request is invalid."""
    body: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    system = _without_billing(request.system or [])
    messages = [{"role": "system", "content": _joined(system)}] if system else []
    for message in request.messages:
        messages += _messages(message, seal, losses)
    body["messages"] = messages
    if request.messages[-1].role == "assistant":
        body["continue_final_message"] = True  # the client has begun the answer
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in request.tools
        ]
    if (choice := request.tool_choice) is not None:
        words = {"auto": "auto", "any": "required", "none": "none"}
        named = {"type": "function", "function": {"name": choice.name}}
        body["tool_choice"] = named if choice.type == "tool" else words[choice.type]
        body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if (form := request.answer_format) is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}
    if request.thinking is not None:
        body["thinking"] = {"type": request.thinking.type}
    if request.output_config is not None and request.output_config.effort is not None:
        body["reasoning_effort"] = request.output_config.effort
    if isinstance(request, MessagesRequest):
        body |= {name: value for name in _SAME_OF_ANSWERS if (value := getattr(request, name)) is not None}
        body["stop"] = request.stop_sequences
        if request.metadata is not None:
            body["user"] = request.metadata.user_id
    try:
        return ChatCompletionRequest.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None


def _without_billing(system: list[TextBlock]) -> list[TextBlock]:
    """Drop the billing line that Claude Code puts first in the system prompt. It differs in every request and means
    nothing to a model, but a different first line would keep a request from reusing anything of the one before."""
    kept = []
    for block in system:
        if not block.text.startswith(BILLING):
            kept.append(block)
        elif rest := block.text.partition("\n")[2]:
            kept.append(block.model_copy(update={"text": rest}))
    return kept


def _messages(message: MessageParam, seal: ThoughtSeal, losses: Losses) -> list[dict[str, Any]]:
    """Return one message as chat messages. Tool results become messages of their own, before the user's text."""
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    if message.role == "assistant":
        said: dict[str, Any] = {"role": "assistant", "content": "".join(block.text for block in texts)}
        thoughts = [
            _thought(block, seal, losses)
            for block in message.content
            if isinstance(block, ThinkingBlock | RedactedThinkingBlock)
        ]
        if any(thoughts):
            said["reasoning_content"] = "".join(thoughts)
        calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
        if calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
                }
                for call in calls
            ]
        return [said]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        for block in message.content
        if isinstance(block, ToolResultBlock)
    ]
    if results and not texts:
        return results
    return [*results, {"role": message.role, "content": _joined(texts)}]


def _thought(block: ThinkingBlock | RedactedThinkingBlock, seal: ThoughtSeal, losses: Losses) -> str:
    """Return a thought: its text where the client sends it, whoever has signed it, otherwise what is sealed. What no
    seal of ours holds is left out."""
    if isinstance(block, ThinkingBlock) and (block.thinking or not block.signature):
        return block.thinking
    thought = seal.open(block.data if isinstance(block, RedactedThinkingBlock) else block.signature or "")
    if thought is None:
        losses.add("messages", block.type)
    return thought or ""


def _result(block: ToolResultBlock) -> str:
    """Return the text of a tool's result. Templates know no failed calls, so the text says it."""
    text = _joined(block.content or [])
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text


def _joined(blocks: list[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)
