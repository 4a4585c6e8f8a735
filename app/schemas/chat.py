"""The chat request: every field's type, range and size. `prepare`, `sampling` and `token_limits` in `reprise.app.turn`
implement their meaning, and `reprise.app.text.grammars`."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from reprise.app.schemas.fields import (
    BOUNDS,
    ELSEWHERE,
    Effort,
    GenerationRequest,
    Part,
    TextPart,
    Thinking,
    is_finite,
    joined_text,
    unsupported,
)
from reprise.app.schemas.offered import settled_tools
from reprise.app.schemas.past.chat import chat_messages
from reprise.app.schemas.past.parts import Losses
from reprise.app.schemas.tools import (
    MAX_TOOLS,
    TOOL_KINDS,
    CallId,
    Choices,
    GivenSchema,
    LarkGrammar,
    Regex,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolCall,
    ToolChoice,
)

MAX_MESSAGES = 4096
MAX_TEMPLATE_ARGS_BYTES = 16_384

# Template arguments that the server sets; clients must not.
_RESERVED_TEMPLATE_ARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


def _template_args(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := _RESERVED_TEMPLATE_ARGS.intersection(value):
        raise PydanticCustomError("template_args", "{name} is set by the server", {"name": min(reserved)})
    if not is_finite(value) or len(msgspec.json.encode(value)) > MAX_TEMPLATE_ARGS_BYTES:
        raise PydanticCustomError("template_args", "Too large, or not plain JSON")
    return value


class CacheMark(Part):
    """`x_cache` of a message: hints for the cache, which the model does not see."""

    may_be_marked = True

    important: bool = Field(False, description="a truncation keeps this message")


class Message(Part):
    refused = frozenset({"function_call", "audio", "refusal"})

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(joined_text, json_schema_input_type=str | list[TextPart])]
    name: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: CallId | None = None
    x_cache: CacheMark | None = Field(
        None, description="what the cache is to know about the message; the model does not see it"
    )

    @model_validator(mode="before")
    @classmethod
    def _check_content(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("role") == "assistant" and value.get("content") is None:
            return {**value, "content": ""}
        return value

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        if self.role == "function":
            raise unsupported("role", "The role 'function' is")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError(
                "role", "Only an assistant's message can have tool calls", {"param": "tool_calls"}
            )
        if self.tool_call_id is not None and self.role != "tool":
            raise PydanticCustomError("role", "Only a tool's message can answer a call", {"param": "tool_call_id"})
        return self

    def as_rendered(self) -> dict[str, Any]:
        """Return the message for the chat template. `developer` is the newer name of `system`."""
        rendered: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.name is not None:
            rendered["name"] = self.name
        if self.reasoning_content:
            rendered["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            rendered["tool_calls"] = [call.as_rendered() for call in self.tool_calls]
        if self.tool_call_id is not None:
            rendered["tool_call_id"] = self.tool_call_id
        return rendered


class PlainMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message with only a role and a text. It stands for a `Message` in a request, because it is parsed much
    faster."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: ClassVar[None] = None
    reasoning_content: ClassVar[None] = None
    tool_calls: ClassVar[None] = None
    x_cache: ClassVar[None] = None

    def as_rendered(self) -> dict[str, Any]:
        """Return the message for the chat template, as `Message.as_rendered` does."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


