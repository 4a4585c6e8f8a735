"""The directory against a real Redis: what its scripts answer, and what happens when Redis does not."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import uvloop

from reprise.fleet import directory_redis
from reprise.fleet.directory import Directory, DirectoryFlushed, Foreign
from reprise.fleet.directory_redis import DirectoryFull, DirectoryUnavailable
from reprise.fleet.keys import SessionName
from reprise.fleet.records import Commit, Committed, Heartbeat, Outcome, Place
from tests.redis_servers import RedisServer, redis_server
from tests.resetting_server import resetting_server

SECRET = bytes(range(32))
MODEL = "0123456789abcdef"
CHAT = SessionName("alice", "chat")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


def directory_of(server: RedisServer, replica: str = "a", **changes: Any) -> Directory:
    fields = {"url": server.url, "secret": SECRET, "deadline_s": 5.0, "replica": replica, "boot": f"{replica}-1"}
    return Directory(**{**fields, **changes})


def heartbeat(replica: str, **changes: Any) -> Heartbeat:
    fields = {"replica": replica, "boot": f"{replica}-1", "url": f"http://{replica}", "fingerprint": MODEL}
    return Heartbeat(**{**fields, "model": "m", "state": "ready", **changes})


@asynccontextmanager
async def fleet(server: RedisServer, *replicas: str, **changes: Any) -> AsyncIterator[list[Directory]]:
    """Directories of replicas that have beaten once, over an empty Redis."""
    from redis import Redis

    with Redis.from_url(server.url) as redis:
        redis.flushall()
    directories = [directory_of(server, replica, **changes) for replica in replicas]
    try:
        for directory, replica in zip(directories, replicas, strict=True):
            await directory.beat(heartbeat(replica), since=0)
        yield directories
    finally:
        for directory in directories:
            await directory.close()


def commit_of(epoch: int, *, name: SessionName = CHAT, **changes: Any) -> Commit:
    fields: dict[str, Any] = {"since": 0, "base_turn": 0, "nonce": secrets.token_bytes(8), "ttl_s": 60.0}
    return Commit(**{"name": name, "fingerprint": MODEL, "epoch": epoch, **fields, **changes})


async def claim(directory: Directory, name: SessionName = CHAT) -> Any:
    return await directory.claim(name, fingerprint=MODEL, ttl_s=60.0)


async def test_a_session_is_claimed_committed_and_found_by_another(server):
    async with fleet(server, "a", "b") as (a, b):
        first = await claim(a)
        assert (first.turn, first.home, first.head, first.forgotten) == (0, "", b"", 0)
        done = await a.commit(
            commit_of(
                first.epoch,
                tokens=70,
                size_bytes=900,
                redis_tokens=64,
                head=b"HEAD",
                rows={b"d1": b"row"},
                chains=(b"c",),
            )
        )
        assert done == Committed(Outcome.COMMITTED, first.epoch, 1, 1, 900)
        again = await claim(a)
        assert (again.epoch, again.turn, again.home) == (first.epoch, 1, "a"), "no new epoch at home"
        found = await b.find("alice", [b"unknown", b"c"], fingerprint=MODEL)
        assert found is not None
        assert (found.session_id, found.home) == ("chat", "a")
        assert await b.find("alice", [b"c"], fingerprint="ffff") is None
        assert await b.find("mallory", [b"c"], fingerprint=MODEL) is None
        record = await b.look(CHAT, fingerprint=MODEL)
        assert (record.home, record.turn, record.tokens, record.redis_tokens) == ("a", 1, 70, 64)
        assert record.idle_s < 30
        moved = await claim(b)
        assert moved.epoch > first.epoch
        assert (moved.turn, moved.home, moved.head) == (1, "a", b"HEAD")
        assert await b.transcript(CHAT, fingerprint=MODEL) == {b"d1": b"row"}
        assert await b.look(SessionName("alice", "other"), fingerprint=MODEL) is None


async def test_who_was_overtaken_may_not_commit_but_leaves_a_branch(server):
    async with fleet(server, "a", "b") as (a, b):
        early = await claim(a)
        late = await claim(b)
        assert (await b.commit(commit_of(late.epoch, head=b"B", rows={b"b": b"said by b"}))).turn == 1
        assert await a.commit(commit_of(early.epoch, head=b"A", rows={b"a": b"said by a"})) == Committed(Outcome.FENCED)
        back = await claim(a)
        assert (back.turn, back.head, back.home) == (1, b"B", "b")
        assert (early.branches, late.branches, back.branches) == (0, 0, 1), "b has not seen all answers yet"
        assert await a.transcript(CHAT, fingerprint=MODEL) == {b"b": b"said by b", b"a": b"said by a"}


async def test_a_commit_that_comes_twice_counts_once(server):
    async with fleet(server, "a") as (a,):
        claimed = await claim(a)
        commit = commit_of(claimed.epoch)
        assert (await a.commit(commit)).turn == 1
        assert (await a.commit(commit)).turn == 1
        unclaimed = replace(commit, name=SessionName("alice", "new"), epoch=0)
        assert (await a.commit(unclaimed)).turn == 1
        assert (await a.commit(unclaimed)).turn == 1


async def test_a_head_that_is_renewed_ends_no_turn(server):
    async with fleet(server, "a") as (a,):
        claimed = await claim(a)
        await a.commit(commit_of(claimed.epoch, head=b"old"))
        done = await a.commit(commit_of(claimed.epoch, head=b"new", ends_turn=False))
        assert (done.outcome, done.turn) == (Outcome.COMMITTED, 1)
        assert (await claim(a)).head == b"new"


async def test_turns_without_a_claim_are_taken_where_nobody_else_was(server):
    """Commit as from the outbox of a replica that could not ask when its turn began."""
    async with fleet(server, "a", "b") as (a, b):
        assert (await a.commit(commit_of(0))).turn == 1
        assert (await a.commit(commit_of(0, base_turn=1))).turn == 2
        assert (await a.commit(commit_of(0, base_turn=1))).outcome is Outcome.FENCED, "a turn that is not the last"
        assert (await b.commit(commit_of(0, base_turn=2))).outcome is Outcome.FENCED, "another's session"
        epoch = (await claim(a)).epoch
        assert await a.release(CHAT, fingerprint=MODEL, epoch=epoch)
        assert not await b.release(CHAT, fingerprint=MODEL, epoch=epoch - 1)
        taken = await b.commit(commit_of(0, base_turn=2))
        assert (taken.turn, taken.epoch > epoch) == (3, True)


async def test_what_was_deleted_stays_so(server):
    async with fleet(server, "a", "b") as (a, b):
        salted = SessionName("alice", "chat", "salt")
        claims = {name: await claim(a, name) for name in (CHAT, salted, SessionName("alice", "kept"))}
        for name, claimed in claims.items():
            await a.commit(commit_of(claimed.epoch, name=name, head=b"H", rows={b"r": b"text"}, size_bytes=5))
        before = (await b.beat(heartbeat("b"), since=0)).epoch
        forgetting = await b.forget("alice", "chat")
        assert (forgetting.found, forgetting.waiting) == (2, ("a",))
        assert await b.unacknowledged(forgetting.epoch) == ("a",)
        for name in (CHAT, salted):
            assert await b.look(name, fingerprint=MODEL) is None
            assert await b.transcript(name, fingerprint=MODEL) == {}
            late = await a.commit(commit_of(claims[name].epoch, name=name, rows={b"r": b"text"}))
            assert late == Committed(Outcome.GONE)
            assert (await a.commit(commit_of(0, name=name, since=before))).outcome is Outcome.GONE
        heard = await a.beat(heartbeat("a"), since=before)
        assert [(f.name, f.epoch) for f in heard.forgotten] == [(a.keys.name("alice", "chat"), forgetting.epoch)]
        assert heard.epoch >= forgetting.epoch
        assert heard.reaches_back
        await a.acknowledge(forgetting.epoch)
        assert await b.unacknowledged(forgetting.epoch) == ()
        assert await b.transcript(CHAT, fingerprint=MODEL) == {}
        anew = await claim(b)
        assert (anew.turn, anew.head, anew.forgotten) == (0, b"", forgetting.epoch)
        assert anew.epoch > forgetting.epoch
        kept = await claim(b, SessionName("alice", "kept"))
        assert (kept.turn, kept.forgotten) == (1, 0)
        done = await b.commit(commit_of(kept.epoch, name=SessionName("alice", "kept"), size_bytes=7))
        assert (done.sessions, done.size_bytes) == (2, 7)


async def test_a_session_whose_claimer_waits_while_it_is_deleted_and_begun_anew_keeps_nothing(server):
    async with fleet(server, "a", "b") as (a, b):
        old = await claim(a)
        await b.forget("alice", "chat")
        await claim(b)
        assert (await a.commit(commit_of(old.epoch, rows={b"r": b"old text"}))).outcome is Outcome.GONE
        assert await b.transcript(CHAT, fingerprint=MODEL) == {}


async def test_deletions_that_were_trimmed_show(server, monkeypatch):
    monkeypatch.setattr("reprise.fleet.directory.MAX_FORGOTTEN", 2)
    async with fleet(server, "a") as (a,):
        epochs = [(await a.forget("alice", f"chat {n}")).epoch for n in range(3)]
        assert not (await a.beat(heartbeat("a"), since=0)).reaches_back
        heard = await a.beat(heartbeat("a"), since=epochs[0])
        assert heard.reaches_back
        assert [f.epoch for f in heard.forgotten] == epochs[1:]


async def test_a_flush_is_noticed(server):
    async with fleet(server, "a") as (a,):
        claimed = await claim(a)
        forgetting = await a.forget("alice", "other")
        await a._redis.flushall()
        assert await a.commit(commit_of(claimed.epoch)) == Committed(Outcome.FLUSHED)
        for call in (claim(a), a.forget("alice", "chat"), a.unacknowledged(forgetting.epoch)):
            with pytest.raises(DirectoryFlushed):
                await call
        born = a.born
        heard = await a.beat(heartbeat("a"), since=0)
        assert heard.born != born
        assert (await claim(a)).epoch > claimed.epoch, "epochs rise across a flush"


async def test_members_are_told_with_the_age_of_their_beats(server):
    async with fleet(server, "a", "b") as (a, b):
        await b._redis.hset("r1:m", "c", b"no beat")
        await b._redis.zadd("r1:ma", {"c": 1})
        roll = await a.members()
        assert roll.born == a.born
        assert {member.beat.replica: member.beat.url for member in roll.members} == {"a": "http://a", "b": "http://b"}
        assert all(member.age_s < 30 for member in roll.members)
        await b.leave()
        assert [member.beat.replica for member in (await a.members()).members] == ["a"]


async def test_a_question_that_is_cancelled_ends_its_task(server):
    async with fleet(server, "a") as (a,):

        async def ask_forever() -> None:
            while True:
                await a.look(CHAT, fingerprint=MODEL)
                await a.find("alice", [b"c"], fingerprint=MODEL)

        for steps in range(20):
            task = asyncio.create_task(ask_forever())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=30)
            assert done
            assert task.cancelled()


async def test_an_operator_drains_a_replica(server):
    async with fleet(server, "a", "b") as (a, b):
        await a.drain("b", on=True)
        assert (await b.members()).drained == {"b"}
        await a.drain("b", on=False)
        assert (await b.members()).drained == set()


async def test_an_operator_moves_a_session_until_it_is_claimed(server):
    async with fleet(server, "a", "b") as (a, b):
        assert not await a.move(CHAT, fingerprint=MODEL, replica="b")
        assert await a.look(CHAT, fingerprint=MODEL) is None, "nothing was made"
        await claim(a)
        assert await a.move(CHAT, fingerprint=MODEL, replica="b")
        assert (await a.look(CHAT, fingerprint=MODEL)).wanted == "b"
        await claim(b)
        found = await a.look(CHAT, fingerprint=MODEL)
        assert (found.home, found.wanted) == ("b", "")


async def test_a_replica_with_another_secret_may_not_join(server):
    async with fleet(server, "a"):
        stranger = directory_of(server, "x", secret=bytes(32))
        with pytest.raises(Foreign, match="tenant_secret_file"):
            await stranger.beat(heartbeat("x"), since=0)
        await stranger.close()


async def test_a_bucket_is_shared(server):
    async with fleet(server, "a", "b") as (a, b):
        taken = [await which.take("alice", "r", per_minute=3, amount=1, need=1) for which in (a, b, a, b)]
        assert [t.wait_s == 0 for t in taken] == [True, True, True, False]
        assert 0 < taken[-1].wait_s <= 20
        assert (await b.take("bob", "r", per_minute=3, amount=1, need=1)).level == 2
        assert (await a.take("alice", "k", per_minute=100, amount=250, need=0)).level == -150
        refused = await b.take("alice", "k", per_minute=100, amount=0, need=1)
        assert 80 < refused.wait_s <= 91
        assert (await b.take("alice", "k", per_minute=200, amount=0, need=1)).wait_s == 0, "its limit was changed"


async def test_a_tenants_sessions_are_bounded_and_the_oldest_leave(server):
    async with fleet(server, "a", max_sessions=5) as (a,):
        for n in range(12):
            name = SessionName("alice", f"chat {n}")
            done = await a.commit(commit_of(0, name=name, size_bytes=10, ttl_s=None if n == 8 else 60.0))
        assert (done.sessions, done.size_bytes) == (5, 50)
        assert await a.look(SessionName("alice", "chat 6"), fingerprint=MODEL) is None
        assert await a.look(SessionName("alice", "chat 11"), fingerprint=MODEL) is not None
        held = await a.held("alice", count=4, longest_s=60)
        assert (held.sessions, held.size_bytes) == (5, 50)
        named = [a.keys.name("alice", f"chat {n}") for n in (7, 9, 10)]
        assert held.oldest == (named[0], "", named[1], named[2]), "the pinned one stays"
        await claim(a, SessionName("alice", "chat 9"))
        held = await a.held("alice", first=1, count=9, longest_s=60)
        assert held.oldest == ("", named[2], a.keys.name("alice", "chat 11"), ""), "and so does the newest"
        await a.commit(commit_of(0, name=SessionName("alice", "chat 12")))
        assert (await a.held("alice", first=2, count=9, longest_s=60)).oldest[-2:] == ("", ""), "its turn runs"
        await asyncio.sleep(0.01)
        assert (await a.held("alice", first=2, count=9, longest_s=0)).oldest[-2:] != ("", ""), "that was long ago"
        assert (await a.held("alice")).oldest == ()
        await a.forget_name("alice", named[0])
        assert await a.look(SessionName("alice", "chat 7"), fingerprint=MODEL) is None


async def test_a_pinned_session_stays_pinned_until_a_client_ends_that(server):
    async with fleet(server, "a") as (a,):
        names = a.keys.session(CHAT, fingerprint=MODEL)
        first = (await claim(a)).epoch
        turn = commit_of(first, rows={b"r": b"text"}, chains=(b"c",))
        await a.commit(turn)
        keys = [names.record, names.transcript, a.keys.chain("alice", b"c")]
        for pinned_s, expires in ((None, False), (60.0, True)):
            await a.keep("alice", "chat", ttl_s=pinned_s)
            for _ in range(2):
                assert [await a._redis.pttl(key) > 0 for key in keys] == [expires] * 3
                await a.commit(replace(turn, nonce=secrets.token_bytes(8)))


async def test_what_leads_to_a_pinned_session_leaves_with_it_or_with_who_has_it_now(server):
    async with fleet(server, "a") as (a,):
        fork, chain = SessionName("alice", "fork"), a.keys.chain("alice", b"c")
        epochs = {name: (await claim(a, name)).epoch for name in (CHAT, fork)}
        for name in (CHAT, fork):
            await a.commit(commit_of(epochs[name], name=name, chains=(b"c",)))
        await a.keep("alice", "chat", ttl_s=None)
        assert await a._redis.pttl(chain) > 0, "it leads to the other one, which expires"
        for _ in range(3):
            for name in (fork, CHAT):
                await a.commit(commit_of(epochs[name], name=name, chains=(b"c",)))
        assert await a._redis.pttl(chain) == -1
        names = a.keys.session(CHAT, fingerprint=MODEL)
        assert await a._redis.lrange(f"r1:g:{names.tenant}:{names.member}", 0, -1) == [chain.encode()]
        await a.forget("alice", "chat")
        assert await a._redis.exists(chain) == 0


async def test_nothing_of_a_session_that_is_not_pinned_any_more_stays_for_ever(server):
    async with fleet(server, "a") as (a,):
        await a.commit(commit_of((await claim(a)).epoch, chains=(b"c",), rows={b"r": b"text"}, ttl_s=None))
        await a.keep("alice", "chat", ttl_s=60.0)
        keys = [
            key async for key in a._redis.scan_iter() if key[:5] in (b"r1:c:", b"r1:g:", b"r1:s:", b"r1:t:", b"r1:n:")
        ]
        assert len(keys) == 5
        assert [key for key in keys if await a._redis.pttl(key) < 0] == []


async def test_rows_that_are_sent_again_take_no_room(server, monkeypatch):
    monkeypatch.setattr("reprise.fleet.directory.MAX_TRANSCRIPT_BYTES", 5000)
    async with fleet(server, "a") as (a,):
        epoch = (await claim(a)).epoch
        rows = {b"%d" % n: bytes(1000) for n in range(4)}
        for count in (3, 4):
            await a.commit(commit_of(epoch, rows=dict(list(rows.items())[:count])))
        assert await a.transcript(CHAT, fingerprint=MODEL) == rows


async def test_what_leads_to_a_session_is_bounded_and_leaves_with_it(server, monkeypatch):
    monkeypatch.setattr("reprise.fleet.directory.MAX_CHAINS", 3)
    async with fleet(server, "a") as (a,):
        held = await claim(a)
        for n in range(5):
            await a.commit(commit_of(held.epoch, chains=(b"%d" % n, b"same")))

        async def known() -> list[bytes]:
            chains = (b"0", b"1", b"2", b"3", b"4", b"same")
            return [chain for chain in chains if await a.find("alice", [chain], fingerprint=MODEL)]

        assert await known() == [b"3", b"4", b"same"]
        other = SessionName("alice", "fork")
        await a.commit(commit_of((await claim(a, other)).epoch, name=other, chains=(b"4",)))
        await a.forget("alice", "chat")
        assert await known() == [b"4"], "another session has this one now"
        await a.forget("alice", "fork")
        left = {key async for key in a._redis.scan_iter() if key[:5] in (b"r1:c:", b"r1:g:", b"r1:s:", b"r1:t:")}
        assert left == set()


async def test_a_tenants_transcripts_are_bounded_and_the_oldest_leave(server):
    async with fleet(server, "a", max_said_bytes=2500) as (a,):
        names = [SessionName("alice", f"chat {n}") for n in range(4)]
        for name in names:
            await a.commit(commit_of(0, name=name, rows={b"r": bytes(1000)}))
        found = [len(await a.transcript(name, fingerprint=MODEL)) for name in names]
        assert found == [0, 0, 1, 1]
        assert await a.look(names[0], fingerprint=MODEL) is not None, "its record stays"
        await a.commit(commit_of(0, name=SessionName("alice", "long"), rows={b"r": bytes(9000)}))
        assert await a.transcript(SessionName("alice", "long"), fingerprint=MODEL) != {}, "the one in use stays"
        assert await a.transcript(names[3], fingerprint=MODEL) == {}


async def test_places_are_shared_and_come_back(server):
    async with fleet(server, "a", "b") as (a, b):
        one, two, more = Place("alice", "1", 2), Place("alice", "2", 1), Place("alice", "3", 1)
        assert await a.enter(one, most=3, lease_s=60) == (True, 2)
        assert await b.enter(two, most=3, lease_s=0.05) == (True, 3)
        assert await a.enter(Place("bob", "4", 3), most=3, lease_s=60) == (True, 3)
        await asyncio.sleep(0.06)
        assert await b.enter(more, most=3, lease_s=60) == (True, 3), "its gateway has not renewed it"
        await a.leave_places(one)
        assert await a.enter(two, most=3, lease_s=60) == (True, 2)
        await a._redis.flushall()
        await b.renew([two, more], lease_s=60)
        assert await a.enter(one, most=3, lease_s=60) == (False, 2)


async def test_expired_sessions_are_uncounted(server):
    async with fleet(server, "a") as (a,):
        await a.commit(commit_of(0, ttl_s=0.02, size_bytes=10))
        await asyncio.sleep(0.05)
        await a.commit(commit_of(0, name=SessionName("alice", "next"), size_bytes=1))
        done = await a.commit(commit_of(0, name=SessionName("alice", "third"), size_bytes=1))
        assert (done.sessions, done.size_bytes) == (2, 2)


async def test_damage_is_as_good_as_nothing(server):
    async with fleet(server, "a", "b") as (a, b):
        names = a.keys.session(CHAT, fingerprint=MODEL)
        await a.commit(commit_of(0, head=b"HEAD", rows={b"1": b"one", b"2": b"two"}))
        other = a.keys.session(SessionName("bob", "chat"), fingerprint=MODEL)
        stolen = await a._redis.hget(names.record, "head")
        await a._redis.hset(other.record, mapping={"head": stolen, "epoch": 1, "turn": 1})
        assert (await claim(b, SessionName("bob", "chat"))).head == b"", "a head counts only in its own place"
        row = await a._redis.hget(names.transcript, b"1")
        await a._redis.hset(names.transcript, b"1", row[:-1] + b"X")
        assert await b.transcript(CHAT, fingerprint=MODEL) == {b"2": b"two"}
        await a._redis.hset(names.record, "turn", "many")
        with pytest.raises(DirectoryUnavailable):
            await claim(b)
        await a._redis.set(names.record, "no hash")
        for call in (claim(b), b.look(CHAT, fingerprint=MODEL), a.commit(commit_of(0))):
            with pytest.raises(DirectoryUnavailable):
                await call


async def test_no_names_and_no_ids_stand_in_keys(server):
    async with fleet(server, "a") as (a,):
        claimed = await claim(a)
        await a.commit(commit_of(claimed.epoch, head=b"H", rows={b"r": b"t"}, chains=(b"c",)))
        await a.take("alice", "r", per_minute=3, amount=1, need=1)
        await a.forget("alice", "x")
        found = b" ".join([key async for key in a._redis.scan_iter()])
        assert b"alice" not in found
        assert b"chat" not in found


async def test_a_stopped_redis_is_the_same_as_none(tmp_path):
    with redis_server(tmp_path) as server:
        directory = directory_of(server, deadline_s=0.2)
        await directory.beat(heartbeat("a"), since=0)
        server.pause()
        clock = asyncio.get_running_loop().time
        started_s = clock()
        for _ in range(4):
            with pytest.raises(DirectoryUnavailable):
                await claim(directory)
        assert clock() - started_s < 3
        assert (directory.state, directory.failures) == ("open", 3)
        server.resume()
        async with asyncio.timeout(30):
            while True:
                try:
                    await directory.beat(heartbeat("a"), since=0)
                    assert (await claim(directory)).turn == 0
                    break
                except DirectoryUnavailable:
                    await asyncio.sleep(0.1)
        assert directory.state == "closed"
        server.stop()
        with pytest.raises(DirectoryUnavailable):
            await claim(directory)
        await directory.close()


async def test_what_no_request_waits_for_may_be_late(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_redis, "UNHURRIED_S", 60.0)
    with redis_server(tmp_path) as server:
        directory = directory_of(server, deadline_s=0.05)
        for call in (lambda: directory.beat(heartbeat("a"), since=0), directory.members):
            server.pause()
            asyncio.get_running_loop().call_later(0.5, server.resume)
            await call()
        assert directory.failures == 0
        await directory.close()


async def test_no_request_waits_to_find_out_whether_redis_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_redis, "PAUSE_S", 0.01)
    monkeypatch.setattr(directory_redis, "UNHURRIED_S", 60.0)
    with redis_server(tmp_path) as server:
        directory = directory_of(server, deadline_s=0.2)
        await directory.beat(heartbeat("a"), since=0)
        server.pause()
        for _ in range(6):
            with pytest.raises(DirectoryUnavailable):
                await claim(directory)
            await asyncio.sleep(0.02)
        assert directory.failures == directory_redis.MOST_FAILURES
        asyncio.get_running_loop().call_later(0.5, server.resume)
        await directory.beat(heartbeat("a"), since=0)
        assert directory.state == "half_open", "it answers, but too late for a request"
        with pytest.raises(DirectoryUnavailable):
            await claim(directory)
        async with asyncio.timeout(60):
            while directory.state != "closed":
                await asyncio.sleep(0.02)
                with suppress(DirectoryUnavailable):
                    await directory.beat(heartbeat("a"), since=0)
        assert (await claim(directory)).turn == 0
        await directory.close()


async def test_a_full_redis_takes_deletions(tmp_path):
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        directory = directory_of(server)
        await directory.beat(heartbeat("a"), since=0)
        full = False
        for n in range(100):
            try:
                rows = {b"r": secrets.token_bytes(100_000)}
                await directory.commit(commit_of(0, name=SessionName("alice", str(n)), rows=rows))
            except DirectoryFull:
                full = True
                break
        assert full
        assert directory.state == "closed", "it answers"
        await directory.forget("alice", "0")
        assert await directory.look(SessionName("alice", "0"), fingerprint=MODEL) is None
        await directory.close()


def test_a_heartbeat_of_another_version_can_be_read():
    data = msgspec.msgpack.encode({**msgspec.to_builtins(heartbeat("a")), "more": [1]})
    assert msgspec.msgpack.decode(data, type=Heartbeat) == heartbeat("a")


def test_a_redis_that_resets_new_connections_is_away_on_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis' client lets the RuntimeError pass that uvloop raises for a write to a connection that is gone."""
    monkeypatch.setattr(directory_redis, "MOST_FAILURES", 1 << 30)

    async def asks() -> None:
        async with resetting_server() as port:
            directory = Directory(
                url=f"redis://127.0.0.1:{port}", secret=SECRET, deadline_s=5.0, replica="a", boot="a-1"
            )
            for _ in range(20):
                claims = (directory.claim(CHAT, fingerprint=MODEL, ttl_s=60.0, begun=0) for _ in range(8))
                found = await asyncio.gather(*claims, return_exceptions=True)
                assert all(isinstance(one, DirectoryUnavailable) for one in found), found

    uvloop.run(asks())
