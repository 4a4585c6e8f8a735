"""Finds how much of a recorded answer begins a chat's text, by a ladder of attempts, the best first.

Each rung takes the chat and a candidate and returns a `Splice`, or None where it does not apply. The text decides: what
is spliced in must say, character by character, what the template renders now. (The exceptions are those that
`reprise.app.conversations.transcripts` names.)
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reprise.app.conversations.digests import digest
from reprise.app.conversations.rendered_chat import RenderedChat, TextTokenizer
from reprise.app.conversations.transcript_store import RecordedAnswer
from reprise.app.text.template import TemplateError

MAX_STEPS_BACK = 8  # tokens that a cut may move back to reach a whole character


@dataclass(frozen=True, slots=True)
class Splice:
    """A division of the request's text into a first part, for which the stored ids of a recorded answer and its prompt
    are used, and `rest`, which is tokenized."""

    kept_tokens: int  # number of the answer's tokens that are kept
    rest: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recorded answer to the first `turn` messages of the chat, which the request may continue. messages[turn] may be
    that answer."""

    turn: int
    answer: RecordedAnswer
    is_exact: bool  # messages[turn] is the answer as recorded; else it is a sibling: cut short, edited, or another one
    is_known: bool  # an answer of ours is in the chat: this one, its beginning, or an earlier one
    has_same_prompt: bool  # the chat's text begins with the very prompt that the answer was generated from


def exact(chat: RenderedChat, candidate: Candidate) -> Splice | None:
    """Keep the whole answer, if it stands in the chat's text right after the answer's prompt, exactly as it was
    generated. Returns None otherwise."""
    answer, start = candidate.answer, candidate.answer.prompt_chars
    if not (candidate.has_same_prompt and chat.text.startswith(answer.text, start)):
        return None
    return cut(chat.tokenizer, answer, len(answer.text), answer.text, chat.text[start + len(answer.text) :])


def in_place(chat: RenderedChat, candidate: Candidate) -> Splice | None:
    """Keep the beginning that the recorded answer has in common with the content that the client has sent back, if this
    content stands right after the answer's prompt in the chat's text. Returns None otherwise."""
    answer, start, content = candidate.answer, candidate.answer.prompt_chars, chat.content(candidate.turn)
    if not (candidate.has_same_prompt and content and chat.text.startswith(content, start)):
        return None
    return cut(chat.tokenizer, answer, common_chars(answer.text, content), content, chat.text[start + len(content) :])


def changed(chat: RenderedChat, candidate: Candidate) -> Splice | None:
    """Keep an answer that the template now renders differently from how it was generated. The answer's place in the
    text is found by rendering a placeholder. Returns None if that place cannot be found, if the text before it does not
    stand for the answer's prompt, or if messages[turn] is not the answer as recorded and has calls or reasoning."""
    answer, turn, text = candidate.answer, candidate.turn, chat.text
    if not candidate.is_exact and chat.says_more_than_content(turn):
        return None
    around = chat.around(turn)
    if around is None:
        return None
    head, tail = around
    if candidate.has_same_prompt:
        if candidate.is_exact:
            # A thought in front of its content is of the answer too. The prompt may have opened it, the placeholder
            # hides it, and the template may write an empty one instead.
            head = head[: answer.prompt_chars]
        elif len(head) != answer.prompt_chars:
            return None
    elif not _is_prompt_of(chat, turn, answer, head):
        return None
    end = len(text) - len(tail)
    least = answer.prompt_chars if candidate.has_same_prompt else len(head)
    if end < least or not text.startswith(head) or not text.endswith(tail):
        return None
    if candidate.is_exact:
        return cut(chat.tokenizer, answer, len(answer.text), answer.text, tail)
    shown, content = text[len(head) : end], chat.content(turn)
    if not (shown and answer.text.startswith(shown)) and answer.text.startswith(content):
        shown = content
    return cut(chat.tokenizer, answer, common_chars(answer.text, shown), shown, tail)


