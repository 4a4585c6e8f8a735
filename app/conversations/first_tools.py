"""Keeps lists of tools in the order of keys in which a tenant first sent them.

A client may write the same tools with their keys in another order: after a restart, or because it keeps them in a set.
The template would render another text, and all that follows in the prompt would be computed again.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable

from reprise.app.conversations.offered import MAX_LIST_BYTES, Offered, Tools, key_of

MAX_BYTES = 32 << 20  # all remembered lists
_BYTES_PER_CHAR = 8  # bytes for each character of a list's JSON: it is remembered as objects and as text

Find = Callable[[bytes], Awaitable[Tools | None]]


class FirstTools:
    """A memory of lists of tools, each with the keys of its JSON objects in the order in which a tenant first sent it.
    To be used by one thread. A list that the memory no longer has, for example after a restart, is looked up in the
    transcripts, which keep a list as long as a session that was recorded with it."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, Offered] = OrderedDict()  # least recently used first
        self.num_bytes = 0

    async def first_seen(self, tenant: str, tools: Tools, find: Find) -> Offered:
        """Return the tools with the keys of their JSON objects in the order in which this tenant first sent equal
        tools. A list longer than MAX_LIST_BYTES is returned as it is. find: looks up a list in the transcripts, by the
        key of `key_of`."""
        key, num_bytes = key_of(tools, tenant=tenant)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        if num_bytes > MAX_LIST_BYTES:
            return Offered.of(tools, tenant=tenant)
        kept = await find(key)
        if (known := self._known.get(key)) is not None:  # another request came first meanwhile
            return known
        offered = Offered.of(tools, tenant=tenant)
        if kept is not None and (again := Offered.of(kept, tenant=tenant)).key == key:
            offered = again
        self._known[key] = offered
        self.num_bytes += _BYTES_PER_CHAR * num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _BYTES_PER_CHAR * self._known.popitem(last=False)[1].num_bytes
        return offered
