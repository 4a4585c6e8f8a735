"""Finds which conversation a turn continues, from its request alone: no template, no tokenizer, no transcript.

A client names its conversation, or it sends all messages again. Then a chain of digests names it: each message is
linked to the digest of those before it, and the digest up to an answer finds the session that gave the answer.

A gateway makes the chain of a request's messages and sends its last digest to the replica in `CHAIN_HEADER`, and the
session that it found, if the client named none, in `SESSION_HEADER`. Both count only beside a valid relay token. The
replica links its answer to the chain with `link_answer` and keeps the result in the directory: the conversation's next
request has that digest in its chain. For a stored response the replica keeps `response_digest` as well.

A wrong match costs one load of KV, never a wrong answer, so digests leave out what clients change on the way: empty
fields, reasoning, ids of calls, white space around a text.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from reprise.app.conversations.digests import canonical, digest
from reprise.app.http.body import mended
from reprise.app.schemas.fields import SESSION_ID
from reprise.app.schemas.offered import flat_name
from reprise.app.schemas.tools import CUSTOM_ARGUMENT
from reprise.engine.messages import salt_of

CHAIN_HEADER = "x-reprise-chain"  # digest of the request's messages, in hex
SESSION_HEADER = "x-reprise-session"  # id of the session that the directory knows for them
MAX_ANSWERS = 8  # answers of a request, from the last one back, that are looked up
CHARS_PER_TOKEN = 4  # characters of English text to a token; for predictions only

Call = tuple[str, str]  # a function's name and its arguments in JSON

_BILLING = "x-anthropic-billing-header:"  # Claude Code puts such a line first; it differs in every request
_RESPONSE, _MARK_DIGITS = "resp_", 8
_PLAIN = frozenset(("role", "content"))
_ANSWERS = frozenset(("assistant", "model"))
_THOUGHTS = frozenset(("thinking", "redacted_thinking", "reasoning"))
_CALLS = frozenset(("tool_use", "function_call", "custom_tool_call"))


class TurnBody(msgspec.Struct):
    """The fields of a turn's body that show which conversation it belongs to. Values are the client's, of any type."""

    model: Any = None
    stream: Any = None
    cache_salt: Any = None
    kv_quality: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    system: Any = None
    messages: Any = None
    input: Any = None
    prompt: Any = None
    n: Any = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """The digests of a request's messages, by which the conversation that they continue is found."""

    chain: bytes  # digest of all messages; the replica links its answer to it
    opening: bytes  # digest up to the first message of a user, which stays the same in all turns
    answers: tuple[bytes, ...]  # digests up to and with each of the last `MAX_ANSWERS` answers, the last one first
    history_chars: int  # up to and with the last answer
    new_chars: int  # after it


@dataclass(slots=True)
class _Said:
    role: str
    text: list[str]
    calls: list[Call]


_decode_body = msgspec.json.Decoder(TurnBody).decode


def read_body(body: bytes) -> TurnBody | None:
    """Return the fields of a turn's body, or None if it is not a JSON object: the replica then tells the client what is
    wrong. Lone surrogates are replaced and a byte order mark is dropped, as a replica does (`mended`)."""
    for form in (bytes, mended):
        try:
            return _decode_body(form(body))
        except (ValueError, RecursionError):
            pass
    return None


def salt_in(body: TurnBody, *, is_exact: bool = False) -> str:
    """Return the salt of a turn: a string made of `cache_salt` and of whether its KV must be exact (changed by no
    codec). Only turns with equal salts share KV. is_exact: whether the tenant's API key demands exact KV for all turns,
    whatever the body says."""
    salt = body.cache_salt if isinstance(body.cache_salt, str) else ""
    return salt_of(salt, is_exact=is_exact or body.kv_quality == "exact")


def conversation_of(body: TurnBody) -> Conversation:
    """Return how long a chat (OpenAI's or Anthropic's) or the input of a response is, and digests of how its messages
    begin, by which its session is found. Takes a few microseconds a message, and a second for a gigabyte of text."""
    # A client with another salt must not learn that somebody had the same conversation.
    salt = salt_in(body)
    chain, opening, answers, history_chars, chars = digest("conversation", salt), b"", list[bytes](), 0, 0
    if isinstance(body.previous_response_id, str):
        answers.append(response_digest(body.previous_response_id))
    try:
        for said in _merged(_messages_of(body)):
            text = "".join(said.text).strip()
            chain = _link(chain, said.role, text, said.calls)
            chars += len(text) + sum(len(arguments) for _, arguments in said.calls)
            if said.role == "user":
                opening = opening or chain
            elif said.role == "assistant":
                answers.append(chain)
                history_chars = chars
    except RecursionError:
        pass  # nested so deeply that the replica will refuse it
    return Conversation(
        chain=chain,
        opening=opening or chain,
        answers=tuple(reversed(answers[-MAX_ANSWERS:])),
        history_chars=history_chars,
        new_chars=chars - history_chars,
    )


