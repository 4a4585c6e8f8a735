"""Tests engines that keep activations below HBM instead of KV: half the bytes, and the texts of a recompute."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from reprise.cache.moves import FillFromPage
from reprise.engine.codec.activation import KvProjection
from reprise.engine.model.loading import ModelRefused
from tests.cache.storage.redis.redis_server import OwnRedis, redis_server
from tests.engine.driver import Answer, Driver, assert_greedy
from tests.engine.models import random_ids, save_tiny, tiny_model
from tests.engine.test_redis_tier import adopt, last_head

__all__ = ["redis_server"]

HEADS = {"num_key_value_heads": 4}  # one for each head of queries
HISTORY, ANSWER, WINDOW = 150, 9, 256
BYTES_PER_TOKEN = 4 * 2 * 64 * 4  # a token's KV: layers, K and V, width, fp32
Make = Callable[..., Driver]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), **HEADS)


@pytest.fixture(scope="module")
def vanilla() -> Any:
    return tiny_model(**HEADS)


@pytest.fixture
def make(path: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes engines, one after the other, in one directory."""
    made: list[Driver] = []

    def make(codec: str = "activation", model: Path = path, **changes: Any) -> Driver:
        if made:
            made[-1].close()
        tiers = {"dram_bytes": 1 << 26, "disk_bytes": 1 << 28, "disk_dir": str(tmp_path), "io_deadline_s": 20.0}
        tiers |= {"codec": codec, "hbm_tokens": 1024, "max_context": WINDOW, **changes}
        driver = Driver(model, cache_mode="attentionstore", **tiers)
        driver.cache.rates.expect_steps(0.001, 0.02)  # steps so slow that every load is worth it
        driver.cache.rates.computed = lambda *_: None  # type: ignore[method-assign]
        made.append(driver)
        return driver

    yield make
    if made:
        made[-1].close()


def turn(driver: Driver, request_id: str, prompt: list[int], session: str = "s", **options: Any) -> Answer:
    answer = driver.ask(request_id, prompt, session=session, max_tokens=ANSWER, ignore_eos=True, **options)
    driver.settle()
    driver.check()
    return answer


def test_a_conversation_goes_on_from_dram_as_if_it_was_computed(make: Make, vanilla: Any) -> None:
    driver = make(disk_bytes=0)
    one = turn(driver, "1", random_ids(100, 1))
    assert_greedy(vanilla, one)
    driver.forget_hbm()
    two = turn(driver, "2", [*one.text, *random_ids(20, 2)])
    assert_greedy(vanilla, two)
    assert two.report is not None
    assert two.report.dram_tokens == 108  # what was not full too: the last token's row is never computed
    assert two.report.coded_tokens == 0
    three = turn(driver, "3", [*two.text, *random_ids(20, 3)])  # on rows that were loaded, and copied on
    assert_greedy(vanilla, three)


@pytest.mark.parametrize("dram_bytes", [0, 1 << 26])
def test_a_restarted_engine_goes_on_from_the_disk(make: Make, vanilla: Any, dram_bytes: int) -> None:
    one = turn(make(dram_bytes=dram_bytes), "1", random_ids(HISTORY, 1))
    assert_greedy(vanilla, one)
    again = make(dram_bytes=dram_bytes)
    two = turn(again, "2", [*one.text, *random_ids(20, 2)])
    assert_greedy(vanilla, two)
    assert two.report is not None
    assert two.report.disk_tokens == HISTORY // 32 * 32  # an open block on disk is computed again
    shared = turn(again, "3", [*one.text[:100], *random_ids(20, 4)], session="other")
    assert_greedy(vanilla, shared)
    assert shared.cached >= 96


