"""Evicts last what is needed next, judged by the queue and by when sessions are expected to return (AttentionStore
§3.3.2)."""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Container, Hashable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import Any

from reprise.cache.blocks.keys import BlockKey
from reprise.cache.policies.queue_line import QueueLine
from reprise.cache.returns.ranking import Ranking
from reprise.cache.returns.return_times import ReturnTimes, SessionReturn, shared_rank

_MOST_STALE_ENTRIES = 128  # most blocks or sessions with changed ranks: half a millisecond
_MOST_SUMMED_OWNERS = 8  # most owners to sum over; a prompt that all sessions begin with has thousands

_Rank = tuple[int, tuple[float, ...]]
"""The rank of a session: (1 if it is queued else 0, its rank in `ReturnTimes`). Smaller ranks leave first. Queued
sessions are ordered by their place in the queue instead, which changes too often to be part of a sorted key."""

_Entry = tuple[Any, ...]
"""A block that could be evicted next, as a tuple that sorts in order of eviction. Without a queued owner: (0, the joint
rank of its owners, block). With one: (1, -place in the queue of its owner nearest the front, 0, block). The tuple is
flat because thousands are compared."""


class _Session:
    """A live session, as the policy knows it."""

    __slots__ = ("context", "name", "rank", "resident", "returns", "waits_at")

    def __init__(self, name: Hashable, queued: bool, returns: SessionReturn) -> None:
        self.name = name
        self.returns = returns
        self.rank: _Rank = (int(queued), returns.rank)  # rank by which it is sorted in
        self.context: dict[int, BlockKey] = {}
        self.resident: list[int] = []  # ascending places in the context whose block is in the tier
        # the block under which `_at_tail` lists it; None if that must be worked out
        self.waits_at: BlockKey | None = None

    @property
    def tail(self) -> BlockKey | None:
        return self.context[self.resident[-1]] if self.resident else None


_Waiting = tuple[_Rank, _Session]
"""(rank, session) of a session whose last block in the tier is the one under which this is stored. Ranks are unique."""


