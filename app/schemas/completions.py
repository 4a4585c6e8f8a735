"""The body of a text completion, OpenAI's older endpoint. lm-evaluation-harness uses it to score texts."""

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from reprise.app.schemas.fields import BOUNDS, ELSEWHERE, GenerationRequest, TokenId

MAX_PROMPTS = 256
MAX_PROMPT_IDS = 1 << 21

Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS)]


def _prompts(value: object) -> object:
    """Convert a text, a list of ids, or a list of either, to a list of texts or lists of ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [value]
    return value


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions. A null means the default."""

    refused = frozenset({"suffix", "prompt_logprobs", "use_beam_search", "prompt_embeds", *BOUNDS, *ELSEWHERE})

    prompt: Annotated[
        Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)],
        BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: int | None = Field(None, ge=0, le=1 << 31)
    echo: bool | None = Field(
        None, description="the answer begins with the prompt; with `logprobs` the prompt is scored"
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("combination", "'max_tokens' may be 0 only with 'echo'")
        if self.echo and self.stream and self.logprobs is not None:
            problem = "'echo' with 'logprobs' cannot be streamed: the prompt's log-probabilities come all at once"
            raise PydanticCustomError("combination", problem)
        return self

    @property
    def answer_tokens(self) -> int | None:
        """The longest answer that the request asks for; 16 if it gives none, as in OpenAI's API. For 0 it is 1: one
        token is generated and not shown."""
        return max(1, 16 if self.max_tokens is None else self.max_tokens)

    @property
    def answer_logprobs(self) -> int | None:
        return self.logprobs