def session_id_of(body: TurnBody, header: str | None) -> str | None:
    """Return the client's name for its conversation, if it gives one, by the rules of `reprise.app.turn.prepare`; a
    name that the replica will refuse may be returned too. header: the first of `SESSION_HEADERS` that was sent."""
    conversation = body.conversation.get("id") if isinstance(body.conversation, dict) else body.conversation
    for given in (body.session_id, header, conversation):
        if isinstance(given, str) and given:
            return given
    key = body.prompt_cache_key
    if not isinstance(key, str):
        return None
    return key if SESSION_ID.fullmatch(key) else f"key_{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def choices_of(body: TurnBody) -> int:
    """Return how many answers a turn's body asks for: `n` for each of its prompts, even if the replica will refuse that
    number."""
    n = body.n if isinstance(body.n, int) and body.n > 0 else 1
    several = isinstance(body.prompt, list) and not all(isinstance(token, int) for token in body.prompt)
    return n * len(body.prompt) if several else n


def response_digest(response_id: str) -> bytes:
    """Return the digest by which a request finds the session of the response that it names as its previous one."""
    return digest("response", response_id)


def background_id(response_id: str, replica: str) -> str:
    """Return the id of a response that runs in the background. It tells gateways at which replica the response runs:
    until it has ended, only that replica knows its state and can cancel it. response_id: the id that the response would
    have in the foreground, "resp_" and hex digits."""
    return f"{_RESPONSE}{_mark(replica)}{response_id[len(_RESPONSE) + _MARK_DIGITS :]}"


def runs_at(response_id: str, replicas: Iterable[str]) -> str | None:
    """Return the replica that a response's id names as the one at which it runs in the background; None if it names
    none of `replicas`. The id of another response may name a replica by chance."""
    given = response_id[len(_RESPONSE) :][:_MARK_DIGITS]
    return next((replica for replica in replicas if _mark(replica) == given), None)


def _mark(replica: str) -> str:
    return digest("replica", replica).hex()[:_MARK_DIGITS]


def link_answer(chain: bytes, text: str, calls: Iterable[Call] = ()) -> bytes:
    """Return the digest of the conversation extended by this answer, by which the next request will find its session.
    chain: digest of the present request's messages. text: the answer without its reasoning."""
    return _link(chain, "assistant", text.strip(), [(name, _arguments(given)) for name, given in calls])


def _link(chain: bytes, role: str, text: str, calls: list[Call]) -> bytes:
    flat = [field for call in calls for field in call]
    return digest(chain, role, text, *flat)


def _messages_of(body: TurnBody) -> Iterator[_Said]:
    if body.system:
        yield _Said("system", [text for text in _texts(body.system) if not text.startswith(_BILLING)], [])
    messages = body.messages if body.messages is not None else body.input
    if messages is None:
        messages = body.prompt
    if isinstance(messages, str):
        yield _Said("user", [messages], [])
    elif isinstance(messages, list):
        for message in messages:
            yield from _said(message)


def _said(message: Any) -> Iterator[_Said]:
    """Yield the role, texts and calls of one message, or of one item of a response's input. Yields nothing for
    reasoning."""
    if not isinstance(message, dict):
        yield _Said("user", [canonical(message)], [])
        return
    role, content = _word(message, "role"), message.get("content")
    role = "assistant" if role in _ANSWERS else role
    if role and isinstance(content, str) and message.keys() == _PLAIN:
        yield _Said(role, [content], [])  # most messages
        return
    kind = _word(message, "type")
    if kind in _CALLS:
        yield _Said("assistant", [], [_call(message)])
        return
    if kind in _THOUGHTS:
        return
    blocks = content if isinstance(content, list) else [content]
    calls = [_call(block) for block in blocks if isinstance(block, dict) and _word(block, "type") in _CALLS]
    if isinstance(given := message.get("tool_calls"), list):
        calls += [_call(call.get("function", call.get("custom"))) for call in given if isinstance(call, dict)]
    if content is None and "output" in message:
        blocks = [message["output"]]
    yield _Said(role or kind, list(_texts(blocks)), calls)


def _texts(content: Any) -> Iterator[str]:
    """Yield the text of a content, whatever its form; a part that is not text is given as JSON."""
    for block in content if isinstance(content, list) else [content]:
        if isinstance(block, str):
            yield block
        elif isinstance(block, dict):
            text, kind = block.get("text"), _word(block, "type")
            if isinstance(text, str):
                yield text
            elif kind == "tool_result":
                yield from _texts(block.get("content"))
            elif kind not in _THOUGHTS and kind not in _CALLS:
                yield canonical(block)
        elif block is not None:
            yield canonical(block)


def _call(call: Any) -> Call:
    if not isinstance(call, dict):
        return "", ""
    name, namespace = _word(call, "name"), _word(call, "namespace")
    given = call.get("arguments", call.get("input"))
    if "arguments" not in call and isinstance(given, str):
        given = {CUSTOM_ARGUMENT: given}  # a custom tool, which the model calls as a function
    return flat_name(name, namespace or None), _arguments(given)


def _word(value: dict[str, Any], field: str) -> str:
    word: object = value.get(field)
    return word if isinstance(word, str) else ""


def _arguments(given: Any) -> str:
    """Return a call's arguments as JSON in one spelling: OpenAI's clients send a string back, Anthropic's an object."""
    if isinstance(given, str):
        try:
            return canonical(json.loads(given))
        except (ValueError, RecursionError):
            return given
    return canonical(given)


def _merged(messages: Iterable[_Said]) -> Iterator[_Said]:
    """Join what adjacent messages of the assistant say into one: in a response, text and calls are items of their
    own."""
    last: _Said | None = None
    for said in messages:
        if last is not None and last.role == said.role == "assistant":
            last.text += said.text
            last.calls += said.calls
            continue
        if last is not None:
            yield last
        last = said
    if last is not None:
        yield last
