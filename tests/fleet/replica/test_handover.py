"""Two servers and a real Redis: what one has answered, the other goes on with, and what one deletes, both do."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from reprise.app.conversations.transcript_rows import Exported
from reprise.app.settings.settings import Settings
from reprise.engine.messages import Head
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.keys import SessionName
from tests.app.fakes import FakeEngine, Running, in_process, make_settings, until, write_tokenizer
from tests.redis_servers import RedisServer, redis_server

SECRET = bytes(range(32))
HELLO = {"role": "user", "content": "Hello"}
MORE = {"role": "user", "content": "And you?"}


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


def settings_of(server: RedisServer, directory: Path, name: str) -> Settings:
    secret = directory / "secret"
    secret.write_bytes(SECRET)
    return make_settings(
        directory / name,
        server={"tenant_secret_file": secret},
        fleet={
            "redis_url": server.url, "advertise": f"http://{name}", "replica": name, "deadline_ms": 5000,
        },
    )  # fmt: skip


@asynccontextmanager
async def replica(server: RedisServer, directory: Path, name: str) -> AsyncIterator[Running]:
    settings = settings_of(server, directory, name)
    async with in_process(FakeEngine(write_tokenizer(directory / "model")), settings) as running:
        await running.app.state.hooks.beat()
        yield running


async def say(running: Running, *messages: dict, session: str = "chat", **fields: Any) -> str:
    body = {"model": "test-model", "messages": list(messages), "session_id": session, **fields}
    answer = await running.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def test_a_conversation_goes_on_at_another_replica_with_the_ids_that_were_generated(server, tmp_path):
    async with replica(server, tmp_path, "a") as a, replica(server, tmp_path, "b") as b:
        spelled = [a.engine.tokenizer.token_to_id(letter) for letter in "Hello"]
        assert spelled != a.engine.tokenizer.encode("Hello").ids
        a.engine.script.token_ids = spelled
        a.app.state.hooks.on_head(
            Head(tenant="local", salt="", session_id="chat", turn=1, redis_tokens=5, head=b"HEAD")
        )
        said = await say(a, HELLO)
        directory, name = a.app.state.hooks.directory, SessionName("local", "chat")
        record = await directory.look(name, fingerprint=a.engine.model.fingerprint)
        assert (record.turn, record.redis_tokens) == (1, 5)
        await say(b, HELLO, {"role": "assistant", "content": said}, MORE)
        first, second = a.engine.submitted[0].token_ids, b.engine.submitted[0].token_ids
        assert second[: len(first) + len(spelled)] == [*first, *spelled]
        assert [adopt.head for adopt in b.engine.adopted] == [b"HEAD"]
        record = await directory.look(name, fingerprint=a.engine.model.fingerprint)
        assert (record.home, record.turn) == ("b", 2)


async def test_both_answer_when_both_are_asked_at_once(server, tmp_path):
    async with replica(server, tmp_path, "a") as a, replica(server, tmp_path, "b") as b:
        for _ in range(5):
            await asyncio.gather(say(a, HELLO), say(b, HELLO))


@pytest.mark.parametrize("first_to_end", ["a", "b"])
async def test_a_turn_that_another_replica_has_overtaken_is_known_there_too(server, tmp_path, first_to_end):
    async with replica(server, tmp_path, "a") as a, replica(server, tmp_path, "b") as b:
        a.engine.script.token_ids, b.engine.script.token_ids = [40, 41, 42], [50, 51]
        turns = {}
        for name, which in (("a", a), ("b", b)):  # b claims last, so its turn is the one that counts
            which.engine.script.may_start = asyncio.Event()
            turns[name] = asyncio.create_task(say(which, HELLO))
            await until(lambda which=which: which.engine.submitted, timeout_s=30)
        for name in sorted(turns, key=lambda name: name != first_to_end):
            {"a": a, "b": b}[name].engine.script.may_start.set()
            await turns[name]
        said = await turns["a"]
        assert a.app.state.hooks.commits == {"fenced": 1}
        await say(b, HELLO, {"role": "assistant", "content": said}, MORE)
        first, second = a.engine.submitted[0].token_ids, b.engine.submitted[1].token_ids
        assert second[: len(first) + 3] == [*first, 40, 41, 42]
        await say(b, HELLO, {"role": "assistant", "content": said}, MORE)
        assert b.app.state.hooks.claims == {"new": 1, "adopted": 1, "home": 1}


async def test_a_deleted_session_is_deleted_everywhere(server, tmp_path):
    async with replica(server, tmp_path, "a") as a, replica(server, tmp_path, "b") as b:
        said = await say(a, HELLO)
        await say(b, HELLO, {"role": "assistant", "content": said}, MORE)
        names = [await which.app.state.text_thread.names() for which in (a, b)]
        assert names == [[("local", "chat")]] * 2
        answer = await b.http.delete("/v1/sessions/chat")
        assert answer.status_code == 204, answer.text
        names = [await which.app.state.text_thread.names() for which in (a, b)]
        assert names == [[], []]
        assert (await b.http.delete("/v1/sessions/chat")).status_code == 404
        await say(a, HELLO)  # a new session of that name
        await a.app.state.hooks.beat()
        assert await a.app.state.text_thread.names() == [("local", "chat")]


async def test_sessions_of_a_deleted_id_are_begun_anew_under_each_salt(server, tmp_path):
    async with replica(server, tmp_path, "a") as a, replica(server, tmp_path, "b") as b:
        salts = ("one", "two")
        for salt in salts:
            await say(a, HELLO, cache_salt=salt)
        assert (await b.http.delete("/v1/sessions/chat")).status_code == 204
        assert await a.app.state.text_thread.names() == []
        for salt in salts:
            await say(a, HELLO, cache_salt=salt)
        told = await a.app.state.text_thread.names()
        assert sorted(scope for scope, _ in told) == ["local/one", "local/two"], (
            "the second deletes nothing of the first"
        )


async def test_a_session_whose_server_is_gone_is_deleted_by_another_engine(server, tmp_path):
    async with replica(server, tmp_path, "b") as b:
        async with replica(server, tmp_path, "a") as a:
            await say(a, HELLO, cache_salt="salt")
        assert (await b.http.delete("/v1/sessions/chat")).status_code == 204
        asked = [(one.tenant, one.session_id) for one in b.engine.questions if one.action == "delete"]
        assert asked == [("local", "chat")]
        assert b.engine.adopted == []


async def test_without_redis_turns_go_on_and_are_committed_later(server, tmp_path):
    async with replica(server, tmp_path, "a") as a:
        server.stop()
        said = await say(a, HELLO)
        answer = await a.http.delete("/v1/sessions/chat")
        assert answer.status_code == 503
        said = await say(a, HELLO, session="other")
        server.start()
        async with asyncio.timeout(60):
            while True:
                with_b = Directory(url=server.url, secret=SECRET, deadline_s=5.0)
                record = await with_b.look(SessionName("local", "other"), fingerprint=a.engine.model.fingerprint)
                await with_b.close()
                if record is not None:
                    break
                await asyncio.sleep(0.2)
        assert (record.home, record.turn) == ("a", 1)
        async with replica(server, tmp_path, "b") as b:
            await say(b, HELLO, {"role": "assistant", "content": said}, MORE, session="other")
            ids = a.engine.submitted[-1].token_ids
            assert b.engine.submitted[0].token_ids[: len(ids)] == ids


async def test_what_was_said_without_redis_is_sent_although_another_replica_has_gone_on(server, tmp_path, monkeypatch):
    async with replica(server, tmp_path, "a") as a, replica(server, tmp_path, "b") as b:
        said = {"role": "assistant", "content": await say(a, HELLO)}
        directory = a.app.state.hooks.directory
        with monkeypatch.context() as outage:

            async def commit_unheard(commit: Any) -> None:
                raise DirectoryUnavailable("no answer")

            outage.setattr(directory, "commit", commit_unheard)
            await say(a, HELLO, said, MORE)
            await say(b, HELLO, said, {"role": "user", "content": "b asks"})
        await say(a, HELLO, said, {"role": "user", "content": "a asks"})
        rows = await directory.transcript(SessionName("local", "chat"), fingerprint=a.engine.model.fingerprint)
        assert len(rows) == 4
        assert await a.app.state.text_thread.export("chat", tenant="local", after=0, most=9) == Exported(rows, 4)


async def test_a_turn_without_a_token_pins_nothing(server, tmp_path):
    async with replica(server, tmp_path, "a") as a:
        fleet, name = a.app.state.hooks, SessionName("local", "chat")
        key = fleet.directory.keys.session(name, fingerprint=a.engine.model.fingerprint).record
        for ttl_s, longest_s in ((None, 60 * 60 * 24), (10**6, 10**6)):
            if ttl_s:
                await fleet.keep("chat", tenant="local", ttl_s=ttl_s)
            await fleet.claim(name)
            fleet.begin(tenant="local", session_id="chat", salt="").give_up()
            fleet.on_head(Head(tenant="local", salt="", session_id="chat", turn=1, redis_tokens=5, head=b"HEAD"))
            await fleet.beat()
            assert longest_s - 3600 < await fleet.directory._redis.ttl(key) <= longest_s


async def test_a_turn_that_ends_while_a_flush_is_noticed_keeps_its_session(server, tmp_path, monkeypatch):
    async with replica(server, tmp_path, "a") as a:
        fleet, name = a.app.state.hooks, SessionName("local", "chat")
        await say(a, HELLO)
        await fleet.claim(name)
        turn = fleet.begin(tenant="local", session_id="chat", salt="")
        publish = fleet.deletions.publish_again

        async def end_and_publish() -> None:
            await turn.end([], chain=None, names=(), tokens=5, ttl_s=None)
            await publish()

        monkeypatch.setattr(fleet.deletions, "publish_again", end_and_publish)
        await fleet.directory._redis.flushall()
        await fleet.beat()
        record = await fleet.directory.look(name, fingerprint=a.engine.model.fingerprint)
        assert record is not None
        assert record.home == "a"
        assert await a.app.state.text_thread.names() == [("local", "chat")]


async def test_a_claim_whose_answer_was_lost_does_not_fence_its_turn(server, tmp_path, monkeypatch):
    async with replica(server, tmp_path, "a") as a, replica(server, tmp_path, "b") as b:
        said = await say(a, HELLO)
        directory = b.app.state.hooks.directory
        claim = directory.claim

        async def claim_unheard(*session: Any, **of: Any) -> None:
            await claim(*session, **of)
            raise DirectoryUnavailable("too late")

        monkeypatch.setattr(directory, "claim", claim_unheard)
        await say(b, HELLO, {"role": "assistant", "content": said}, MORE)
        record = await directory.look(SessionName("local", "chat"), fingerprint=b.engine.model.fingerprint)
        assert (record.home, record.turn) == ("b", 2)


async def test_a_replica_that_ends_lets_go_and_leaves(server, tmp_path):
    async with replica(server, tmp_path, "a") as a:
        await say(a, HELLO)
        fingerprint = a.engine.model.fingerprint
    directory = Directory(url=server.url, secret=SECRET, deadline_s=5.0)
    assert (await directory.members()).members == ()
    assert (await directory.look(SessionName("local", "chat"), fingerprint=fingerprint)).home == ""
    await directory.close()


def test_a_server_alone_does_not_load_redis():
    program = "import sys, reprise.app.main; print('redis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "False"
