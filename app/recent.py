"""Message lists of late, and the digests that were computed for them.

A client sends its whole conversation again with every turn. Comparing a message with the one of the turn before takes a
tenth of a microsecond; encoding and hashing it takes ten.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Key = tuple[bytes, int, str, str]


@dataclass(frozen=True, slots=True)
class _Known:
    messages: list[Message]
    chain: list[bytes]
    chars: int


class RecentChains:
    """For one thread. Holds the messages it is given, which nobody may change afterwards; `max_chars` bounds their
    text. Only messages whose fields are all strings are known: of other values, equal ones may digest differently."""

    def __init__(self, *, max_chars: int) -> None:
        self._max_chars = max_chars
        self.num_chars = 0  # held
        self._known: OrderedDict[Key, _Known] = OrderedDict()  # least recently added first

    def take(self, scope: bytes, messages: list[Message], turn: int) -> list[bytes] | None:
        """The chain of messages[:turn], turn + 1 digests, if they were added under this scope. They are known no longer
        then: the caller adds the longer list that they are the beginning of."""
        key = _key(scope, messages, turn)
        known = self._known.get(key)
        if known is None or known.messages != messages[:turn]:
            return None
        self._forget(key)
        return known.chain

    def add(self, messages: list[Message], chain: list[bytes], checked: int) -> None:
        """`chain` begins with the scope. The first `checked` messages equal those of a chain that was taken."""
        if not all(isinstance(value, str) for message in messages[checked:] for value in message.values()):
            return
        key = _key(chain[0], messages, len(messages))
        self._forget(key)
        chars = sum(len(value) for message in messages for value in message.values())
        self._known[key] = _Known(list(messages), chain, chars)
        self.num_chars += chars
        while self.num_chars > self._max_chars:
            self._forget(next(iter(self._known)))

    def _forget(self, key: Key) -> None:
        known = self._known.pop(key, None)
        self.num_chars -= known.chars if known is not None else 0


def _key(scope: bytes, messages: list[Message], count: int) -> Key:
    """Of the first `count` messages; two conversations that share it displace each other."""

    def content(index: int) -> str:
        value = messages[index].get("content") if 0 <= index < len(messages) else None
        return value if isinstance(value, str) else ""

    return scope, count, content(count - 1), content(count - 2)
