"""Tools and other constraints on an answer's form: response formats and vLLM's structured outputs."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from reprise.app.schemas.fields import (
    FORM_BOUNDS,
    MAX_SCHEMA_DEPTH,
    JsonSchema,
    Part,
    is_deeper,
    is_finite,
    plain_numbers,
    too_deep_schema,
    unsupported,
)

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
MAX_ARGUMENT_CHARS = 1 << 20
MAX_ARGUMENT_LEVELS = 64  # deepest nesting of a call's arguments that a template writes as an object
CUSTOM_ARGUMENT = "input"  # the one argument of the function that stands for a custom tool
TOOL_KINDS = frozenset({"function", "custom"})  # types of the tools that a chat can offer


def _tool_name(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError("tool_name", "A tool's name consists of printable characters")
    return value


def _arguments(value: object) -> object:
    """Convert arguments that are an object to its JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) and is_finite(value) else value


ToolName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS), AfterValidator(_tool_name)]
# In a history a name may be one that the model made up, and be joined with that of a namespace.
CalledName = Annotated[str, Field(max_length=2 * MAX_NAME_CHARS + 2)]
CallId = Annotated[str, Field(max_length=256)]
Arguments = Annotated[
    str,
    BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any]),
    Field(max_length=MAX_ARGUMENT_CHARS),
]
# Descriptions and schemas of tools are bounded by the body alone: those of a coding agent are long.
ToolSchema = Annotated[dict[str, Any], AfterValidator(plain_numbers)]


class Function(Part):
    name: ToolName
    description: str | None = None
    parameters: ToolSchema | None = None
    strict: bool | None = None


class CustomFormat(Part):
    """The form of a custom tool's input: any text, or one that follows a grammar."""

    converted = frozenset({"grammar"})

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_shape(cls, value: object) -> object:
        """A chat nests the grammar, a response does not."""
        inner = value.get("grammar") if isinstance(value, dict) else None
        return {**value, **inner} if isinstance(value, dict) and isinstance(inner, dict) else value

    @model_validator(mode="after")
    def _check_grammar(self) -> "CustomFormat":
        if self.type == "grammar" and (self.syntax is None or self.definition is None):
            raise PydanticCustomError("missing", "A grammar has a 'syntax' and a 'definition'")
        return self


class Custom(Part):
    """A tool whose input is one text. The model sees a function with one argument, `input`."""

    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None

    def as_function(self) -> dict[str, Any]:
        given: dict[str, Any] = {"type": "string"}
        said = [self.description] if self.description else []
        if self.format is not None and self.format.definition is not None:
            said.append(f"The input follows this {self.format.syntax} grammar:\n{self.format.definition}")
            if self.format.syntax == "regex":
                given["pattern"] = f"^(?:{self.format.definition})$"
        parameters = {
            "type": "object",
            "properties": {CUSTOM_ARGUMENT: given},
            "required": [CUSTOM_ARGUMENT],
            "additionalProperties": False,
        }
        return {"name": self.name, "description": "\n\n".join(said) or None, "parameters": parameters}


class Tool(Part):
    """A tool that the model may call. A custom tool has its function beside itself."""

    type: Literal["function", "custom"]
    function: Function
    custom: Custom | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, value: object) -> object:
        if not isinstance(value, dict) or not isinstance(kind := value.get("type"), str) or kind == "function":
            return value
        if kind != "custom":
            raise unsupported("type", f"A tool of type {kind[:40]!r} is")
        custom = Custom.model_validate(value.get("custom"))
        return {"type": kind, "custom": custom, "function": custom.as_function()}

    def as_rendered(self) -> dict[str, Any]:
        """Return the tool for a chat template: only the fields that were given."""
        function = self.function.model_dump(exclude_none=True)
        return {"type": "function", "function": function}


class NamedFunction(Part):
    name: ToolName


def _as_function_choice(value: object) -> object:
    """Convert the choice of a custom tool to that of the function by which the model sees it."""
    if not isinstance(value, dict) or value.get("type") != "custom":
        return value
    return {"type": "function", "function": value.get("custom")}


class AllowedTool(Part):
    converted = frozenset({"custom"})
    read_as: ClassVar[Mapping[str, type[BaseModel]]] = {"custom": NamedFunction}

    type: Literal["function"]
    function: NamedFunction

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, value: object) -> object:
        return _as_function_choice(value)


class AllowedTools(Part):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class ChosenTools(Part):
    """The value of `tool_choice`. A string stands for an object with only this type."""

    converted = frozenset({"custom"})
    read_as: ClassVar[Mapping[str, type[BaseModel]]] = {"custom": NamedFunction}

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, value: object) -> object:
        return _as_function_choice(value)

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
    name: CalledName
    arguments: Arguments


class ToolCall(Part):
    """A call in an assistant's message, as an answer returned it."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_rendered(self) -> dict[str, Any]:
        return rendered_call(self.id, self.function.name, self.function.arguments)


def rendered_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the form for chat templates. Its arguments are an object, if they are the JSON of one that a
    template can write: not nested too deeply, and without lone surrogates. Otherwise they stay a text."""
    plain = arguments.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    given: Any = plain
    try:
        value = json.loads(plain)
        if isinstance(value, dict) and not is_deeper(value, MAX_ARGUMENT_LEVELS) and is_finite(value):
            json.dumps(value, ensure_ascii=False).encode()
            given = value
    except (ValueError, RecursionError):
        pass
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


class JsonSchemaFormat(Part):
    refused = FORM_BOUNDS

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
    description: str | None = Field(None, max_length=16_384)
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    refused = FORM_BOUNDS
    converted = frozenset({"schema"})

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_schema_beside(cls, value: object) -> object:
        """Take the schema of a JSON object that stands beside its type, as llama.cpp and others have it."""
        if not isinstance(value, dict) or value.get("schema") is None:
            return value
        if value.get("type") != "json_object":
            raise unsupported("schema", "'schema' beside this type is")
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value["schema"]}}

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "Field required", {"param": "json_schema"})
        return self


def _schema_text(value: object) -> object:
    """Return a JSON schema as an object. Decodes a schema that is given as its text, which vLLM accepts too."""
    if isinstance(value, str) and len(value) <= 1 << 17:
        try:
            schema = json.loads(value)
        except ValueError:
            raise PydanticCustomError("json_schema", "Not valid JSON") from None
        except RecursionError:
            raise too_deep_schema() from None
        if is_deeper(schema, MAX_SCHEMA_DEPTH):  # before other checks, which recurse
            raise too_deep_schema()
        return schema
    return value


GivenSchema = Annotated[
    JsonSchema | None, BeforeValidator(_schema_text, json_schema_input_type=dict[str, Any] | str | None)
]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)]
Regex = Annotated[str, Field(min_length=1, max_length=16_384)]
LarkGrammar = Annotated[str, Field(min_length=1, max_length=65_536)]


class StructuredOutputs(Part):
    """vLLM's `structured_outputs`: exactly one of these fields."""

    refused = FORM_BOUNDS

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
