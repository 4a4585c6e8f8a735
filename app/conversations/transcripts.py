"""Finds the conversation that a request goes on with, and the exact token ids of its prompt.

Clients send a conversation's whole text again with every turn. Re-tokenized, an answer often gives other ids than were
generated, and the KV after the first difference would be lost. So every answer is recorded with its ids, under a chain
of digests over the scope (tenant, model, template, tools, template arguments) and the messages. A request is matched on
its longest chain that ends in an answer of ours; the stored ids are spliced in and only what follows is tokenized.

The chain finds candidates, the rendered text decides. A candidate's prompt must be, character by character, what the
template renders in front of the answer now; of the answer only whole tokens count whose text the client sent back. So
an answer that was cut (stop button, stop string) or edited matches up to its last token in common, and the ids of a
prompt always decode to the text that the template renders, with two exceptions, kept on purpose:

- A template that renders an answer in another way than it was generated (it strips the thinking, trims white space,
  opens a thinking block in new prompts only) does not change history. An answer that came back unchanged keeps the ids
  it was generated with, and so its KV. The same holds for all steps of an agent's turn, whose thoughts a template
  strips, or the client leaves out, when the next message of a user comes. What stands around the answers has to be
  rendered as it was.
- Special tokens that the model generated inside an answer stay too, though its text does not show them. At its end
  they are dropped, unless they mark a call: the template writes its own end of turn.
"""

import base64
import secrets
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reprise.app.conversations.digests import REASONING, Message, canonical, digest, link, without_reasoning
from reprise.app.conversations.divergence import Change, Divergence, explain
from reprise.app.conversations.drafts import Continued, Draft, ShiftedOn, Whole
from reprise.app.conversations.known_chains import RecentChains
from reprise.app.conversations.message_table import Chat, MessagePage
from reprise.app.conversations.offered import Offered, Tools
from reprise.app.conversations.outline import Asked, outline_of, tail_of
from reprise.app.conversations.outline_table import NewOutline
from reprise.app.conversations.prepared_prompt import PreparedPrompt
from reprise.app.conversations.rendered_chat import RenderedChat, TextTokenizer
from reprise.app.conversations.splice import Candidate, Splice, common_chars, common_ids, shifted, splice_of
from reprise.app.conversations.transcript_rows import Exported
from reprise.app.conversations.transcript_store import History, NewAnswer, RecordedAnswer, TranscriptStore
from reprise.app.state_disk import StateDisk
from reprise.app.text.message_bounds import MessageBounds
from reprise.app.text.template import TemplateError

MAX_LOOKUPS = 512  # answers of a request, from the last one back, that are looked up
MAX_ATTEMPTS = 4  # candidates whose text is compared
MAX_STREAM_TOKENS = 1 << 18  # a conversation that a client shortens is begun anew when it is longer than that
MIN_SHIFTED_TOKENS = 128  # four blocks: a shorter rest of a conversation is computed as fast as moved
EXCERPT_TOKENS = 64  # before the place where a prompt leaves its conversation, to explain it
MAX_COMPARED_TOKENS = 1 << 14  # from that place on, to find where the text differs
_KNOWN_CHAINS_BYTES = 4 << 20  # most for conversations whose next turn is recognised by comparing texts
_FOR_EVER_S = 1e12


@dataclass(frozen=True, slots=True)
class KeptChat:
    """A conversation whose messages are stored, and the time at which it expires."""

    chat: Chat
    expires_s: float | None  # unix time; None: not while there is room


