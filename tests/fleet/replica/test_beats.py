"""A server in a fleet says that it lives, whatever else it does, until it leaves."""

from reprise.fleet.directory import Directory
from reprise.fleet.keys import SessionName
from tests.app.fakes import FakeEngine, in_process
from tests.fleet.gateway.harness import until
from tests.fleet.replica.test_replica import TENANT, beaten, directory_of, model_dir, redis, settings_of

__all__ = ["model_dir", "redis"]


async def test_it_beats_and_leaves(redis, model_dir, tmp_path):
    async with in_process(FakeEngine(model_dir), settings_of(tmp_path, redis)) as running:
        await running.app.state.readiness.wait_loaded()  # a beat before that tells of no model
        await beaten(running)
        (member,) = (await directory_of(running).members()).members
        assert (member.beat.replica, member.beat.model, member.beat.version != "") == ("a", "test-model", True)
        watcher = Directory(url=redis.url, secret=(tmp_path / "tenant_secret").read_bytes(), deadline_s=2.0)
        assert len((await watcher.members()).members) == 1
    assert (await watcher.members()).members == ()
    await watcher.close()


async def test_beats_do_not_wait_for_a_turn(redis, model_dir, tmp_path, monkeypatch):
    beats = []
    say = Directory.beat

    async def counted(self, beat, *, since):
        beats.append(beat)
        return await say(self, beat, since=since)

    monkeypatch.setattr(Directory, "beat", counted)
    async with in_process(FakeEngine(model_dir), settings_of(tmp_path, redis)) as running:
        held = running.app.state.hooks.held.of(SessionName(TENANT, "s"))
        async with held.lock:  # as a turn does that waits for another one of its session
            held.epoch, held.has_new_head = 1, True
            before = len(beats)
            await until(lambda: len(beats) >= before + 3)
