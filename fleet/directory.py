"""Keeps in Redis the members of the fleet, and for each session the replica that is its home.

A session has one record. The replica that claims it becomes its home and gets an epoch (a number that grows with every
claim and deletion). The home may commit the session's turns, which is to write their result into the record, until
another replica claims the session: then its commits are refused. Everything else in the fleet is a cache of what the
record names, so a stale entry costs a load and never an answer. Changes that must happen together are one script, in
scripts/. One Redis, not a cluster, with `noeviction`.

Nothing that Redis sends is trusted. Replies are bounded while they are read (`reprise.app.conversations.redis_reply`).
Heads and transcript rows carry a keyed digest of their bytes and of the key under which they lie. Every call has a
deadline, so a stopped Redis is the same as none. After repeated failures Redis is not called for a second.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from reprise.app.conversations.breaker import State
from reprise.fleet import keys
from reprise.fleet.directory_redis import DirectoryRedis, DirectoryUnavailable
from reprise.fleet.keys import BadSeal, Keys, SessionKeys, SessionName, acknowledgements
from reprise.fleet.records import (
    MAX_BEAT_BYTES,
    MAX_CHAINS,
    MAX_HEAD_BYTES,
    MAX_ROW_BYTES,
    MAX_ROWS,
    MAX_TRANSCRIPT_BYTES,
    Claim,
    Commit,
    Committed,
    Forgetting,
    Forgotten,
    Heard,
    Heartbeat,
    Held,
    Member,
    Outcome,
    Place,
    Record,
    Roll,
    Taken,
)

LIVE_S = 3.0  # a member that is silent for longer is not waited for: three beats are missing
REMOVED_S = 600.0  # a member is removed this long after its last beat
MAX_FORGOTTEN = 100_000  # deletions that are remembered
FORGOTTEN_S = 30 * 86_400.0  # for so long
FORGOTTEN_AT_ONCE = 256  # deleted sessions that the answer to one beat names
RENEWED_AT_ONCE = 256  # leases
_RECORD = ("id", "home", "boot", "wanted", "epoch", "turn", "tokens", "bytes", "in_redis", "used")
_COUNTS = (b"size", b"branches")  # fields of a transcript that are no rows

log = logging.getLogger(__name__)


class DirectoryFlushed(DirectoryUnavailable):
    """The directory has lost its data since this replica's last beat (its report to the directory), or no beat has been
    answered yet."""


class Foreign(DirectoryUnavailable):
    """The members of this directory have another tenant secret than this one."""


class Directory:
    """The directory of one fleet. One per process, on its event loop. A beat is the report that a replica sends about
    once a second.

    Every method that calls Redis raises DirectoryUnavailable, after `deadline_s` at the latest (`beat` and `members`
    after `UNHURRIED_S`), and at once while the circuit breaker is open. Gateways use `members`, `look`, `find` and
    `take`; replicas use the other methods.
    """

    def __init__(
        self,
        *,
        url: str,
        secret: bytes,
        deadline_s: float,
        replica: str = "",
        boot: str = "",
        max_sessions: int = 1_000_000,
        max_said_bytes: int = 1 << 30,
    ) -> None:
        """Set up; the first call connects. secret: the tenant secret, the same on every member. replica and boot: this
        replica's name and the id of this start. max_sessions and max_said_bytes: the most sessions, and bytes of
        transcripts, that the directory keeps of one tenant. What was used longest ago is dropped, which costs a
        session's next turn a load or a recompute. Raises ValueError for an invalid address, ImportError without redis'
        client."""
        self.keys = Keys(secret)
        self.born = ""  # the `born` of the last answered beat
        self._replica, self._boot = replica, boot
        self._max_sessions = max_sessions
        self._max_said_bytes = max_said_bytes
        self._server = DirectoryRedis(url, deadline_s=deadline_s)
        self._redis = self._server.client

    @property
    def state(self) -> State:
        """The state of the circuit breaker; Redis is called while it is closed."""
        return self._server.state

    @property
    def failures(self) -> int:
        return self._server.failures

    def on_answer(self, tell: Callable[[float], None]) -> None:
        """Set a function that is called with the seconds that each call to Redis took."""
        self._server.on_answer = tell

    async def close(self) -> None:
        await self._server.close()

    # --- members ------------------------------------------------------------------------------------------------------

    async def beat(self, beat: Heartbeat, *, since: int) -> Heard:
        """Report that this replica lives. Returns the state of the directory and the deletions whose epoch (a number
        that grows with every claim and deletion) is above `since`. Raises DirectoryUnavailable, and Foreign if other
        members have another tenant secret."""
        data = msgspec.msgpack.encode(beat)
        if len(data) > MAX_BEAT_BYTES:
            raise ValueError(f"a beat of {len(data)} bytes")
        new = secrets.token_hex(16)
        answer = await self._server.run(
            *("beat", beat.replica, data, new, self.keys.check, since, FORGOTTEN_AT_ONCE, int(REMOVED_S * 1e3)),
            deadline_s=self._server.unhurried_s,
        )
        if answer[0] == b"foreign":
            raise Foreign("the members of this directory have another tenant secret: see server.tenant_secret_file")
        with _reading():
            _, born, epoch, trimmed, pairs = answer
            forgotten = tuple(
                Forgotten(name.decode("ascii"), int(at)) for name, at in zip(pairs[::2], pairs[1::2], strict=True)
            )
            heard = Heard(
                born=born.decode("ascii"),
                epoch=int(epoch),
                forgotten=forgotten,
                has_more=len(forgotten) >= FORGOTTEN_AT_ONCE,
                reaches_back=int(trimmed) <= since,
            )
        self.born = heard.born
        return heard

    async def leave(self) -> None:
        """Remove this replica from the members."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(keys.MEMBERS, self._replica)
            pipe.zrem(keys.BEATEN, self._replica)
            await self._server.ask(pipe.execute())

    async def members(self) -> Roll:
        """Return all members, including draining and silent ones (whose last beat is old). A beat that cannot be
        decoded is left out."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(keys.BORN)
            pipe.hgetall(keys.MEMBERS)
            pipe.zrange(keys.BEATEN, 0, -1, withscores=True)
            pipe.smembers(keys.DRAINED)
            pipe.time()
            answers = await self._server.ask(pipe.execute(), deadline_s=self._server.unhurried_s)
            born, beats, beaten, drained, (seconds, micros) = answers
        now_ms = seconds * 1e3 + micros / 1e3
        members = []
        with _reading():
            for replica, at_ms in beaten:
                try:
                    beat = msgspec.msgpack.decode(beats.get(replica, b""), type=Heartbeat)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                if beat.replica == replica.decode("utf-8", "replace"):
                    members.append(Member(beat, max(0.0, now_ms - at_ms) / 1e3))
            names = frozenset(name.decode("utf-8", "replace") for name in drained)
            return Roll((born or b"").decode("ascii"), tuple(members), names)

    async def drain(self, replica: str, *, on: bool) -> None:
        """Make gateways send no new turns to a replica, or end that (`on` False). Its sessions move with their next
        turns."""
        change = self._redis.sadd if on else self._redis.srem
        await self._server.ask(change(keys.DRAINED, replica))

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def find(self, tenant: str, chains: Sequence[bytes], *, fingerprint: str) -> Record | None:
        """Return the record of the session that one of these chains belongs to, the first chain that the directory
        knows; None if it knows none. chains: digests of how the messages begin (`reprise.fleet.identify`), the longest
        history first. Calls Redis twice."""
        if not chains:
            return None
        places = [self.keys.chain(tenant, chain) for chain in chains[:MAX_CHAINS]]
        found = await self._server.ask(self._redis.mget(places))
        prefix = f"{fingerprint}:".encode()
        for member in dict.fromkeys(value for value in found if isinstance(value, bytes)):
            if member.startswith(prefix):
                with _reading():
                    key = keys.record(self.keys.tenant(tenant), member.decode())
                if (record := await self._record(key)) is not None:
                    return record
        return None

    async def look(self, name: SessionName, *, fingerprint: str) -> Record | None:
        """Return the record of a session; None if there is none."""
        return await self._record(self._keys_of(name, fingerprint).record)

    async def _record(self, key: str) -> Record | None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(key, _RECORD)
            pipe.time()
            fields, (seconds, _) = await self._server.ask(pipe.execute())
        if fields[4] is None:
            return None
        with _reading():
            session_id, home, boot, wanted = ((field or b"").decode() for field in fields[:4])
            epoch, turn, tokens, size_bytes, in_redis, used = (int(field or 0) for field in fields[4:])
            return Record(
                session_id=session_id,
                home=home,
                boot=boot,
                epoch=epoch,
                turn=turn,
                tokens=tokens,
                size_bytes=size_bytes,
                redis_tokens=in_redis,
                idle_s=max(0.0, seconds - used / 1e3),
                wanted=wanted,
            )

    async def begun(self, names: Sequence[SessionName], *, fingerprint: str) -> list[int | None]:
        """Return for each session the epoch (a number that grows with every claim and deletion) of its first claim;
        None for sessions without a record. A session that was deleted and begun anew has a later epoch."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hget(self._keys_of(name, fingerprint).record, "begun")
            found = await self._server.ask(pipe.execute())
        with _reading():
            return [None if epoch is None else int(epoch) for epoch in found]

    async def claim(self, name: SessionName, *, fingerprint: str, ttl_s: float, begun: int = 0) -> Claim:
        """Make this replica the home of a session, which is the one that may commit to it. The session's record is made
        if there is none. ttl_s: time to live of a new session after its last use. begun: the epoch of this replica's
        first claim of the session, 0 if it has no copy; used only if the record is made now, as after a flush (the
        directory lost its data) or once it has expired. Raises DirectoryFlushed too."""
        names = self._keys_of(name, fingerprint)
        answer = await self._server.run(
            *("claim", self.born, self._replica, self._boot, name.session_id, names.tenant, names.name, names.member),
            *(_milliseconds(ttl_s), self._max_sessions, begun),
        )
        self._must_be_ours(answer)
        with _reading():
            _, epoch, turn, home, forgotten, tokens, head, branches = answer
            return Claim(
                epoch=int(epoch),
                turn=int(turn),
                home=home.decode(),
                forgotten=int(forgotten),
                tokens=int(tokens),
                head=self._unsealed(head, names.record),
                branches=int(branches),
            )

    async def commit(self, commit: Commit) -> Committed:
        """Record the end of a turn, or a newer head (the record by which another replica can take over the session).
        The result says whether it was recorded; it is not if another replica has claimed the session since, if the
        session was deleted, or if the directory was flushed."""
        names = self._keys_of(commit.name, commit.fingerprint)
        chains = [self.keys.chain(commit.name.tenant, chain) for chain in commit.chains[:MAX_CHAINS]]
        head = self.keys.seal(commit.head, key=names.record) if 0 < len(commit.head) <= MAX_HEAD_BYTES else b""
        rows: list[bytes] = []
        for digest, row in commit.rows.items():
            if len(row) <= MAX_ROW_BYTES:
                rows += (digest, self.keys.seal(row, key=names.transcript))
        answer = await self._server.run(
            *("commit", self.born, self._replica, self._boot, commit.epoch, commit.since, commit.base_turn),
            *(commit.nonce, int(commit.ends_turn), commit.name.session_id, names.tenant, names.name, names.member),
            *(commit.tokens, commit.size_bytes, commit.redis_tokens, _milliseconds(commit.ttl_s), head, names.member),
            *(MAX_TRANSCRIPT_BYTES, MAX_ROWS, self._max_sessions, self._max_said_bytes, MAX_CHAINS),
            *(len(chains), *chains, *rows),
        )
        with _reading():
            outcome = Outcome(answer[0].decode())
            if outcome is not Outcome.COMMITTED:
                return Committed(outcome)
            epoch, turn, sessions, size_bytes = map(int, answer[1:])
            return Committed(outcome, epoch, turn, sessions, size_bytes)

    async def transcript(self, name: SessionName, *, fingerprint: str) -> dict[bytes, bytes]:
        """Return a session's transcript: digest of an answer -> its row. Damaged rows are left out."""
        key = self._keys_of(name, fingerprint).transcript
        found = await self._server.ask(self._redis.hgetall(key))
        with _reading():
            rows = {digest: self._unsealed(row, key) for digest, row in found.items() if digest not in _COUNTS}
        return {digest: row for digest, row in rows.items() if row}

    async def release(self, name: SessionName, *, fingerprint: str, epoch: int) -> bool:
        """Give up the claim of a session, so that its next turn may go to any replica. epoch: that of the claim.
        Returns whether this replica still had the claim."""
        names = self._keys_of(name, fingerprint)
        answer = await self._server.run("release", self.born, epoch, names.tenant, names.member)
        return bool(answer[0] == b"released")

    async def move(self, name: SessionName, *, fingerprint: str, replica: str) -> bool:
        """Make gateways send a session's next turn to a replica. Returns whether the session has a record."""
        names = self._keys_of(name, fingerprint)
        answer = await self._server.run("move", names.tenant, names.member, replica)
        return bool(answer[0] == b"moved")

    async def forget(self, tenant: str, session_id: str) -> Forgetting:
        """Delete the sessions of this id, with all salts and of all models, and tell the other replicas to do so. All
        have done so when `unacknowledged` returns nothing. Raises DirectoryFlushed too."""
        return await self.forget_name(tenant, self.keys.name(tenant, session_id))

    async def forget_name(self, tenant: str, name: str) -> Forgetting:
        """Delete sessions as `forget` does, given their hashed name. name: from `SessionKeys.name`."""
        answer = await self._server.run(
            *("forget", self.born, self._replica, self.keys.tenant(tenant), name, int(LIVE_S * 1e3), MAX_FORGOTTEN),
            int(FORGOTTEN_S * 1e6),
        )
        self._must_be_ours(answer)
        with _reading():
            _, epoch, waiting, count = answer
            return Forgetting(int(epoch), tuple(other.decode() for other in waiting), int(count))

    async def remember(self, forgotten: Sequence[Forgotten]) -> None:
        """Write deletions again after a flush (the directory lost its data), before anything else is written. Raises
        DirectoryFlushed too."""
        for start in range(0, len(forgotten), FORGOTTEN_AT_ONCE):
            values: list[str | int] = []
            for deletion in forgotten[start : start + FORGOTTEN_AT_ONCE]:
                values += (deletion.name.partition(":")[0], deletion.name, deletion.epoch)
            self._must_be_ours(await self._server.run("remember", self.born, *values))

    async def acknowledge(self, epoch: int) -> None:
        """Report that this replica has carried out the deletion that has this epoch (the number that `forget` gave
        it)."""
        await self._server.ask(self._redis.srem(acknowledgements(epoch), self._replica))

    async def unacknowledged(self, epoch: int) -> tuple[str, ...]:
        """Return the live members that have not carried out the deletion that has this epoch (the number that `forget`
        gave it). Silent members learn of the deletion before they take requests. Raises DirectoryFlushed if the
        directory has lost its data meanwhile."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(keys.BORN)
            pipe.smembers(acknowledgements(epoch))
            pipe.zrange(keys.BEATEN, 0, -1, withscores=True)
            pipe.time()
            born, waiting, beaten, (seconds, micros) = await self._server.ask(pipe.execute())
        if born != self.born.encode():
            raise DirectoryFlushed("the directory was flushed")
        since_ms = seconds * 1e3 + micros / 1e3 - LIVE_S * 1e3
        with _reading():
            return tuple(sorted(other.decode() for other, at_ms in beaten if at_ms >= since_ms and other in waiting))

    async def held(self, tenant: str, *, first: int = 0, count: int = 0, longest_s: float = 0.0) -> Held:
        """Return how many sessions and bytes of KV a tenant has. With `count` also the names of up to `count` sessions,
        ordered by last use, the oldest first, beginning with the one at index `first`. The name is "" for a session
        that may not be deleted: it is pinned, runs, or is the one used last. longest_s: a turn that began longer ago
        than this no longer counts as running."""
        answer = await self._server.run("held", self.keys.tenant(tenant), first, count, _milliseconds(longest_s))
        with _reading():
            _, sessions, size_bytes, names = answer
            return Held(int(sessions), int(size_bytes), tuple(name.decode("ascii") for name in names))

    async def keep(self, tenant: str, session_id: str, *, ttl_s: float | None) -> None:
        """Set how long sessions of this id, with any salt, live after their last use; None: they are pinned."""
        name = self.keys.name(tenant, session_id)
        await self._server.run("keep", self.keys.tenant(tenant), name, _milliseconds(ttl_s))

    # --- allowances ---------------------------------------------------------------------------------------------------

    async def take(self, tenant: str, kind: str, *, per_minute: int, amount: int, need: int) -> Taken:
        """Take from a tenant's bucket of requests (kind "r") or tokens ("k"), shared by the fleet. It fills evenly and
        holds a minute's allowance. need: how much the bucket must contain, else nothing is taken; 0: it may be
        overdrawn, for a cost that is known only afterwards. Returns what is left, and the seconds to wait if nothing
        was taken.

        A gateway takes a request with amount=1, need=1 and asks for tokens with amount=0, need=1; a replica, which
        counts them, takes the tokens with need=0.
        """
        answer = await self._server.run("take", self.keys.bucket(tenant, kind), per_minute, amount, need)
        with _reading():
            wait_s, level = map(float, answer)
            return Taken(wait_s, level)

    async def enter(self, place: Place, *, most: int, lease_s: float) -> tuple[bool, int]:
        """Take `place.count` places, one for each answer of a turn that counts against its key, if the tenant then uses
        at most `most` places. They are freed by `leave_places`, or when their lease ends: `lease_s` from now, unless
        `renew` extends it. Returns whether they were taken, and how many the tenant uses now."""
        key = keys.places(self.keys.tenant(place.tenant))
        answer = await self._server.run("enter", key, place.lease, place.count, most, _milliseconds(lease_s))
        with _reading():
            outcome, in_use = answer
            return outcome == b"entered", int(in_use)

    async def renew(self, places: Sequence[Place], *, lease_s: float) -> None:
        """Extend the leases of these places, which then last `lease_s` from now. Places that a flush has removed are
        written again."""
        for start in range(0, len(places), RENEWED_AT_ONCE):
            values: list[str | int] = []
            for place in places[start : start + RENEWED_AT_ONCE]:
                values += (keys.places(self.keys.tenant(place.tenant)), place.lease, place.count)
            await self._server.run("renew", _milliseconds(lease_s), *values)

    async def leave_places(self, place: Place) -> None:
        """Free the places that `enter` took for a turn."""
        key = keys.places(self.keys.tenant(place.tenant))
        await self._server.ask(self._redis.zrem(key, f"{place.count}:{place.lease}"))

    # ------------------------------------------------------------------------------------------------------------------

    def _keys_of(self, name: SessionName, fingerprint: str) -> SessionKeys:
        return self.keys.session(name, fingerprint=fingerprint)

    def _unsealed(self, sealed: bytes, key: str) -> bytes:
        """Return the data that a member has sealed; empty if no member of this fleet has written the data under this
        key."""
        try:
            return self.keys.unseal(sealed, key=key) if sealed else b""
        except BadSeal as error:
            log.error("an entry of the directory is damaged, and so not there: %s", error)
            return b""

    def _must_be_ours(self, answer: list[Any]) -> None:
        if answer[0] == b"flushed":
            raise DirectoryFlushed("the directory was flushed")


@contextmanager
def _reading() -> Iterator[None]:
    """Turn errors that a reply of an unexpected form causes in the `with` block, such as KeyError, into
    DirectoryUnavailable."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise DirectoryUnavailable(f"a reply that is none: {error}") from None


def _milliseconds(seconds: float | None) -> int:
    return -1 if seconds is None else max(1, int(seconds * 1e3))
