"""Models of the answers, for the API description. Answers are built as plain dicts; tests compare them with these."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    """Fields that clients may rely on. There may be more."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Answer):
    error: ErrorDetail


class AnthropicErrorDetail(_Answer):
    type: str
    message: str


class AnthropicError(_Answer):
    type: Literal["error"]
    error: AnthropicErrorDetail


class Diverged(_Answer):
    """The place where a request left the conversation that it was expected to continue, and why."""

    message: int | None = Field(description="index of the request's message; null: the place is in no message")
    role: str | None = Field(description="that message's role")
    where: str = Field(description="what differs, such as `content`, `tools[3].parameters`, `model`")
    token: int = Field(description="number of the prompt's leading tokens that are as recorded")
    sentence: str = Field(description="the reason, for people; its words may change")


class CacheUse(_Answer):
    """The prompt's tokens by where their KV came from. hbm + dram + disk + redis + computed tokens add up to the prompt
    in the window."""

    session_id: str = Field(description="the conversation that the request was found to be")
    resumed: bool = Field(
        description="another server of the fleet began the answer: the tokens and times are those with which it began"
    )
    hbm_tokens: int = Field(description="prompt tokens whose KV was in HBM")
    dram_tokens: int = Field(description="prompt tokens whose KV was loaded from DRAM")
    disk_tokens: int = Field(description="prompt tokens whose KV was loaded from disk")
    redis_tokens: int = Field(
        description="prompt tokens whose KV was loaded from Redis, where another server had left it"
    )
    computed_tokens: int = Field(description="prompt tokens computed now")
    history_tokens: int = Field(
        description="prompt tokens that earlier turns had computed, of this conversation or another of the same key"
    )
    truncated_tokens: int = Field(description="history tokens that are no longer in the context")
    shifted_tokens: int = Field(
        description="tokens found at another position, since the client had dropped what stood before them"
    )
    coded_tokens: int = Field(description="cached tokens whose KV has been through a lossy codec (`cache.codec`)")
    recalled_tokens: int = Field(
        description="tokens that a cut had dropped and this turn has brought back (`cache.recall`)"
    )
    codec: str = Field(
        description="codec that the KV of this conversation may go through, all but `activation` lossy; `raw`: none"
    )
    hbm_dtype: str = Field(
        description="numbers of KV in HBM (`cache.hbm_dtype`); `int8` is lossy, the others are as computed"
    )
    selected_tokens: int = Field(
        description="tokens of the answer that read a part of their context only; in a stream, in its last event"
    )
    selector: str = Field(description="what may choose that part (`selector.name`); `none`: all of it is read")
    miss_reasons: dict[str, int] = Field(description="why tokens were computed: reason to number of tokens")
    diverged_at: Diverged | None = Field(
        description="where and why the request left the recorded conversation that it seems to continue; null: it did"
        " not, or there is none"
    )
    load_ms: float | None = Field(description="how long loading the request's KV took")
    saved_ms: float | None = Field(
        description="about how much sooner the first token came than if the cached tokens had been computed, by the"
        " server's measured rates, less what loading them took; never negative"
    )
    ttft_target_ms: float | None = Field(
        description="target for the first token (`ttft_ms` of the request or its key); null: none"
    )
    ttft_target_made: bool | None = Field(
        description="whether the first token came within the target; null without one, or without a token"
    )


class AnswerTimings(_Answer):
    """Milliseconds; null if the engine did not report a time."""

    queue_ms: float | None = Field(description="from the arrival in the engine to the first step")
    load_ms: float | None = Field(description="loading KV into HBM")
    prefill_ms: float | None = Field(description="from the first step to the first token")
    ttft_ms: float | None = Field(description="from the arrival to the first token")
    decode_ms: float | None = Field(description="from the first token to the last")
    tokens_per_s: float | None = Field(description="tokens after the first, by `decode_ms`")


class PromptDetails(_Answer):
    cached_tokens: int


