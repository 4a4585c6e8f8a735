"""Remembers recent message lists and the digests that were computed for them.

A client sends its whole conversation again with every turn. Comparing a message with the one of the turn before takes a
tenth of a microsecond; encoding and hashing it takes ten.
"""

from collections import OrderedDict
from dataclasses import dataclass

from reprise.app.conversations.digests import Message

Key = tuple[bytes, int, str, str]

_MESSAGE_BYTES = 400  # size of a message without its text: dict, string headers, role, digest
_LIST_BYTES = 400  # size of a list, its chain and its place here


@dataclass(frozen=True, slots=True)
class _Known:
    messages: list[Message]
    chain: list[bytes]
    num_bytes: int


class RecentChains:
    """A cache of the digests of message lists: for each list a chain, the digests of its first 0, 1, 2 and so on
    messages. For one thread. Keeps the messages it is given, which must not be changed afterwards; `max_bytes` bounds
    the memory that they take, as far as that can be told without looking at every object. Only messages whose fields
    are all strings are stored, because equal values of other kinds may digest differently."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0  # size of all that is held
        self._known: OrderedDict[Key, _Known] = OrderedDict()  # least recently added first

    def take(self, scope: bytes, messages: list[Message], turn: int) -> list[bytes] | None:
        """Remove and return the chain of messages[:turn], which has turn + 1 digests. None if these messages were not
        added under this scope, or were forgotten. The caller should then `add` the chain of all `messages`."""
        key = _key(scope, messages, turn)
        known = self._known.get(key)
        if known is None or known.messages != messages[:turn]:
            return None
        self._forget(key)
        return known.chain

    def add(self, messages: list[Message], chain: list[bytes], checked: int) -> None:
        """Store a list of messages with its chain, the first digest of which is the scope. checked: how many leading
        messages `take` has found, so that their fields need not be checked again."""
        if not all(isinstance(value, str) for message in messages[checked:] for value in message.values()):
            return
        key = _key(chain[0], messages, len(messages))
        self._forget(key)
        num_bytes = _LIST_BYTES + _MESSAGE_BYTES * len(messages)
        num_bytes += sum(_text_bytes(value) for message in messages for value in message.values())
        self._known[key] = _Known(list(messages), chain, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._known)))

    def _forget(self, key: Key) -> None:
        known = self._known.pop(key, None)
        self.num_bytes -= known.num_bytes if known is not None else 0


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def _key(scope: bytes, messages: list[Message], count: int) -> Key:
    """Return a key for the first `count` messages; two conversations with the same key displace each other."""

    def content(index: int) -> str:
        value = messages[index].get("content") if 0 <= index < len(messages) else None
        return value if isinstance(value, str) else ""

    return scope, count, content(count - 1), content(count - 2)
