"""Models that the answers of several endpoints share: errors, usage, and what was reused."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Fields that clients may rely on. There may be more."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    error: ErrorDetail


class AnthropicErrorDetail(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    type: Literal["error"]
    error: AnthropicErrorDetail


class Diverged(Answer):
    """The place where a request left the conversation that it was expected to continue, and why."""

    message: int | None = Field(description="index of the request's message; null: the place is in no message")
    role: str | None = Field(description="that message's role")
    where: str = Field(description="what differs, such as `content`, `tools[3].parameters`, `model`")
    token: int = Field(description="number of the prompt's leading tokens that are as recorded")
    sentence: str = Field(description="the reason, for people; its words may change")


class CacheUse(Answer):
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


class AnswerTimings(Answer):
    """Milliseconds; null if the engine did not report a time."""

    queue_ms: float | None = Field(description="from the arrival in the engine to the first step")
    load_ms: float | None = Field(description="loading KV into HBM")
    prefill_ms: float | None = Field(description="from the first step to the first token")
    ttft_ms: float | None = Field(description="from the arrival to the first token")
    decode_ms: float | None = Field(description="from the first token to the last")
    tokens_per_s: float | None = Field(description="tokens after the first, by `decode_ms`")


class PromptDetails(Answer):
    cached_tokens: int


class CompletionDetails(Answer):
    reasoning_tokens: int
    accepted_prediction_tokens: int = Field(description="of `prediction`, that were drafted and right")
    rejected_prediction_tokens: int = Field(description="of `prediction`, that were drafted in vain")


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class DeletedObject(Answer):
    id: str
    object: str
    deleted: bool


class InputTokens(Answer):
    input_tokens: int
