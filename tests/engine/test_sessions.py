"""Tests the session endpoints' requests on a real engine with DRAM and disk."""

from pathlib import Path
from typing import Any

import pytest

from reprise.engine.messages import SessionReply, SessionRequest
from tests.engine.driver import Driver
from tests.engine.models import random_ids

SLOT = 32 * 4 * 2 * (16 + 16) * 4
SYSTEM = random_ids(70, 99)


@pytest.fixture
def driver(path: Path, tmp_path: Path) -> Any:
    made = start(path, tmp_path)
    yield made
    made.close()


def start(path: Path, tmp_path: Path, **changes: Any) -> Driver:
    settings = {"hbm_tokens": 1024, "dram_bytes": 40 * SLOT, "disk_bytes": 1 << 26, **changes}
    driver = Driver(path, cache_mode="attentionstore", disk_dir=str(tmp_path / "disk"), **settings)
    driver.cache.rates.load_s = lambda direction, num_bytes: 0.0  # type: ignore[method-assign]
    return driver


def apply(driver: Driver, action: str, session: str = "", *, tenant: str = "t", **more: Any) -> SessionReply | None:
    """The answer at once, or None."""
    request = SessionRequest(
        request_id=f"q-{action}-{session}", tenant=tenant, action=action, session_id=session, **more
    )
    replies = driver.engine.sessions(request, driver.now)
    assert len(replies) <= 1
    return replies[0] if replies else None


def now(driver: Driver, *arguments: Any, **more: Any) -> SessionReply:
    reply = apply(driver, *arguments, **more)
    assert reply is not None
    return reply


def delete(driver: Driver, session: str) -> SessionReply:
    """A deletion, from the question to its answer."""
    reply = apply(driver, "delete", session)
    for _ in range(1000):
        if reply is not None:
            return reply
        driver.engine._transfer.wait(0.01)
        for reply in driver.engine.poll(driver.now):
            assert reply.request_id == f"q-delete-{session}"
    raise AssertionError("the deletion has no answer")


def files(tmp_path: Path) -> list[Path]:
    return [file for file in (tmp_path / "disk").rglob("*") if file.is_file() and file.stat().st_size > 8192
            and "sqlite" not in file.name and ".db" not in file.name]  # fmt: skip


def test_a_tenant_sees_its_sessions_page_by_page(driver: Driver) -> None:
    for name in "cab":
        driver.ask(name, random_ids(50, ord(name)), session=name)
    driver.ask("theirs", random_ids(50, 1), session="z", tenant="other")
    reply = now(driver, "list", limit=2)
    assert ([info.session_id for info in reply.sessions], reply.more) == (["a", "b"], True)
    reply = now(driver, "list", limit=2, after="b")
    assert ([info.session_id for info in reply.sessions], reply.more) == (["c"], False)
    reply = now(driver, "list", after="az")  # is gone, or somebody else's: the same
    assert ([info.session_id for info in reply.sessions], reply.more) == (["b", "c"], False)
    assert now(driver, "list", after="z").sessions == []
    assert [info.session_id for info in now(driver, "list", tenant="other").sessions] == ["z"]
    assert now(driver, "list", tenant="nobody").sessions == []
    for action in ("get", "patch", "delete", "prefetch"):
        assert now(driver, action, "z").error_code == "not_found"


def test_everybodys_sessions_come_page_by_page_and_those_of_one_id_together(driver: Driver) -> None:
    for tenant, session, salt in (("u", "a", ""), ("t", "b", ""), ("t", "b", "x"), ("t", "a", ""), ("t", "a", "x")):
        driver.ask(f"{tenant}{session}{salt}", random_ids(40, 1), session=session, tenant=tenant, salt=salt)
    pages, after, more = [], "", True
    while more:
        reply = now(driver, "list_all", limit=1, after=after)
        pages.append([(info.tenant, info.session_id, info.cache_salt) for info in reply.sessions])
        after, more = "/".join(pages[-1][-1][:2]), reply.more
    assert pages == [[("t", "a", ""), ("t", "a", "x")], [("t", "b", ""), ("t", "b", "x")], [("u", "a", "")]]
    assert [info.session_id for info in now(driver, "list_all", after="t/aa").sessions] == ["b", "b", "a"]
    own = now(driver, "list", limit=1)
    assert [(info.session_id, own.more) for info in own.sessions] == [("a", True)] * 2


