"""The bodies of OpenAI's /v1/responses and /v1/conversations, which consist of items."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from reprise.app.schemas.chat import MAX_MESSAGES, TemplateArgs
from reprise.app.schemas.fields import (
    BOUNDS,
    ELSEWHERE,
    FORM_BOUNDS,
    MAX_TIMEOUT_S,
    MAX_TTFT_MS,
    CacheOptions,
    Effort,
    JsonSchema,
    Metadata,
    Part,
    SessionId,
    TextPart,
    joined_text,
    unsupported,
)
from reprise.app.schemas.offered import flat_name, settled_tools
from reprise.app.schemas.past.items import input_items
from reprise.app.schemas.past.parts import Losses
from reprise.app.schemas.tools import (
    MAX_ARGUMENT_CHARS,
    MAX_NAME_CHARS,
    MAX_TOOLS,
    TOOL_KINDS,
    Arguments,
    CustomFormat,
    ToolName,
    ToolSchema,
)
from reprise.app.schemas.unknown import Holds

MAX_ITEMS = MAX_MESSAGES
_TEXT_KINDS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
ResponseId = Annotated[str, Field(pattern=r"^resp_[A-Za-z0-9]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
ItemId = Annotated[str, Field(max_length=256)]
ItemName = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Namespace = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
ConversationId = Annotated[str, Field(pattern=r"^conv_[A-Za-z0-9]{1,64}$")]


def _text(value: object) -> object:
    return joined_text(value, _TEXT_KINDS)


Text = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | list[TextPart])]


class MessageItem(Part):
    type: Literal["message"] = "message"
    id: ItemId | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text

    def as_stored(self) -> dict[str, Any]:
        kind = "output_text" if self.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        content = [{"type": kind, "text": self.content, **more}]
        return {"type": "message", "role": self.role, "status": "completed", "content": content}


class FunctionCallItem(Part):
    type: Literal["function_call"]
    id: ItemId | None = None
    call_id: CallId
    name: ItemName
    namespace: Namespace | None = None
    arguments: Arguments

    def as_stored(self) -> dict[str, Any]:
        fields = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {"type": "function_call", "status": "completed", **fields, **_namespace(self.namespace)}


class CustomCallItem(Part):
    """A call of a custom tool, whose input is one text."""

    type: Literal["custom_tool_call"]
    id: ItemId | None = None
    call_id: CallId
    name: ItemName
    namespace: Namespace | None = None
    input: str = Field(max_length=MAX_ARGUMENT_CHARS)

    def as_stored(self) -> dict[str, Any]:
        fields = {"call_id": self.call_id, "name": self.name, "input": self.input}
        return {"type": "custom_tool_call", "status": "completed", **fields, **_namespace(self.namespace)}


class FunctionOutputItem(Part):
    type: Literal["function_call_output", "custom_tool_call_output"]
    id: ItemId | None = None
    call_id: CallId
    output: Text

    def as_stored(self) -> dict[str, Any]:
        return {"type": self.type, "status": "completed", "call_id": self.call_id, "output": self.output}


class ReasoningItem(Part):
    type: Literal["reasoning"]
    id: ItemId | None = None
    content: Text | None = None
    summary: Text | None = None
    encrypted_content: str | None = None

    def as_stored(self) -> dict[str, Any]:
        """Return the item with its reasoning in plain text. If that did not come back, the summary is kept in its
        place, because this server's summaries are the whole reasoning. The sealed form (`encrypted_content`) is left
        out."""
        content = [{"type": "reasoning_text", "text": self.content}] if self.content else []
        summary = [{"type": "summary_text", "text": self.summary}] if self.summary and not content else []
        return {"type": "reasoning", "summary": summary, "content": content}


class ReferenceItem(Part):
    """An item of an earlier response, which the server has stored."""

    type: Literal["item_reference"]
    id: ItemId

    def as_stored(self) -> dict[str, Any]:
        return {"type": "item_reference", "id": self.id}


def _namespace(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"namespace": name}


Item = MessageItem | FunctionCallItem | CustomCallItem | FunctionOutputItem | ReasoningItem | ReferenceItem
_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
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
    namespace: Namespace | None = None
    description: str | None = None
    parameters: ToolSchema | None = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the tool in the form of a chat request."""
        function = self.model_dump(exclude_none=True, exclude={"type", "namespace"})
        return {"type": "function", "function": {**function, "name": self.flat_name}}

    @property
    def flat_name(self) -> str:
        """The name under which the model sees the tool."""
        return flat_name(self.name, self.namespace)


