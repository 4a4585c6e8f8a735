"""Tools and other constraints on an answer's form: response formats and vLLM's structured outputs."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from reprise.app.schemas.fields import JsonSchema, Part, unsupported

MAX_TOOLS = 128
MAX_ARGUMENT_CHARS = 1 << 20
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]


class Function(Part):
    name: ToolName
    description: str | None = Field(None, max_length=16_384)
    parameters: JsonSchema | None = None
    strict: bool | None = None


class Tool(Part):
    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, value: object) -> object:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "function":
            raise unsupported("type", f"A tool of type {kind[:40]!r} is")
        return value

    def as_rendered(self) -> dict[str, Any]:
        """Return the tool for a chat template: only the fields that were given."""
        function = self.function.model_dump(exclude_none=True)
        return {"type": "function", "function": function}


class NamedFunction(Part):
    name: ToolName


class AllowedTool(Part):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Part):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class ChosenTools(Part):
    """The value of `tool_choice`. A string stands for an object with only this type."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _check_names(self) -> "ChosenTools":
        given = {"function": self.function, "allowed_tools": self.allowed_tools}
        if self.type in given and given[self.type] is None:
            raise PydanticCustomError("missing", "Field required", {"param": self.type})
        return self

    @property
    def must_call(self) -> bool:
        mode = self.allowed_tools.mode if self.type == "allowed_tools" and self.allowed_tools else self.type
        return mode in ("required", "function")

    @property
    def names(self) -> list[str] | None:
        """The names of the functions that may be called; None: all."""
        if self.type == "function" and self.function is not None:
            return [self.function.name]
        if self.type == "allowed_tools" and self.allowed_tools is not None:
            return [tool.function.name for tool in self.allowed_tools.tools]
        return None


def _word(value: object) -> object:
    if isinstance(value, str):
        return {"type": value if value in ("none", "auto", "required") else f"{value[:40]!r}"}
    return value


ToolChoice = Annotated[
    ChosenTools, BeforeValidator(_word, json_schema_input_type=Literal["none", "auto", "required"] | ChosenTools)
]


class CalledFunction(Part):
    name: ToolName
    arguments: str = Field(max_length=MAX_ARGUMENT_CHARS)


class ToolCall(Part):
    """A call in an assistant's message, as an answer returned it."""

    id: str = Field(max_length=128)
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_rendered(self) -> dict[str, Any]:
        return rendered_call(self.id, self.function.name, self.function.arguments)


def rendered_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call for chat templates, with its arguments as an object if they are valid JSON of one."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    given: Any = value if isinstance(value, dict) else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


class JsonSchemaFormat(Part):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
    description: str | None = Field(None, max_length=16_384)
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "Field required", {"param": "json_schema"})
        return self


def _schema_text(value: object) -> object:
    """Return a JSON schema as an object. Decodes a schema that is given as its text, which vLLM accepts too."""
    if isinstance(value, str) and len(value) <= 1 << 17:
        try:
            return json.loads(value)
        except ValueError:
            raise PydanticCustomError("json_schema", "Not valid JSON") from None
    return value


GivenSchema = Annotated[
    JsonSchema | None, BeforeValidator(_schema_text, json_schema_input_type=dict[str, Any] | str | None)
]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)]
Regex = Annotated[str, Field(min_length=1, max_length=16_384)]
LarkGrammar = Annotated[str, Field(min_length=1, max_length=65_536)]


class StructuredOutputs(Part):
    """vLLM's `structured_outputs`: exactly one of these fields."""

    json_: GivenSchema = Field(None, alias="json")
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: LarkGrammar | None = None

    @model_validator(mode="after")
    def _check_one_is_given(self) -> "StructuredOutputs":
        given = [value for value in self.__dict__.values() if value not in (None, False)]
        if len(given) != 1:
            raise PydanticCustomError("combination", "One of 'json', 'json_object', 'regex', 'choice', 'grammar'")
        return self
