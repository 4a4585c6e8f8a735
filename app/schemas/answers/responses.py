"""Models of the answers of Responses and of its conversations."""

from typing import Any, Literal

from reprise.app.schemas.answers.shared import Answer, AnswerTimings, CacheUse


class CachedTokens(Answer):
    cached_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    total_tokens: int


class OutputItem(Answer):
    id: str
    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ]


class ResponseError(Answer):
    code: str
    message: str


class ResponseObject(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    tools: list[dict[str, Any]]
    usage: ResponseUsage | None
    metadata: dict[str, str]
    x_cache: CacheUse | None = None
    timings: AnswerTimings | None = None


class ResponseEvent(Answer):
    """One event of a streamed response; the event's name is its type."""

    type: str
    sequence_number: int


class ItemList(Answer):
    object: Literal["list"]
    data: list[OutputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ConversationObject(Answer):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]
