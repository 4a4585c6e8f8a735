"""Defines a chat request together with the text that the template makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from reprise.app.conversations.digests import REASONING, Message, canonical, digest, without_reasoning
from reprise.app.conversations.outline import Asked
from reprise.app.text.template import TemplateError

MAX_THOUGHTS = 64  # looked for in a text
_GENERATED = frozenset(("content", "tool_calls", "function_call", *REASONING))


class TextTokenizer(Protocol):
    """The part of `reprise.app.text.tokenizer.ChatTokenizer` used here."""

    special_ids: frozenset[int]
    mark_ids: frozenset[int]  # special tokens that mark calls and thoughts
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
    def encode_marked(self, text: str, marks: Sequence[int], *, follows: bool) -> tuple[list[int], list[int]]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class RenderedChat:
    tokenizer: TextTokenizer
    tenant: str
    session_id: str | None  # as the client calls it
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_args: dict[str, Any]
    text: str  # all of it, rendered
    chain: list[bytes]  # [messages + 1]: digest of the scope and the first n messages
    placeholder: str  # a word that no message holds and no template changes
    max_tokens: int | None = None  # the most that it may have
    max_newest_tokens: int | None = None  # the most that its last message may have
    asked: Asked | None = None  # the same request, to be outlined

    def render(self, messages: list[Message], opens_answer: bool = True) -> str:
        """Render other messages with the tools and template arguments of this chat. opens_answer: whether the text ends
        with the opening of a new answer. Raises TemplateError."""
        return self.tokenizer.render(
            messages, tools=self.tools, template_args=self.template_args, add_generation_prompt=opens_answer
        )

    def around(self, turn: int) -> tuple[str, str] | None:
        """Return the text before and after the content of messages[turn], which is found by rendering a placeholder in
        place of that content. None if the placeholder does not appear exactly once."""
        others = {name: value for name, value in self.messages[turn].items() if name not in _GENERATED}
        marked = {**others, "content": self.placeholder}
        try:
            parts = self.render([*self.messages[:turn], marked, *self.messages[turn + 1 :]]).split(self.placeholder)
        except TemplateError:
            return None
        return (parts[0], parts[1]) if len(parts) == 2 else None

    def around_answers(self, count: int) -> list[str] | None:
        """Return the text before, between and after the contents of all answers in messages[:count], which is found by
        rendering a placeholder in place of each, without reasoning. None if not every placeholder appears exactly
        once."""
        marked = [
            {**without_reasoning(message), "content": self.placeholder}
            if message.get("role") == "assistant"
            else message
            for message in self.messages[:count]
        ]
        answers = sum(message.get("role") == "assistant" for message in marked)
        try:
            parts = self.render(marked).split(self.placeholder)
        except TemplateError:
            return None
        return parts if len(parts) == answers + 1 else None

    def content(self, turn: int) -> str:
        content = self.messages[turn].get("content")
        return content if isinstance(content, str) else ""

    def says_more_than_content(self, turn: int) -> bool:
        """Return whether messages[turn] has calls or reasoning beside its content."""
        return any(self.messages[turn].get(name) for name in _GENERATED if name != "content")

    def hidden_thoughts(self, first: int) -> int:
        """Return how many of the thoughts in messages[first:] the template has left out of the text. Looks only for the
        first MAX_THOUGHTS, since each search may go through all of the text."""
        given = (message.get(name) for message in self.messages[first:] for name in REASONING)
        thoughts = (thought.strip() for thought in given if isinstance(thought, str))
        return sum(thought not in self.text for thought in islice(thoughts, MAX_THOUGHTS))

    def tail(self, turn: int) -> bytes:
        """Return a digest of messages[turn] and the chat's scope (tenant, model, template and tools), without the
        messages before it. By this digest a conversation is found whose beginning the client has dropped."""
        return digest("tail", self.chain[0], canonical(without_reasoning(self.messages[turn])))

    @property
    def last_answer(self) -> int:
        """The index in `messages` of the last message of the assistant. 0 if there is none; a message at index 0 does
        not count."""
        turns = range(len(self.messages) - 1, 0, -1)
        return next((turn for turn in turns if self.messages[turn].get("role") == "assistant"), 0)

    @property
    def answered(self) -> bytes:
        """The digest of the messages before the last answer (`last_answer`); empty if there is no answer."""
        last = self.last_answer
        return self.chain[last] if last else b""