class LookaheadPolicy:
    """A policy that evicts in this order: (a) blocks without a live owner, least recently touched first; (b) sessions
    that are not queued, those expected back last first (`reprise.cache.returns.return_times`), or oldest use first
    where nothing is known; (c) queued sessions, from the tail of the queue to its head.

    A session leaves tail-first. A shared block leaves only after all blocks in the tier that follow it in any owner's
    context have left (or are pinned), so what stays is always a usable prefix. Its rank combines the ranks of its
    owners, since any of them may come for it; once an owner is queued, it ranks like the owner first in line.

    A newcomer (a session whose block needs room) gets room by evicting blocks that rank before it, never blocks of its
    own session. In a rotation the newcomer is the last to return, so a tier that is too small keeps what it has instead
    of thrashing.

    Cost: an event touches only the sessions it concerns, in logarithmic time plus a short memmove; `look_ahead` touches
    the sessions that joined or left the queue. Queued sessions are kept apart from the sorted rest and sorted only as
    far as `victims` reaches them. `victims` costs what it returns plus the pinned blocks it skips. Memory: the blocks
    in the tier and the contexts of live sessions. Ownership outlives a block's stay in the tier, so that a fetched
    block knows its owners, until `forget` or until another block takes its place.
    """

    def __init__(self, returns: ReturnTimes) -> None:
        self._touched: dict[BlockKey, int] = {}  # every resident block -> number of its last touch
        self._touches = 0
        self._ownerless: dict[BlockKey, None] = {}  # resident blocks in order of their last touch, unless `_unsorted`
        self._unsorted = False
        self._sessions: dict[Hashable, _Session] = {}
        # block -> owners, with the block's place in each one's context
        self._owners: dict[BlockKey, dict[_Session, int]] = {}
        # Block -> the sessions whose last resident block it is, sorted by rank; the session that returns first is last.
        self._at_tail: dict[BlockKey, list[_Waiting]] = {}
        # Leaves have nothing resident after them in any owner's context; other blocks become leaves as those leave. The
        # value is the leaf's entry in `_order`, or None if one of its owners is queued.
        self._leaves: dict[BlockKey, _Entry | None] = {}
        self._order: Ranking[_Entry] = Ranking()
        self._stale: set[BlockKey] = set()  # blocks whose state in `_leaves` and `_order` is out of date
        self._moved: set[_Session] = set()  # sessions whose tail has changed since `_at_tail` was updated
        self._returns = returns
        returns.listen(self._returns_changed)
        self._queue = QueueLine()
        self._absent = 0  # this many sessions at the tail of the queue are known to have nothing in the tier

    # --- events -------------------------------------------------------------------------------------------------------

    def touch(self, key: BlockKey) -> None:
        entered = key not in self._touched
        self._touches += 1
        self._touched[key] = self._touches
        owners = self._owners.get(key)
        if not owners:
            self._ownerless.pop(key, None)
            self._ownerless[key] = None
        elif entered:
            for session, place in owners.items():
                self._set_resident(session, place, True)

    def remove(self, key: BlockKey) -> None:
        del self._touched[key]
        self._ownerless.pop(key, None)
        for session, place in self._owners.get(key, {}).items():
            self._set_resident(session, place, False)

    def own(self, key: BlockKey, session: Hashable, place: int) -> None:
        owner = self._sessions.get(session) or self._session(session)
        if owner.context.get(place) == key:
            return  # the usual case: most blocks enter several tiers and are owned the same in each
        if key in self._owners and owner in self._owners[key]:
            self._disown(key, owner)
        if place in owner.context:
            self._disown(owner.context[place], owner)
        owner.context[place] = key
        self._owners.setdefault(key, {})[owner] = place
        if key in self._touched:
            self._ownerless.pop(key, None)
            self._set_resident(owner, place, True)
            self._refresh(key)  # it may no longer be a leaf: the new owner may have resident blocks after it

    def forget(self, session: Hashable) -> None:
        owner = self._sessions.pop(session, None)
        if owner is None:
            return
        for place in sorted(owner.context, reverse=True):
            self._disown(owner.context[place], owner)
        self._moved.discard(owner)
        self._move(owner)  # at once, because a new session may come with the same name and rank

    def look_ahead(self, upcoming: Sequence[Hashable], changed: Collection[Hashable] | None = None) -> None:
        for name in self._queue.become(upcoming, changed):
            session = self._sessions.get(name)
            if session is not None:
                self._rerank(session)
        self._absent = 0

    def _returns_changed(self, changed: Sequence[SessionReturn]) -> None:
        for returns in changed:
            session = self._sessions.get(returns.name)
            if session is not None:
                self._rerank(session)

    def _session(self, name: Hashable) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session(name, name in self._queue, self._returns.of(name))
        return session

    def _rerank(self, session: _Session) -> None:
        """Update the rank of a session whose expected return has changed, or which has joined or left the queue."""
        before, session.rank = session.rank, (int(session.name in self._queue), session.returns.rank)
        key = session.waits_at
        if key is not None and before != session.rank:
            waiting = self._at_tail[key]
            del waiting[bisect_left(waiting, (before, session))]
            insort(waiting, (session.rank, session))
            self._refresh(key)

    def _disown(self, key: BlockKey, session: _Session) -> None:
        owners = self._owners[key]
        place = owners.pop(session)
        resident = key in self._touched
        if resident:
            self._set_resident(session, place, False)
        del session.context[place]
        if not owners:
            del self._owners[key]
            if resident:
                self._ownerless[key] = None
                self._unsorted = True
        if resident:
            self._refresh(key)  # it may have become a leaf: only this owner may have had blocks after it

    def _set_resident(self, session: _Session, place: int, resident: bool) -> None:
        """Record that a block of the session's context has entered or left the tier."""
        places = session.resident
        if resident:
            if places and place < places[-1]:
                insort(places, place)
                return
            places.append(place)
        elif place == places[-1]:
            places.pop()
        else:
            del places[bisect_left(places, place)]
            return
        # A turn adds and removes many blocks of a session in a row, so its new tail is worked out once for all of them.
        self._moved.add(session)
        if len(self._moved) > _MOST_STALE_ENTRIES:
            self._put_in_order()

    def _move(self, session: _Session) -> None:
        """Move the session's entry in `_at_tail` (block -> the sessions whose last block in the tier it is) to the
        block that is now its last, if it has one. The code is fastest for a block with a single session, which most
        have."""
        at_tail, before, after = self._at_tail, session.waits_at, session.tail
        if before == after:
            return
        session.waits_at, alone = after, None
        if before is not None:
            waiting = at_tail[before]
            if len(waiting) == 1:
                alone = at_tail.pop(before)
            else:
                del waiting[bisect_left(waiting, (session.rank, session))]
            self._stale.add(before)
        elif session.rank[0]:
            self._absent = 0
        if after is not None:
            others = at_tail.get(after)
            if others is None:
                at_tail[after] = alone or [(session.rank, session)]
            else:
                insort(others, (session.rank, session))
            self._stale.add(after)

    def _refresh(self, key: BlockKey) -> None:
        """Note that the block may have become a leaf (nothing in the tier follows it in a context), ceased to be one,
        or changed rank. Notes are collected, because an event often changes many blocks and the next event may reverse
        the change."""
        self._stale.add(key)
        if len(self._stale) > _MOST_STALE_ENTRIES:
            self._put_in_order()

    def _put_in_order(self) -> None:
        for session in self._moved:
            self._move(session)
        self._moved.clear()
        for key in self._stale:
            before = self._leaves.pop(key, None)
            after = None
            waiting = self._at_tail.get(key)
            if waiting is not None and len(waiting) == len(self._owners[key]):
                best = waiting[-1]
                after = self._leaves[key] = None if _is_queued(best) else self._unqueued(key, waiting)
            if before == after:
                continue
            if before is not None:
                self._order.remove(before)
            if after is not None:
                self._order.add(after)
        self._stale.clear()

    # --- the order of leaving -----------------------------------------------------------------------------------------

    def victims(
        self,
        count: int,
        pinned: Container[BlockKey],
        *,
        newcomer: Hashable | None = None,
        spare_queued: bool = False,
    ) -> list[BlockKey]:
        self._put_in_order()
        # A pinned tail mostly belongs to a running request, whose other blocks are pinned too, so do not look before
        # it.
        chosen = self._victims(count, pinned, newcomer, spare_queued, behind_pinned=False)
        if len(chosen) < count:
            chosen = self._victims(count, pinned, newcomer, spare_queued, behind_pinned=True)
        return chosen

    def _victims(
        self,
        count: int,
        pinned: Container[BlockKey],
        newcomer: Hashable | None,
        spare_queued: bool,
        behind_pinned: bool,
    ) -> list[BlockKey]:
        chosen: list[BlockKey] = []
        for key in self._ownerless_in_order():
            if len(chosen) >= count:
                break
            if key not in pinned:
                chosen.append(key)
        limit = self._limit(newcomer, spare_queued)
        walk = _Walk(self)
        while len(chosen) < count and (entry := walk.peek()) is not None:
            key = entry[-1]
            if limit is not None and (entry[0], entry[1:-1]) >= limit:
                break  # all later entries rank after it
            if key not in pinned:
                chosen.append(key)
                walk.leave(entry)
            elif behind_pinned:
                walk.leave(entry)
            else:
                walk.drop()
        everything = len(self._ownerless) + walk.num_left == len(self._touched)
        if len(chosen) < count and newcomer is None and not spare_queued and behind_pinned and not everything:
            # Contexts hold blocks in the order they were computed in. If two contexts ever disagreed, each block would
            # wait for the other and neither would be a leaf. No order is right then, but no block may stay in the tier
            # for ever.
            rest = self._touched.keys() - set(chosen)
            stuck = sorted((key for key in rest if key not in pinned), key=self._touched.__getitem__)
            chosen += stuck[: count - len(chosen)]
        return chosen

    def _ownerless_in_order(self) -> dict[BlockKey, None]:
        if self._unsorted:  # usually two sorted runs, so sorting is cheap
            self._ownerless = dict.fromkeys(sorted(self._ownerless, key=self._touched.__getitem__))
            self._unsorted = False
        return self._ownerless

    def _limit(self, newcomer: Hashable | None, spare_queued: bool) -> _Rank | None:
        """Return the rank, in the order of eviction, below which blocks may be evicted; None: all may."""
        if spare_queued and (newcomer is None or newcomer in self._queue):
            return (1, (-math.inf, 0))
        if newcomer is None:
            return None
        if (place := self._queue.place(newcomer)) is not None:
            return (1, (-place, 0))
        return (0, self._returns.rank(newcomer))

    def _unqueued(self, key: BlockKey, waiting: Sequence[_Waiting]) -> _Entry:
        """Return the sort key, ascending in order of eviction, of a block none of whose owners is queued. waiting: the
        owners whose last block in the tier this is, sorted by rank."""
        if len(waiting) == 1:
            return (0, *waiting[0][0][1], key)
        return (0, *shared_rank([rank for (_, rank), _ in waiting[-_MOST_SUMMED_OWNERS:]]), key)

    def _queued(self, key: BlockKey) -> _Entry:
        owners, queue = self._owners[key], self._queue
        if len(owners) <= len(queue):
            place = min(place for owner in owners if (place := queue.place(owner.name)) is not None)
        else:
            place = next(place for place in range(len(queue)) if self._sessions.get(queue[place]) in owners)
        return (1, -place, 0, key)


