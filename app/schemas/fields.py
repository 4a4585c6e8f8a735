"""Defines the parts from which all bodies are built: strict objects, and the fields of every request that generates."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from reprise.engine.messages import salt_of

MAX_TIMEOUT_S = 86_400.0
MAX_TTFT_MS = 600_000.0
# "." and ".." are excluded: clients remove them from URLs, so such a session could not be deleted.
# Headers in which clients name a conversation: ours (OpenCode uses it too), Codex's, Claude Code's.
SESSION_HEADERS = ("x-session-id", "session-id", "x-claude-code-session-id")
SESSION_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:\-]{1,128}")
SESSION_ID_RULE = "1 to 128 letters, digits, '.', '_', ':' or '-', and neither '.' nor '..'"
ELSEWHERE = frozenset({"thread", "previous_interaction_id", "previous_message_id", "container"})
"""Fields that name a conversation or a place that another server keeps. A request without it would lose its context."""
BOUNDS = frozenset(
    {"response_format", "structured_outputs", "output_config", "output_format", "json_schema", "regex", "ebnf"}
    | {"format", "grammar", "guided_choice", "guided_decoding", "guided_grammar", "guided_json", "guided_regex"}
    | {"stop", "stop_sequences", "stop_token_ids", "bad_words", "allowed_token_ids"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens"}
)
"""Fields by which APIs and servers bound what an answer may be, and where it ends. A program that sends one relies on
it, so an endpoint that does not know it refuses the request."""
FORM_BOUNDS = BOUNDS | {
    *("additional_properties", "disable_additional_properties", "disable_any_whitespace", "whitespace_pattern"),
    *("choice", "choices", "enum", "pattern", "structural_tag", "structures", "triggers"),
}
"""Fields by which an object that describes the form of an answer says more of this form. Such an object that does not
know one refuses it."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The words for how much a model is to think, from the least to the most."""
_NO_EFFORT = ("auto", "default")  # words that leave it to the model
MAX_SCHEMA_BYTES = 65_536
MAX_SCHEMA_DEPTH = 32


def unsupported(param: str, what: str) -> PydanticCustomError:
    """Return the validation error for something that this server does not support. param: the field, relative to the
    place where the error is raised."""
    return PydanticCustomError("unsupported", "{what} not supported by this server", {"param": param, "what": what})


class TextPart(BaseModel):
    """A text in a message whose content is a list of parts. Only for the API description: `joined_text` parses it."""

    type: Literal["text", "input_text", "output_text"]
    text: str