def prompt_alone(chat: RenderedChat, candidate: Candidate) -> Splice | None:
    """Keep only the ids of the answer's prompt, because nothing of the answer can be kept. Returns None if the chat's
    text does not begin with that prompt, or if no recorded answer is in the chat, not even an earlier one."""
    if not (candidate.has_same_prompt and candidate.is_known):
        return None
    return Splice(0, chat.text[candidate.answer.prompt_chars :])


def shifted(chat: RenderedChat, turn: int, answer: RecordedAnswer) -> Splice | None:
    """Keep the whole answer messages[turn] in a chat from whose beginning the client has dropped messages. The text
    before the answer is not checked here; the caller has to do that. Returns None if the template does not show where
    the answer stands."""
    around = chat.around(turn)
    if around is None or not chat.text.endswith(around[1]):
        return None
    return cut(chat.tokenizer, answer, len(answer.text), answer.text, around[1])


Rung = Callable[[RenderedChat, Candidate], Splice | None]
LADDER: tuple[Rung, ...] = (exact, changed, in_place, prompt_alone)
SIBLING_LADDER: tuple[Rung, ...] = (in_place, changed, prompt_alone)


def splice_of(chat: RenderedChat, candidate: Candidate) -> Splice | None:
    """Return the splice of the first attempt (of `LADDER` or `SIBLING_LADDER`) that applies. None if none does: then
    the answer's stored ids cannot be used."""
    rungs = LADDER if candidate.is_exact else SIBLING_LADDER
    return next((splice for rung in rungs if (splice := rung(chat, candidate)) is not None), None)


def _is_prompt_of(chat: RenderedChat, turn: int, answer: RecordedAnswer, head: str) -> bool:
    """Return whether the answer was generated from the first `turn` messages, and `head` stands for the same prompt
    now. A prompt may end in more than the template puts before an answer: an opened or an empty thinking block. And the
    template may show less of earlier answers by now: the thoughts of an agent's steps, once a user has said more."""
    try:
        prompt = chat.render(chat.messages[:turn])
    except TemplateError:
        return False
    if digest(prompt) != answer.prompt_digest:
        return False
    return prompt.startswith(head) or _shows_other_answers_alone(chat, turn, prompt)


def _shows_other_answers_alone(chat: RenderedChat, turn: int, prompt: str) -> bool:
    """Return whether the template writes the same around the answers before messages[turn] as in `prompt`, which it
    made of the messages before that. Where it does, only what it shows of these answers differs, and the ids with which
    they were generated stand for them. Where it does not, the prompt has changed: a template may move the tools to the
    newest message of a user, or count the messages."""
    then, now = chat.around_answers(turn), chat.around_answers(len(chat.messages))
    if then is None or now is None:
        return False
    is_same = all(before.startswith(after) for before, after in zip(then, now, strict=False))
    return is_same and prompt.startswith(now[0]) and chat.text.startswith(now[0])


def cut(tokenizer: TextTokenizer, answer: RecordedAnswer, limit: int, shown: str, tail: str) -> Splice:
    """Return the splice that keeps the tokens that lie wholly in the first `limit` characters of the answer. shown: the
    text that stands for the answer in the chat; its first `limit` characters are the answer's. tail: the chat's text
    after `shown`."""
    ids, ends = answer.token_ids, answer.ends
    if limit == len(answer.text) and (not ends or ends[-1] <= limit):
        tokens, endings = len(ids), tokenizer.special_ids - tokenizer.mark_ids
        while tokens and ids[tokens - 1] in endings:
            tokens -= 1
        # A mark at the end closes a call, unless the template writes it after every answer.
        if tokens and ids[tokens - 1] in tokenizer.mark_ids and tail.startswith(_text_of(tokenizer, ids[tokens - 1])):
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


def _text_of(tokenizer: TextTokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def common_chars(a: str, b: str) -> int:
    """Return how many characters two texts have in common at their beginnings."""
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
