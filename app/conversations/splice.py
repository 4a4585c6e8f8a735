"""What of a recorded answer goes into a prompt again, and the digests by which conversations are found."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.conversations.transcript_store import RecordedAnswer, digest

Message = dict[str, Any]

MAX_STEPS_BACK = 8  # tokens that a cut may move back to reach a whole character
_REASONING = ("reasoning_content", "reasoning", "thinking")
GENERATED = frozenset(("content", "tool_calls", "function_call", *_REASONING))
_NEVER_RENDERED = frozenset(("annotations", "cache_control", "refusal"))
_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode  # json.dumps would build one per call


class TextTokenizer(Protocol):
    """The part of `app.text.tokenizer.ChatTokenizer` used here."""

    special_ids: frozenset[int]
    template_digest: bytes

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None,
        template_args: dict[str, Any],
        add_generation_prompt: bool,
    ) -> str: ...
    def exceeds(self, text: str, max_tokens: int) -> bool: ...
    def encode_marked(self, text: str, marks: Sequence[int], *, behind: bool) -> tuple[list[int], list[int]]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class RenderedChat:
    tokenizer: TextTokenizer
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_args: dict[str, Any]
    text: str  # all of it, rendered
    chain: list[bytes]  # [messages + 1]: digest of the scope and the first n messages
    max_tokens: int | None = None  # it may have
    max_newest_tokens: int | None = None  # its last message may have

    def render(self, messages: list[Message], opens_answer: bool = True) -> str:
        return self.tokenizer.render(
            messages, tools=self.tools, template_args=self.template_args, add_generation_prompt=opens_answer
        )


@dataclass(frozen=True, slots=True)
class Splice:
    """The request's text is that of the stored ids kept, and `rest`."""

    kept_tokens: int  # of the answer, behind its prompt
    rest: str


def cut(tokenizer: TextTokenizer, answer: RecordedAnswer, limit: int, shown: str, tail: str) -> Splice:
    """Keep the answer's whole tokens within its first `limit` characters, which begin `shown`."""
    ids, ends = answer.token_ids, answer.ends
    if limit == len(answer.text) and (not ends or ends[-1] <= limit):
        tokens = len(ids)
        while tokens and ids[tokens - 1] in tokenizer.special_ids:
            tokens -= 1
        if tokenizer.decode(ids[:tokens], skip_special_tokens=True) == answer.text:
            return Splice(tokens, shown[limit:] + tail)
    # A token after which no more text was complete may hold the first bytes of the next character: the first token that
    # completed the text is the one to end with. It may hold such bytes as well; then its decoded text tells.
    count = bisect_right(ends, limit)
    for _ in range(MAX_STEPS_BACK):
        complete = ends[count - 1] if count else 0
        if complete == 0:
            break
        tokens = bisect_left(ends, complete) + 1
        if tokenizer.decode(ids[:tokens], skip_special_tokens=True) == answer.text[:complete]:
            return Splice(tokens, shown[complete:] + tail)
        count = tokens - 1
    return Splice(0, shown + tail)


def link(chain: bytes, message: Message) -> bytes:
    return digest("message", chain, canonical(message))


def tail_of(request: RenderedChat, last: int) -> bytes:
    """Of the scope and one message."""
    return digest("tail", request.chain[0], canonical(without_reasoning(request.messages[last])))


def without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in _REASONING}


def canonical(value: Any) -> str:
    """JSON with sorted keys. Fields that say nothing are left out of every object: clients add and drop them."""
    return _ENCODE(_without_empty(value))


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        if all(type(item) is str for item in value.values()) and _NEVER_RENDERED.isdisjoint(value):
            return value  # nothing to leave out: most messages
        return {
            name: _without_empty(item)
            for name, item in value.items()
            if name not in _NEVER_RENDERED and item is not None and item != [] and item != {}
        }
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value


def content_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def common_chars(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_ids(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