def test_what_is_known_of_a_session(driver: Driver) -> None:
    answer = driver.ask("a", random_ids(90, 1), session="s", max_tokens=11, ignore_eos=True)
    (info,) = now(driver, "get", "s").sessions
    assert info.tokens == len(answer.text) - 1 == 100
    assert info.blocks == {"hbm": 4, "dram": 4, "disk": 4}  # three full ones, and one of four tokens
    per_token = SLOT // 32
    assert info.bytes == dict.fromkeys(("hbm", "dram", "disk"), 100 * per_token)
    assert (info.truncated_tokens, info.pinned, info.running) == (0, False, False)
    assert info.expires_s == info.last_used_s + 3600.0
    driver.submit("b", answer.text, session="s")
    assert now(driver, "get", "s").sessions[0].running
    driver.run()


def test_a_pin_keeps_a_session_within_the_tenants_quota(path: Path, tmp_path: Path) -> None:
    driver = start(path, tmp_path, ttl_s=10.0, disk_bytes=20 * SLOT)
    for name, size in (("small", 60), ("large", 250)):
        driver.ask(name, random_ids(size, 1), session=name, max_tokens=2)
    (info,) = now(driver, "patch", "small", pinned=True).sessions
    assert info.pinned
    assert info.expires_s is None
    refused = now(driver, "patch", "large", pinned=True)
    assert refused.error_code == "pin_quota"
    assert not now(driver, "get", "large").sessions[0].pinned
    driver.cache.sessions.sweep(driver.cache.sessions.contexts["t", "", "large"].last_used_s + 11.0)
    driver.settle()
    assert [info.session_id for info in now(driver, "list").sessions] == ["small"]
    (info,) = now(driver, "patch", "small", pinned=False, ttl_s=500.0).sessions
    assert info.expires_s == info.last_used_s + 500.0
    driver.close()


def test_pins_and_times_to_live_survive_a_restart(path: Path, tmp_path: Path) -> None:
    driver = start(path, tmp_path)
    driver.ask("a", random_ids(60, 1), session="s")
    before = now(driver, "patch", "s", pinned=True, ttl_s=77.0).sessions[0]
    driver.close()
    driver = start(path, tmp_path)
    after = now(driver, "get", "s").sessions[0]
    assert after.pinned
    assert driver.cache.sessions.contexts["t", "", "s"].ttl_s == 77.0
    assert after.last_used_s == pytest.approx(before.last_used_s, abs=1.0)
    assert (after.tokens, after.blocks["disk"]) == (before.tokens, before.blocks["disk"])
    driver.close()


def test_what_is_deleted_is_gone_from_every_tier(driver: Driver, tmp_path: Path) -> None:
    answer = driver.ask("a", random_ids(100, 1), session="s", ignore_eos=True)
    assert files(tmp_path)
    assert delete(driver, "s").error_code is None
    assert not files(tmp_path), "before the answer, not behind it"
    assert len(driver.cache.tiers.table) == 0
    stats = driver.engine.stats()
    assert (stats.tier_bytes["dram"], stats.sessions, stats.hbm_pages_cached) == (0, 0, 0)
    assert now(driver, "get", "s").error_code == "not_found"
    again = driver.ask("b", answer.text, session="s", ignore_eos=True)
    assert again.cached == 0
    assert now(driver, "list").sessions[0].tokens == len(again.text) - 1


