"""Models of the answers of completions."""

from typing import Literal

from reprise.app.schemas.answers.shared import Answer, AnswerTimings, CacheUse, Usage


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(Answer):
    """A text completion, or an event of its stream, the last of which is [DONE]."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    x_cache: CacheUse | None = None
    timings: AnswerTimings | None = None
