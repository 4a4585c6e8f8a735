"""Which conversation a request goes on with, and its exact token ids.

Clients send a conversation's whole text again with every turn. Re-tokenized, an answer often gives other ids than were
generated, and the KV behind the first difference would be lost. So every answer is recorded with its ids, under a chain
of digests over the scope (tenant, model, template, tools, template arguments) and the messages. A request is matched on
its longest chain that ends in an answer of ours; the stored ids are spliced in and only what follows is tokenized.

The chain finds candidates, the rendered text decides. A candidate's prompt must be, character by character, what the
template renders in front of the answer now; of the answer only whole tokens count whose text the client sent back. So
an answer that was cut (stop button, stop string) or edited matches up to its last token in common, and the ids of a
prompt always decode to the text that the template renders, with two exceptions, kept on purpose:

- A template that renders an answer in another way than it was generated (it strips the thinking, trims white space,
  opens a thinking block in new prompts only) does not change history. An answer that came back unchanged keeps the ids
  it was generated with, and so its KV.
- Special tokens that the model generated inside an answer stay too, though its text does not show them. At its end
  they are dropped: the template writes its own end of turn.
"""

import base64
import secrets
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.conversations.known_chains import RecentChains
from app.conversations.splice import (
    GENERATED,
    Message,
    RenderedChat,
    Splice,
    TextTokenizer,
    canonical,
    common_chars,
    common_ids,
    content_of,
    cut,
    link,
    tail_of,
    without_reasoning,
)
from app.conversations.transcript_store import (
    Base,
    NewAnswer,
    PreparedPrompt,
    RecordedAnswer,
    Shifted,
    TranscriptStore,
    digest,
)
from app.text.message_bounds import MessageBounds
from app.text.template import TemplateError
from app.text.tokenizer import SHIELD, PromptTooLong

__all__ = ["PreparedPrompt", "TextTokenizer", "Transcripts"]

