"""Deletes sessions: each is removed from every tier with the blocks that only it owns, once no copy of them is under
way."""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from reprise.cache.blocks.context import ExpiredContext, SessionContext
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.blocks.table import BlockRow, SessionName
from reprise.cache.requests.running import Requests
from reprise.cache.tiers.hierarchy import Hierarchy


@dataclass(slots=True)
class _Wait:
    """A client's request that waits until sessions are deleted."""

    left: int  # sessions left to delete, not counting Redis
    problem: str | None  # what it will be told


class SessionDeletions:
    """A part that deletes sessions for the SessionStore, on the engine's thread: those that a client deletes and those
    whose time to live is over. A deletion waits for the copies of its blocks that are under way."""

    def __init__(
        self,
        *,
        contexts: OrderedDict[SessionName, SessionContext],
        tiers: Hierarchy,
        running: Requests,
        max_sessions: int,
    ) -> None:
        """Set up. contexts: the contexts of the store, from which deleted sessions are removed."""
        self.expired: OrderedDict[SessionName, ExpiredContext] = OrderedDict()
        """Sessions that have expired, to explain misses. There are at most `max_sessions` of them."""
        self.waits: dict[str, _Wait] = {}
        """Requests that wait for deletions. Read only."""
        self._deleting: dict[SessionName, str | None] = {}
        """Sessions whose deletion waits for the end of a save or write -> the request that waits for the deletion;
        None: the session has expired."""
        self._unseen: dict[tuple[str, str], None] | None = None
        """Sessions (tenant, session id) that were to be deleted before the disk was taken, so that it is not known what
        it has of them; None: it was taken. There are at most `max_sessions` of them."""
        self._contexts = contexts
        self._tiers, self._table = tiers, tiers.table
        self._running = running
        self._max_sessions = max_sessions

    def is_deleting(self, name: SessionName) -> bool:
        """Return whether a session will be deleted as soon as the copies of its blocks have ended."""
        return name in self._deleting

    def delete(self, tenant: str, session_id: str, waiter: str) -> str | None:
        """Begin to delete a tenant's sessions of this id, with any salt, from every tier, with the blocks that only
        they own. Copies in Redis that other servers wrote are deleted too, even of a session that is not known here.
        waiter: id of the client's request, which `take_ended` returns when the deletions have ended.

        Returns None if they have begun. Otherwise nothing is deleted, and the result says why: `not_found`, or `busy`
        while a request of such a session runs or waits, or another request waits for its deletion. If the disk has not
        answered since the start, what it has of these sessions is deleted once it answers.
        """

        def named(names: Iterable[SessionName]) -> list[SessionName]:
            return [name for name in names if (name[0], name[2]) == (tenant, session_id)]

        for name in named(self.expired):
            del self.expired[name]
        here = named(self._contexts)
        again = [name for name in self._tiers.disk.undone(tenant, session_id) if name not in self._contexts]
        # The first turn of a session is under way before there is a session.
        if named(context.session for context in self._running.values()) or any(map(self._deleting.get, here)):
            return "busy"
        is_unseen = self._note_unseen(tenant, session_id)
        if not (here or again or self._tiers.redis.is_on or is_unseen):
            return "not_found"
        problem = "undeleted" if is_unseen else "not_found"
        self.waits[waiter] = _Wait(len(here) + len(again), None if here or again else problem)
        for name in again:
            self._tiers.disk.delete_again(name, waiter)
        for name in here:
            self.begin(name, waiter)
        if not here:
            self._tiers.redis.delete(tenant, session_id, waiter)
        return None

    def disk_is_unseen(self) -> None:
        """Note that the disk has not answered yet, so that it is unknown, until `take_unseen`, what lies on it."""
        self._unseen = {}

    def take_unseen(self) -> set[tuple[str, str]]:
        """Note that the disk has answered, so that its contents are known from now on. Returns the sessions (tenant,
        session id) that were to be deleted before."""
        unseen, self._unseen = self._unseen or {}, None
        return set(unseen)

    def _note_unseen(self, tenant: str, session_id: str) -> bool:
        """Note that what the disk has of these sessions is to be deleted once it answers. Returns False, and does
        nothing, if it has answered already."""
        if self._unseen is None:
            return False
        self._unseen[tenant, session_id] = None
        if len(self._unseen) > self._max_sessions:
            del self._unseen[next(iter(self._unseen))]
        return True

    def take_ended(self) -> list[tuple[str, str | None]]:
        """Return (request, problem) for each waiting request whose deletions have all ended, and forget it. problem:
        `undeleted` if bytes may remain, `not_found`, or None if all bytes are gone."""
        disk, redis = self._tiers.disk, self._tiers.redis
        for waiter, is_done in disk.ended_deletions:
            wait = self.waits[waiter]
            wait.left -= 1
            wait.problem = wait.problem if is_done else "undeleted"
        disk.ended_deletions.clear()
        ended = [waiter for waiter, wait in self.waits.items() if not wait.left and not redis.waits(waiter)]
        problems = [self.waits.pop(waiter).problem for waiter in ended]
        return [
            (waiter, "undeleted" if redis.take_refusal(waiter) else problem)
            for waiter, problem in zip(ended, problems, strict=True)
        ]

    def begin(self, name: SessionName, waiter: str | None) -> None:
        """Delete a session, now or when the copies of its blocks have ended. waiter: the request that waits for it;
        None if the session has expired."""
        # First fetch the blocks that others have in the same extents, so that they can be written anew.
        self._tiers.fetches.fetch(self._sharers_of(name), name)
        if self._has_to_wait(name):
            self._deleting[name] = waiter
        else:
            self._delete_now(name, waiter)

    def go_on(self) -> None:
        """Delete the sessions whose deletion waited for a copy that has ended."""
        for name in [name for name in self._deleting if not self._has_to_wait(name)]:
            waiter = self._deleting.pop(name)
            if waiter is not None or not self._running.of(name):  # it had expired, and was asked for again
                self._delete_now(name, waiter)

    def forget(self, name: SessionName) -> None:
        """Forget a session. Its open block and the blocks on disk that only it owns are deleted; the others leave as
        space is needed."""
        session = self._contexts.pop(name)
        self._tiers.pinned.discard(name)
        if session.open_key is not None:
            self._tiers.forget(session.open_key)
        self._tiers.forget_session(name)
        private = self.disown(name, session.owned)
        self._tiers.delete_session(name, [row for row in private if "disk" in row.copies], None)
        for row in private:
            self._tiers.redis.drop(row)  # it stays in Redis for its time to live, for servers that know its name
            if row.is_nowhere:
                self._table.forget(row)

    def disown(self, name: SessionName, keys: Iterable[BlockKey]) -> list[BlockRow]:
        """Remove a session from the owners of its blocks. Returns the blocks that no other session owns."""
        private = []
        self._tiers.dram.saves.disown(name)
        for key in keys:
            row = self._table.get(key)
            if row is None:
                continue
            row.owners = tuple(owner for owner in row.owners if owner != name)
            if not row.owners:
                private.append(row)
        return private

    def retry(self) -> None:
        """Try all refused deletions again, however recently they were refused."""
        self._tiers.disk.go_on(math.inf)

    def _sharers_of(self, name: SessionName) -> list[BlockRow]:
        rows = (self._table.get(key) for key in self._contexts[name].owned)
        return self._tiers.disk.sharers_of([row for row in rows if row is not None and row.owners == (name,)])

    def _has_to_wait(self, name: SessionName) -> bool:
        """Return whether a copy of the session's blocks is under way, which a deletion must not interrupt."""
        fetches = self._tiers.fetches
        return self._tiers.is_busy(name) or any(fetches.is_fetching(row.key) for row in self._sharers_of(name))

    def _delete_now(self, name: SessionName, waiter: str | None) -> None:
        session = self._contexts.pop(name)
        if waiter is None and (expired := ExpiredContext.of(session)) is not None:
            self.expired[name] = expired
            if len(self.expired) > self._max_sessions:
                self.expired.popitem(last=False)
        self._tiers.pinned.discard(name)
        self._tiers.forget_session(name)
        private = self.disown(name, session.owned)
        self._tiers.delete_session(name, private, waiter)
        for row in private:
            self._tiers.forget(row.key)