class Transcripts:
    """A store of all tenants' conversations. Calls are synchronous and take a few milliseconds at most, except for the
    text that `prepare` must tokenize, and for the first one that a disk does not answer, which stops waiting after the
    disk's deadline. While `prepare` tokenizes, other threads may call; otherwise calls wait for each other. `forget`,
    `entitle`, `chats`, `messages` and `names` raise DiskAway; the others go on without what is stored.

    `now` is in seconds since the epoch, since sessions outlive the process.
    """

    def __init__(
        self,
        *,
        path: Path | None,
        max_bytes: int,
        ttl_s: float,
        max_answers_per_prompt: int,
        disk: StateDisk | None = None,
    ) -> None:
        """Keep transcripts in a file, or in memory if `path` is None. Sessions are deleted `ttl_s` after their last
        use, and those used longest ago when the database would become larger than `max_bytes`. disk: the file's.
        """
        self._store = TranscriptStore(
            path=path, max_bytes=max_bytes, max_answers_per_prompt=max_answers_per_prompt, disk=disk
        )
        self._ttl_s = ttl_s
        self._bounds = MessageBounds(mark=secrets.token_hex(16))
        self._known_chains = RecentChains(max_bytes=_KNOWN_CHAINS_BYTES)
        self._placeholder = secrets.token_hex(16)  # lower-case letters and digits, which no filter changes
        self._lock = threading.Lock()  # for all of the above; methods with an underscore are called with it held

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
        offered: Offered | None = None,
        numbers: Sequence[int] | None = None,
    ) -> PreparedPrompt:
        """Return the token ids of a chat request, and its session: the one given, that of the answer it continues, or a
        new one. With `client_shift` it may also continue a conversation whose earliest messages the client has dropped.

        Recorded answers are found by content, whatever session they are of. `messages` must not be changed afterwards.
        Raises TemplateError. Raises PromptTooLong for a long text that certainly has more than `max_tokens`, or more
        than `max_newest_tokens` in its last message. This rough test comes before tokenizing: a prompt slightly over
        these limits is prepared, and the caller has to count its ids.

        offered: the request's tools, which `tools` or a message of `messages` renders. numbers: for each
        message, the index of the client's message that it begins with, or -1. Both only help to explain why a prompt
        leaves its conversation (`diverged`).
        """
        with self._lock:
            tools_text = offered.canonical if offered is not None and tools is offered.tools else canonical(tools)
            scope = digest("scope", tenant, model, tokenizer.template_digest, tools_text, canonical(template_args))
            chain = self._chain(scope, messages)
            chat = RenderedChat(
                tokenizer=tokenizer,
                tenant=tenant,
                session_id=session_id,
                messages=messages,
                tools=tools,
                template_args=template_args,
                text=tokenizer.render(messages, tools=tools, template_args=template_args, add_generation_prompt=True),
                chain=chain,
                placeholder=self._placeholder,
                max_tokens=max_tokens,
                max_newest_tokens=max_newest_tokens,
                asked=Asked(
                    tenant=tenant,
                    model=model,
                    template_digest=tokenizer.template_digest,
                    template_args=template_args,
                    tools=offered.tools if offered is not None else tools,
                    tools_key=offered.key if offered is not None else b"",
                    messages=messages,
                    chain=chain,
                    numbers=numbers,
                ),
            )
        drafts = self._drafts(chat, since=now - self._ttl_s, client_shift=client_shift)
        while True:
            with self._lock:
                draft = next(drafts)
                bounds = self._message_bounds(draft)
            ids, starts = draft.tokenize(bounds)  # without the lock: others go on meanwhile
            if (prompt := draft.finish(ids, starts)) is not None:
                break
        if draft.left is not None:
            with self._lock:
                prompt = replace(prompt, diverged=self._why(draft, prompt, since=now - self._ttl_s))
        if draft.goes_on is not None:
            with self._lock:
                self._store.touch(tenant, draft.goes_on, now=now)
        return prompt

    def record(
        self,
        prompt: PreparedPrompt,
        *,
        answer: Message,
        token_ids: Sequence[int],
        text: str,
        text_ends: Sequence[int],
        now: float,
        messages: Sequence[Message] = (),
    ) -> None:
        """Record an answer. answer: the message as the client will send it back. text: what `token_ids` decode to,
        which a stop string may have shortened. text_ends: for each token, the number of characters complete after it.
        messages: the conversation with this answer as the client knows it, to be shown again; if empty, the stored
        messages of the session are left as they are."""
        bare = without_reasoning(answer)
        new = NewAnswer(
            chain=link(prompt.chain, answer),
            bare=link(prompt.chain, bare),
            tail=link(prompt.tail, bare),
            token_ids=array("I", token_ids),
            text=text,
            ends=array("I", text_ends),
        )
        without_thoughts = _without_thoughts(prompt, new, answer)
        with self._lock:
            self._store.add(prompt, new, now=now, outline=self._outline(prompt, answer), messages=messages)
            if without_thoughts is not None:
                self._store.add(*without_thoughts, now=now)

    def begun(self, prompt: PreparedPrompt, text: str, *, now: float) -> tuple[list[int], int]:
        """Find how an answer to this prompt was tokenized that begins as `text` does. Returns the recorded token ids of
        the most that a recorded answer has in common with it, in whole tokens, and the number of characters of `text`
        that they are: ([], 0) if there is none. What a damaged file holds may be other tokens: the caller compares."""
        with self._lock:
            answers = self._store.find_siblings(
                before=prompt.chain, session_id=prompt.session_id, since=now - self._ttl_s
            )
        best: tuple[list[int], int] = ([], 0)
        for answer in answers:
            ends = answer.ends[: len(answer.token_ids)]
            count = bisect_right(ends, common_chars(answer.text, text))
            if count and ends[count - 1] > best[1]:
                chars = ends[count - 1]
                # Without tokens after it that complete no character.
                best = answer.token_ids[: bisect_left(ends, chars) + 1].tolist(), chars
        return best

    def tools(self, key: bytes) -> Tools | None:
        """Return the stored list of tools with this key (`offered.key_of`), in the order of keys in which the tenant
        first sent it; None if there is none."""
        with self._lock:
            return self._store.tools(key)

    def keep(self, session_id: str, *, tenant: str, ttl_s: float | None) -> None:
        """Set how long the sessions that a tenant has recorded under this id, with any salt, are stored: `ttl_s` after
        their last use; None: for as long as there is room."""
        with self._lock:
            self._store.extend(session_id, tenant=tenant, extra_s=_FOR_EVER_S if ttl_s is None else ttl_s - self._ttl_s)

    @property
    def hides_file(self) -> bool:
        """Whether a file with transcripts lies there that is not used before the next start, as it could not be
        opened. What is deleted meanwhile stays in it."""
        return self._store.hides_file

    def forget(self, session_id: str, *, tenant: str | None = None) -> int:
        """Delete the sessions that were recorded under this id: those of a tenant, with any salt, or if `tenant` is
        None those of all tenants. Sessions that continued from a deleted one keep their own copies. Returns the number
        of deleted sessions."""
        with self._lock:
            return self._store.forget(session_id, tenant=tenant)

    def entitle(self, session_id: str, *, tenant: str, title: str | None) -> bool:
        """Set the title of the sessions that a tenant has recorded under this id, with any salt; None removes it.
        Returns False if none of them has stored messages, since only sessions with messages have titles."""
        with self._lock:
            return self._store.entitle(session_id, tenant=tenant, title=title) > 0

    def chats(self, tenants: tuple[str, str], *, after: str, now: float, limit: int) -> list[KeptChat]:
        """Return the conversations whose messages are stored and whose session id comes after `after`, in the order of
        these ids, at most `limit`. tenants: the domains to look in ("tenant" or "tenant/salt"), from `domains_of`."""
        with self._lock:
            found = self._store.chats(tenants, after=after, since=now - self._ttl_s, limit=limit)
        return [
            KeptChat(chat, None if chat.kept_s >= _FOR_EVER_S else chat.used_s + self._ttl_s + chat.kept_s)
            for chat in found
        ]

    def messages(
        self, tenants: tuple[str, str], session_id: str, *, after: int, now: float, limit: int
    ) -> MessagePage | None:
        """Return the stored messages of a session after the message at index `after`, at most `limit`. None if no
        messages of the session are stored, or it has expired. tenants: the domains to look in ("tenant" or
        "tenant/salt"), from `domains_of`; if several have a session of that id, it is the last used one."""
        with self._lock:
            return self._store.message_page(tenants, session_id, after=after, since=now - self._ttl_s, limit=limit)

    def export(self, session_id: str, *, tenant: str, after: int, most: int) -> Exported:
        """Return the answers of a session that were recorded after the one with the id `after`, each encoded as a row
        that other servers can `adopt`: at most the newest `most`. tenant: with the salt, if there is one."""
        with self._lock:
            return self._store.export(session_id, tenant=tenant, after=after, most=most)

    def adopt(self, session_id: str, rows: Mapping[bytes, bytes], *, tenant: str, now: float, after: int) -> int:
        """Record the answers of a session that other servers have exported. rows: digest of an answer -> its encoded
        row. after: id of the newest answer that this server has exported. Returns the id to give as `after` to the next
        `export`."""
        with self._lock:
            return self._store.adopt(session_id, rows, tenant=tenant, now=now, after=after)

    def names(self) -> list[tuple[str, str]]:
        """Return (tenant with its salt, session id) of all sessions."""
        with self._lock:
            return self._store.names()

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
        """Return [messages + 1] digests, the nth of the scope and the first n messages."""
        turn = next((n for n in range(len(messages) - 1, 0, -1) if messages[n].get("role") == "assistant"), 0)
        known = self._known_chains.take(scope, messages, turn)
        chain = [scope] if known is None else known[:]
        for message in messages[len(chain) - 1 :]:
            chain.append(link(chain[-1], message))
        self._known_chains.add(messages, chain, 0 if known is None else turn)
        return chain

    def _outline(self, prompt: PreparedPrompt, answer: Message) -> NewOutline | None:
        asked = None if prompt.chat is None else prompt.chat.asked
        if asked is None or not asked.messages:
            return None
        known = self._store.known_outline(asked, session_id=prompt.session_id)
        return NewOutline(
            asked=asked,
            outline=outline_of(asked, answer, known=known),
            tail=tail_of(asked.tenant, asked.messages[-1], answer),
            why=prompt.diverged,
        )

    def _why(self, draft: Draft, prompt: PreparedPrompt, *, since: float) -> Divergence | None:
        """Explain why the prompt leaves the recorded request that it was expected to go on from. None if there is no
        such request, or the prompt does go on from it."""
        chat, asked = draft.chat, draft.chat.asked
        found = None if asked is None else self._store.find_outline(asked, session_id=draft.left, since=since)
        history = None if found is None else self._store.history(found[0])
        if asked is None or found is None or history is None:
            return None
        was, now = found[1], outline_of(asked)
        token, end = common_ids(prompt.token_ids, history.ids), len(history.ids)
        while end and history.ids[end - 1] in chat.tokenizer.special_ids:
            end -= 1
        if token >= min(end, len(prompt.token_ids)) and was.model == now.model:
            return None
        return explain(
            was,
            now,
            was_tools=asked.tools if was.tools == now.tools else self._store.tools(was.tools),
            now_tools=asked.tools,
            change=_change(chat, prompt, history, token),
            numbers=asked.numbers,
        )

    def _message_bounds(self, draft: Draft) -> list[int] | None:
        chat = draft.chat
        template = chat.tokenizer.template_digest
        return self._bounds.find(chat.text, chat.messages, first=draft.first, render=chat.render, template=template)

    def _drafts(self, chat: RenderedChat, *, since: float, client_shift: bool) -> Iterator[Draft]:
        """Yield ways to make the chat's prompt, best first. The last one, the whole text, always succeeds."""
        nearest: tuple[RecordedAnswer, array[int]] | None = None
        goes_on: str | None = None
        for candidate in self._candidates(chat, since=since):
            answer = candidate.answer
            history = self._store.history(answer.id)
            if history is None:
                continue
            nearest = nearest or (answer, history.ids)
            goes_on = goes_on or (answer.session_id if candidate.is_known else None)
            splice = splice_of(chat, candidate)
            if splice is not None:
                yield Continued(
                    chat=chat,
                    session_id=chat.session_id or goes_on or _new_session_id(),
                    goes_on=goes_on,
                    known_tokens=len(history.ids) - len(answer.token_ids) + splice.kept_tokens,
                    rest=splice.rest,
                    first=candidate.turn + 1,
                    left=None if _keeps_all(chat, candidate, splice) else chat.session_id or nearest[0].session_id,
                    answer=answer,
                    history=history,
                )
                return
        if client_shift:
            yield from self._shifted(chat, since=since)
        yield Whole(
            chat=chat,
            session_id=chat.session_id or goes_on or _new_session_id(),
            goes_on=goes_on,
            known_tokens=0,
            rest=chat.text,
            first=0,
            left=_expected(chat, nearest[0].session_id if nearest else ""),
            nearest=nearest,
        )

    def _shifted(self, chat: RenderedChat, *, since: float) -> Iterator[ShiftedOn]:
        """Yield drafts that consist of leading system messages, the last whole messages of a recorded conversation, and
        new ones.

        The answer before the new messages finds the conversation; the number of messages tells what was dropped.
        """
        messages = chat.messages
        lead = next((n for n, message in enumerate(messages) if message.get("role") != "system"), len(messages))
        turn = max((n for n, message in enumerate(messages) if message.get("role") == "assistant"), default=0)
        if turn <= lead:  # no message before the answer is left to recognise it by
            return
        tail = link(chat.tail(turn - 1), without_reasoning(messages[turn]))
        for answer in self._store.find_tails(tail=tail, session_id=chat.session_id, since=since):
            history = self._store.history(answer.id)
            resume_at = len(history.starts) - (turn + 1 - lead) if history is not None else 0
            splice = shifted(chat, turn, answer) if resume_at > lead else None
            if history is None or splice is None:
                continue
            kept = len(history.ids) - len(answer.token_ids) + splice.kept_tokens
            known_tokens = kept - history.starts[resume_at]
            if known_tokens < MIN_SHIFTED_TOKENS or kept > MAX_STREAM_TOKENS:
                continue
            yield ShiftedOn(
                chat=chat,
                session_id=chat.session_id or answer.session_id,
                goes_on=answer.session_id,
                known_tokens=known_tokens,
                rest=splice.rest,
                first=turn + 1,
                left=None,
                answer=answer,
                history=history,
                kept=kept,
                lead=lead,
                resume_at=resume_at,
            )

    def _known_turns(self, chat: RenderedChat) -> Iterator[int]:
        """Yield the indices of the chat's answers that follow a recorded prompt, the last one first."""
        messages = chat.messages
        turns = [n for n in range(len(messages) - 1, -1, -1) if messages[n].get("role") == "assistant"][:MAX_LOOKUPS]
        yield from turns[:1]  # most often this is the one, so query for the others only when they are asked for
        known = self._store.known_prompts([chat.chain[turn] for turn in turns[1:]])
        yield from (turn for turn in turns[1:] if chat.chain[turn] in known)

    def _candidates(self, chat: RenderedChat, *, since: float) -> Iterator[Candidate]:
        """Yield recorded answers that the chat may continue, the latest first, one per turn."""
        attempts = 0
        for turn in self._known_turns(chat):
            content = chat.content(turn)
            before, after = chat.chain[turn : turn + 2]
            answers = self._store.find_answers(after=after, session_id=chat.session_id, since=since)
            is_exact = bool(answers)
            if not is_exact:
                answers = self._store.find_siblings(before=before, session_id=chat.session_id, since=since)
            if answers:
                # max() keeps the first of equals: the session's own, then the newest.
                best = max(answers, key=lambda answer: common_chars(answer.text, content))
                is_beginning = content != "" and best.text.startswith(content)
                start = best.prompt_chars
                yield Candidate(
                    turn=turn,
                    answer=best,
                    is_exact=is_exact,
                    is_known=is_exact or is_beginning or best.continues,
                    has_same_prompt=len(chat.text) >= start and digest(chat.text[:start]) == best.prompt_digest,
                )
                attempts += 1
                if attempts == MAX_ATTEMPTS:
                    return


