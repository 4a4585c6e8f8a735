"""Finds how much of a recorded answer begins a chat's text, by a ladder of attempts, the best first.

Each rung takes the chat and a candidate and returns a `Splice`, or None where it does not apply. The text decides: what
is spliced in must say, character by character, what the template renders now. (The exceptions are those that
`app.conversations.transcripts` names.)
"""

from collections.abc import Callable
from dataclasses import dataclass

from app.conversations.digests import digest
from app.conversations.rendered_chat import RenderedChat
from app.conversations.splice import Splice, common_chars, cut
from app.conversations.transcript_store import RecordedAnswer
from app.text.template import TemplateError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recorded answer to the first `turn` messages of the chat; messages[turn] may be that answer."""

    turn: int
    answer: RecordedAnswer
    is_exact: bool  # messages[turn] is the answer as recorded; else it is a sibling: cut short, edited, or another one
    is_known: bool  # an answer of ours is in the chat: this one, its beginning, or an earlier one
    has_same_prompt: bool  # the chat's text begins with the very prompt that the answer was generated from


def exact(chat: RenderedChat, candidate: Candidate) -> Splice | None:
    """Keep all of an answer that stands after its prompt as it was generated."""
    answer, start = candidate.answer, candidate.answer.prompt_chars
    if not (candidate.has_same_prompt and chat.text.startswith(answer.text, start)):
        return None
    return cut(chat.tokenizer, answer, len(answer.text), answer.text, chat.text[start + len(answer.text) :])


def in_place(chat: RenderedChat, candidate: Candidate) -> Splice | None:
    """Keep an answer as far as it says the same as what the client sent back, which stands after the prompt."""
    answer, start, content = candidate.answer, candidate.answer.prompt_chars, chat.content(candidate.turn)
    if not (candidate.has_same_prompt and content and chat.text.startswith(content, start)):
        return None
    return cut(chat.tokenizer, answer, common_chars(answer.text, content), content, chat.text[start + len(content) :])


def changed(chat: RenderedChat, candidate: Candidate) -> Splice | None:
    """Keep an answer that the template renders in another way than it was generated. A placeholder shows where it
    stands."""
    answer, turn, text = candidate.answer, candidate.turn, chat.text
    if not candidate.is_exact and chat.says_more_than_content(turn):
        return None
    around = chat.around(turn)
    if around is None:
        return None
    head, tail = around
    if candidate.has_same_prompt:
        if len(head) != answer.prompt_chars:
            return None
    elif not _is_prompt_of(chat, turn, answer, head):
        return None
    end = len(text) - len(tail)
    if end < len(head) or not text.startswith(head) or not text.endswith(tail):
        return None
    if candidate.is_exact:
        return cut(chat.tokenizer, answer, len(answer.text), answer.text, tail)
    shown, content = text[len(head) : end], chat.content(turn)
    if not (shown and answer.text.startswith(shown)) and answer.text.startswith(content):
        shown = content
    return cut(chat.tokenizer, answer, common_chars(answer.text, shown), shown, tail)


def prompt_alone(chat: RenderedChat, candidate: Candidate) -> Splice | None:
    """Keep only the ids of the answer's prompt, because nothing of the answer can be kept."""
    if not (candidate.has_same_prompt and candidate.is_known):
        return None
    return Splice(0, chat.text[candidate.answer.prompt_chars :])


def shifted(chat: RenderedChat, turn: int, answer: RecordedAnswer) -> Splice | None:
    """Keep all of an answer, messages[turn], before which the client has dropped messages, wherever it stands in the
    text. The caller has to compare what stands before it."""
    around = chat.around(turn)
    if around is None or not chat.text.endswith(around[1]):
        return None
    return cut(chat.tokenizer, answer, len(answer.text), answer.text, around[1])


Rung = Callable[[RenderedChat, Candidate], Splice | None]
LADDER: tuple[Rung, ...] = (exact, changed, in_place, prompt_alone)
SIBLING_LADDER: tuple[Rung, ...] = (in_place, changed, prompt_alone)


def splice_of(chat: RenderedChat, candidate: Candidate) -> Splice | None:
    """Return the splice of the first rung that applies. None if the chat's text does not begin with the stored ids."""
    rungs = LADDER if candidate.is_exact else SIBLING_LADDER
    return next((splice for rung in rungs if (splice := rung(chat, candidate)) is not None), None)


def _is_prompt_of(chat: RenderedChat, turn: int, answer: RecordedAnswer, head: str) -> bool:
    """Whether the answer was generated from the first `turn` messages, and they are rendered as `head` now. A prompt
    may end in more than the template puts before an answer: an opened or an empty thinking block."""
    try:
        prompt = chat.render(chat.messages[:turn])
    except TemplateError:
        return False
    return digest(prompt) == answer.prompt_digest and prompt.startswith(head)