def test_rows_take_half_the_bytes_in_all_tiers(make: Make) -> None:
    driver = make()
    turn(driver, "1", random_ids(HISTORY, 1))
    model, slab = driver.engine.model, driver.engine._transfer._slab
    assert model.codec == "activation"
    assert not model.lossy_codec
    assert model.coded_bytes == 0.5
    assert model.kv_bytes_per_token == BYTES_PER_TOKEN
    assert slab.slot_bytes == 32 * BYTES_PER_TOKEN / 2
    stats = driver.engine.stats()
    blocks = -(-(HISTORY + ANSWER) // 32)
    assert stats.tier_bytes["dram"] == blocks * slab.slot_bytes
    assert blocks * slab.slot_bytes < stats.tier_bytes["disk"] < (blocks + 1) * slab.slot_bytes  # with its header
    assert stats.tier_capacity["dram"] == 1 << 26
    held = driver.cache.sessions.bytes_of(("t", "", "s"))
    assert held["hbm"] == (HISTORY + ANSWER - 1) * BYTES_PER_TOKEN
    assert held["dram"] == held["disk"] == held["hbm"] / 2
    raw = make("raw")
    turn(raw, "1", random_ids(HISTORY, 1))
    assert raw.engine._transfer._slab.num_slots < slab.num_slots  # they have the same bytes


def test_a_full_window_is_cut_and_the_rest_goes_on(make: Make, vanilla: Any) -> None:
    """Positions are others after a cut, and the text is none of a recompute: it is that of a server with raw KV."""
    told: list[list[list[int]]] = []
    for codec in ("raw", "activation"):
        driver = make(codec, truncation="auto", truncation_mode="decoupled")
        text, said = random_ids(200, 1), []
        for number in range(4):
            answer = turn(driver, f"{codec} {number}", text, session=codec)
            assert answer.error is None
            said.append(answer.token_ids)
            text = [*answer.text, *random_ids(40, 10 + number)]
            if number == 2:
                driver.forget_hbm()
        assert answer.report is not None
        assert answer.report.truncated_tokens
        assert answer.report.dram_tokens >= 64
        told.append(said)
    assert told[0] == told[1]


def test_engines_with_and_without_it_never_meet(make: Make, vanilla: Any) -> None:
    for codec in ("activation", "raw", "activation"):
        answer = turn(make(codec), "1", random_ids(HISTORY, 1), session=codec)
        assert_greedy(vanilla, answer)
        assert answer.cached == (0 if codec == "raw" else answer.cached)
    assert answer.cached >= 128  # its own is still there


@pytest.mark.parametrize("layer", [0, 3])
def test_an_altered_activation_is_a_miss(make: Make, vanilla: Any, layer: int) -> None:
    driver = make(disk_bytes=0)
    one = turn(driver, "1", random_ids(HISTORY, 1))
    driver.forget_hbm()
    slot = next(
        row.copies.get("dram")
        for row in driver.cache.tiers.table
        if row.place == 1 and list(row.token_ids) == one.text[32:64]
    )
    assert slot is not None
    driver.engine._transfer._slab.segment(layer, slot)[77] ^= 4
    two = turn(driver, "2", [*one.text, *random_ids(20, 2)])
    assert_greedy(vanilla, two)
    assert two.cached <= 32
    assert driver.engine.stats().load_failures["checksum"]


def test_an_altered_extent_is_a_miss(make: Make, vanilla: Any, tmp_path: Path) -> None:
    driver = make(dram_bytes=0)
    one = turn(driver, "1", random_ids(HISTORY, 1))
    driver.close()
    (extent,) = [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 32 * BYTES_PER_TOKEN]
    data = bytearray(extent.read_bytes())
    for place in range(4096, len(data), 256):
        data[place] ^= 4
    extent.write_bytes(data)
    two = turn(make(dram_bytes=0), "2", [*one.text, *random_ids(20, 2)])
    assert_greedy(vanilla, two)
    assert two.cached == 0


def test_another_engine_goes_on_from_redis(make: Make, vanilla: Any, redis_server: OwnRedis, tmp_path: Path) -> None:
    redis = {"redis_urls": (redis_server.url,), "redis_bytes": 1 << 28}
    first = make(**redis)
    one = turn(first, "1", random_ids(HISTORY, 1))
    head = last_head(first)
    other = make(disk_dir=str(tmp_path / "other"), **redis)
    adopt(other, head)
    two = turn(other, "2", [*one.text, *random_ids(20, 2)])
    assert_greedy(vanilla, two)
    assert two.report is not None
    assert two.report.redis_tokens >= 128


def test_nothing_is_saved_out_of_a_page(make: Make, vanilla: Any) -> None:
    """Rows are not saved at all where DRAM has no room while they are computed: pages have no activations."""
    driver = make(disk_bytes=0, dram_bytes=3 * 32 * BYTES_PER_TOKEN // 2, staging_bytes=32 * BYTES_PER_TOKEN)
    moves: list[Any] = []
    put = driver.engine._transfer._saves.put
    driver.engine._transfer._saves.put = lambda orders: moves.extend(orders) or put(orders)  # type: ignore[method-assign, func-returns-value]
    texts = [random_ids(HISTORY, seed) for seed in range(3)]
    for number in range(9):
        answer = turn(driver, str(number), texts[number % 3], session=str(number % 3))
        assert_greedy(vanilla, answer)
        texts[number % 3] = [*answer.text, *random_ids(5, 50 + number)]
    assert moves
    assert not any(isinstance(move, FillFromPage) for move in moves)


def test_a_model_for_which_it_saves_nothing_is_refused_at_the_start(make: Make, tmp_path: Path) -> None:
    shared = save_tiny(tmp_path / "model")
    with pytest.raises(ModelRefused, match=r"1,024 bytes a token, its K and V 1,024"):
        make(model=shared)


def test_the_first_loads_are_priced_with_the_projection(make: Make) -> None:
    raw = make("raw").cache.rates
    ours = make().cache.rates
    size = 32 * BYTES_PER_TOKEN // 2
    # Per token 4 layers of 2 * 64 * 128 operations, at 4e11 a second.
    extra_s = 32 * 4 * 2 * 64 * 128 / 4e11
    assert ours.load_s("dram_to_hbm", size) == pytest.approx(raw.load_s("dram_to_hbm", size) + extra_s)
    assert ours.load_s("disk_to_dram", size) == raw.load_s("disk_to_dram", size)


def test_a_load_that_takes_longer_than_computing_is_not_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice sees what making K and V takes: it is part of placing a layer."""
    decode = KvProjection.decode

    def slow(self: KvProjection, layer: int, segments: Tensor, raw: Tensor, *, together: bool = False) -> None:
        time.sleep(0.1)
        decode(self, layer, segments, raw, together=together)

    monkeypatch.setattr(KvProjection, "decode", slow)
    driver = make(disk_bytes=0)
    driver.cache.rates.expect_steps(0.001, 0.0002)  # 150 tokens in 31 ms; a load takes 400
    text, reasons = random_ids(HISTORY, 1), []
    for number in range(3):
        answer = turn(driver, str(number), text)
        assert answer.report is not None
        reasons.append(answer.report.miss_reasons.get("cheaper_to_recompute", 0) > 0)
        text = [*answer.text, *random_ids(5, 10 + number)]
        driver.forget_hbm()
    assert reasons == [False, False, True]  # the second turn is the first to load, at the price that is guessed


@pytest.mark.long
def test_in_bf16_a_recompute_agrees_with_what_is_loaded(make: Make) -> None:
    driver = make(dtype="bfloat16", verify_rate=1.0)
    text = random_ids(HISTORY, 1)
    for number in range(4):
        answer = turn(driver, str(number), text)
        assert answer.error is None
        assert number == 0 or answer.cached >= HISTORY
        text = [*answer.text, *random_ids(5, 10 + number)]
        driver.forget_hbm()
    stats = driver.engine.stats()
    assert stats.verified_loads == 3
    assert stats.verify_mismatches == 0