class CompletionDetails(_Answer):
    reasoning_tokens: int
    accepted_prediction_tokens: int = Field(description="of `prediction`, that were drafted and right")
    rejected_prediction_tokens: int = Field(description="of `prediction`, that were drafted in vain")


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatLogprob(_Answer):
    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprobs(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(_Answer):
    content: list[TokenLogprobs]
    refusal: None


class AnsweredFunction(_Answer):
    name: str
    arguments: str


class AnsweredCustom(_Answer):
    name: str
    input: str


class AnsweredCall(_Answer):
    id: str
    type: Literal["function", "custom"]
    function: AnsweredFunction | None = None
    custom: AnsweredCustom | None = None


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(_Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Answer):
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


class FunctionDelta(_Answer):
    name: str | None = None
    arguments: str


class CustomDelta(_Answer):
    name: str | None = None
    input: str


class ToolCallDelta(_Answer):
    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class ChatDelta(_Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(_Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class PromptProgress(_Answer):
    """The progress of a prompt, in chunks without choices before the first token."""

    prompt_tokens: int = Field(description="tokens of the prompt")
    read_tokens: int = Field(description="those that are read, found or computed; 0 while it waits")
    cached_tokens: int = Field(description="those that were found; while it waits, that would be found now")
    ahead: int = Field(description="requests that start before it; 0: it starts next, or is read")
    left_ms: float | None = Field(
        description="about how long the rest takes from its start on, if it is alone; null: not known yet"
    )


class ChatCompletionChunk(_Answer):
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


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(_Answer):
    """A text completion, or an event of its stream, the last of which is [DONE]."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    x_cache: CacheUse | None = None
    timings: AnswerTimings | None = None


class CachedTokens(_Answer):
    cached_tokens: int


class ResponseUsage(_Answer):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    total_tokens: int


class OutputItem(_Answer):
    id: str
    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ]


class ResponseError(_Answer):
    code: str
    message: str


class ResponseObject(_Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    tools: list[dict[str, Any]]
    usage: ResponseUsage | None
    metadata: dict[str, str]
    x_cache: CacheUse | None = None
    timings: AnswerTimings | None = None


class ResponseEvent(_Answer):
    """One event of a streamed response; the event's name is its type."""

    type: str
    sequence_number: int


class DeletedObject(_Answer):
    id: str
    object: str
    deleted: bool


class ItemList(_Answer):
    object: Literal["list"]
    data: list[OutputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ConversationObject(_Answer):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class InputTokens(_Answer):
    input_tokens: int


class MessageUsage(_Answer):
    """Token counts. `input_tokens` excludes tokens that came from the cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class ContentBlock(_Answer):
    type: Literal["text", "thinking", "tool_use"]


class AnthropicMessage(_Answer):
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


class MessageEvent(_Answer):
    """One event of a streamed message; the event's name is its type."""

    type: str


class Tokens(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(_Answer):
    prompt: str


class DefaultSampling(_Answer):
    """The parameters of a request that gives none: the model's generation_config.json, else OpenAI's defaults."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    context_length: int
    context_window: int
    max_output_tokens: int = Field(description="how much of the window to keep free for an answer; it may be longer")
    meta: dict[str, int]
    supported_parameters: list[str]
    default_sampling: DefaultSampling
    capabilities: dict[str, bool | str]
    template: dict[str, str]


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]
    models: list[Any] | None = None


class Props(_Answer):
    default_generation_settings: dict[str, int]
    total_slots: int
    model_alias: str
    modalities: dict[str, bool]


class Session(_Answer):
    id: str
    object: Literal["session"]
    tokens: int = Field(description="tokens in the context")
    truncated_tokens: int = Field(description="tokens no longer in the context")
    blocks: dict[str, int] = Field(description="blocks by tier")
    bytes: dict[str, int] = Field(description="bytes of KV by tier")
    last_used_at: float = Field(description="Unix time")
    expires_at: float | None = Field(description="Unix time; null while pinned")
    pinned: bool = Field(description="a pinned session does not expire")
    running: bool = Field(description="a request of it runs")
    title: str | None = Field(None, description="with `titles`: as PATCH has set it; null: it has none")
    first_text: str | None = Field(None, description="with `titles`: how the first message of a user begins")
    num_messages: int | None = Field(None, description="with `titles`: messages kept; null: none are")


class SessionList(_Answer):
    object: Literal["list"]
    data: list[Session]
    first_id: str | None
    last_id: str | None
    has_more: bool


class SessionMessage(_Answer):
    id: str = Field(description="its place in the conversation, from 0")
    object: Literal["session.message"]
    role: str
    content: str
    name: str | None = None
    reasoning_content: str | None = Field(None, description="the thought of an answer")
    tool_calls: list[Any] | None = Field(None, description="calls of functions, as in a chat")
    tool_call_id: str | None = None


class SessionMessageList(_Answer):
    object: Literal["list"]
    data: list[SessionMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CacheSession(Session):
    tenant: str
    cursor: str


class CacheSessionList(_Answer):
    object: Literal["list"]
    data: list[CacheSession]
    has_more: bool


class TierUse(_Answer):
    used_bytes: int
    capacity_bytes: int


class CacheStatsObject(_Answer):
    object: Literal["cache.stats"]
    mode: str
    sessions: int
    tiers: dict[str, TierUse]
    problems: dict[str, str]  # tier that is not used now -> why; "state": transcripts and responses
    prompt_tokens: dict[str, int]
    hit_rate: float | None
    hit_rates: dict[str, float | None]
    miss_tokens: dict[str, int]
    moved_bytes: dict[str, int]
    moved_seconds: dict[str, float]
    load_seconds: float
    load_wait_seconds: float
    evicted_blocks: dict[str, int]
    refused_blocks: dict[str, int]
    load_failures: dict[str, int]
    write_failures: dict[str, int]
    truncated_tokens: int
    recalled_tokens: int
    verified_loads: int
    verify_mismatches: int
    leases: int
    in_flight: int


class CacheCleared(_Answer):
    object: Literal["cache.cleared"]
    removed: int
    running: int


class Health(_Answer):
    status: Literal["ok"]
    engine: str
    # state of the circuit breaker for Redis; closed: Redis is used
    redis: Literal["closed", "open", "half_open"] | None = None
    # away: it does not answer, and is used again when it does; the last three: it is read, and nothing new is kept;
    # failing also: a file of it could not be opened, and is used after a restart
    disk: Literal["used", "away", "full", "read_only", "failing"] | None = None
    disk_problem: str | None = None  # why the disk keeps no new transcripts and responses


class FleetReplica(_Answer):
    replica: str
    url: str
    state: str  # what it says of itself
    open: bool  # gateways send it turns
    silent: bool
    drained: bool  # by an operator
    model: str
    fingerprint: str
    version: str
    running: int
    waiting: int
    wait_s: float | None  # time until a new prompt would be started
    busy: float | None  # share of the last seconds in which it computed
    sessions: int  # sessions whose home it is
    tiers: dict[str, TierUse]


class FleetRedis(_Answer):
    state: Literal["ok", "away"]
    failures: int


class FleetKv(_Answer):
    used_bytes: int
    budget_bytes: int


class Fleet(_Answer):
    object: Literal["fleet"]
    redis: FleetRedis
    kv: FleetKv | None  # the fleet's KV in Redis
    states: dict[str, int]
    replicas: list[FleetReplica]
    has_more: bool
    gateway: dict[str, Any] | None  # what a gateway has counted


class ReadyStatus(_Answer):
    status: Literal["ready"]
    model: str


class Version(_Answer):
    version: str
    wire_version: int
    python: str


class SchedulerObject(_Answer):
    object: Literal["scheduler"]
    running: int
    waiting: int
    policy: str
    front: list[dict[str, Any]]
