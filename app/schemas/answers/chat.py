"""Models of the answers of chat completions, whole and streamed."""

from typing import Literal

from pydantic import Field

from reprise.app.schemas.answers.shared import Answer, AnswerTimings, CacheUse, Usage


class ChatLogprob(Answer):
    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprobs(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprobs]
    refusal: None


class AnsweredFunction(Answer):
    name: str
    arguments: str


class AnsweredCustom(Answer):
    name: str
    input: str


class AnsweredCall(Answer):
    id: str
    type: Literal["function", "custom"]
    function: AnsweredFunction | None = None
    custom: AnsweredCustom | None = None


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: str
    choices: list[ChatChoice]
    usage: Usage
    x_cache: CacheUse | None = None
    timings: AnswerTimings


class FunctionDelta(Answer):
    name: str | None = None
    arguments: str


class CustomDelta(Answer):
    name: str | None = None
    input: str


class ToolCallDelta(Answer):
    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class PromptProgress(Answer):
    """The progress of a prompt, in chunks without choices before the first token."""

    prompt_tokens: int = Field(description="tokens of the prompt")
    read_tokens: int = Field(description="those that are read, found or computed; 0 while it waits")
    cached_tokens: int = Field(description="those that were found; while it waits, that would be found now")
    ahead: int = Field(description="requests that start before it; 0: it starts next, or is read")
    left_ms: float | None = Field(
        description="about how long the rest takes from its start on, if it is alone; null: not known yet"
    )


class ChatCompletionChunk(Answer):
    """One event of a streamed chat; the last event is [DONE]."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    x_cache: CacheUse | None = None
    timings: AnswerTimings | None = None
    x_progress: PromptProgress | None = None