def _expected(chat: RenderedChat, nearest: str) -> str | None:
    """Return the session that a chat is expected to go on from, for `Draft.left`. nearest: session of a recorded answer
    that was found for it, or ""."""
    if chat.last_answer:
        return chat.session_id or nearest
    return chat.session_id if chat.asked is not None and chat.asked.goes_on else None


def _keeps_all(chat: RenderedChat, candidate: Candidate, splice: Splice) -> bool:
    """Return whether a splice keeps all that is recorded of a chat: it is of the last answer, which came back whole or
    cut by the client."""
    answer, content = candidate.answer, chat.content(candidate.turn)
    is_beginning = content != "" and answer.text.startswith(content)
    is_kept = splice.kept_tokens > 0 or len(answer.token_ids) <= 1
    return candidate.turn == chat.last_answer and (candidate.is_exact or is_beginning) and is_kept


def _without_thoughts(
    prompt: PreparedPrompt, new: NewAnswer, answer: Message
) -> tuple[PreparedPrompt, NewAnswer] | None:
    """Return the end of an agent's turn as a client sends it back that leaves the thoughts of all steps out from then
    on. None if there are none, or the turn is not over."""
    chat = prompt.chat
    if chat is None or prompt.shift is not None or answer.get("tool_calls"):
        return None
    if not any(name in message for message in chat.messages for name in REASONING):
        return None
    messages = [without_reasoning(message) for message in chat.messages]
    try:
        text = chat.render(messages)
    except TemplateError:
        return None
    chain = chat.chain[0]
    for message in messages:
        chain = link(chain, message)
    bare = link(chain, without_reasoning(answer))
    return replace(prompt, chain=chain, chars=len(text), text_digest=digest(text)), replace(new, chain=bare, bare=bare)


