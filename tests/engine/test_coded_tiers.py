"""Tests engines whose KV below DRAM is coded: what comes back is near, nothing is coded twice, nothing of it is found
by others, and whatever is wrong with it is a miss."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.cache.blocks.keys import salt_of, token_bytes
from reprise.cache.blocks.stored import is_coded
from reprise.cache.moves import EncodeBlocks, WriteExtent
from tests.cache.storage.redis.redis_server import OwnRedis, redis_server
from tests.engine.driver import Answer, Driver, assert_greedy
from tests.engine.models import random_ids, save_tiny, tiny_model
from tests.engine.test_redis_tier import adopt, last_head

__all__ = ["redis_server"]

pytest.importorskip("numba")

HISTORY, ANSWER = 150, 9
Make = Callable[..., Driver]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def vanilla() -> Any:
    return tiny_model(head_dim=32)


@pytest.fixture(autouse=True)
def random_calibration_text(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [torch.tensor(random_ids(320, seed)) for seed in range(6)]
    monkeypatch.setattr("reprise.engine.codec.text.calibration_text", lambda _: (texts[:3], texts[3:]))


@pytest.fixture
def make(path: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes engines, one after the other, in one directory."""
    made: list[Driver] = []

    def make(codec: str = "transform", **changes: Any) -> Driver:
        if made:
            made[-1].close()
        tiers = {"dram_bytes": 1 << 26, "disk_bytes": 1 << 28, "disk_dir": str(tmp_path), "io_deadline_s": 20.0}
        tiers |= {"codec": codec, "codec_budget": 1e-5, "hbm_tokens": 1024, "max_context": 512, **changes}
        driver = Driver(path, cache_mode="attentionstore", **tiers)
        driver.cache.rates.expect_steps(0.001, 0.02)  # steps so slow that every load is worth it
        driver.cache.rates.computed = lambda *_: None  # type: ignore[method-assign]
        made.append(driver)
        return driver

    yield make
    made[-1].close()


def turn(driver: Driver, request_id: str, prompt: list[int], session: str = "s", salt: str = "") -> Answer:
    answer = driver.ask(request_id, prompt, session=session, salt=salt, max_tokens=ANSWER, ignore_eos=True)
    driver.settle()
    driver.check()
    return answer


def codec_of(driver: Driver) -> Any:
    return driver.engine._transfer._writes._coded.codec


def extents_of(driver: Driver) -> dict[int, list[int]]:
    """Extent -> places of its blocks in their context."""
    found: dict[int, list[int]] = {}
    for row in driver.cache.tiers.table:
        if "disk" in row.copies:
            found.setdefault(row.copies["disk"][0], []).append(len(row.token_ids))
    return found


def test_a_restarted_engine_goes_on_from_coded_kv(make, vanilla):
    first = make()
    one = turn(first, "1", random_ids(HISTORY, 1))
    assert_greedy(vanilla, one)
    prompt = [*one.text, *random_ids(20, 2)]
    second = make()
    two = turn(second, "2", prompt)
    assert two.cached >= HISTORY  # all of the first turn's full blocks, and its open one
    assert two.report.disk_tokens == two.cached
    assert two.report.coded_tokens == 3 * 32  # neither the first block nor what was open
    again = make()
    assert turn(again, "3", prompt, session="other").text == two.text  # the same bytes give the same text


def test_what_there_is_no_memory_to_decode_is_computed_and_loaded_the_next_time(make, vanilla, monkeypatch):
    first = make()
    one = turn(first, "1", random_ids(HISTORY, 1))
    prompt = [*one.text, *random_ids(20, 2)]
    second = make()
    decode, left = codec_of(second).decode, [1]

    def lacks_memory(*given, **named):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("out of memory")
        decode(*given, **named)

    monkeypatch.setattr(codec_of(second), "decode", lacks_memory)
    two = turn(second, "2", prompt)
    assert left == [0]
    assert two.report.coded_tokens == 0
    assert_greedy(vanilla, two)
    assert second.engine.stats().load_failures["memory"] == 3
    third = turn(make(), "3", prompt, session="other")
    assert third.report.coded_tokens >= 3 * 32  # its copies are as good as they were


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_coded_kv_is_decoded_on_a_gpu(make, dtype):
    first = make(device="cuda", dtype=dtype)
    assert first.engine._transfer._writes._coded.decodes.device.type == "cuda"
    one = turn(first, "1", random_ids(HISTORY, 1))
    prompt = [*one.text, *random_ids(20, 2)]
    second = make(device="cuda", dtype=dtype)
    two = turn(second, "2", prompt)
    assert two.report.disk_tokens == two.cached >= HISTORY
    assert two.report.coded_tokens == 3 * 32
    third = make(device="cuda", dtype=dtype)
    assert turn(third, "3", prompt, session="other").text == two.text


