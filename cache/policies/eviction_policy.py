"""How a tier chooses what leaves."""

from collections.abc import Callable, Collection, Container, Hashable, Sequence
from typing import Protocol

from cache.blocks.keys import BlockKey
from cache.blocks.table import BlockRow
from cache.returns.return_times import ReturnTimes


class EvictionPolicy(Protocol):
    """Ranks the blocks of one tier for eviction. Holds keys, never bytes. Single-threaded, pure. When sessions are
    expected back is worked out once for all tiers, by the `ReturnTimes` that a policy is made with. A policy that
    judges by the past alone ignores these, and what it is told of sessions, the queue and the newcomer: for it a
    newcomer is always admitted and no queued session is spared."""

    def touch(self, key: BlockKey) -> None:
        """An insert or a hit."""
        ...

    def remove(self, key: BlockKey) -> None:
        """The block has left the tier. KeyError if it was not there."""
        ...

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        """The block stands at `place` of the session's context, counted in blocks from its head; whatever stood there
        before belongs to the session no more. Idempotent. A block may have several owners, and be owned before it
        enters the tier and after it left."""
        ...

    def forget(self, session: Hashable) -> None:
        """The session is gone or expired: its blocks have one owner less. Forgives a session never heard of."""
        ...

    def look_ahead(self, upcoming: Sequence[Hashable], changed: Collection[Hashable] | None = None) -> None:
        """The sessions of queued turns, next first, each once. The sequence is kept: it must not change any more.
        changed: who has come in or gone out since the last call, None to have it found.

        Best without the turns that run already: their blocks are pinned as long as they are needed, and what they add
        is for the session's next return. Named here, they are let in before all that is not queued, whenever that is
        expected back: harmless, but a rotation through half of the room it needs then hits 42 % instead of 50.
        """
        ...

    def victims(
        self,
        count: int,
        pinned: Container[BlockKey],
        *,
        newcomer: Hashable | None = None,
        spare_queued: bool = False,
    ) -> list[BlockKey]:
        """Up to `count` blocks that are not pinned, first to leave first; changes nothing.

        newcomer: only blocks that should leave before a block of that session would. Fewer than asked, or none, means
        that the newcomer had better bypass the tier.
        spare_queued: the sessions given to `look_ahead` are exempt (AttentionStore §3.3.2: what leaves the whole
        hierarchy spares the window).
        """
        ...


PolicyFactory = Callable[[ReturnTimes], EvictionPolicy]
"""A new policy for one tier, of those of a hierarchy that share the returns."""


def enter(policy: EvictionPolicy, row: BlockRow) -> None:
    """Tell a policy that a block is in its tier now, and whose it is: that first, for by itself a block that enters
    takes its place among those that nobody owns."""
    if row.place is not None:
        for owner in row.owners:
            policy.own(row.key, owner, row.place)
    policy.touch(row.key)
