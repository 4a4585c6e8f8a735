"""Finds and deletes this replica's own copies of sessions: KV, transcripts, and commits that wait to be sent."""

import asyncio
from collections.abc import AsyncIterator

from reprise.app.conversations.text_thread import TextThread
from reprise.app.errors import ApiError
from reprise.app.turn.sessions import SessionCommands
from reprise.engine.messages import SessionInfo
from reprise.fleet.keys import SessionName
from reprise.fleet.replica.held_sessions import HeldSessions
from reprise.fleet.replica.outbox_thread import OutboxThread

POLL_S = 0.1  # between two tries to delete a session of which a request runs
LISTED = 200  # sessions in one answer of the engine


class Copies:
    """The copies of sessions (KV, transcripts, unsent commits) on this replica. One per replica, on its event loop."""

    def __init__(
        self, *, held: HeldSessions, outbox: OutboxThread, transcripts: TextThread, commands: SessionCommands
    ) -> None:
        self._held, self._outbox = held, outbox
        self._transcripts, self._commands = transcripts, commands

    async def names(self) -> set[SessionName]:
        """Return the sessions of which this replica has anything. Raises ApiError."""
        found = set(self._held)
        for scope, session_id in await self._transcripts.names():
            tenant, _, salt = scope.partition("/")
            found.add(SessionName(tenant, session_id, salt))
        async for info in self._kept():
            found.add(SessionName(info.tenant, info.session_id, info.cache_salt))
        return found

    async def delete(self, tenant: str, session_id: str) -> None:
        """Delete the copies of the sessions of an id, with any salt. Raises ApiError: 404 if there is none, 409 while a
        request of the session runs. A transcript in a file that is not used stays: see `hides_some`."""
        await self._commands.delete_here(session_id, tenant=tenant, may_stay_hidden=True)

    @property
    def hides_some(self) -> bool:
        """Whether transcripts lie in a file that is not used before the next start, and none of which is deleted until
        then."""
        return self._transcripts.hides_file

    async def delete_soon(self, tenant: str, session_id: str) -> None:
        """Wait until no request of the session runs, then delete the copies of this id, with any salt. Errors are not
        raised: the deletion is tried again until it succeeds or nothing is there."""
        while True:
            try:
                await self.delete(tenant, session_id)
                return
            except ApiError as error:
                if error.status == 404:
                    return
            await asyncio.sleep(POLL_S)

    async def delete_older(self, tenant: str, session_id: str, epoch: int) -> None:
        """Wait until no request of the session runs, then delete the copies of this id, with any salt. Does nothing if
        the session was begun again after the deletion with this epoch (a number that grows with every claim and
        deletion)."""
        if not self._held.are_begun_after(SessionName(tenant, session_id), epoch):
            await self.let_go(tenant, session_id, epoch)
            await self.delete_soon(tenant, session_id)

    async def let_go(self, tenant: str, session_id: str, epoch: int) -> None:
        """Forget the claims of the sessions of an id, with any salt, whose first claim has this epoch or an earlier
        one, so that this replica no longer commits to them. Drops all commits of this id that wait in the outbox."""
        for name, held in self._held.of_id(tenant, session_id).items():
            if held.begun <= epoch:
                self._held.forget(name)
        await self._outbox.forget(tenant, session_id)

    async def _kept(self) -> AsyncIterator[SessionInfo]:
        """Yield what the engine reports of each of its sessions. Raises ApiError."""
        after, more = "", True
        while more:
            reply = await self._commands.ask("list_all", after=after, limit=LISTED)
            for info in reply.sessions:
                yield info
                after = f"{info.tenant}/{info.session_id}"
            more = reply.more and bool(reply.sessions)


def scope_of(name: SessionName) -> str:
    """Return the name under which transcripts keep a session's tenant: "tenant", or "tenant/salt" if the session has a
    salt."""
    return f"{name.tenant}/{name.salt}" if name.salt else name.tenant
