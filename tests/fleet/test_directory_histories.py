"""Random histories of a fleet against the real scripts in a real Redis, held against a model of what they promise.

    FLEET_HISTORIES=20000 python -m pytest -n0 tests/fleet/test_directory_histories.py

Replicas claim, commit, replay old commits, crash, delete, hear of deletions and let go; operators move sessions;
records expire, the directory loses its data. After every step:

- Epochs rise, across flushes too, and each has one home.
- A commit is taken exactly from the session's home; one that is refused changes nothing of the record.
- What was deleted does not come back: heads and rows say in which life of their session the turn began.

There is one rule for all of that. Of several rules hypothesis leaves some out of each history, and a stale commit needs
five steps of three kinds: hardly a history in a hundred had one.
"""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from reprise.fleet.directory import Directory, DirectoryFlushed
from reprise.fleet.keys import SessionName
from reprise.fleet.records import FIRST_EPOCH, Commit, Forgotten, Outcome
from tests.fleet.test_directory import MODEL, SECRET, heartbeat
from tests.redis_servers import RedisServer, redis_server

HISTORIES = int(os.environ.get("FLEET_HISTORIES", "40"))
REPLICAS = ("a", "b", "c")
SESSIONS = (SessionName("alice", "1"), SessionName("alice", "1", "salt"), SessionName("bob", "1"))
ACTS = {  # act -> how often it is drawn
    "beat": 4, "claim": 10, "commit": 12, "begin_turn_without_redis": 4, "release": 2, "move": 2, "forget": 2,
    "crash": 2, "expire": 1, "flush": 1, "settle": 3,
}  # fmt: skip
T = TypeVar("T")
acts = st.sampled_from([act for act, often in ACTS.items() for _ in range(often)])
replicas, sessions = st.sampled_from(REPLICAS), st.sampled_from((SESSIONS[0], *SESSIONS))


def deleted_with(name: SessionName) -> list[SessionName]:
    return [other for other in SESSIONS if (other.tenant, other.session_id) == (name.tenant, name.session_id)]


@dataclass
class Turn:
    """A turn under way, or one that has ended and may be replayed."""

    commit: Commit
    life: int
    boot: str


@dataclass
class Replica:
    directory: Directory
    boot: str
    since: int = 0
    born: str = ""
    claimed: dict[SessionName, tuple[int, int]] = field(default_factory=dict)  # epoch and turn
    begun: dict[SessionName, int] = field(default_factory=dict)  # epoch at which its copy was begun
    life: dict[SessionName, int] = field(default_factory=dict)  # life of its copy
    knows: dict[str, int] = field(default_factory=dict)  # deletions


@dataclass
class Session:
    """Return what the record must be; None: there is none."""

    home: str
    boot: str
    epoch: int
    turn: int = 0
    head: bytes = b""
    nonce: bytes = b""
    wanted: str = ""


