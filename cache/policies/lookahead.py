"""What is needed last leaves first, by the queue and by when sessions are expected back (AttentionStore §3.3.2)."""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Container, Hashable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import Any, Literal

from cache.blocks.keys import BlockKey
from cache.policies.queue_line import Line
from cache.returns.ranking import Ranking
from cache.returns.return_times import ReturnTimes, SessionReturn, shared_rank

_MOST_STALE = 128  # blocks or sessions: half a millisecond
_MOST_SUMMED = 8  # owners: a prompt that all begin with has them by the thousand

_Rank = tuple[int, tuple[float, ...]]
"""Of a session: (1 if it is queued, its rank in `ReturnTimes`). Leaves in ascending order, among the queued from the
tail of the queue, which moves too often to be part of what is sorted."""

_Entry = tuple[Any, ...]
"""A block that could leave next, in order of leaving. Owned by nobody who is queued: 0; -place for block granularity
and 0 otherwise; the rank of its owners together; and the block. Else: 1, 0, -place in the queue of the first of its
owners, 0, and the block. Flat, for they are compared by the thousand."""


class _Session:
    """What the policy knows of one live session."""

    __slots__ = ("context", "name", "rank", "resident", "returns", "waits_at")

    def __init__(self, name: Hashable, queued: bool, returns: SessionReturn) -> None:
        self.name = name
        self.returns = returns
        self.rank: _Rank = (int(queued), returns.rank)  # as of when it was last put in order
        self.context: dict[int, BlockKey] = {}
        self.resident: list[int] = []  # the places whose block is in the tier, ascending
        self.waits_at: BlockKey | None = None  # the tail as `_at_tail` has it, unless that is to be put in order

    @property
    def tail(self) -> BlockKey | None:
        return self.context[self.resident[-1]] if self.resident else None


_Waiting = tuple[_Rank, _Session]
"""A session with nothing resident behind a block, and its rank. Ranks are unique."""