def joined_text(value: object, kinds: frozenset[str] = frozenset({"text"})) -> object:
    """Join a list of text parts into one string, one part a line; return any other value as it is. kinds: the types of
    parts that count as text. Raises PydanticCustomError for another part."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content_part", "Each content part is an object with a 'type'")
        if kind not in kinds:
            raise unsupported("", f"Content of type {kind[:40]!r} is")
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content_part", "A text part has a string 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _token_bias(value: object) -> object:
    """Convert the string keys of a JSON object, which must be plain token ids."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
        raise PydanticCustomError("logit_bias", "Keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def is_finite(value: object) -> bool:
    """Return whether all numbers of a decoded JSON value are finite, and all integers lie within an i64."""
    if isinstance(value, dict):
        return all(is_finite(item) for item in value.values())
    if isinstance(value, list):
        return all(is_finite(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) < 1 << 63


def plain_numbers(value: Any) -> Any:
    """Return a decoded JSON value in which integers beyond 64 bits are floats, as many JSON parsers read them, since
    answers cannot contain larger integers. Raises PydanticCustomError for a number that is not finite."""
    if isinstance(value, dict):
        return {name: plain_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        value = float(value) if abs(value) < 1 << 1023 else math.inf
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("json_schema", "Numbers must be finite")
    return value


def is_deeper(value: object, levels: int, *, but: Sequence[object] = ()) -> bool:
    """Return whether objects and lists are nested more than `levels` deep. Works level by level, without recursion.
    but: objects and lists whose inside is not counted."""
    passed = {id(one) for one in but}
    layer = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        if not layer:
            return False
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if (type(inner) is dict or type(inner) is list) and id(inner) not in passed
        ]
    return bool(layer)


def too_deep_schema() -> PydanticCustomError:
    """Return the validation error for a schema that is nested too deeply."""
    return PydanticCustomError("json_schema", "A schema has at most {depth} levels", {"depth": MAX_SCHEMA_DEPTH})


def _json_schema(value: dict[str, Any]) -> dict[str, Any]:
    if is_deeper(value, MAX_SCHEMA_DEPTH):  # first, because the other checks recurse
        raise too_deep_schema()
    value = plain_numbers(value)
    if len(msgspec.json.encode(value)) > MAX_SCHEMA_BYTES:
        raise PydanticCustomError("json_schema", "A schema has at most {size} bytes", {"size": MAX_SCHEMA_BYTES})
    return value


def _session_id(value: str) -> str:
    if not SESSION_ID.fullmatch(value):
        raise PydanticCustomError("session_id", SESSION_ID_RULE)
    return value


def _effort(value: object) -> object:
    """Convert the words that leave it to the model how much to think."""
    return None if value in _NO_EFFORT else value


Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    BeforeValidator(
        _effort,
        json_schema_input_type=Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "auto", "default"]
        | None,
    ),
]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
SessionId = Annotated[str, AfterValidator(_session_id)]
JsonSchema = Annotated[dict[str, Any], AfterValidator(_json_schema)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class Part(BaseModel):
    """A body, or an object in one. Unknown fields are accepted; `ignored` names them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    # Fields that clients send with an empty value, but whose other values would change the meaning.
    refused: ClassVar[frozenset[str]] = frozenset()
    converted: ClassVar[frozenset[str]] = frozenset()  # further names that are read before the fields are
    read_as: ClassVar[Mapping[str, type[BaseModel]]] = {}  # what kinds of objects `converted` names
    may_be_marked: ClassVar[bool] = False  # whether `important` may be set in this part

    @model_validator(mode="before")
    @classmethod
    def _check_nothing_is_lost(cls, value: object) -> object:
        if isinstance(value, dict):
            for name in (cls.refused & value.keys()) - cls.model_fields.keys():
                if value[name] not in (None, [], False):  # an empty object asks for the defaults
                    raise unsupported(name, f"'{name}' is")
            if not cls.may_be_marked and value.get("important") not in (None, False):
                problem = 'Marks stand in a message, as "x_cache": {"important": true}'
                raise PydanticCustomError("misplaced", problem, {"param": "important"})
        return value

    @classmethod
    def settled(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the body in the form that the fields take, and the names of everything in it that has no effect. The
        history is made readable (`reprise.app.schemas.past`)."""
        return body, cls.ignored(body)

    @classmethod
    def ignored(cls, body: dict[str, Any]) -> list[str]:
        """Return the names of the body's fields that have no effect, in the order sent: unknown fields, and hints that
        change no answer (`verbosity` ...). Null values are not reported."""
        known = cls.model_fields.keys() | cls.refused
        return [name for name, value in body.items() if value is not None and name not in known]


def _thinking(value: object) -> object:
    """Convert true and false, and a type alone."""
    if isinstance(value, bool):
        return {"type": "enabled" if value else "disabled"}
    return {"type": value} if isinstance(value, str) else value


class ThinkingOptions(Part):
    """The value of `thinking`. A budget has no effect, and a type such as "adaptive" leaves it to the model."""

    type: str = Field("", max_length=64)

    @property
    def is_on(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


Thinking = Annotated[ThinkingOptions, BeforeValidator(_thinking, json_schema_input_type=bool | str | ThinkingOptions)]


class StreamOptions(Part):
    include_usage: bool = False
    include_progress: bool = False
    include_obfuscation: bool | None = None


def _seconds(value: object) -> object:
    """Convert "30m" to 1800.0; OpenAI writes times to live in this form."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", value)
    if found is None:
        raise PydanticCustomError("ttl", "A number and one of s, m, h, d, such as '30m'")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


class CacheOptions(Part):
    """The value of `prompt_cache_options`."""

    ttl: Annotated[float | None, BeforeValidator(_seconds, json_schema_input_type=float | str | None)] = Field(
        None, gt=0, le=1e9
    )


class GenerationRequest(Part):
    """The fields that chat and text completions share. A null means the default."""

    model: str | None = Field(None, min_length=1, max_length=512, description="default: the model that is served")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    min_tokens: int | None = Field(
        None, ge=0, le=1 << 31, description="the answer does not end before this many tokens"
    )
    best_of: Literal[1] | None = None
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None,
        BeforeValidator(_token_bias, json_schema_input_type=dict[str, float] | None),
    ] = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]] | None,
        BeforeValidator(one_or_many, json_schema_input_type=str | list[str] | None),
    ] = Field(None, max_length=16)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=128)
    ignore_eos: bool | None = Field(None, description="the answer goes on past the model's end of text")
    skip_special_tokens: bool | None = Field(None, description="false: special tokens are shown")
    include_stop_str_in_output: bool | None = Field(
        None, description="true: the stop string that ended the answer is shown"
    )
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None,
        description="`flex`, for side calls such as titles: half the usual share of the engine, and the key's other "
        "requests of the next two minutes go first; `priority`: four times the usual share",
    )
    priority: int | None = Field(
        None,
        ge=-100,
        le=100,
        description="each step below 0 doubles the share of the engine asked for, each step above halves it; four "
        "times the usual share at most; with less than the usual share the key's other requests go first, as with "
        "`flex`",
    )
    ttft_ms: float | None = Field(
        None,
        gt=0,
        le=MAX_TTFT_MS,
        description="target for the first token, in milliseconds from the arrival: moves the request forward among its "
        "key's; `x_cache` says whether it was made; default: the key's `ttft_ms`, except for side calls",
    )
    timeout: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_S,
        description="seconds from the arrival to the last byte, then 408; also as the header `X-Request-Timeout`",
    )
    session_id: SessionId | None = Field(
        None,
        description=f"names the conversation: {SESSION_ID_RULE}; default: the header `X-Session-ID`, then "
        "`prompt_cache_key`, then the conversation with the same messages",
    )
    prompt_cache_key: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="names the conversation where neither `session_id` nor `X-Session-ID` does",
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="`24h`: how long the session is kept after this turn"
    )
    prompt_cache_options: CacheOptions | None = Field(
        None, description="`ttl`: how long the session is kept after this turn, such as `30m`"
    )
    cache_salt: str | None = Field(
        None, max_length=256, description="cached KV is shared only with requests of the same salt"
    )
    kv_quality: Literal["exact", "default"] | None = Field(
        None,
        description="`exact`: use and leave no KV that has been through a lossy codec (`cache.codec`), and read "
        "whole contexts (`selector.name`); exact requests share KV among themselves; 400 with `cache.hbm_dtype` int8",
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="a full window: `auto` drops the earliest history, `disabled` answers 400; default: "
        "`cache.truncation`, which is `disabled` for requests with tools unless it is set",
    )
    keep_first_tokens: int | None = Field(
        None, ge=0, le=1 << 24, description="leading tokens that a truncation keeps; default: the system prompt"
    )

    @property
    def salt(self) -> str:
        """A string made of `cache_salt` and of whether `kv_quality` is exact. Only requests with equal salts share
        KV."""
        return salt_of(self.cache_salt or "", is_exact=self.kv_quality == "exact")

    @model_validator(mode="after")
    def _check_generation(self) -> "GenerationRequest":
        if self.min_tokens is not None and self.answer_tokens is not None and self.min_tokens > self.answer_tokens:
            raise PydanticCustomError("combination", "'min_tokens' is greater than the token limit of the answer")
        return self

    @property
    def answer_tokens(self) -> int | None:
        """The longest answer requested, in tokens."""
        return self.max_tokens

    @property
    def answer_logprobs(self) -> int | None:
        """The number of likeliest tokens wanted for each token of the answer; None: no log-probabilities."""
        return None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def include_progress(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_progress

    @property
    def keep_s(self) -> float | None:
        """Seconds that the session is to be kept after its last use; None: as long as others."""
        if self.prompt_cache_options is not None and self.prompt_cache_options.ttl is not None:
            return self.prompt_cache_options.ttl
        return 86_400.0 if self.prompt_cache_retention == "24h" else None