def test_what_is_asked_exactly_is_neither_coded_nor_decoded(make, vanilla):
    exact = {"salt": salt_of("", is_exact=True)}
    first = make()
    orders = watch_orders(first)
    one = turn(first, "1", random_ids(HISTORY, 1), **exact)
    assert orders
    assert not any(isinstance(order, EncodeBlocks) or order.is_coded for order in orders)
    coded = turn(first, "2", random_ids(HISTORY, 1))
    assert coded.cached == 0  # exact KV is found by exact requests alone
    prompt = [*one.text, *random_ids(20, 2)]
    second = make()
    two = turn(second, "3", prompt, **exact)
    assert (two.report.disk_tokens, two.report.coded_tokens) == (two.cached, 0)
    assert two.cached >= HISTORY
    assert_greedy(vanilla, two)
    three = turn(second, "4", prompt)
    assert three.report.coded_tokens == 3 * 32
    # In one server, beside coded KV of the same text.
    assert turn(second, "5", [*two.text, 1], **exact).report.coded_tokens == 0


def test_full_blocks_but_the_first_are_coded_and_smaller(make):
    driver = make()
    turn(driver, "1", random_ids(HISTORY, 1))
    kinds = {is_coded(extent): sizes for extent, sizes in extents_of(driver).items()}
    assert sorted(kinds[True]) == [32, 32, 32]
    assert sorted(kinds[False]) == [30, 32]  # the open block, and the first
    assert sum(codec_of(driver).segment_bytes) < 32 * driver.engine.model.kv_bytes_per_token / 3


def test_a_model_whose_kv_is_coded_is_not_called_exact(make):
    assert "cache.codec" not in make("raw").engine.model.exactness
    info = make().engine.model
    assert not info.exact
    assert "cache.codec" in info.exactness


def test_nothing_is_coded_twice(make, monkeypatch):
    driver = make()
    text = random_ids(HISTORY, 1)
    turn(driver, "1", text)
    driver = make()  # what it loads was decoded
    orders = watch_orders(driver)
    turn(driver, "2", [*text, *random_ids(80, 3)])
    decoded = {row.key for row in driver.cache.tiers.table if row.decoded}
    assert len(decoded) == 3
    third = turn(driver, "2b", [*text, *random_ids(80, 3), 7])
    assert (third.report.coded_tokens, third.report.disk_tokens) == (3 * 32, 0)  # it is in HBM, and was coded once
    # Have the disk lose all, so that what DRAM has is written again.
    driver.cache.tiers.disk.lost(list(extents_of(driver)))
    turn(driver, "3", random_ids(40, 4), session="other")
    writes = [order for order in orders if isinstance(order, WriteExtent)]
    encoded = {key for order in orders if isinstance(order, EncodeBlocks) for key, _, _ in order.blocks}
    encoded |= {b.key for order in writes if order.is_coded and not order.from_coded for b in order.blocks}
    assert encoded
    assert not encoded & decoded
    assert {block.key for order in writes if order.from_coded for block in order.blocks} >= decoded


def test_an_open_block_that_began_with_decoded_rows_is_not_coded_after_a_restart(make):
    one = turn(make(), "1", random_ids(HISTORY, 1))
    branch = [*one.text[:80], *random_ids(5, 3)]  # goes off in the middle of a coded block
    two = turn(make(), "2", branch, session="branch")
    assert two.cached == 80
    driver = make()
    orders = watch_orders(driver)
    three = turn(driver, "3", [*two.text, *random_ids(80, 4)], session="branch")
    assert three.cached > 80
    writes = [order for order in orders if isinstance(order, WriteExtent)]
    coded = {block.token_ids for order in writes if order.is_coded for block in order.blocks}
    whole = [token_bytes(three.text[start : start + 32]) for start in range(64, 160, 32)]
    assert [tokens in coded for tokens in whole] == [False, True, True]


def watch_orders(driver: Driver) -> list[WriteExtent | EncodeBlocks]:
    seen: list[WriteExtent | EncodeBlocks] = []
    orders, add = driver.cache.tiers.orders, driver.cache.tiers.orders.add

    def noted(move: Any) -> None:
        if isinstance(move, WriteExtent | EncodeBlocks):
            seen.append(move)
        add(move)

    orders.add = noted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("other", [{"codec": "raw"}, {"codec_budget": 1e-4}], ids=["raw", "another budget"])