def test_a_deletion_is_answered_when_the_copies_under_all_salts_are_gone(driver: Driver, tmp_path: Path) -> None:
    for salt in ("", "x"):
        driver.ask(f"a{salt}", random_ids(100, 1), session="s", salt=salt, ignore_eos=True)
    busy = driver.cache.tiers.is_busy
    driver.cache.tiers.is_busy = lambda name: name[1] == ""  # type: ignore[method-assign]
    assert apply(driver, "delete", "s") is None
    for _ in range(20):
        driver.engine._transfer.wait(0.01)
        assert driver.engine.poll(driver.now) == []
    assert now(driver, "delete", "s").error_code == "busy", "another one waits for it"
    driver.cache.tiers.is_busy = busy  # type: ignore[method-assign]
    driver.cache.sessions.deletions.go_on()
    replies: list[SessionReply] = []
    while not replies:
        driver.engine._transfer.wait(0.01)
        replies = driver.engine.poll(driver.now)
    assert [(reply.request_id, reply.error_code) for reply in replies] == [("q-delete-s", None)]
    assert not files(tmp_path)


def test_while_it_runs_a_session_cannot_be_deleted(driver: Driver) -> None:
    driver.submit("a", random_ids(60, 1), session="s", ignore_eos=True)
    driver.step()
    assert now(driver, "delete", "s").error_code == "busy", "also before its first turn has ended"
    assert now(driver, "delete", "s", tenant="other").error_code == "not_found"
    driver.run()
    driver.submit("b", random_ids(60, 1), session="s", ignore_eos=True)
    driver.step()
    assert now(driver, "delete", "s").error_code == "busy"
    driver.run()
    assert delete(driver, "s").error_code is None


@pytest.mark.parametrize("deleted", ["first", "second"])
@pytest.mark.parametrize("dram", [0, 40])
def test_a_shared_system_prompt_outlives_one_of_its_sessions(
    path: Path, tmp_path: Path, deleted: str, dram: int
) -> None:
    driver = start(path, tmp_path, dram_bytes=dram * SLOT)
    texts = {}
    for number, name in enumerate(("first", "second")):
        texts[name] = driver.ask(name, SYSTEM + random_ids(50, number), session=name, ignore_eos=True).text
    assert delete(driver, deleted).error_code is None
    driver.settle()
    left = "second" if deleted == "first" else "first"
    again = driver.ask("again", texts[left], session=left, ignore_eos=True)
    assert again.cached == len(texts[left]) - 1, "nothing of the other is lost"
    gone = driver.ask("gone", texts[deleted], session=deleted, ignore_eos=True)
    assert gone.cached < len(SYSTEM) + 1
    driver.close()


def test_a_session_that_is_expected_is_brought_up(path: Path, tmp_path: Path) -> None:
    driver = start(path, tmp_path, dram_bytes=8 * SLOT, hbm_tokens=288, max_context=256)
    text = driver.ask("a", random_ids(150, 1), session="s", ignore_eos=True).text
    for number in range(4):
        driver.ask(f"o{number}", random_ids(240, 5 + number), session=f"o{number}", max_tokens=2)
    before = now(driver, "get", "s").sessions[0].blocks
    assert before["dram"] < before["disk"]
    for number in range(4):
        delete(driver, f"o{number}")
    assert now(driver, "prefetch", "s").error_code is None
    driver.settle()
    after = now(driver, "get", "s").sessions[0].blocks
    assert after["dram"] == after["disk"] == 6
    again = driver.ask("b", text, session="s", ignore_eos=True)
    assert again.report is not None
    assert again.report.disk_tokens == 0
    assert again.cached == len(text) - 1
    driver.close()


def test_the_sessions_used_last_come_first_and_only_the_tenants_own(driver: Driver) -> None:
    for n, (tenant, session) in enumerate([("t", "a"), ("t", "b"), ("u", "c"), ("t", "a")]):
        driver.ask(f"r{n}", random_ids(40, n), session=session, tenant=tenant, max_tokens=1)
    assert [info.session_id for info in now(driver, "recent", limit=5).sessions] == ["a", "b"]
    assert [info.session_id for info in now(driver, "recent", limit=1).sessions] == ["a"]
    driver.submit("again", random_ids(40, 1), session="b", tenant="t", max_tokens=1)
    (info,) = now(driver, "recent", limit=1).sessions
    assert (info.session_id, info.running) == ("b", True), "it is in use now"
