"""Limits how long a turn's prompt and answer may be."""

from dataclasses import dataclass

from reprise.app.errors import ApiError, context_length_exceeded, prompt_too_long
from reprise.app.settings.sections import LimitSettings
from reprise.engine.messages import ModelInfo


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The limits of prompts and answers, in tokens. truncates: whether the earliest history is dropped when the context
    window is full; otherwise a prompt that does not fit is refused, and an answer ends at the window's end."""

    window: int  # the model's window
    truncates: bool
    prompt: int  # a prompt must have fewer
    beyond_window: int  # longest answer where history makes room for it; 0 where it does not

    @classmethod
    def of(cls, model: ModelInfo, limits: LimitSettings, *, truncates: bool) -> "TokenLimits":
        if truncates:
            return cls(model.max_context, True, limits.prompt_tokens, limits.answer_tokens)
        return cls(model.max_context, False, model.max_context, 0)

    def too_long(self, prompt_tokens: int | None, *, param: str = "messages") -> ApiError:
        """Return the error for a prompt that is too long. prompt_tokens: None if it has too many to count. param: the
        request's field that holds the prompt."""
        refusal = prompt_too_long if self.truncates else context_length_exceeded
        return refusal(self.prompt, prompt_tokens, param=param)

    def answer(self, asked: int | None, *, prompt_tokens: int) -> int:
        """Return the most tokens that the answer to a prompt may have. asked: the most that the request asks for; None:
        it does not say."""
        return answer_limit(
            asked, room=self.window - prompt_tokens, window=self.window, beyond_window=self.beyond_window
        )


def answer_limit(asked: int | None, *, room: int, window: int, beyond_window: int) -> int:
    """Return the most tokens that an answer may have where `room` tokens are left in the window. asked: the most that
    the request asks for, or None.

    beyond_window: 0 if a full window ends the answer. Otherwise history is dropped to make room: a request may ask for
    up to `beyond_window` tokens, or `room` if that is more, and one that asks for nothing gets `room` or an eighth of
    the window, whichever is more.
    """
    if not beyond_window:
        return min(asked or room, room)
    return max(room, window // 8, 1) if asked is None else min(asked, max(room, beyond_window))
