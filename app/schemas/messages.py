"""The bodies of Anthropic's /v1/messages."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from reprise.app.schemas.chat import MAX_MESSAGES, TemplateArgs
from reprise.app.schemas.fields import (
    BOUNDS,
    ELSEWHERE,
    FORM_BOUNDS,
    MAX_TIMEOUT_S,
    MAX_TTFT_MS,
    Effort,
    JsonSchema,
    Part,
    SessionId,
    Thinking,
    unsupported,
)
from reprise.app.schemas.offered import settled_tools
from reprise.app.schemas.past.blocks import blocks
from reprise.app.schemas.past.parts import Losses, readable
from reprise.app.schemas.tools import MAX_TOOLS, CalledName, ToolName, ToolSchema

MAX_BLOCKS = 1024
_TOOL_KINDS = frozenset({"custom"})  # tools that the client runs; most have no type
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class TextBlock(Part):
    type: Literal["text"]
    text: str


class ThinkingBlock(Part):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Part):
    """A thought that the client has not read: only the server that sealed it can open it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: CallId
    name: CalledName
    input: dict[str, Any]


def _text_blocks(value: object) -> object:
    """Convert a text to a list of one text block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextBlocks = Annotated[
    list[TextBlock],
    BeforeValidator(_text_blocks, json_schema_input_type=str | list[TextBlock]),
    Field(max_length=MAX_BLOCKS),
]


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextBlocks | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
_BLOCKS: dict[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}


def _block(value: object) -> object:
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _BLOCKS:
        raise unsupported("type", f"A block of type {str(kind)[:40]!r} is")
    return _BLOCKS[kind].model_validate(value)


Blocks = Annotated[
    list[Annotated[Block, BeforeValidator(_block, json_schema_input_type=Block)]],
    BeforeValidator(_text_blocks, json_schema_input_type=str | list[Block]),
    Field(max_length=MAX_BLOCKS),
]


class MessageParam(Part):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _check_blocks(self) -> "MessageParam":
        allowed = {
            "user": (TextBlock, ToolResultBlock),
            "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
        }
        if not all(isinstance(block, allowed.get(self.role, (TextBlock,))) for block in self.content):
            raise PydanticCustomError(
                "content", "A block that a message of this role cannot have", {"param": "content"}
            )
        return self


class ToolParam(Part):
    name: ToolName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: ToolSchema
    strict: bool | None = None


class ToolChoiceParam(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesMetadata(Part):
    user_id: str | None = Field(None, max_length=1024)


class OutputFormat(Part):
    """The form of the answer. Only its schema says what it is."""

    refused = FORM_BOUNDS

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(Part):
    refused = FORM_BOUNDS

    format: OutputFormat | None = None
    effort: Effort = None


class CountTokensRequest(Part):
    """The body of POST /v1/messages/count_tokens: the fields that determine the prompt."""

    # `context_management` is accepted: what it would have cleared stays in the context.
    refused = frozenset({"mcp_servers", "previous_response_id", "conversation", *ELSEWHERE})

    model: str | None = Field(None, min_length=1, max_length=512)
    messages: list[MessageParam] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: TextBlocks | None = None
    tools: list[ToolParam] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = Field(
        None, description="`type`: `enabled` or `disabled` turns thinking on or off where the template can"
    )
    output_config: OutputConfig | None = Field(
        None, description="`format`: a JSON schema of the answer; `effort`: as a chat's `reasoning_effort`"
    )
    output_format: OutputFormat | None = Field(None, description="the older name of `output_config.format`")
    # Reprise's own fields, as in a chat.
    session_id: SessionId | None = None
    cache_salt: str | None = Field(None, max_length=256)
    kv_quality: Literal["exact", "default"] | None = None
    chat_template_kwargs: TemplateArgs | None = None

    @classmethod
    def settled(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        losses = Losses(cls.ignored(body))
        if isinstance(thread := body.get("thread"), dict) and thread.get("type") == "create":
            # The request holds all of the conversation; only one that continues the thread would lack the rest.
            losses.add("thread", "create")
            body = {**body, "thread": None}
        if isinstance(system := body.get("system"), list):
            body = {**body, "system": readable(system, losses, field="system", is_asked=True)}
        if "messages" in body:
            body = {**body, "messages": blocks(body["messages"], losses)}
        return settled_tools(body, losses, _TOOL_KINDS), losses.names

    @property
    def answer_format(self) -> OutputFormat | None:
        config = self.output_config
        return config.format if config is not None and config.format is not None else self.output_format


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages. A null means the default."""

    refused = CountTokensRequest.refused | BOUNDS

    max_tokens: int = Field(ge=1, le=1 << 31)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(None, max_length=16)
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)
    ttft_ms: float | None = Field(None, gt=0, le=MAX_TTFT_MS)