class Histories(RuleBasedStateMachine):
    loop: asyncio.AbstractEventLoop
    directories: dict[str, Directory]

    @initialize()
    def begin(self) -> None:
        self.redis = self.directories["a"]._redis
        self.wait(self.redis.flushall())
        self.replicas = {name: Replica(directory, f"{name}-0") for name, directory in self.directories.items()}
        for name, replica in self.replicas.items():
            replica.directory._boot = replica.boot
            replica.directory.born = ""
            self.beat(name)
        self.records: dict[SessionName, Session | None] = dict.fromkeys(SESSIONS)
        self.lives = dict.fromkeys(SESSIONS, 0)
        self.turns: list[tuple[str, Turn]] = []
        self.epochs: dict[int, tuple[str, str, SessionName]] = {}
        self.is_settled = True  # every replica has beaten since the last flush

    def wait(self, call: Awaitable[T]) -> T:
        return self.loop.run_until_complete(call)  # type: ignore[arg-type]

    def record_in_redis(self, name: SessionName) -> dict[bytes, bytes]:
        return self.wait(self.redis.hgetall(self.directories["a"].keys.session(name, fingerprint=MODEL).record))

    def note_epoch(self, epoch: int, home: str, boot: str, name: SessionName) -> None:
        if epoch not in self.epochs:
            assert epoch > max(self.epochs, default=0), "epochs rise"
        assert self.epochs.setdefault(epoch, (home, boot, name)) == (home, boot, name), "one home an epoch"

    @rule(act=acts, who=replicas, name=sessions, place=st.integers(0, 5))
    def do(self, act: str, who: str, name: SessionName, place: int) -> None:
        """place: of a turn, the last one is 0."""
        match act:
            case "beat" | "crash":
                getattr(self, act)(who)
            case "claim" | "begin_turn_without_redis" | "release" | "move" | "forget":
                getattr(self, act)(who, name)
            case "commit" if self.turns:
                self.commit(*self.turns[-1 - place % len(self.turns)])
            case "expire":
                self.expire(name)
            case "flush" | "settle":
                getattr(self, act)()

    # --- what replicas do ---------------------------------------------------------------------------------------------

    def claim(self, who: str, name: SessionName) -> None:
        """Claim a session and begin a turn of it."""
        replica, was = self.replicas[who], self.records[name]
        began = replica.begun.get(name, 0)
        try:
            claim = self.wait(replica.directory.claim(name, fingerprint=MODEL, ttl_s=600.0, begun=began))
        except DirectoryFlushed:
            return
        if was is not None and (was.home, was.boot) == (who, replica.boot):
            assert (claim.epoch, claim.turn) == (was.epoch, was.turn)
        else:
            assert claim.turn == (0 if was is None else was.turn)
            assert claim.home == ("" if was is None else was.home)
            self.records[name] = Session(who, replica.boot, claim.epoch, claim.turn, b"" if was is None else was.head)
            if was is not None:
                self.records[name].nonce = was.nonce
        assert claim.head == (b"" if was is None else was.head)
        self.records[name].wanted = ""
        self.note_epoch(claim.epoch, who, replica.boot, name)
        replica.claimed[name] = claim.epoch, claim.turn
        if claim.forgotten > began:  # its copy is older than the deletion, so it deletes that first
            replica.begun[name], replica.life[name] = claim.epoch, self.lives[name]
        elif claim.turn > 0:  # it adopts what is there
            replica.life[name] = max(replica.life.get(name, 0), self.lives[name] if self.is_settled else 0)
            replica.begun.setdefault(name, claim.epoch)
        else:
            replica.begun.setdefault(name, claim.epoch)
            replica.life.setdefault(name, self.lives[name])
        turn = self.commit_of(who, name, epoch=claim.epoch, turn=claim.turn, since=replica.begun[name])
        self.turns.append((who, turn))

    def commit_of(self, who: str, name: SessionName, *, epoch: int, turn: int, since: int) -> Turn:
        replica = self.replicas[who]
        life = replica.life.get(name, 0)
        nonce = secrets.token_bytes(8)
        said = f"{life} {nonce.hex()}".encode()
        commit = Commit(
            name=name, fingerprint=MODEL, epoch=epoch, since=since, base_turn=turn, nonce=nonce, ttl_s=600.0, head=said,
            rows={nonce: said},
        )  # fmt: skip
        return Turn(commit, life, replica.boot)

    def begin_turn_without_redis(self, who: str, name: SessionName) -> None:
        replica = self.replicas[who]
        _, turn = replica.claimed.get(name, (0, 0))
        # What it has a copy of was begun then; a session that is new to it begins now, after all that it has heard.
        since = replica.begun.get(name, max(FIRST_EPOCH, replica.since))
        replica.life.setdefault(name, self.lives[name] if self.knows_all(replica, name) else 0)
        replica.begun.setdefault(name, since)
        self.turns.append((who, self.commit_of(who, name, epoch=0, turn=turn, since=since)))

    def knows_all(self, replica: Replica, name: SessionName) -> bool:
        key = replica.directory.keys.name(name.tenant, name.session_id)
        return all(other.knows.get(key, 0) <= replica.since for other in self.replicas.values())

    def commit(self, who: str, turn: Turn) -> None:
        """End a turn that has begun, as often as one likes: the outbox may send it again."""
        commit, name = turn.commit, turn.commit.name
        replica, was = self.replicas[who], self.records[name]
        before = self.record_in_redis(name)
        done = self.wait(replica.directory.commit(commit))
        after = self.record_in_redis(name)
        if done.outcome is not Outcome.COMMITTED:
            assert after == before, "a refused commit changes nothing"
        if done.outcome is Outcome.FLUSHED:
            return
        if done.outcome is Outcome.GONE:
            if self.is_settled and commit.epoch:
                assert was is None or turn.life < self.lives[name]
            return
        assert was is not None or not commit.epoch, "a record that is gone is told as such"
        is_again = was is not None and was.nonce == commit.nonce and was.home == who
        if commit.epoch:
            may = was is not None and was.epoch == commit.epoch
        else:
            may = was is None or (was.home in (who, "") and was.turn == commit.base_turn)
        assert (done.outcome is Outcome.COMMITTED) == (is_again or may)
        if done.outcome is Outcome.COMMITTED and not is_again:
            if was is None:
                was = self.records[name] = Session(who, replica.boot, done.epoch)
            elif not commit.epoch and (was.home, was.boot) != (who, replica.boot):
                was.home, was.boot, was.epoch = who, replica.boot, done.epoch
            was.turn, was.head, was.nonce = was.turn + 1, commit.head, commit.nonce
            assert (done.turn, done.epoch) == (was.turn, was.epoch)
            if was.home:  # its home may have let go of it meanwhile
                self.note_epoch(was.epoch, was.home, was.boot, name)
            if name in replica.claimed and replica.claimed[name][0] == done.epoch:
                replica.claimed[name] = done.epoch, done.turn

    def release(self, who: str, name: SessionName) -> None:
        replica, was = self.replicas[who], self.records[name]
        epoch, _ = replica.claimed.pop(name, (1, 0))
        let_go = self.wait(replica.directory.release(name, fingerprint=MODEL, epoch=epoch))
        if replica.born == self.born_in_redis():
            assert let_go == (was is not None and was.epoch == epoch)
        if let_go and was is not None:
            was.home = was.boot = ""

    def move(self, who: str, name: SessionName) -> None:
        was = self.records[name]
        moved = self.wait(self.directories[who].move(name, fingerprint=MODEL, replica=who))
        assert moved == (was is not None)
        if was is not None:
            was.wanted = who

    def forget(self, who: str, name: SessionName) -> None:
        replica = self.replicas[who]
        try:
            forgetting = self.wait(replica.directory.forget(name.tenant, name.session_id))
        except DirectoryFlushed:
            return
        assert forgetting.epoch > max(self.epochs, default=0)
        self.epochs[forgetting.epoch] = ("", "", name)
        for other in deleted_with(name):
            self.records[other] = None
            self.lives[other] += 1
        self.hear(replica, Forgotten(replica.directory.keys.name(name.tenant, name.session_id), forgetting.epoch))

    def hear(self, replica: Replica, deletion: Forgotten) -> None:
        """Delete the copies that are older."""
        replica.knows[deletion.name] = max(deletion.epoch, replica.knows.get(deletion.name, 0))
        for name in SESSIONS:
            if replica.directory.keys.name(name.tenant, name.session_id) != deletion.name:
                continue
            if replica.begun.get(name, 0) < deletion.epoch:
                for kept in (replica.begun, replica.life, replica.claimed):
                    kept.pop(name, None)

    def beat(self, who: str) -> None:
        replica = self.replicas[who]
        since = replica.since
        heard = self.wait(replica.directory.beat(heartbeat(who, boot=replica.boot), since=since))
        assert heard.reaches_back
        assert not heard.has_more
        for deletion in heard.forgotten:
            self.hear(replica, deletion)
        replica.since = max(heard.epoch, since)
        if heard.born != replica.born:
            replica.born = heard.born
            replica.claimed.clear()
            if replica.knows:
                known = [Forgotten(name, epoch) for name, epoch in replica.knows.items()]
                self.wait(replica.directory.remember(known))
                for name in SESSIONS if hasattr(self, "records") else ():
                    if not self.record_in_redis(name):
                        self.records[name] = None

    def crash(self, who: str) -> None:
        """Come back under another boot, with what lies on disk."""
        replica = self.replicas[who]
        replica.boot = f"{who}-{int(replica.boot.partition('-')[2]) + 1}"
        replica.directory._boot = replica.boot
        replica.claimed.clear()
        self.beat(who)

    # --- what happens to Redis ----------------------------------------------------------------------------------------

    def expire(self, name: SessionName) -> None:
        names = self.directories["a"].keys.session(name, fingerprint=MODEL)
        self.wait(self.redis.delete(names.record, names.transcript))
        self.records[name] = None

    def flush(self) -> None:
        self.wait(self.redis.flushall())
        self.records = dict.fromkeys(SESSIONS)
        self.is_settled = False

    def settle(self) -> None:
        """Let every replica beat twice: once to say what was deleted before a flush, once to hear of it."""
        for _ in range(2):
            for who in REPLICAS:
                self.beat(who)
        self.is_settled = True

    def born_in_redis(self) -> str:
        return (self.wait(self.redis.get("r1:born")) or b"").decode()

    @invariant()
    def redis_is_as_the_model_says(self) -> None:
        if not hasattr(self, "records"):
            return
        keys = self.directories["a"].keys
        names = [keys.session(name, fingerprint=MODEL) for name in SESSIONS]
        pipe = self.redis.pipeline(transaction=False)
        for one in names:
            pipe.hgetall(one.record)
            pipe.hgetall(one.transcript)
        found = self.wait(pipe.execute())
        for name, one, record, transcript in zip(SESSIONS, names, found[::2], found[1::2], strict=True):
            expected = self.records[name]
            assert bool(record) == (expected is not None), name
            if expected is not None:
                assert record[b"home"].decode() == expected.home
                assert record.get(b"wanted", b"").decode() == expected.wanted
                assert (int(record[b"epoch"]), int(record[b"turn"])) == (expected.epoch, expected.turn)
            for digest, row in transcript.items() if self.is_settled else ():
                if digest not in (b"size", b"branches"):
                    life = keys.unseal(row, key=one.transcript).split()[0]
                    assert int(life) == self.lives[name], "what was deleted came back"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


