"""The chat request: every field we know has a type, a range and a size; what it means is in `app.generation`."""

import math
import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from app.deadline import MAX_TIMEOUT_S

MAX_MESSAGES = 4096
MAX_TEMPLATE_ARGS_BYTES = 16_384
SESSION_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

# What the template is given by us, not by the client.
_RESERVED_TEMPLATE_ARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


def _unsupported(param: str, what: str) -> PydanticCustomError:
    """`app.errors` names `param`, relative to where the error was raised."""
    return PydanticCustomError("unsupported", "{what} not supported by this server", {"param": param, "what": what})


def _joined_text(value: object) -> object:
    """A list of text parts becomes one string; parts are paragraphs of their own, so a newline keeps them apart."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content_part", "Each content part is an object with a 'type'")
        if kind != "text":
            raise _unsupported("", f"Content of type {kind[:40]!r} is")
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content_part", "A text part has a string 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _token_bias(value: object) -> object:
    """JSON has string keys only; they must be plain token ids."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
        raise PydanticCustomError("logit_bias", "Keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def _template_args(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := _RESERVED_TEMPLATE_ARGS.intersection(value):
        raise PydanticCustomError("template_args", "{name} is set by the server", {"name": min(reserved)})
    if not _is_finite(value) or len(msgspec.json.encode(value)) > MAX_TEMPLATE_ARGS_BYTES:
        raise PydanticCustomError("template_args", "Too large, or not plain JSON")
    return value


def _is_finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_finite(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_finite(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) < 1 << 63


def _session_id(value: str) -> str:
    if not SESSION_ID.fullmatch(value):
        raise PydanticCustomError("session_id", "1 to 128 letters, digits, '.', '_', ':' or '-'")
    return value


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    # Fields that clients send back or along with an empty value, and that would change the meaning with any other.
    refused: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_be_lost(cls, value: object) -> object:
        if isinstance(value, dict):
            for name in cls.refused & value.keys():
                if value[name] not in (None, [], {}, False):
                    raise _unsupported(name, f"'{name}' is")
        return value


class CacheMark(_Part):
    """`x_cache` of a message: what the cache is to know about it. The model does not see it."""

    important: bool = False  # a truncation keeps it


class Message(_Part):
    refused = frozenset({"tool_calls", "tool_call_id", "function_call", "audio", "refusal"})

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_joined_text)]
    name: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    x_cache: CacheMark | None = None

    @model_validator(mode="before")
    @classmethod
    def _an_assistant_may_have_said_nothing(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("role") == "assistant" and value.get("content") is None:
            return {**value, "content": ""}
        return value

    @model_validator(mode="after")
    def _no_tools_yet(self) -> "Message":
        if self.role in ("tool", "function"):
            raise _unsupported("role", f"The role {self.role!r} is")
        return self

    def as_rendered(self) -> dict[str, Any]:
        """What the chat template sees. `developer` is the newer name of `system`."""
        rendered: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.name is not None:
            rendered["name"] = self.name
        if self.reasoning_content is not None:
            rendered["reasoning_content"] = self.reasoning_content
        return rendered


class PlainMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message that is nothing but a role and a text; stands where a `Message` may."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: ClassVar[None] = None
    reasoning_content: ClassVar[None] = None
    x_cache: ClassVar[None] = None

    def as_rendered(self) -> dict[str, Any]:
        """As `Message.as_rendered`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


_PLAIN = Annotated[list[PlainMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


def _messages(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """A history of hundreds of plain messages comes with every turn: they are checked all at once, ten times faster.
    What is not plain in any of them, or wrong, is the model's to name."""
    try:
        return msgspec.convert(value, _PLAIN)
    except msgspec.ValidationError:
        return validate(value)


class StreamOptions(_Part):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class ChatCompletionRequest(_Part):
    """POST /v1/chat/completions. An explicit null means the default."""

    refused = frozenset(
        {"tools", "functions", "audio", "web_search_options", "echo", "prompt_logprobs", "guided_json", "guided_regex"}
        | {"guided_choice", "guided_grammar", "structured_outputs", "use_beam_search", "continue_final_message"}
        | {"chat_template", "documents"}
    )

    model: str = Field(min_length=1, max_length=512)
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), WrapValidator(_messages)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    min_tokens: int | None = Field(None, ge=0, le=1 << 31)
    best_of: Literal[1] | None = None
    add_generation_prompt: Literal[True] | None = None
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(_token_bias)
    ] = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]] | None, BeforeValidator(_one_or_many)
    ] = Field(None, max_length=16)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=128)
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    user: str | None = Field(None, max_length=1024)
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    priority: int | None = Field(None, ge=-100, le=100)  # a lower number goes first, as in vLLM
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)  # seconds from the arrival to the last byte
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_args)] | None = None
    session_id: Annotated[str, AfterValidator(_session_id)] | None = None
    prompt_cache_key: str | None = Field(None, min_length=1, max_length=1024)
    cache_salt: str | None = Field(None, max_length=256)
    tool_choice: Any = None
    function_call: Any = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = Field(None, max_length=8)
    truncation: Literal["auto", "disabled"] | None = None
    keep_first_tokens: int | None = Field(None, ge=0, le=1 << 24)
    client_shift: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatCompletionRequest":
        if self.tool_choice not in (None, "none"):
            raise _unsupported("tool_choice", "'tool_choice' other than \"none\" is")
        if self.function_call not in (None, "none"):
            raise _unsupported("function_call", "'function_call' other than \"none\" is")
        if self.response_format is not None and self.response_format.type != "text":
            raise _unsupported("response_format", "'response_format' other than text is")
        if self.modalities not in (None, [], ["text"]):
            raise _unsupported("modalities", "'modalities' other than [\"text\"] is")
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("combination", "'stream_options' is only allowed when 'stream' is true")
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("combination", "'top_logprobs' needs 'logprobs' to be true")
        if self.min_tokens is not None and self.answer_tokens is not None and self.min_tokens > self.answer_tokens:
            raise PydanticCustomError("combination", "'min_tokens' is greater than the largest answer asked for")
        return self

    @property
    def answer_tokens(self) -> int | None:
        """The longest answer asked for; the newer field wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @classmethod
    def ignored(cls, body: dict[str, Any]) -> list[str]:
        """Names in `body` that are accepted and have no effect here, in the order sent: fields nobody knows, and
        hints that change no answer (`store`, `verbosity`, `prompt_cache_retention` ...). Null says nothing."""
        known = cls.model_fields.keys() | cls.refused
        return [name for name, value in body.items() if value is not None and name not in known]