class CustomTool(Part):
    type: Literal["custom"]
    name: ToolName
    namespace: Namespace | None = None
    description: str | None = None
    format: CustomFormat | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the tool in the form of a chat request."""
        form = None if self.format is None else self.format.model_dump(exclude_none=True)
        return {
            "type": "custom",
            "custom": {"name": self.flat_name, "description": self.description, "format": form},
        }

    @property
    def flat_name(self) -> str:
        """The name under which the model sees the tool."""
        return flat_name(self.name, self.namespace)


_TOOLS: dict[str, type[FunctionTool | CustomTool]] = {"function": FunctionTool, "custom": CustomTool}
_TOOL_KINDS = TOOL_KINDS | {"namespace"}


def _tool(value: object) -> object:
    """Parse a tool by its type."""
    if not isinstance(value, dict):
        return value
    kind = value.get("type", "function")  # the schema of a function says that the type is missing
    if not isinstance(kind, str) or kind not in _TOOLS:
        raise unsupported("type", f"A tool of type {str(kind)[:40]!r} is")
    return _TOOLS[kind].model_validate(value)


ResponseTool = Annotated[
    FunctionTool | CustomTool, BeforeValidator(_tool, json_schema_input_type=FunctionTool | CustomTool)
]


class TextFormat(Part):
    refused = FORM_BOUNDS

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
    refused = FORM_BOUNDS

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Part):
    effort: Effort = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class StreamedResponse(Part):
    """The value of `stream_options`."""

    include_obfuscation: bool | None = None


class ConversationRef(Part):
    id: ConversationId


def _conversation(value: object) -> object:
    return {"id": value} if isinstance(value, str) else value


class NamedTool(BaseModel):
    type: str
    name: str | None = None
    namespace: str | None = None


class ToolSelection(NamedTool):
    """Names the fields of a `tool_choice` that is no word. `reprise.app.api.responses.as_chat` reads them."""

    mode: str | None = None
    tools: list[NamedTool] | None = None


class ResponseRequest(Part):
    """The body of POST /v1/responses. A null means the default."""

    refused = frozenset({"prompt", *BOUNDS, *ELSEWHERE})

    model: str | None = Field(None, min_length=1, max_length=512)
    input: Items | None = None
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    conversation: Annotated[
        ConversationRef | None, BeforeValidator(_conversation, json_schema_input_type=str | ConversationRef | None)
    ] = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamedResponse | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[Annotated[str, Field(max_length=128)]] | None = Field(None, max_length=16)
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, Holds(ToolSelection)] = None
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

    @property
    def wants_sealed_thoughts(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def wants_summary(self) -> bool:
        """Whether the client wants to see a thought as a summary."""
        return self.reasoning is not None and self.reasoning.summary not in (None, "none")

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
    def settled(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        losses = Losses(cls.ignored(body))
        return settled_tools(_with_items(body, "input", losses), losses, _TOOL_KINDS), losses.names


def _with_items(body: dict[str, Any], field: str, losses: Losses) -> dict[str, Any]:
    return {**body, field: input_items(body[field], losses)} if isinstance(body.get(field), list) else body


class ConversationRequest(Part):
    """The body of POST /v1/conversations; of the POST that changes one conversation, its metadata alone counts."""

    items: Items | None = None
    metadata: Metadata | None = None

    @classmethod
    def settled(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        losses = Losses(cls.ignored(body))
        return _with_items(body, "items", losses), losses.names


class ItemsRequest(Part):
    items: Annotated[list[AnyItem], Field(min_length=1, max_length=MAX_ITEMS)]

    @classmethod
    def settled(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        losses = Losses(cls.ignored(body))
        return _with_items(body, "items", losses), losses.names