def test_no_history_breaks_the_promises_of_the_directory(server: RedisServer) -> None:
    loop = asyncio.new_event_loop()
    directories = {name: Directory(url=server.url, secret=SECRET, deadline_s=60.0, replica=name) for name in REPLICAS}
    machine = type("Histories", (Histories,), {"loop": loop, "directories": directories})
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=HISTORIES,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
    finally:
        for directory in directories.values():
            loop.run_until_complete(directory.close())
        loop.close()


def test_a_copy_of_before_the_first_epoch_is_older_than_every_deletion(server: RedisServer) -> None:
    loop = asyncio.new_event_loop()
    directories = {name: Directory(url=server.url, secret=SECRET, deadline_s=60.0, replica=name) for name in REPLICAS}
    machine = type("Histories", (Histories,), {"loop": loop, "directories": directories})()
    name = SESSIONS[0]
    try:
        machine.begin()
        machine.forget("a", name)
        machine.flush()  # the deletion goes too, of which b has not heard
        machine.beat("b")
        machine.begin_turn_without_redis("b", name)  # its copy may be older than the deletion
        machine.claim("b", name)
        machine.beat("a")
        machine.commit(*machine.turns[-1])
        machine.settle()
        machine.redis_is_as_the_model_says()
    finally:
        for directory in directories.values():
            loop.run_until_complete(directory.close())
        loop.close()