class LookaheadPolicy:
    """Order of leaving: (a) blocks without a live owner, least recently touched first; (b) sessions that are not
    queued, the one expected back last first (`cache.returns.return_times`), oldest use first where nothing is known;
    (c) queued sessions, from the tail of the queue to its head.

    A session leaves tail-first. A shared block leaves only when all that is resident behind it, in the context of
    whichever owner, has left (or is pinned), so what stays is always a usable prefix. It then ranks as its owners do
    together, for any of them may come for it; once one is queued, as the first of those in line.
    A newcomer is admitted at the expense of what ranks before its session, never of the session's own blocks; in a
    rotation the newcomer is the last to return, so a tier that is too small keeps what it has instead of collapsing.

    granularity "session" empties one session after the other. "block" interleaves those of (b): the largest place goes
    first and the expected return only breaks ties, so all keep their heads a while longer. The queue's order in (c) and
    the terms for newcomers are the same.

    Cost: an event touches only the sessions it concerns, in logarithmic time plus a short memmove, `look_ahead` those
    that have come into the queue or left it. What is queued is not in the order of the rest, and sorted only as far as
    `victims` comes to it. `victims` costs what it returns plus the pinned blocks it passes over (for "block" with a
    newcomer also those that it may not displace). Memory: resident blocks plus the contexts of live sessions: ownership
    outlives the block's stay in the tier, so that a fetched block knows its owners, until `forget` or until another
    block stands at its place.
    """

    def __init__(self, returns: ReturnTimes, granularity: Literal["session", "block"] = "session") -> None:
        self._by_place = granularity == "block"
        self._touched: dict[BlockKey, int] = {}  # every resident block -> number of its last touch
        self._touches = 0
        self._ownerless: dict[BlockKey, None] = {}  # resident, in the order of the last touch unless `_unsorted`
        self._unsorted = False
        self._sessions: dict[Hashable, _Session] = {}
        self._owners: dict[BlockKey, dict[_Session, int]] = {}  # with the block's place in each owner's context
        # Whose last resident block it is, with the rank of each, sorted: the best is last.
        self._at_tail: dict[BlockKey, list[_Waiting]] = {}
        # A leaf has nothing resident behind it: it is the tail of all its owners. The others become leaves in turn.
        # With its entry in `_order`; None: one of its owners is queued.
        self._leaves: dict[BlockKey, _Entry | None] = {}
        self._order: Ranking[_Entry] = Ranking()
        self._stale: set[BlockKey] = set()  # not in their places yet, in these two
        self._moved: set[_Session] = set()  # nor are these in `_at_tail`: their tail is another one
        self._returns = returns
        returns.listen(self._returns_changed)
        self._queue = Line()
        self._absent = 0  # so many at the tail of the queue are known to have nothing in the tier

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
            return  # as most are that enter a tier, for whatever a session has is its own in all
        if key in self._owners and owner in self._owners[key]:
            self._disown(key, owner)
        if place in owner.context:
            self._disown(owner.context[place], owner)
        owner.context[place] = key
        self._owners.setdefault(key, {})[owner] = place
        if key in self._touched:
            self._ownerless.pop(key, None)
            self._set_resident(owner, place, True)
            self._refresh(key)  # it may be a leaf no more: the new owner has something behind it

    def forget(self, session: Hashable) -> None:
        owner = self._sessions.pop(session, None)
        if owner is None:
            return
        for place in sorted(owner.context, reverse=True):
            self._disown(owner.context[place], owner)
        self._moved.discard(owner)
        self._move(owner)  # at once: another session may come by its name, and rank as it did

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
        """It is expected at another time, or has come into the queue or left it."""
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
            self._refresh(key)  # it may have become a leaf: this owner was the one with something behind it

    def _set_resident(self, session: _Session, place: int, resident: bool) -> None:
        """A block of the session's context entered the tier or left it."""
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
        # A turn brings and takes a session's blocks one behind the other: where it waits is worked out once for all.
        self._moved.add(session)
        if len(self._moved) > _MOST_STALE:
            self._put_in_order()

    def _move(self, session: _Session) -> None:
        """To the last of its blocks in the tier, where there is one. Most blocks are their session's alone."""
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
        """It may have become a leaf, or be one no more, or one of another rank. What an event does to many blocks, and
        the next one undoes, is put in order once."""
        self._stale.add(key)
        if len(self._stale) > _MOST_STALE:
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
        # A pinned tail is most often that of a request that runs, with all before it pinned too: not worth the walk.
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
            if limit is not None and (entry[0], entry[2:-1]) >= limit:
                if entry[0] or not self._by_place:
                    break  # all the others rank behind it
                walk.drop()
            elif key not in pinned:
                chosen.append(key)
                walk.leave(entry)
            elif behind_pinned:
                walk.leave(entry)
            else:
                walk.drop()
        everything = len(self._ownerless) + walk.num_left == len(self._touched)
        if len(chosen) < count and newcomer is None and not spare_queued and behind_pinned and not everything:
            # Contexts hold blocks in the order they were computed in. If two ever disagree, neither block is a leaf
            # before the other, and there is no right order; but nothing may be stuck in the tier.
            rest = self._touched.keys() - set(chosen)
            stuck = sorted((key for key in rest if key not in pinned), key=self._touched.__getitem__)
            chosen += stuck[: count - len(chosen)]
        return chosen

    def _ownerless_in_order(self) -> dict[BlockKey, None]:
        if self._unsorted:  # two sorted runs, most often: cheap
            self._ownerless = dict.fromkeys(sorted(self._ownerless, key=self._touched.__getitem__))
            self._unsorted = False
        return self._ownerless

    def _limit(self, newcomer: Hashable | None, spare_queued: bool) -> _Rank | None:
        """Of what may leave: what ranks below it. None: all."""
        if spare_queued and (newcomer is None or newcomer in self._queue):
            return (1, (-math.inf, 0))
        if newcomer is None:
            return None
        if (place := self._queue.place(newcomer)) is not None:
            return (1, (-place, 0))
        return (0, self._returns.rank(newcomer))

    def _unqueued(self, key: BlockKey, waiting: Sequence[_Waiting]) -> _Entry:
        """Of a block with these owners, sorted, nobody queued among them."""
        place = -self._owners[key][waiting[-1][1]] if self._by_place else 0
        if len(waiting) == 1:
            return (0, place, *waiting[0][0][1], key)
        return (0, place, *shared_rank([rank for (_, rank), _ in waiting[-_MOST_SUMMED:]]), key)

    def _queued(self, key: BlockKey) -> _Entry:
        owners, queue = self._owners[key], self._queue
        if len(owners) <= len(queue):
            place = min(place for owner in owners if (place := queue.place(owner.name)) is not None)
        else:
            place = next(place for place in range(len(queue)) if self._sessions.get(queue[place]) in owners)
        return (1, 0, -place, 0, key)


