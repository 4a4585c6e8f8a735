"""Commits turns that have ended, that is records them in the directory. Commits that do not reach it wait in the
outbox."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from reprise.engine.messages import Head
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryFull, DirectoryUnavailable
from reprise.fleet.keys import SessionName
from reprise.fleet.outbox import Unsent
from reprise.fleet.records import FIRST_EPOCH, MAX_ROWS, Commit, Outcome
from reprise.fleet.replica.background import Background
from reprise.fleet.replica.copies import Copies, scope_of
from reprise.fleet.replica.held_sessions import HeldSession, HeldSessions
from reprise.fleet.replica.outbox_thread import OutboxThread
from reprise.fleet.replica.this_server import ThisServer

UNSENT_AT_ONCE = 64  # sessions of the outbox that one beat sends


class Commits:
    """A part that records in the directory the turns that have ended here. One per replica, on its event loop."""

    def __init__(
        self,
        *,
        directory: Directory,
        server: ThisServer,
        held: HeldSessions,
        copies: Copies,
        outbox: OutboxThread,
        background: Background,
        deadline_s: float,
        last_epoch: Callable[[], int],
    ) -> None:
        """Set up. deadline_s: longest wait at the end of a turn. last_epoch: returns the last epoch (number of a claim
        or deletion) that this replica knows of."""
        self.outcomes: Counter[str] = Counter()  # an Outcome, "unsent" or "full"
        self._directory, self._server = directory, server
        self._held, self._copies, self._outbox, self._background = held, copies, outbox, background
        self._deadline_s, self._last_epoch = deadline_s, last_epoch

    async def commit(self, name: SessionName, *, tokens: int, ttl_s: float | None, chains: tuple[bytes, ...]) -> None:
        """Commit a turn that has ended. Waits for the directory up to the deadline; a turn that is not recorded by then
        is committed later. tokens: length of the session's context. ttl_s: time after its last use until the session
        expires; None: it is pinned. chains: digests of the conversation, by which its next request finds the
        session."""
        task = self._background.spawn(self._commit(name, tokens=tokens, ttl_s=ttl_s, chains=chains))
        await asyncio.wait({task}, timeout=self._deadline_s)

    def on_head(self, head: Head) -> None:
        """Keep the engine's newest head of a session (the record by which another replica can take it over), to be
        committed. A head that comes after the commit of its turn is committed with the next beat."""
        held = self._held.of(SessionName(head.tenant, head.session_id, head.salt))
        held.head, held.redis_tokens, held.has_new_head = head.head, head.redis_tokens, True

    async def send_waiting(self) -> None:
        """Commit to the directory the `UNSENT_AT_ONCE` sessions that have waited longest in the outbox, and the newest
        heads (the records by which another replica can take sessions over) of sessions whose turns were committed
        before these heads came."""
        for unsent in await self._outbox.first(UNSENT_AT_ONCE):
            name = SessionName(unsent.tenant, unsent.session_id, unsent.salt)
            if unsent.fingerprint != self._server.fingerprint or self._directory.state != "closed":
                continue
            held = self._held.of(name)
            async with held.lock:
                if not held.begun:  # this process has not seen it: another one has written the entry
                    held.begun, held.turn, held.exported = unsent.since, unsent.base_turn, unsent.exported
                    held.tokens, held.ttl_s, held.head = unsent.tokens, unsent.ttl_s, unsent.head
                await self._send(name, held, ends_turn=True)
        for name, held in self._held.items():
            if held.has_new_head and not held.running:
                async with held.lock:
                    if held.epoch and held.has_new_head:
                        await self._send(name, held, ends_turn=False)

    def forget_directory(self) -> list[tuple[SessionName, HeldSession]]:
        """Forget which claims and commits the directory has recorded, because it has lost its data. Returns the
        sessions of which this replica was the home, which the caller must commit again (`send_again`)."""
        owned = []
        for name, held in self._held.items():
            owned += [(name, held)] if held.epoch else []
            held.epoch = held.turn = held.exported = 0
        return owned

    async def send_again(self, sessions: Iterable[tuple[SessionName, HeldSession]]) -> None:
        """Queue sessions that the directory has lost, so that the next beats commit them again."""
        for name, held in sessions:
            await self._outbox.put(self._unsent(name, held, self._server.fingerprint))

    async def release_all(self) -> None:
        """Give up the claims of all sessions that this replica is home of, so that their next turns may go to any
        replica. Raises DirectoryUnavailable."""
        for name, held in self._held.items():
            if held.epoch:
                await self._directory.release(name, fingerprint=self._server.fingerprint, epoch=held.epoch)

    async def _commit(self, name: SessionName, *, tokens: int, ttl_s: float | None, chains: tuple[bytes, ...]) -> None:
        held = self._held.of(name)
        try:
            async with held.lock:
                held.tokens, held.ttl_s = tokens, ttl_s
                held.begun = held.begun or held.epoch or max(FIRST_EPOCH, self._last_epoch())
                await self._send(name, held, ends_turn=True, chains=chains)
        finally:
            held.running = max(0, held.running - 1)

    async def _send(
        self, name: SessionName, held: HeldSession, *, ends_turn: bool, chains: tuple[bytes, ...] = ()
    ) -> None:
        """Commit the newest turn and head of a session, or put it into the outbox if Redis does not answer. The caller
        has the session's lock."""
        model = self._server.readiness.require_loaded()
        rows: dict[bytes, bytes] = {}
        exported = held.exported
        if (transcripts := self._server.shared_transcripts) is not None:
            found = await transcripts.export(name.session_id, tenant=scope_of(name), after=held.exported, most=MAX_ROWS)
            rows, exported = found.rows, found.newest
        commit = Commit(
            name=name, fingerprint=model.fingerprint, epoch=held.epoch, since=held.begun, base_turn=held.turn,
            nonce=secrets.token_bytes(8), ends_turn=ends_turn, tokens=held.tokens,
            size_bytes=held.tokens * model.kv_bytes_per_token, redis_tokens=held.redis_tokens,
            ttl_s=held.ttl_s, head=held.head, rows=rows, chains=chains,
        )  # fmt: skip
        had_new_head, held.has_new_head = held.has_new_head, False
        try:
            done = await self._directory.commit(commit)
            if done.outcome is Outcome.FENCED and not commit.epoch and (epoch := await self._epoch_at_home(name)):
                done = await self._directory.commit(replace(commit, epoch=epoch))
            self.outcomes[done.outcome.value] += 1
        except DirectoryUnavailable as error:
            self.outcomes["full" if isinstance(error, DirectoryFull) else "unsent"] += 1
            done = None
        if done is None or done.outcome is Outcome.FLUSHED:
            held.has_new_head = had_new_head
            held.epoch = 0 if done is not None else held.epoch
            await self._outbox.put(self._unsent(name, held, model.fingerprint))
            return
        if self._outbox.waiting:
            await self._outbox.remove(name)
        if done.outcome is Outcome.COMMITTED:
            held.epoch, held.turn, held.exported = done.epoch, done.turn, exported
        elif done.outcome is Outcome.FENCED:
            held.epoch, held.exported = 0, exported
        else:
            self._held.forget(name)
            self._background.spawn(self._copies.delete_soon(name.tenant, name.session_id))

    async def _epoch_at_home(self, name: SessionName) -> int:
        """Ask the directory for the epoch under which this process is a session's home; 0 if it is not. A claim or
        commit whose answer came too late here may have been carried out in Redis. Raises DirectoryUnavailable."""
        record = await self._directory.look(name, fingerprint=self._server.fingerprint)
        identity = self._server.identity
        is_home = record is not None and (record.home, record.boot) == (identity.name, identity.boot)
        return record.epoch if record is not None and is_home else 0

    def _unsent(self, name: SessionName, held: HeldSession, fingerprint: str) -> Unsent:
        return Unsent(
            tenant=name.tenant, session_id=name.session_id, salt=name.salt, fingerprint=fingerprint, since=held.begun,
            base_turn=held.turn, exported=held.exported, tokens=held.tokens, ttl_s=held.ttl_s,
            head=held.head,
        )  # fmt: skip