MAX_LOOKUPS = 512  # answers of a request, from the last one back, that are looked up
MAX_ATTEMPTS = 4  # candidates whose text is compared
MAX_STREAM_TOKENS = 1 << 18  # a conversation that a client shortens is begun anew when it is longer than that
MIN_SHIFTED_TOKENS = 128  # four blocks: a shorter rest of a conversation is computed as fast as moved
_RECENT_BYTES = 4 << 20  # of conversations whose next turn is recognised by comparing texts
_FOR_EVER_S = 1e12


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A recorded answer to the first `turn` messages of the request; messages[turn] may be that answer."""

    turn: int
    answer: RecordedAnswer
    is_exact: bool  # messages[turn] is the answer as recorded
    is_known: bool  # an answer of ours is in the request: this one, its beginning, or an earlier one


class Transcripts:
    """All tenants' conversations. Every call is synchronous and takes a few milliseconds at most, but for the text that
    `prepare` must tokenize; calls of other threads go on meanwhile, and else wait for each other.

    `now` is in seconds since the epoch, since sessions outlive the process.
    """

    def __init__(self, *, path: Path | None, max_bytes: int, ttl_s: float, max_answers_per_prompt: int) -> None:
        """In memory if `path` is None. Sessions leave `ttl_s` after their last use, and those used longest ago when the
        database would become larger than `max_bytes`."""
        self._store = TranscriptStore(path=path, max_bytes=max_bytes, max_answers_per_prompt=max_answers_per_prompt)
        self._ttl_s = ttl_s
        self._bounds = MessageBounds(mark=secrets.token_hex(16))
        self._recent = RecentChains(max_bytes=_RECENT_BYTES)
        self._lock = threading.Lock()  # not held while a text is tokenized
        self._sentinel = secrets.token_hex(16)  # lower-case letters and digits, which no filter changes

    def prepare(
        self,
        *,
        tokenizer: TextTokenizer,
        tenant: str,
        model: str,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        template_args: dict[str, Any],
        session_id: str | None,
        now: float,
        client_shift: bool = False,
        max_tokens: int | None = None,
        max_newest_tokens: int | None = None,
    ) -> PreparedPrompt:
        """The ids of a chat request, and its session: the one given, that of the answer it goes on from, or a new one.
        With `client_shift` it may also go on from a conversation whose earliest messages the client has dropped.

        Recorded answers are found by content, whatever session they are of. `messages` must not be changed afterwards.
        Raises TemplateError, and PromptTooLong for a long text of more than `max_tokens`, or with more than
        `max_newest_tokens` in its last message, before it is tokenized as a whole; what is little longer is prepared.
        """
        with self._lock:
            text = tokenizer.render(messages, tools=tools, template_args=template_args, add_generation_prompt=True)
            scope = digest(
                "scope", tenant, model, tokenizer.template_digest, canonical(tools), canonical(template_args)
            )
            chain = self._chain(scope, messages)
            request = RenderedChat(
                tokenizer, messages, tools, template_args, text, chain, max_tokens, max_newest_tokens
            )
            return self._prepare(request, tenant, session_id, now, client_shift)

    def _prepare(
        self, request: RenderedChat, tenant: str, session_id: str | None, now: float, client_shift: bool
    ) -> PreparedPrompt:
        text, chain = request.text, request.chain
        ids: list[int] | None = None
        starts: list[int] = []
        base: Base | None = None
        first: tuple[RecordedAnswer, array[int]] | None = None
        found_session: str | None = None
        for candidate in self._candidates(request, session_id, since=now - self._ttl_s):
            answer = candidate.answer
            history = self._store.history(answer.id)
            if history is None:
                continue
            stored = history.ids
            first = first or (answer, stored)
            found_session = found_session or (answer.session_id if candidate.is_known else None)
            splice = self._splice(request, candidate)
            if splice is not None:
                tokens = len(stored) - len(answer.token_ids) + splice.kept_tokens
                rest, later = self._encode(request, splice.rest, candidate.turn + 1, known=tokens)
                ids = stored[:tokens].tolist() + rest
                starts = history.starts.tolist()
                if len(starts) == candidate.turn + 1:  # all are known up to the answer's own
                    starts += [tokens + start for start in later]
                base = Base(answer.id, answer.digest, tokens)
                break
        if ids is None and client_shift:
            shifted = self._shifted(request, tenant, session_id, now)
            if shifted is not None:
                return shifted
        if ids is None:
            ids, starts = self._encode(request, text, 0)
            if first is not None and (common := common_ids(ids, first[1])):
                base = Base(first[0].id, first[0].digest, common)
        if found_session is not None:
            self._store.touch(tenant, found_session, now=now)
        return PreparedPrompt(
            token_ids=ids,
            session_id=session_id or found_session or _new_session_id(),
            spliced_tokens=base.tokens if base is not None else 0,
            tenant=tenant,
            chain=chain[-1],
            chars=len(text),
            text_digest=digest(text),
            base=base,
            starts=tuple(starts),
            tail=tail_of(request, len(request.messages) - 1),
            answered=_answered(request),
        )

    def _shifted(self, request: RenderedChat, tenant: str, session_id: str | None, now: float) -> PreparedPrompt | None:
        """Leading system messages and the last whole messages of a recorded conversation, and what follows them.

        The answer before the new messages finds the conversation, the number of messages tells what was dropped, and
        the ids that are left must decode to the text rendered: no less is taken for it than for any other prompt.
        """
        tokenizer, messages = request.tokenizer, request.messages
        lead = next((n for n, message in enumerate(messages) if message.get("role") != "system"), len(messages))
        turn = max((n for n, message in enumerate(messages) if message.get("role") == "assistant"), default=0)
        if turn <= lead:  # no message in front of the answer is left to know it by
            return None
        tail = link(tail_of(request, turn - 1), without_reasoning(messages[turn]))
        for answer in self._store.find_tails(tail=tail, session_id=session_id, since=now - self._ttl_s):
            history = self._store.history(answer.id)
            first = len(history.starts) - (turn + 1 - lead) if history is not None else 0
            splice = self._splice_answer(request, turn, answer) if first > lead else None
            if history is None or splice is None:
                continue
            known = len(history.ids) - len(answer.token_ids) + splice.kept_tokens
            resume = history.starts[first]
            if known - resume < MIN_SHIFTED_TOKENS or known > MAX_STREAM_TOKENS:
                continue
            rest, later = self._encode(request, splice.rest, turn + 1, known=known - resume)
            stream = history.ids[:known].tolist() + rest
            starts = (*history.starts, *(known + start for start in later))
            # Without a system prompt one token may stand in front of the first message: the text's own beginning.
            for keep in (history.starts[lead],) if lead else (0, 1):
                ids = stream[:keep] + stream[resume:]
                if tokenizer.decode(ids, skip_special_tokens=False) == request.text.replace(SHIELD, ""):
                    break
            else:
                continue
            chain = answer.chain
            for message in messages[turn + 1 :]:
                chain = link(chain, message)
            self._store.touch(tenant, answer.session_id, now=now)
            return PreparedPrompt(
                token_ids=ids,
                session_id=session_id or answer.session_id,
                spliced_tokens=keep + known - resume,
                tenant=tenant,
                chain=chain,
                chars=0,  # the whole was not rendered, so no request is taken for its continuation by its text
                text_digest=digest("not rendered"),
                base=Base(answer.id, answer.digest, known),
                starts=(*starts[:lead], *(start - resume + keep for start in starts[first:])),
                tail=tail_of(request, len(messages) - 1),
                shift=Shifted(stream, starts, keep, resume),
            )
        return None

    def _splice_answer(self, request: RenderedChat, turn: int, answer: RecordedAnswer) -> Splice | None:
        """What of the recorded answer is kept where the request has it, and the text behind that."""
        message = request.messages[turn]
        others = {name: value for name, value in message.items() if name not in GENERATED}
        marked = [*request.messages[:turn], {**others, "content": self._sentinel}, *request.messages[turn + 1 :]]
        try:
            _, *tails = request.render(marked).split(self._sentinel)
        except TemplateError:
            return None
        if len(tails) != 1 or not request.text.endswith(tails[0]):
            return None
        return cut(request.tokenizer, answer, len(answer.text), answer.text, tails[0])

    def _encode(self, request: RenderedChat, rest: str, first: int, *, known: int = 0) -> tuple[list[int], list[int]]:
        """The ids of `rest`, with which the request's text ends, and where in them messages[first:] and then the answer
        begin; nowhere if the template does not show it. `known` tokens of the prompt stand in front of them. Raises
        PromptTooLong."""
        tokenizer = request.tokenizer
        bounds = self._bounds.find(
            request.text, request.messages, first=first, render=request.render, template=tokenizer.template_digest
        )
        start = len(request.text) - len(rest)
        marks = [max(0, bound - start) for bound in bounds or ()]
        newest = request.text[bounds[-2] : bounds[-1]] if bounds is not None and len(bounds) > 1 else ""
        self._lock.release()
        try:
            if request.max_newest_tokens is not None and tokenizer.exceeds(newest, request.max_newest_tokens):
                raise PromptTooLong(request.max_newest_tokens)
            if request.max_tokens is not None and tokenizer.exceeds(rest, max(0, request.max_tokens - known)):
                raise PromptTooLong(request.max_tokens)
            return tokenizer.encode_marked(rest, marks, behind=first > 0)
        finally:
            self._lock.acquire()

    def record(
        self,
        prompt: PreparedPrompt,
        *,
        answer: Message,
        token_ids: Sequence[int],
        text: str,
        text_ends: Sequence[int],
        now: float,
    ) -> None:
        """Remember an answer: `answer` is the message as the client will send it back, `text` what `token_ids` said; it
        may end before they do, where a stop string cut it. `text_ends` has an entry per token."""
        bare = without_reasoning(answer)
        new = NewAnswer(
            chain=link(prompt.chain, answer),
            bare=link(prompt.chain, bare),
            tail=link(prompt.tail, bare),
            token_ids=array("I", token_ids),
            text=text,
            ends=array("I", text_ends),
        )
        with self._lock:
            self._store.add(prompt, new, now=now)

    def keep(self, session_id: str, *, tenant: str, ttl_s: float | None) -> None:
        """What a tenant has recorded under this id, with or without salts, leaves that long after its last use; None:
        only when there is no room."""
        with self._lock:
            self._store.extend(session_id, tenant=tenant, extra_s=_FOR_EVER_S if ttl_s is None else ttl_s - self._ttl_s)

    def forget(self, session_id: str, *, tenant: str | None = None) -> int:
        """Delete what was recorded under this id by a tenant, with or without salts of its own ("tenant/salt"), or by
        all tenants if None. What other sessions recorded on from it, they have copies of. Returns how many sessions."""
        with self._lock:
            return self._store.forget(session_id, tenant=tenant)

    def sweep(self, now: float) -> int:
        """Remove expired sessions, a bounded number per call. Returns how many."""
        with self._lock:
            return self._store.sweep(before=now - self._ttl_s)

    def used_bytes(self) -> int:
        with self._lock:
            return self._store.used_bytes()

    def close(self) -> None:
        with self._lock:
            self._store.close()

    def _chain(self, scope: bytes, messages: list[Message]) -> list[bytes]:
        """[messages + 1]: digest of the scope and the first n messages."""
        turn = next((n for n in range(len(messages) - 1, 0, -1) if messages[n].get("role") == "assistant"), 0)
        known = self._recent.take(scope, messages, turn)
        chain = [scope] if known is None else known[:]
        for message in messages[len(chain) - 1 :]:
            chain.append(link(chain[-1], message))
        self._recent.add(messages, chain, 0 if known is None else turn)
        return chain

    def _known_turns(self, request: RenderedChat) -> Iterator[int]:
        """Indices of the request's answers, the last one first, in front of which a recorded prompt ends."""
        messages = request.messages
        turns = [n for n in range(len(messages) - 1, -1, -1) if messages[n].get("role") == "assistant"][:MAX_LOOKUPS]
        yield from turns[:1]  # most often it is the one, and the query for the others waits until they are asked for
        known = self._store.known_prompts([request.chain[turn] for turn in turns[1:]])
        yield from (turn for turn in turns[1:] if request.chain[turn] in known)

    def _candidates(self, request: RenderedChat, session_id: str | None, *, since: float) -> Iterator[_Candidate]:
        """Deepest first, one per turn."""
        attempts = 0
        for turn in self._known_turns(request):
            content = content_of(request.messages[turn])
            before, after = request.chain[turn : turn + 2]
            answers = self._store.find_answers(after=after, session_id=session_id, since=since)
            is_exact = bool(answers)
            if not is_exact:
                answers = self._store.find_siblings(before=before, session_id=session_id, since=since)
            if answers:
                # max() keeps the first of equals: the session's own, then the newest.
                best = max(answers, key=lambda answer: common_chars(answer.text, content))
                is_beginning = content != "" and best.text.startswith(content)
                yield _Candidate(turn, best, is_exact, is_exact or is_beginning or best.continues)
                attempts += 1
                if attempts == MAX_ATTEMPTS:
                    return

    def _splice(self, request: RenderedChat, candidate: _Candidate) -> Splice | None:
        """None if the stored ids are not those of the beginning of the request's text."""
        answer, text = candidate.answer, request.text
        start = answer.prompt_chars
        content = content_of(request.messages[candidate.turn])
        has_same_prompt = len(text) >= start and digest(text[:start]) == answer.prompt_digest
        if has_same_prompt and candidate.is_exact and text.startswith(answer.text, start):
            return cut(request.tokenizer, answer, len(answer.text), answer.text, text[start + len(answer.text) :])
        in_place: Splice | None = None
        if has_same_prompt and content and text.startswith(content, start):
            common = common_chars(answer.text, content)
            in_place = cut(request.tokenizer, answer, common, content, text[start + len(content) :])
            if not candidate.is_exact:
                return in_place
        changed = self._splice_changed(request, candidate, has_same_prompt=has_same_prompt)
        if changed is None and has_same_prompt and candidate.is_known:
            return in_place or Splice(0, text[start:])
        return changed

    def _splice_changed(self, request: RenderedChat, candidate: _Candidate, *, has_same_prompt: bool) -> Splice | None:
        """For templates that do not render an answer's text as it is: a unique word in its place shows what stands
        around it."""
        answer, turn, text = candidate.answer, candidate.turn, request.text
        message, content = request.messages[turn], content_of(request.messages[turn])
        others = {name: value for name, value in message.items() if name not in GENERATED}
        if not candidate.is_exact and any(message.get(name) for name in GENERATED if name != "content"):
            return None
        marked = [*request.messages[:turn], {**others, "content": self._sentinel}, *request.messages[turn + 1 :]]
        try:
            head, *tails = request.render(marked).split(self._sentinel)
            # A prompt may end in more than the template puts before an answer: an opened or an empty thinking block.
            if not has_same_prompt:
                prompt = request.render(request.messages[:turn])
                if digest(prompt) != answer.prompt_digest or not prompt.startswith(head):
                    return None
        except TemplateError:
            return None
        if len(tails) != 1 or (has_same_prompt and len(head) != answer.prompt_chars):
            return None
        (tail,) = tails
        end = len(text) - len(tail)
        if end < len(head) or not text.startswith(head) or not text.endswith(tail):
            return None
        if candidate.is_exact:
            return cut(request.tokenizer, answer, len(answer.text), answer.text, tail)
        shown = text[len(head) : end]
        if not (shown and answer.text.startswith(shown)) and answer.text.startswith(content):
            shown = content
        return cut(request.tokenizer, answer, common_chars(answer.text, shown), shown, tail)


def _answered(request: RenderedChat) -> bytes:
    turns = (n for n, message in enumerate(request.messages) if message.get("role") == "assistant")
    last = max(turns, default=0)
    return request.chain[last] if last else b""


def _new_session_id() -> str:
    return "sess_" + base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]