class _Walk:
    """Takes leaves off in order, without changing anything."""

    def __init__(self, policy: LookaheadPolicy) -> None:
        self._policy = policy
        self._order = iter(policy._order)
        self._head = next(self._order, None)
        # Who is queued is looked at from the tail on, when it is their turn; so many are left.
        self._left_in_line = len(policy._queue) - policy._absent
        self._offered: list[_Entry] = []  # a heap: those that became leaves on the walk, and those of the queued
        self._seen: set[BlockKey] = set()  # leaves of the queued that have been offered
        self.num_left = 0  # blocks taken off
        self._left: dict[_Session, int] = {}  # how many resident blocks of a session have left on the walk
        # How many owners have nothing left behind a block, and the best of them, sorted, if that has changed here.
        self._waiting: dict[BlockKey, tuple[int, list[_Waiting]]] = {}

    def peek(self) -> _Entry | None:
        """The next leaf."""
        if self._head is None:
            # Nobody in line before `_left_in_line` has a leaf that leaves before the first of the heap.
            while self._left_in_line and not (self._offered and self._offered[0] < (1, 0, 1 - self._left_in_line, 0)):
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
        """Pass over what `peek` showed; all that stands before it stays too."""
        if self._head is not None and not (self._offered and self._offered[0] < self._head):
            self._head = next(self._order, None)
        else:
            heappop(self._offered)

    def leave(self, entry: _Entry) -> None:
        """Take off the leaf that `peek` showed; the blocks that become leaves by it come in their turn."""
        policy = self._policy
        owners = policy._owners[entry[-1]]
        self.num_left += 1
        if len(owners) > 1 or policy._by_place:
            self.drop()
            for session in owners:
                self._leave(session)
            return
        (session,) = owners  # as nearly all are: the block before it ranks as it did
        left = self._left[session] = self._left.get(session, 0) + 1
        resident = session.resident
        behind = None if left == len(resident) else session.context[resident[-1 - left]]
        if behind is not None and len(policy._owners[behind]) == 1:
            self._replace((*entry[:-1], behind))
            return
        self.drop()
        if behind is not None:
            self._wait(behind, session)

    def _leave(self, session: _Session) -> None:
        left = self._left[session] = self._left.get(session, 0) + 1
        if left < len(session.resident):
            self._wait(session.context[session.resident[-1 - left]], session)

    def _wait(self, before: BlockKey, session: _Session) -> None:
        """The session has nothing left behind this block of its."""
        policy = self._policy
        if (known := self._waiting.get(before)) is not None:
            count, best = known
        else:
            here = policy._at_tail.get(before, ())
            count, best = len(here), list(here[-_MOST_SUMMED:])
        insort(best, (session.rank, session))
        del best[:-_MOST_SUMMED]
        self._waiting[before] = (count + 1, best)
        if count + 1 == len(policy._owners[before]):
            entry = policy._queued(before) if _is_queued(best[-1]) else policy._unqueued(before, best)
            heappush(self._offered, entry)

    def _replace(self, entry: _Entry) -> None:
        """As `drop`, and offer this one."""
        if self._head is not None and not (self._offered and self._offered[0] < self._head):
            self._head = next(self._order, None)
            heappush(self._offered, entry)
        else:
            heapreplace(self._offered, entry)


def _is_queued(waiting: _Waiting) -> bool:
    return waiting[0][0] > 0
