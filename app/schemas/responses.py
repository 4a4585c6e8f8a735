"""The bodies of OpenAI's /v1/responses and /v1/conversations, which consist of items."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from reprise.app.schemas.chat import MAX_MESSAGES, TemplateArgs
from reprise.app.schemas.fields import (
    MAX_TIMEOUT_S,
    MAX_TTFT_MS,
    CacheOptions,
    JsonSchema,
    Metadata,
    Part,
    SessionId,
    TextPart,
    joined_text,
    unsupported,
)
from reprise.app.schemas.tools import MAX_ARGUMENT_CHARS, MAX_TOOLS, ToolName

MAX_ITEMS = MAX_MESSAGES
_TEXT_KINDS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
ResponseId = Annotated[str, Field(pattern=r"^resp_[A-Za-z0-9]{1,64}$")]
ConversationId = Annotated[str, Field(pattern=r"^conv_[A-Za-z0-9]{1,64}$")]


def _text(value: object) -> object:
    return joined_text(value, _TEXT_KINDS)


Text = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | list[TextPart])]


class MessageItem(Part):
    type: Literal["message"] = "message"
    id: str | None = Field(None, max_length=128)
    role: Literal["user", "assistant", "system", "developer"]
    content: Text

    def as_stored(self) -> dict[str, Any]:
        kind = "output_text" if self.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        content = [{"type": kind, "text": self.content, **more}]
        return {"type": "message", "role": self.role, "status": "completed", "content": content}


class FunctionCallItem(Part):
    type: Literal["function_call"]
    id: str | None = Field(None, max_length=128)
    call_id: str = Field(min_length=1, max_length=128)
    name: ToolName
    arguments: str = Field(max_length=MAX_ARGUMENT_CHARS)

    def as_stored(self) -> dict[str, Any]:
        fields = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {"type": "function_call", "status": "completed", **fields}


class FunctionOutputItem(Part):
    type: Literal["function_call_output"]
    id: str | None = Field(None, max_length=128)
    call_id: str = Field(min_length=1, max_length=128)
    output: Text

    def as_stored(self) -> dict[str, Any]:
        fields = {"call_id": self.call_id, "output": self.output}
        return {"type": "function_call_output", "status": "completed", **fields}


class ReasoningItem(Part):
    type: Literal["reasoning"]
    id: str | None = Field(None, max_length=128)
    content: Text | None = None
    summary: Text | None = None

    def as_stored(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self.content}] if self.content else []
        return {"type": "reasoning", "summary": [], "content": content}


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}


def _item(value: object) -> object:
    """Parse an item by its type; an item without a type is a message."""
    if not isinstance(value, dict):
        return value
    kind = value.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise unsupported("type", f"An item of type {str(kind)[:40]!r} is")
    return _ITEMS[kind].model_validate(value)


AnyItem = Annotated[Item, BeforeValidator(_item, json_schema_input_type=Item)]


def _items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    list[AnyItem], BeforeValidator(_items, json_schema_input_type=str | list[Item]), Field(max_length=MAX_ITEMS)
]


class FunctionTool(Part):
    type: Literal["function"]
    name: ToolName
    description: str | None = Field(None, max_length=16_384)
    parameters: JsonSchema | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, value: object) -> object:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "function":
            raise unsupported("type", f"A tool of type {kind[:40]!r} is")
        return value


def _is_hosted(tool: object) -> bool:
    """Return whether a tool is anything but a function, such as one that OpenAI's own servers provide."""
    return isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != "function"


def _functions(value: object) -> object:
    """Keep only functions. Coding agents send hosted tools of their provider along with their own functions. If there
    are no functions, keep the others, so that they are refused."""
    if not isinstance(value, list):
        return value
    return [tool for tool in value if not _is_hosted(tool)] or value


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")] | None = None
    description: str | None = Field(None, max_length=16_384)
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise PydanticCustomError("missing", "A json_schema has a 'name' and a 'schema'")
        return self


class TextOptions(Part):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Part):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ConversationRef(Part):
    id: ConversationId


def _conversation(value: object) -> object:
    return {"id": value} if isinstance(value, str) else value


class ResponseRequest(Part):
    """POST /v1/responses. An explicit null means the default."""

    refused = frozenset({"prompt"})

    model: str = Field(min_length=1, max_length=512)
    input: Items | None = None
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    conversation: Annotated[
        ConversationRef | None, BeforeValidator(_conversation, json_schema_input_type=str | ConversationRef | None)
    ] = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = Field(None, max_length=8)
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[Annotated[str, Field(max_length=128)]] | None = Field(None, max_length=16)
    tools: Annotated[list[FunctionTool] | None, BeforeValidator(_functions)] = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: str | None = Field(None, min_length=1, max_length=1024)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None
    # Reprise's and vLLM's fields, as in a chat.
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    session_id: SessionId | None = None
    cache_salt: str | None = Field(None, max_length=256)
    kv_quality: Literal["exact", "default"] | None = None
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)
    priority: int | None = Field(None, ge=-100, le=100)
    ttft_ms: float | None = Field(None, gt=0, le=MAX_TTFT_MS)
    chat_template_kwargs: TemplateArgs | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "ResponseRequest":
        if self.previous_response_id is not None and self.conversation is not None:
            raise PydanticCustomError("combination", "Send either 'previous_response_id' or 'conversation', not both")
        if not self.input and self.previous_response_id is None and self.conversation is None:
            raise PydanticCustomError("missing", "Field required", {"param": "input"})
        if self.background and self.stream:
            raise unsupported("background", "'background' with 'stream' is")
        if self.background and self.store is False:
            raise PydanticCustomError("combination", "A response in the background must be stored")
        return self

    @classmethod
    def ignored(cls, body: dict[str, Any]) -> list[str]:
        tools = body.get("tools")
        hosted = [tool["type"] for tool in tools if _is_hosted(tool)] if isinstance(tools, list) else []
        return [*super().ignored(body), *(f"tools.{kind}" for kind in dict.fromkeys(hosted))]


class ConversationRequest(Part):
    """POST /v1/conversations, and for one conversation its metadata."""

    items: Items | None = None
    metadata: Metadata | None = None


class ItemsRequest(Part):
    items: Annotated[list[AnyItem], Field(min_length=1, max_length=MAX_ITEMS)]
