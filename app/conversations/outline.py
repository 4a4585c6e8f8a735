"""Outlines a request: digests of its messages and of what else decides its prompt, short enough to keep.

By the outline of a conversation's last request a later one is compared with it, message by message
(`reprise.app.conversations.divergence`). It holds no text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from reprise.app.conversations.digests import REASONING, Message, canonical, digest, without_reasoning

MAX_OUTLINED = 2048  # leading messages of a request that are outlined
MAX_ARGUMENTS = 64  # arguments of the template that are outlined
_PART_BYTES = 4  # an explanation may be wrong once in four billion
_NO_THOUGHT = bytes(_PART_BYTES)
_MARK_BYTES = 1 + 3 * _PART_BYTES
_ROLES = ("other", "system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class Mark:
    """The outline of one message: its role, and digests of its content, of its reasoning and of all its other
    fields."""

    role: str
    content: bytes
    thought: bytes  # b"": it has none
    rest: bytes

    @property
    def said(self) -> tuple[str, bytes, bytes]:
        """The role and the digests without that of the reasoning, which clients may leave out when they send an answer
        back."""
        return self.role, self.content, self.rest


class Outline(msgspec.Struct, frozen=True, array_like=True):
    """A short record of a request and its answer by digests, to compare later requests with. It holds no text. `marks`
    has an entry for each of the first `outlined` messages, and one for the answer if it is recorded."""

    chain: bytes  # digest of the scope and of the first `outlined` messages
    outlined: int  # how many messages of the request are outlined
    model: bytes
    template: bytes
    arguments: dict[str, bytes]  # the template's: name -> digest
    tools: bytes  # their key in `reprise.app.conversations.offered`; b"": none
    packed: bytes

    @property
    def marks(self) -> list[Mark]:
        places = range(0, len(self.packed) - _MARK_BYTES + 1, _MARK_BYTES)
        return [_unpacked(self.packed[place : place + _MARK_BYTES]) for place in places]

    @property
    def answer(self) -> Mark | None:
        """The entry of the answer in `marks`; None if the answer is not recorded."""
        marks = self.marks
        return marks[-1] if len(marks) > self.outlined else None


@dataclass(frozen=True, slots=True)
class Asked:
    """The parts of a request that its outline is made of."""

    tenant: str
    model: str
    template_digest: bytes
    template_args: Mapping[str, Any]
    tools: list[dict[str, Any]] | None
    tools_key: bytes
    messages: Sequence[Message]
    chain: Sequence[bytes]  # [messages + 1]: digest of the scope and of the first n messages
    numbers: Sequence[int] | None = None  # see `reprise.app.conversations.divergence.explain`

    @property
    def opening(self) -> bytes:
        """A digest of the first message after the system prompt. Requests with one session name but different first
        messages (one that asks for a title, say) are of different conversations."""
        first = next((message for message in self.messages if message.get("role") not in ("system", "developer")), {})
        return digest("opening", canonical(without_reasoning(first)))

    @property
    def goes_on(self) -> bool:
        """Whether the request has at least two messages besides the system prompt, so that it continues something."""
        said = (message for message in self.messages if message.get("role") not in ("system", "developer"))
        return next(said, None) is not None and next(said, None) is not None

    @property
    def tail(self) -> bytes | None:
        """The digest (`tail_of`) of the last answer in the request, by which the request that this answer belongs to is
        found. None if the request has no answer."""
        turns = range(len(self.messages) - 1, 0, -1)
        turn = next((turn for turn in turns if self.messages[turn].get("role") == "assistant"), None)
        return None if turn is None else tail_of(self.tenant, self.messages[turn - 1], self.messages[turn])


def tail_of(tenant: str, before: Message, answer: Message) -> bytes:
    """Return a digest of an answer and the message before it. A later request with the same digest continues from that
    answer, even if earlier messages have changed."""
    said = (canonical(without_reasoning(message)) for message in (before, answer))
    return digest("end", tenant, *said)


def outline_of(asked: Asked, answer: Message | None = None, *, known: Outline | None = None) -> Outline:
    """Return the outline of a request, and of its answer if there is one. known: the outline of an earlier request; if
    this request begins with the messages of the earlier one, their digests are copied from `known` instead of
    computed."""
    count = min(len(asked.messages), MAX_OUTLINED)
    start, packed = 0, b""
    if known is not None and known.outlined <= count and asked.chain[known.outlined] == known.chain:
        start, packed = known.outlined, known.packed[: known.outlined * _MARK_BYTES]
    added = [*asked.messages[start:count], *([answer] if answer is not None and count < MAX_OUTLINED else ())]
    return Outline(
        chain=asked.chain[count],
        outlined=count,
        model=_short(asked.model),
        template=asked.template_digest,
        arguments={
            name[:64]: _short(canonical(value)) for name, value in sorted(asked.template_args.items())[:MAX_ARGUMENTS]
        },
        tools=asked.tools_key,
        packed=packed + b"".join(map(_packed, added)),
    )


def _packed(message: Message) -> bytes:
    role = message.get("role")
    code = _ROLES.index(role) if role in _ROLES else 0
    thought = next((message[name] for name in REASONING if message.get(name)), None)
    rest = {name: value for name, value in without_reasoning(message).items() if name not in ("role", "content")}
    return (
        bytes([code])
        + _short(canonical({"content": message.get("content") or ""}))
        + (_NO_THOUGHT if thought is None else _short(canonical(thought)))
        + _short(canonical(rest))
    )


def _unpacked(data: bytes) -> Mark:
    content, thought, rest = (data[place : place + _PART_BYTES] for place in range(1, _MARK_BYTES, _PART_BYTES))
    role = _ROLES[data[0]] if data[0] < len(_ROLES) else _ROLES[0]
    return Mark(role, content, b"" if thought == _NO_THOUGHT else thought, rest)


def _short(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_PART_BYTES).digest()
