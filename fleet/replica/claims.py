"""Claims a session before its turn, and fetches what other replicas have committed of it."""

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable

from reprise.engine.messages import Adopt
from reprise.engine.process.client import EngineLost, EngineTimeout, EngineUnavailable
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.keys import SessionName
from reprise.fleet.replica.copies import Copies, scope_of
from reprise.fleet.replica.held_sessions import HeldSession, HeldSessions
from reprise.fleet.replica.this_server import ThisServer

ADOPT_S = 2.0  # longest wait for the engine to take over a session; after that it computes what it does not have


class Claims:
    """A claimer of sessions: a replica may commit turns of those that it has claimed. One per replica, on its event
    loop."""

    def __init__(
        self,
        *,
        directory: Directory,
        server: ThisServer,
        held: HeldSessions,
        copies: Copies,
        ttl_s: float,
        deleted_until: Callable[[], int],
    ) -> None:
        """Set up. ttl_s: time to live of a new session. deleted_until: returns the epoch (number of a claim or
        deletion) up to which deletions were carried out here."""
        self.results: Counter[str] = Counter()  # new, home, adopted, failed
        self._directory, self._server, self._held, self._copies = directory, server, held, copies
        self._ttl_s, self._deleted_until = ttl_s, deleted_until

    async def claim(self, name: SessionName) -> bool:
        """Make this replica the session's home, and fetch what other replicas have committed of the session.

        Returns True if the directory had turns that this replica lacked: more of the turn's prompt may now be found in
        the transcript. Returns False if it had none, and also if the directory is unavailable; in the latter case the
        session counts as not claimed here."""
        held = self._held.of(name)
        async with held.lock:
            try:
                claim = await self._directory.claim(
                    name, fingerprint=self._server.fingerprint, ttl_s=self._ttl_s, begun=held.begun
                )
                if claim.forgotten > held.begun:  # what is here is older than its deletion, if anything is
                    if claim.forgotten > self._deleted_until() and not self._held.are_begun_after(
                        name, claim.forgotten
                    ):
                        await self._copies.delete_soon(name.tenant, name.session_id)
                    held.turn = held.exported = held.begun = 0
                held.epoch = claim.epoch
                held.begun = held.begun or claim.epoch
                if claim.turn <= held.turn and claim.branches == held.branches:
                    self.results["home" if claim.turn else "new"] += 1
                    return False
                self.results["adopted"] += 1
                await self._adopt(name, held, claim.head if claim.turn > held.turn else b"")
                if claim.turn > held.turn:
                    held.turn, held.tokens = claim.turn, claim.tokens
                held.branches = claim.branches
                return True
            except DirectoryUnavailable:
                self.results["failed"] += 1
                held.epoch = 0
                return False

    async def _adopt(self, name: SessionName, held: HeldSession, head: bytes) -> None:
        """Fetch a session's transcript, and have the engine take over the KV that another replica has stored in Redis.
        head: the record that names this KV; empty: there is none. KV that cannot be taken over is computed."""
        if (transcripts := self._server.shared_transcripts) is not None:
            rows = await self._directory.transcript(name, fingerprint=self._server.fingerprint)
            held.exported = await transcripts.adopt(
                name.session_id, rows, tenant=scope_of(name), now=time.time(), after=held.exported
            )
        if head:
            held.head = head
            request = Adopt(
                request_id=f"adopt-{secrets.token_hex(12)}", tenant=name.tenant, salt=name.salt,
                session_id=name.session_id, head=head,
            )  # fmt: skip
            with contextlib.suppress(EngineUnavailable, EngineTimeout, EngineLost):
                await self._server.engine.sessions(request, timeout_s=ADOPT_S)
