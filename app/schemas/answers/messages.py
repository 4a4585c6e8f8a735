"""Models of the answers of Messages."""

from typing import Literal

from reprise.app.schemas.answers.shared import Answer, AnswerTimings, CacheUse


class MessageUsage(Answer):
    """Token counts. `input_tokens` excludes tokens that came from the cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class ContentBlock(Answer):
    type: Literal["text", "thinking", "tool_use"]


class AnthropicMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    x_cache: CacheUse | None = None
    timings: AnswerTimings


class MessageEvent(Answer):
    """One event of a streamed message; the event's name is its type."""

    type: str