_PLAIN = Annotated[list[PlainMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


def _messages(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Validate plain messages all at once, which is ten times faster: every turn brings a history of hundreds. If any
    message is not plain, or wrong, the pydantic model validates them and reports errors."""
    try:
        return msgspec.convert(value, _PLAIN)
    except msgspec.ValidationError:
        return validate(value)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), WrapValidator(_messages)]
TemplateArgs = Annotated[dict[str, Any], AfterValidator(_template_args)]


def settled_chat(body: dict[str, Any], ignored: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return a body with `messages` and `tools` in the form that the schema takes, and the names of all parts that have
    no effect. ignored: names that are known already."""
    losses = Losses(ignored)
    if "messages" in body:
        body = {**body, "messages": chat_messages(body["messages"], losses)}
    return settled_tools(body, losses, TOOL_KINDS), losses.names


class Prediction(Part):
    """The text that most of the answer is expected to repeat. The engine tries its tokens as drafts, which makes the
    answer faster without changing it."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(joined_text, json_schema_input_type=str | list[TextPart])]


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions. A null means the default."""

    refused = frozenset(
        {"functions", "audio", "web_search_options", "echo", "prompt_logprobs", "use_beam_search"}
        | {"chat_template", "documents"}
        | {"previous_response_id", "conversation", *BOUNDS, *ELSEWHERE}
    )

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="the last message is the beginning of the answer, which goes on from there"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: TemplateArgs | None = Field(None, description="arguments of the model's chat template")
    reasoning_effort: Effort = Field(
        None,
        description="how much to think: `none` turns thinking off, as does `minimal` where the model's template knows "
        "on and off alone; other values are given to a template that reads them; `chat_template_kwargs` wins",
    )
    thinking: Thinking | None = Field(
        None, description="`type`: `enabled` or `disabled` turns thinking on or off where the template can"
    )
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    function_call: Any = None
    prediction: Prediction | None = Field(None, description="what most of the answer is expected to be")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's: the form of the answer")
    guided_json: GivenSchema = Field(None, description="vLLM's: a JSON schema of the answer")
    guided_regex: Regex | None = Field(None, description="vLLM's: a regular expression of the answer")
    guided_choice: Choices | None = Field(None, description="vLLM's: the answers to choose from")
    guided_grammar: LarkGrammar | None = Field(None, description="vLLM's: a Lark grammar of the answer")
    modalities: list[str] | None = Field(None, max_length=8)
    client_shift: bool | None = Field(
        None, description="serve a history that the client shortened from saved KV; default: `cache.client_shift`"
    )

    @classmethod
    def settled(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        return settled_chat(body, cls.ignored(body))

    @model_validator(mode="after")
    def _check_together(self) -> "ChatCompletionRequest":
        if self.function_call not in (None, "none"):
            raise unsupported("function_call", "'function_call' other than \"none\" is")
        if self.modalities not in (None, [], ["text"]):
            raise unsupported("modalities", "'modalities' other than [\"text\"] is")
        if self.top_logprobs is not None and not self.logprobs:
            problem = "'top_logprobs' needs 'logprobs' to be true"
            raise PydanticCustomError("combination", problem, {"param": "top_logprobs"})
        self._check_tools()
        self._check_ending()
        self._check_form()
        return self

    def _check_form(self) -> None:
        names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
        forms = [name for name in names if getattr(self, name) is not None]
        if forms and self.tool_choice is not None and self.tool_choice.must_call:
            problem = "'{form}' applies to text, but 'tool_choice' requires a call"
            raise PydanticCustomError("combination", problem, {"param": forms[0], "form": forms[0]})
        if self.response_format is not None and self.response_format.type != "text":
            forms.append("response_format")
        if len(forms) > 1:
            raise PydanticCustomError("combination", "An answer can have only one format", {"param": forms[1]})
        if forms and self.continue_final_message:  # the form would begin anew after what the client has begun
            problem = "'{form}' applies to a whole answer, and 'continue_final_message' begins one"
            raise PydanticCustomError("combination", problem, {"param": forms[0], "form": forms[0]})

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "Two tools have the same name", {"param": "tools"})
        if self.tool_choice is None or self.tool_choice.type == "none":
            return
        if not names and not self.tool_choice.must_call:
            return  # "auto", which without tools means nothing; Codex sends it when it compacts a conversation
        if not names:
            problem = "'tool_choice' requires a call, but 'tools' has none that this server can offer"
            raise PydanticCustomError("combination", problem, {"param": "tool_choice"})
        if unknown := set(self.tool_choice.names or ()).difference(names):
            problem = "'tool_choice' names {name}, which is not in 'tools'"
            raise PydanticCustomError("combination", problem, {"name": min(unknown), "param": "tool_choice"})

    def _check_ending(self) -> None:
        """Check `continue_final_message` and `add_generation_prompt`, which exclude each other. The prompt ends with
        the opening of an answer, or else with the last message left open, which must then be an assistant's text after
        another message."""
        if not self.continue_final_message:
            if self.add_generation_prompt is False:
                raise PydanticCustomError(
                    "combination",
                    "'add_generation_prompt' may be false only with 'continue_final_message'",
                    {"param": "add_generation_prompt"},
                )
            return
        last = self.messages[-1]
        if self.add_generation_prompt:
            problem = "'continue_final_message' and 'add_generation_prompt' exclude each other"
            raise PydanticCustomError("combination", problem, {"param": "continue_final_message"})
        if last.role != "assistant" or last.tool_calls or len(self.messages) < 2:
            problem = "'continue_final_message' needs a last message that is an assistant's text, and one before it"
            raise PydanticCustomError("combination", problem, {"param": "continue_final_message"})

    @property
    def answer_tokens(self) -> int | None:
        """The longest answer requested; the newer field takes precedence."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think; None if `thinking` does not say."""
        return None if self.thinking is None else self.thinking.is_on

    @property
    def custom_names(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(tool.function.name for tool in self.tools or () if tool.type == "custom")

    @property
    def has_tools(self) -> bool:
        """Whether the request is an agent's: it offers tools, or its history holds results of some."""
        return bool(self.tools) or any(message.role == "tool" for message in self.messages)

    @property
    def may_have_form(self) -> bool:
        """Whether the request has `tools`, `response_format`, `structured_outputs` or a `guided_` field, any of which
        may constrain the text of the answer."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        fields = (self.response_format, self.structured_outputs, *guided)
        return bool(self.tools) or any(field is not None for field in fields)

    @property
    def answer_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
