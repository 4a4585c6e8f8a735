"""The bodies of vLLM's /tokenize and /detokenize."""

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from reprise.app.schemas.chat import Messages, TemplateArgs, settled_chat
from reprise.app.schemas.completions import MAX_PROMPT_IDS
from reprise.app.schemas.fields import Part, TokenId
from reprise.app.schemas.tools import MAX_TOOLS, Tool


class TokenizeRequest(Part):
    """A text, or the messages of a chat."""

    model: str | None = Field(None, min_length=1, max_length=512)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArgs | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    return_token_strs: bool | None = None

    @classmethod
    def settled(cls, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        return settled_chat(body, cls.ignored(body))

    @model_validator(mode="after")
    def _check_one_is_given(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("combination", "Send either 'prompt' or 'messages'")
        return self


class DetokenizeRequest(Part):
    model: str | None = Field(None, min_length=1, max_length=512)
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS)]