def _change(chat: RenderedChat, prompt: PreparedPrompt, history: History, token: int) -> Change:
    """Describe the place where a prompt leaves the recorded ids, with the text around it, of one message.

    token: index of the first id that differs. The text may differ only later: what a client sends back is often
    tokenized in another way than it was generated.
    """
    first = bisect_right(prompt.starts, token) - 1
    message, begins = first, (max(0, token - EXCERPT_TOKENS, prompt.starts[first] if first >= 0 else 0),) * 2
    before = was = now = ""
    left = MAX_COMPARED_TOKENS
    while left > 0:
        ends = [_end(starts, message, len(ids)) for ids, starts in _both(prompt, history)]
        parts = [
            ids[begin : min(end, begin + left)]
            for (ids, _), begin, end in zip(_both(prompt, history), begins, ends, strict=True)
        ]
        now, was = (chat.tokenizer.decode(part, skip_special_tokens=True).rstrip("\ufffd") for part in parts)
        common = common_chars(was, now)
        before, was, now = now[:common], was[common:], now[common:]
        is_last = message < 0 or message + 1 >= min(len(prompt.starts), len(history.starts))
        if was or now or is_last:
            break
        left -= len(parts[0])
        message += 1
        begins = (prompt.starts[message], history.starts[message])
    if not (was or now):
        message, before = first, ""
    return Change(
        token=token,
        message=message if message >= 0 else None,
        before=before,
        was=was,
        now=now,
        dropped_thoughts=chat.hidden_thoughts(max(0, first)),
    )


def _both(prompt: PreparedPrompt, history: History) -> tuple[tuple[Sequence[int], Sequence[int]], ...]:
    """Return the ids and the indices at which messages begin, of the prompt and of what is recorded."""
    return (prompt.token_ids, prompt.starts), (history.ids, history.starts)


def _end(starts: Sequence[int], message: int, count: int) -> int:
    """Return the index at which a message ends, of `count` ids. A message of -1 is all of them."""
    return starts[message + 1] if 0 <= message < len(starts) - 1 else count


def _new_session_id() -> str:
    return "sess_" + base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]