def test_servers_that_code_otherwise_find_nothing(make, vanilla, other):
    one = turn(make(), "1", random_ids(HISTORY, 1))
    two = turn(make(**other), "2", [*one.text, 5])
    assert two.cached == 0
    if "codec" in other:
        assert_greedy(vanilla, two)


def test_flipped_bits_in_coded_segments_are_misses(make, vanilla, tmp_path):
    driver = make()
    one = turn(driver, "1", random_ids(HISTORY, 1))
    for extent in [extent for extent in extents_of(driver) if is_coded(extent)]:
        [file] = tmp_path.rglob(f"{extent:016x}.kv")
        data = bytearray(file.read_bytes())
        for place in range(4096, len(data), 256):
            data[place] ^= 4
        file.write_bytes(data)
    second = make()
    two = turn(second, "2", [*one.text, 5])
    assert two.cached <= 64
    assert_greedy(vanilla, two)


def test_blocks_that_the_codec_refuses_are_written_raw(make, vanilla):
    driver = make()
    codec_of(driver).encode = lambda layer, raw, segments: [False] * len(raw)
    one = turn(driver, "1", random_ids(HISTORY, 1))
    assert not any(map(is_coded, extents_of(driver)))
    assert sum(map(len, extents_of(driver).values())) >= 5
    second = make()
    two = turn(second, "2", [*one.text, 5])
    assert two.cached >= HISTORY
    assert_greedy(vanilla, two)


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "fetched"])
def test_engines_of_one_calibration_share_coded_kv_in_redis(path, tmp_path, redis_server: OwnRedis, is_loaded):
    made: list[Driver] = []
    tiers = {"dram_bytes": 1 << 26, "disk_bytes": 1 << 28, "io_deadline_s": 20.0, "codec": "transform"}
    tiers |= {"codec_budget": 1e-5, "redis_urls": (redis_server.url,), "redis_bytes": 1 << 28}
    try:
        for name in ("a", "b"):
            if made:
                shutil.copytree(tmp_path / "a" / "codecs", tmp_path / "b" / "codecs")
            directory = str(tmp_path / name)
            driver = Driver(
                path, cache_mode="attentionstore", hbm_tokens=1024, max_context=512, disk_dir=directory, **tiers
            )
            driver.cache.rates.expect_steps(0.001, 0.02)
            driver.cache.rates.computed = lambda *_: None  # type: ignore[method-assign]
            made.append(driver)
        first, second = made
        text = turn(first, "1", random_ids(HISTORY, 1)).text
        assert adopt(second, last_head(first)).error_code is None
        if not is_loaded:  # into DRAM, ahead of the turn
            second.cache.sessions.prefetch(("t", "", "s"), second.now)
            second.settle()
            assert second.engine.stats().moved_bytes["redis_to_dram"] > 0
        answer = turn(second, "2", [*text, *random_ids(80, 2)])
        assert (answer.report.cached_tokens, answer.report.coded_tokens) == (len(text) - 1, 3 * 32)
        assert (answer.report.redis_tokens > 0) == is_loaded
        # And back: the first engine has the beginning as it was computed, and loads what the second has coded.
        assert adopt(first, last_head(second)).error_code is None
        again = turn(first, "3", [*answer.text, 5])
        assert again.report.cached_tokens == len(answer.text) - 1
        assert (again.report.redis_tokens > 0, again.report.coded_tokens) == (True, 2 * 32)
    finally:
        for driver in made:
            driver.close()


def test_a_calibration_is_made_once(make, monkeypatch):
    make()
    monkeypatch.setattr("reprise.engine.codec.calibration.calibrate", lambda *_, **__: pytest.fail("calibrated again"))
    make()


def test_a_budget_that_cannot_be_kept_leaves_kv_raw_and_says_so(make, monkeypatch):
    monkeypatch.setattr("reprise.engine.codec.calibration.calibrate", lambda *_, **__: None)
    driver = make()
    assert any("stays raw" in warning for warning in driver.engine.model.warnings)
    turn(driver, "1", random_ids(HISTORY, 1))
    assert driver.engine._transfer._writes._coded is None
    assert not driver.cache.tiers.form.block_bytes
    assert not driver.cache.tiers.dram.coded.is_on
