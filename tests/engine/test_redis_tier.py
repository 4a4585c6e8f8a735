"""Tests engines that share KV through Redis: what one has left the other goes on with, and whatever is wrong with the
copy there is a miss and never another text."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reprise.engine.messages import Adopt, Head, SessionReply, SessionRequest
from tests.cache.storage.redis.redis_server import OwnRedis, redis_server
from tests.engine.driver import Answer, Driver, assert_greedy
from tests.engine.models import random_ids

__all__ = ["redis_server"]

HISTORY, ANSWER = 150, 9
SESSION = "s"
Make = Callable[..., Driver]


@pytest.fixture
def make(path: Path, tmp_path: Path, redis_server: OwnRedis) -> Iterator[Make]:
    """Makes engines with a disk of their own and the same Redis."""
    made: list[Driver] = []

    def make(**changes: Any) -> Driver:
        directory = tmp_path / f"disk{len(made)}"
        tiers = {"dram_bytes": 1 << 26, "disk_bytes": 1 << 28, "disk_dir": str(directory), "io_deadline_s": 20.0}
        tiers |= {"redis_urls": (redis_server.url,), "redis_bytes": 1 << 28, **changes}
        driver = Driver(path, cache_mode="attentionstore", hbm_tokens=1024, max_context=512, **tiers)
        driver.cache.rates.expect_steps(0.001, 0.02)  # steps so slow that every load is worth it
        driver.cache.rates.computed = lambda *_: None  # type: ignore[method-assign]
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.close()


def turn(driver: Driver, request_id: str, prompt: list[int]) -> Answer:
    return driver.ask(request_id, prompt, session=SESSION, max_tokens=ANSWER, ignore_eos=True)


def last_head(driver: Driver) -> Head:
    """The head of the session, after all uploads have ended."""
    return [head for head in driver.engine.take_heads() if head.session_id == SESSION][-1]


def adopt(driver: Driver, given: Head, **changes: Any) -> SessionReply:
    names = {"tenant": given.tenant, "salt": given.salt, "session_id": given.session_id}
    fields = {**names, "head": given.head, **changes}
    return _answer(driver, "adopt", driver.engine.adopt(Adopt(request_id="adopt", **fields), driver.now))


def delete(driver: Driver) -> SessionReply:
    """Delete the session, and return the answer."""
    request = SessionRequest(request_id="d", tenant="t", action="delete", session_id=SESSION)
    return _answer(driver, "d", driver.engine.sessions(request, driver.now))


def _answer(driver: Driver, request_id: str, replies: list[SessionReply]) -> SessionReply:
    """Return the one answer to a request, which may come later than at once."""
    until = time.monotonic() + 30
    while not replies:
        assert time.monotonic() < until
        driver.engine._transfer.wait(0.01)
        replies = driver.engine.poll(driver.now)
    (reply,) = replies
    assert reply.request_id == request_id
    return reply


def redis_tokens(answer: Answer) -> int:
    assert answer.report is not None
    return answer.report.redis_tokens


def test_a_session_goes_on_in_another_engine_from_redis(make: Make, vanilla: Any) -> None:
    first, second = make(), make()
    text = turn(first, "a", random_ids(HISTORY, 1)).text
    head = last_head(first)
    assert (head.tenant, head.salt, head.turn) == ("t", "", 1)
    assert adopt(second, head).error_code is None
    prompt = [*text, *random_ids(20, 2)]
    answer = turn(second, "b", prompt)
    assert_greedy(vanilla, answer)
    assert redis_tokens(answer) == len(text) - 1  # the last token was drawn and never computed
    assert second.engine.stats().moved_bytes["redis_to_hbm"] > 0
    # And back again: the first engine has the beginning, and loads what the second has added.
    head = last_head(second)
    assert head.turn == 2
    assert adopt(first, head).error_code is None
    again = turn(first, "c", [*answer.text, *random_ids(20, 3)])
    assert_greedy(vanilla, again)
    assert again.report is not None
    assert again.report.cached_tokens == len(answer.text) - 1
    assert 0 < redis_tokens(again) <= len(answer.text) - len(text) + 32


def test_a_head_goes_ahead_of_the_last_output_and_again_after_the_upload(make: Make) -> None:
    driver = make()
    driver.submit("a", random_ids(HISTORY, 1), session=SESSION, max_tokens=ANSWER, ignore_eos=True)
    heads: list[Head] = []
    while driver.engine.has_work():
        outputs = driver.step()
        heads = driver.engine.take_heads()
        assert bool(heads) == any(output.finish_reason for output in outputs)
    driver.settle()
    after = last_head(driver)
    assert after.turn == heads[0].turn == 1
    assert len(after.head) > len(heads[0].head)  # it names the extent
    assert (heads[0].redis_tokens, after.redis_tokens) == (0, HISTORY + ANSWER - 1)  # the last was never computed


def test_a_head_of_another_session_secret_or_making_is_refused(make: Make) -> None:
    first = make()
    turn(first, "a", random_ids(HISTORY, 1))
    head, second = last_head(first), make(tenant_secret=b"another")
    assert adopt(second, head).error_code == "bad_head"
    for changes in ({"tenant": "u"}, {"salt": "x"}, {"session_id": "r"}, {"head": b""}, {"head": head.head[:-1]}):
        assert adopt(first, head, **changes).error_code == "bad_head"
    assert adopt(first, head).error_code is None
    assert adopt(make(redis_bytes=0), head).error_code == "unavailable"


def damage(server: OwnRedis, how: str) -> None:
    for key in server.keys(b"r1:k:*"):
        if how == "evicted":
            server.call(b"DEL", key)
        elif how == "cut off":
            server.call(b"HSET", key, b"0", b"short")
        elif how == "a field lost":
            server.call(b"HDEL", key, b"0")
        else:
            connection = server.connection()
            value = bytearray(bytes(connection.call(b"HGET", key, b"0", max_bytes=1 << 24)))  # type: ignore[call-overload]
            for place in range(0, len(value), 997):
                value[place] ^= 1 << place % 8
            connection.call(b"HSET", key, b"0", bytes(value))
            connection.close()


@pytest.mark.parametrize("how", ["evicted", "cut off", "a field lost", "bits flipped"])
@pytest.mark.parametrize("is_adopted", [True, False])
def test_what_is_wrong_in_redis_is_computed(
    make: Make, vanilla: Any, redis_server: OwnRedis, how: str, is_adopted: bool
) -> None:
    first, second = make(), make()
    text = turn(first, "a", random_ids(HISTORY, 1)).text
    head = last_head(first)
    if is_adopted:
        adopt(second, head)
    damage(redis_server, how)
    if not is_adopted:
        adopt(second, head)
    answer = turn(second, "b", [*text, *random_ids(20, 2)])
    assert_greedy(vanilla, answer)
    assert redis_tokens(answer) == 0
    failures = second.engine.stats().load_failures
    # A byte that has changed is seen only when it is placed; what is missing at the adoption is never looked for.
    assert bool(failures) == (is_adopted or how != "evicted"), failures
    assert_greedy(vanilla, turn(second, "c", [*answer.text, *random_ids(20, 3)]))


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["cut off", "a field lost", "bits flipped"])
def test_what_one_engine_finds_damaged_is_missing_for_the_next(
    make: Make, vanilla: Any, redis_server: OwnRedis, how: str
) -> None:
    first, second, third = make(), make(), make()
    text = turn(first, "a", random_ids(HISTORY, 1)).text
    head = last_head(first)
    adopt(second, head)
    adopt(third, head)
    damaged = set(redis_server.keys(b"r1:k:*"))
    damage(redis_server, how)
    turn(second, "b", [*text, *random_ids(20, 2)])
    reason = {"cut off": "short_read", "a field lost": "missing", "bits flipped": "checksum"}[how]
    assert set(second.engine.stats().load_failures) == {reason}
    wait_until(lambda: not damaged & set(redis_server.keys(b"r1:k:*")))
    assert_greedy(vanilla, turn(third, "c", [*text, *random_ids(20, 3)]))
    assert set(third.engine.stats().load_failures) == {"missing"}


def test_a_damaged_header_is_gone_after_the_first_who_reads_it(make: Make, redis_server: OwnRedis) -> None:
    first, second = make(), make()
    turn(first, "a", random_ids(HISTORY, 1))
    head = last_head(first)
    for key in redis_server.keys(b"r1:k:*"):
        redis_server.call(b"HSET", key, b"h", b"altered")
    adopt(second, head)
    wait_until(lambda: not redis_server.keys(b"r1:k:*"))


def test_what_is_loaded_stays_for_another_time_to_live(make: Make, redis_server: OwnRedis) -> None:
    first, second = make(), make()
    text = turn(first, "a", random_ids(HISTORY, 1)).text
    adopt(second, last_head(first))
    keys = redis_server.keys(b"r1:k*:*")  # extents, and the set of their session
    for key in keys:
        redis_server.call(b"EXPIRE", key, b"60")
    before = {key: redis_server.call(b"ZSCORE", b"r1:kz", key) for key in redis_server.keys(b"r1:k:*")}
    assert redis_tokens(turn(second, "b", [*text, *random_ids(20, 2)])) == len(text) - 1
    for key in keys:
        wait_until(lambda key=key: int(str(redis_server.call(b"TTL", key))) > 3_000)  # type: ignore[misc]
    assert all(redis_server.call(b"ZSCORE", b"r1:kz", key) != score for key, score in before.items())


def test_a_session_that_is_always_served_at_home_stays_in_redis(
    make: Make, vanilla: Any, redis_server: OwnRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reprise.cache.tiers.redis._RENEW_S", 0.0)
    home, other = make(), make()
    text = turn(home, "a", random_ids(HISTORY, 1)).text
    last_head(home)
    old = redis_server.keys(b"r1:k*:*")  # the extent, and the set of its session
    for key in old:
        redis_server.call(b"EXPIRE", key, b"60")
    text = turn(home, "b", [*text, *random_ids(20, 2)]).text
    for key in old:
        wait_until(lambda key=key: int(str(redis_server.call(b"TTL", key))) > 3_000)  # type: ignore[misc]
    for key in old:
        redis_server.call(b"DEL", key)
    text = turn(home, "c", [*text, *random_ids(20, 3)]).text

    def is_back() -> bool:
        home.settle()
        return set(old) <= set(redis_server.keys(b"r1:k*:*"))

    wait_until(is_back)
    adopt(other, last_head(home))
    answer = turn(other, "d", [*text, *random_ids(20, 4)])
    assert_greedy(vanilla, answer)
    assert redis_tokens(answer) == len(text) - 1


def test_how_full_redis_is_is_told_with_its_budget(make: Make, redis_server: OwnRedis) -> None:
    first, second = make(), make()
    assert first.engine.stats().tier_capacity["redis"] == 1 << 28
    turn(first, "a", random_ids(HISTORY, 1))
    last_head(first)
    held = int(bytes(redis_server.call(b"HGET", b"r1:kb", b"")))  # type: ignore[call-overload]
    assert held > 0

    def tells(driver: Driver) -> bool:
        driver.engine.poll(driver.now)
        return driver.engine.stats().tier_bytes["redis"] == held

    for driver in (first, second):  # whoever wrote it
        wait_until(lambda driver=driver: tells(driver))  # type: ignore[misc]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("how", [None, "evicted", "cut off", "bits flipped"])
def test_a_turn_that_waits_has_its_kv_fetched_from_redis_into_dram(
    make: Make, vanilla: Any, redis_server: OwnRedis, how: str | None
) -> None:
    first, second = make(), make(max_seqs=1)
    text = turn(first, "a", random_ids(HISTORY, 1)).text
    adopt(second, last_head(first))
    if how is not None:
        damage(redis_server, how)
    running = second.submit("long", random_ids(20, 5), session="other", max_tokens=400, ignore_eos=True)
    second.step()
    prompt = [*text, *random_ids(20, 2)]
    answer = second.submit("b", prompt, session=SESSION, max_tokens=ANSWER, ignore_eos=True)

    def has_ended() -> bool:
        stats = second.engine.stats()
        return bool(stats.moved_bytes.get("redis_to_dram") or stats.load_failures)

    while not has_ended():
        assert running.finish_reason is None
        second.step()
    assert not answer.token_ids
    second.run()
    assert_greedy(vanilla, running)
    assert_greedy(vanilla, answer)
    history = len(text) - 1
    whole = history // 32 * 32
    assert answer.report is not None
    expected = (whole, history - whole) if how is None else (0, 0)
    assert (answer.report.dram_tokens, answer.report.redis_tokens) == expected
    assert_greedy(vanilla, turn(second, "c", [*answer.text, *random_ids(20, 3)]))


def test_a_redis_that_is_gone_costs_no_answer(make: Make, vanilla: Any, redis_server: OwnRedis) -> None:
    first, second = make(), make()
    text = turn(first, "a", random_ids(HISTORY, 1)).text
    head = last_head(first)
    adopt(second, head)
    redis_server.stop()
    answer = turn(second, "b", [*text, *random_ids(20, 2)])
    assert_greedy(vanilla, answer)
    assert redis_tokens(answer) == 0
    assert adopt(second, head).error_code in {None, "unavailable"}
    redis_server.start()


def test_a_redis_that_stands_still_is_given_up(make: Make, vanilla: Any, redis_server: OwnRedis) -> None:
    first, second = make(), make(io_deadline_s=1.0)
    text = turn(first, "a", random_ids(HISTORY, 1)).text
    adopt(second, last_head(first))
    redis_server.pause()
    try:
        answer = turn(second, "b", [*text, *random_ids(20, 2)])
        assert_greedy(vanilla, answer)
        assert redis_tokens(answer) == 0
    finally:
        redis_server.resume()


def test_a_deleted_session_has_left_redis_before_the_answer(make: Make, tmp_path: Path, redis_server: OwnRedis) -> None:
    first, second = make(), make()
    turn(first, "a", random_ids(HISTORY, 1))
    adopt(second, last_head(first))
    assert redis_server.keys(b"r1:k*:*")
    assert delete(second).error_code is None
    assert redis_server.keys(b"r1:k*:*") == []
    assert len(second.cache.tiers.table) == 0


def test_what_a_server_that_is_gone_has_left_in_redis_is_deleted_with_all_salts(
    make: Make, redis_server: OwnRedis
) -> None:
    first, second = make(), make()
    for salt, session in (("", SESSION), ("x", SESSION), ("", "kept"), ("x", "kept")):
        first.ask(f"{salt}{session}", random_ids(40, 1), session=session, salt=salt, ignore_eos=True)
    before = len(redis_server.keys(b"r1:k:*"))
    assert delete(second).error_code == "not_found", "here"
    assert (before, len(redis_server.keys(b"r1:k:*"))) == (4, 2)
    assert len(redis_server.keys(b"r1:ks:*")) == 1
    redis_server.stop()
    assert delete(second).error_code == "undeleted"
    redis_server.start()


def test_without_redis_nothing_of_it_is_there(make: Make) -> None:
    driver = make(redis_bytes=0)
    turn(driver, "a", random_ids(HISTORY, 1))
    assert set(driver.engine.stats().tier_bytes) == {"dram", "disk"}
    assert driver.engine.take_heads() == []
    assert not [thread.name for thread in driver.engine._transfer._threads if "redis" in thread.name]
