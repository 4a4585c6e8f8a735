"""Drafts prompts: their last part is still text.

A draft is made while the transcripts are locked, tokenized while they are not, and finished into a prompt.
"""

from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass

from reprise.app.conversations.digests import digest, link
from reprise.app.conversations.prepared_prompt import Base, PreparedPrompt, Shifted
from reprise.app.conversations.rendered_chat import RenderedChat
from reprise.app.conversations.splice import common_ids
from reprise.app.conversations.transcript_store import History, RecordedAnswer
from reprise.app.text.tokenizer import SHIELD, PromptTooLong


@dataclass(frozen=True, slots=True)
class Draft(ABC):
    """A prompt whose last part, `rest`, is still text. Call `tokenize`, and then `finish` with its result."""

    chat: RenderedChat
    session_id: str  # the prompt's session
    goes_on: str | None  # the recorded session that it continues
    known_tokens: int  # number of tokens of the prompt before `rest`
    rest: str  # the end of the chat's text, still to be tokenized
    first: int  # messages[first:] and then the answer begin in `rest`
    left: str | None  # session that it was expected to go on from whole, and does not; "": unknown; None: no such one

    def tokenize(self, bounds: list[int] | None) -> tuple[list[int], list[int]]:
        """Return (token ids of `rest`, starts). starts: the index in these ids of the first token of each of the chat's
        messages[first:], and then of the answer; empty if `bounds` is None. bounds: the character offsets in the chat's
        text at which these messages and the answer begin; None if the template does not show them. Takes seconds for
        megabytes. Raises PromptTooLong."""
        chat = self.chat
        start = len(chat.text) - len(self.rest)
        newest = chat.text[bounds[-2] : bounds[-1]] if bounds is not None and len(bounds) > 1 else ""
        if chat.max_newest_tokens is not None and chat.tokenizer.exceeds(newest, chat.max_newest_tokens):
            raise PromptTooLong(chat.max_newest_tokens)
        if chat.max_tokens is not None and chat.tokenizer.exceeds(
            self.rest, max(0, chat.max_tokens - self.known_tokens)
        ):
            raise PromptTooLong(chat.max_tokens)
        marks = [max(0, bound - start) for bound in bounds or ()]
        return chat.tokenizer.encode_marked(self.rest, marks, follows=self.first > 0)

    @abstractmethod
    def finish(self, ids: list[int], starts: list[int]) -> PreparedPrompt | None:
        """Return the prompt. ids, starts: the results of `tokenize`. None if the prompt's ids do not decode to the
        chat's text; then another draft has to be tried."""


@dataclass(frozen=True, slots=True)
class Whole(Draft):
    """A draft that tokenizes the whole text. nearest: a recorded answer that the chat may continue, and all ids up to
    the answer's end; None if there is none. If that answer is of the prompt's session, the ids with which both these
    and the tokenized text begin are not stored again: the prompt is recorded as one that continues this answer (its
    `Base`)."""

    nearest: tuple[RecordedAnswer, "array[int]"] | None  # the answer that was found, and all ids up to its end

    def finish(self, ids: list[int], starts: list[int]) -> PreparedPrompt:
        base = None
        if self.nearest is not None and (common := common_ids(ids, self.nearest[1])):
            answer, _ = self.nearest
            base = Base(answer.id, answer.digest, common)
        return _prompt(self, ids, starts, base)


@dataclass(frozen=True, slots=True)
class Continued(Draft):
    """A draft that continues a recorded answer: the stored ids that can be kept, then `rest`."""

    answer: RecordedAnswer
    history: History

    def finish(self, ids: list[int], starts: list[int]) -> PreparedPrompt:
        tokens = self.known_tokens
        all_starts = self.history.starts.tolist()
        if len(all_starts) == self.first:  # known for all messages before `rest`
            all_starts += [tokens + start for start in starts]
        base = Base(self.answer.id, self.answer.digest, tokens)
        return _prompt(self, self.history.ids[:tokens].tolist() + ids, all_starts, base)


@dataclass(frozen=True, slots=True)
class ShiftedOn(Draft):
    """A draft that continues a recorded conversation from whose beginning the client has dropped messages. It consists
    of the leading `lead` system messages, of the stored messages from number `resume_at` on, and of `rest`.

    These ids together must decode to the rendered text; otherwise `finish` returns None.
    """

    answer: RecordedAnswer
    history: History
    kept: int  # number of stored ids kept of the conversation, with those of the dropped messages
    lead: int
    resume_at: int

    def finish(self, ids: list[int], starts: list[int]) -> PreparedPrompt | None:
        chat, history, known = self.chat, self.history, self.kept
        resume = history.starts[self.resume_at]
        stream = history.ids[:known].tolist() + ids
        text = chat.text.replace(SHIELD, "")
        # Without a system prompt one token may precede the first message: the text's own beginning.
        for keep in (history.starts[self.lead],) if self.lead else (0, 1):
            left = stream[:keep] + stream[resume:]
            if chat.tokenizer.decode(left, skip_special_tokens=False) == text:
                break
        else:
            return None
        chain = self.answer.chain
        for message in chat.messages[self.first :]:
            chain = link(chain, message)
        all_starts = (*history.starts, *(known + start for start in starts))
        return PreparedPrompt(
            token_ids=left,
            session_id=self.session_id,
            spliced_tokens=keep + known - resume,
            tenant=chat.tenant,
            chain=chain,
            chars=0,  # the whole was not rendered, so no later request can match it by its text
            text_digest=digest("not rendered"),
            base=Base(self.answer.id, self.answer.digest, known),
            starts=(
                *all_starts[: self.lead],
                *(start - resume + keep for start in all_starts[self.resume_at :]),
            ),
            tail=chat.tail(len(chat.messages) - 1),
            chat=chat,
            shift=Shifted(stream, all_starts, keep, resume),
        )


def _prompt(draft: Draft, ids: list[int], starts: list[int], base: Base | None) -> PreparedPrompt:
    chat = draft.chat
    return PreparedPrompt(
        token_ids=ids,
        session_id=draft.session_id,
        spliced_tokens=base.tokens if base is not None else 0,
        tenant=chat.tenant,
        chain=chat.chain[-1],
        chars=len(chat.text),
        text_digest=digest(chat.text),
        base=base,
        starts=tuple(starts),
        tail=chat.tail(len(chat.messages) - 1),
        answered=chat.answered,
        chat=chat,
    )