class _Walk:
    """A walk over the leaves (blocks after which nothing follows in the tier) in order of eviction, for `victims`. It
    leaves the policy unchanged."""

    def __init__(self, policy: LookaheadPolicy) -> None:
        self._policy = policy
        self._order = iter(policy._order)
        self._head = next(self._order, None)
        # Queued sessions are examined from the tail of the queue, only when reached; this many are left to examine.
        self._left_in_line = len(policy._queue) - policy._absent
        # a heap of blocks that became leaves during the walk, and of leaves of queued sessions
        self._offered: list[_Entry] = []
        self._seen: set[BlockKey] = set()  # leaves of queued sessions that have been offered
        self.num_left = 0  # number of blocks removed so far
        self._left: dict[_Session, int] = {}  # session -> number of its resident blocks removed so far
        # Block -> how many owners have nothing left after it, and the first of them to return, sorted; only blocks
        # where the walk changed this.
        self._waiting: dict[BlockKey, tuple[int, list[_Waiting]]] = {}

    def peek(self) -> _Entry | None:
        """Return the next leaf; None if there is none."""
        if self._head is None:
            # Until no session left to examine can have a leaf that leaves before the first of the heap.
            while self._left_in_line and not (self._offered and self._offered[0] < (1, 1 - self._left_in_line, 0)):
                self._look_at_the_last_in_line()
        elif not (self._offered and self._offered[0] < self._head):
            return self._head
        return self._offered[0] if self._offered else None

    def _look_at_the_last_in_line(self) -> None:
        policy = self._policy
        self._left_in_line -= 1
        session = policy._sessions.get(policy._queue[self._left_in_line])
        tail = session.tail if session is not None else None
        if tail is None:
            if self._left_in_line == len(policy._queue) - policy._absent - 1:
                policy._absent += 1
        elif tail in policy._leaves and tail not in self._seen:
            self._seen.add(tail)
            heappush(self._offered, policy._queued(tail))

    def drop(self) -> None:
        """Skip the leaf that `peek` returned. It stays resident, and so do all blocks before it."""
        if self._head is not None and not (self._offered and self._offered[0] < self._head):
            self._head = next(self._order, None)
        else:
            heappop(self._offered)

    def leave(self, entry: _Entry) -> None:
        """Remove the leaf `entry` that `peek` returned. Blocks that become leaves by that are offered in their turn."""
        policy = self._policy
        owners = policy._owners[entry[-1]]
        self.num_left += 1
        if len(owners) > 1:
            self.drop()
            for session in owners:
                self._leave(session)
            return
        (session,) = owners  # the usual case: the block before it has the same single owner, so it has the same rank
        left = self._left[session] = self._left.get(session, 0) + 1
        resident = session.resident
        tail = None if left == len(resident) else session.context[resident[-1 - left]]
        if tail is not None and len(policy._owners[tail]) == 1:
            self._replace((*entry[:-1], tail))
            return
        self.drop()
        if tail is not None:
            self._wait(tail, session)

    def _leave(self, session: _Session) -> None:
        left = self._left[session] = self._left.get(session, 0) + 1
        if left < len(session.resident):
            self._wait(session.context[session.resident[-1 - left]], session)

    def _wait(self, before: BlockKey, session: _Session) -> None:
        """Record that nothing of the session is left in the tier after the block `before`."""
        policy = self._policy
        if (known := self._waiting.get(before)) is not None:
            count, best = known
        else:
            here = policy._at_tail.get(before, ())
            count, best = len(here), list(here[-_MOST_SUMMED_OWNERS:])
        insort(best, (session.rank, session))
        del best[:-_MOST_SUMMED_OWNERS]
        self._waiting[before] = (count + 1, best)
        if count + 1 == len(policy._owners[before]):
            entry = policy._queued(before) if _is_queued(best[-1]) else policy._unqueued(before, best)
            heappush(self._offered, entry)

    def _replace(self, entry: _Entry) -> None:
        """Skip the leaf that `peek` returned, as `drop` does, but offer this entry in its place."""
        if self._head is not None and not (self._offered and self._offered[0] < self._head):
            self._head = next(self._order, None)
            heappush(self._offered, entry)
        else:
            heapreplace(self._offered, entry)


def _is_queued(waiting: _Waiting) -> bool:
    return waiting[0][0] > 0
