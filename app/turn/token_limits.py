"""How long a turn's prompt and answer may be."""

from dataclasses import dataclass

from app.errors import ApiError, context_length_exceeded, prompt_too_long
from app.settings.settings import LimitSettings
from engine.messages import ModelInfo


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """In tokens. `truncates` says that a full window drops the earliest history; else it refuses the prompt, and ends
    the answer."""

    window: int  # the model's
    truncates: bool
    prompt: int  # a prompt has fewer
    beyond_window: int  # an answer may be as long, where history makes room for it; 0 where it does not

    @classmethod
    def of(cls, model: ModelInfo, limits: LimitSettings, *, truncates: bool) -> "TokenLimits":
        if truncates:
            return cls(model.max_context, True, limits.prompt_tokens, limits.answer_tokens)
        return cls(model.max_context, False, model.max_context, 0)

    def too_long(self, prompt_tokens: int | None, *, param: str = "messages") -> ApiError:
        """Refuses a prompt. `prompt_tokens` None: so many that nobody counted. `param` is where they stand."""
        refusal = prompt_too_long if self.truncates else context_length_exceeded
        return refusal(self.prompt, prompt_tokens, param=param)

    def answer(self, asked: int | None, *, prompt_tokens: int) -> int:
        """The longest answer to a prompt, where the request asks for `asked` tokens at most."""
        return answer_limit(
            asked, room=self.window - prompt_tokens, window=self.window, beyond_window=self.beyond_window
        )


def answer_limit(asked: int | None, *, room: int, window: int, beyond_window: int) -> int:
    """The longest answer, in tokens, where `room` is left in the window.

    `beyond_window` is 0 where a full window ends the answer; otherwise history makes room, an answer may be as long as
    asked up to that bound, and one of no given length has at least the room that a truncation leaves for it.
    """
    if not beyond_window:
        return min(asked or room, room)
    return max(room, window // 8, 1) if asked is None else min(asked, max(room, beyond_window))
