"""Defines the interface by which a tier chooses what to evict."""

from collections.abc import Callable, Collection, Container, Hashable, Sequence
from typing import Protocol

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BlockRow
from reprise.cache.returns.return_times import ReturnTimes


class EvictionPolicy(Protocol):
    """A ranking of one tier's blocks for eviction. Holds keys, never bytes. Each tier's ledger calls it on the engine's
    thread; it is pure.

    The times at which sessions are expected back are computed once for all tiers, by the `ReturnTimes` given to a
    policy's factory. A policy that judges by past touches alone ignores them. It also ignores sessions, the queue and
    the newcomer (the session whose block needs the room): it always admits a newcomer and spares no queued session.
    """

    def touch(self, key: BlockKey) -> None:
        """Record that a block has entered the tier or was used."""
        ...

    def remove(self, key: BlockKey) -> None:
        """Record that the block has left the tier. Raises KeyError if it was not there."""
        ...

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        """Record that the block stands at `place` of the session's context, counted in blocks from the head, instead of
        the block that stood there before. Idempotent. A block may have several owners, and may be owned before it
        enters the tier and after it has left."""
        ...

    def forget(self, session: Hashable) -> None:
        """Remove a session that was deleted or has expired from its blocks' owners. An unknown session is ignored."""
        ...

    def look_ahead(self, upcoming: Sequence[Hashable], changed: Collection[Hashable] | None = None) -> None:
        """Set the sessions that have a turn in the queue, next first, each once. The policy keeps the sequence, which
        must not change afterwards. changed: the sessions that are in only one of this sequence and that of the call
        before; None: the policy finds them by comparison.

        Best called without the running turns. Their blocks are pinned anyway, and the blocks they add serve the
        session's next return. If running turns are named, their new blocks count as queued and push out sessions that
        are not queued, however late they return. This costs hits, but nothing else: a rotation of sessions with half of
        the room it needs then hits 42 % instead of 50 %.
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
        """Choose up to `count` unpinned blocks, first to leave first. Changes nothing.

        newcomer: the session whose block needs room; only blocks that should leave before a block of this session are
        returned. If they are fewer than `count`, that block had better not enter the tier. Only DRAM passes it.
        spare_queued: whether blocks of the sessions given to `look_ahead` stay, because a block that leaves the last
        tier is lost (AttentionStore §3.3.2). Only the disk passes it.
        """
        ...


PolicyFactory = Callable[[ReturnTimes], EvictionPolicy]
"""Makes the policy of one tier. All policies of a hierarchy share the ReturnTimes."""


def enter(policy: EvictionPolicy, row: BlockRow) -> None:
    """Tell a policy that a block has entered its tier, and first which sessions own it: a block that enters without
    owners is ranked as if no session owned it."""
    if row.place is not None:
        for owner in row.owners:
            policy.own(row.key, owner, row.place)
    policy.touch(row.key)
