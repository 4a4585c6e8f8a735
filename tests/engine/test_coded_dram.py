"""Tests engines whose DRAM is coded: it holds more, what is warm stays exact, nothing is coded twice, and whatever goes
wrong beside an encoding is a miss at worst."""

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.cache.transfer.loader import Loader
from tests.engine.driver import Driver, assert_greedy
from tests.engine.models import random_ids, save_tiny, tiny_model
from tests.engine.test_coded_tiers import codec_of, make, random_calibration_text, turn

__all__ = ["make", "random_calibration_text"]

pytest.importorskip("numba")

LONG, ROOM = 900, 960  # tokens of a conversation, and of what it becomes
ROUNDS = 2
KV_BYTES = 4 * 2 * 2 * 32 * 4  # a token's KV: layers, K and V, heads, numbers, fp32
ONE_IN_HBM = {"hbm_tokens": ROOM + 64, "max_context": ROOM, "disk_bytes": 0, "staging_bytes": 40 * 32 * KV_BYTES}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), head_dim=32, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def vanilla() -> Any:
    return tiny_model(head_dim=32, max_position_embeddings=1024)


def rotate(driver: Driver, conversations: int) -> list[Any]:
    """Rounds of turns of each conversation in turn. Returns the answers of the last."""
    texts = [random_ids(LONG, seed) for seed in range(conversations)]
    answers = []
    for number in range(ROUNDS):
        answers = [turn(driver, f"{number} {i}", text, session=f"s{i}") for i, text in enumerate(texts)]
        texts = [[*answer.text, *random_ids(11, number)] for answer in answers]
    return answers


def test_dram_for_three_conversations_holds_all_eight_coded(make):
    driver = make(codec_budget=1e-3, dram_bytes=3 * ROOM * KV_BYTES, **ONE_IN_HBM)
    assert driver.engine.model.kv_bytes_per_token == KV_BYTES
    tiers = driver.cache.tiers
    answers = rotate(driver, 8)
    for answer in answers:
        assert answer.report is not None
        assert answer.report.cached_tokens == answer.report.history_tokens >= LONG
        assert answer.report.dram_tokens >= LONG - 64
    assert sum(answer.report.coded_tokens for answer in answers) > 6 * (LONG - 200)
    stats = driver.engine.stats()
    held = (
        tiers.dram.rows.resident * tiers.dram.rows.slot_bytes + tiers.dram.coded.resident * tiers.dram.coded.slot_bytes
    )
    assert stats.tier_bytes["dram"] == held
    assert held <= stats.tier_capacity["dram"] <= 3 * ROOM * KV_BYTES
    assert driver.engine.model.memory_plan["dram"] == stats.tier_capacity["dram"]
    assert driver.engine.model.dram_tokens == 32 * (tiers.dram.most_rows + tiers.dram.coded.num_slots)
    segments = codec_of_encodes(driver).segment_bytes
    layer_bytes = tiers.dram.rows.slot_bytes // len(segments)
    assert driver.engine.model.memory_plan["coding"] == 2 * 64 * (sum(segments) + layer_bytes)


def test_after_short_conversations_a_restart_gives_rows_more_of_dram(make):
    tiers = {"dram_bytes": 400 * 32 * KV_BYTES, "disk_bytes": 1 << 28}
    first = make(**tiers)
    rows = first.cache.tiers.dram.most_rows
    assert rows == 100  # a quarter: nothing is known yet
    for number in range(3):
        turn(first, str(number), random_ids(450, number), session=f"s{number}")  # 14 full blocks and one more
    again = make(**tiers).cache.tiers
    ratio = again.dram.rows.slot_bytes / again.dram.coded.slot_bytes
    assert again.dram.most_rows == pytest.approx(400 * (2 / (2 + 13 / ratio) + 0.1), abs=1)
    held = again.dram.capacity_bytes
    assert held <= tiers["dram_bytes"]


def test_what_is_warm_in_dram_is_exact_beside_the_codec(make, vanilla):
    """A turn's rows stay in DRAM as they are after they were coded, as long as nobody wants their slots."""
    texts = {}
    for codec in ("raw", "transform"):
        driver = make(codec, hbm_tokens=320, max_context=256)
        one = turn(driver, "1", random_ids(150, 1))
        turn(driver, "2", random_ids(200, 2), session="other")  # takes the pages
        two = turn(driver, "3", [*one.text, *random_ids(9, 3)])
        assert two.report.dram_tokens >= 64
        assert (two.report.cached_tokens, two.report.coded_tokens) == (len(one.text) - 1, 0)
        assert_greedy(vanilla, two)
        texts[codec] = two.text
    assert driver.engine.stats().tier_bytes["disk"] > 0
    assert driver.cache.stats.encoded_blocks > 3
    assert texts["raw"] == texts["transform"]


def test_nothing_is_coded_twice_however_often_it_comes_and_goes(make):
    driver = make(**{**ONE_IN_HBM, "dram_bytes": 2 * ROOM * KV_BYTES, "disk_bytes": 1 << 28})
    codec, seen = codec_of(driver), Counter()
    encode = codec.encode

    def counted(layer: int, raw: Any, segments: Any) -> list[bool]:
        seen.update((layer, bytes(block.view(-1).numpy().tobytes())) for block in raw)
        return encode(layer, raw, segments)

    codec.encode = counted
    answers = rotate(driver, 5)
    assert max(seen.values()) == 1
    assert driver.cache.stats.encoded_blocks == len(seen) / driver.engine.model.layers
    assert all(answer.report.cached_tokens >= LONG for answer in answers)


def evicted(driver: Driver, request_id: str) -> Any:
    """A turn of which HBM has nothing any more, and DRAM only coded blocks but for the first and the last."""
    answer = turn(driver, request_id, random_ids(150, 1))
    rows = [row for row in driver.cache.tiers.table if "s" in [owner[2] for owner in row.owners]]
    for row in rows:
        driver.cache.tiers.hbm.leave(row)
        if "coded" in row.copies:
            driver.cache.tiers.dram.rows.drop(row)
    assert sum("coded" in row.copies for row in rows) == 3
    return answer


LACKS = [
    torch.OutOfMemoryError(),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4503599627370496 bytes."),
    MemoryError(),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("error", LACKS)
@pytest.mark.parametrize("where", ["decoded", "placed"])
def test_what_there_is_never_memory_to_decode_or_place_is_computed(make, vanilla, monkeypatch, error, where):
    driver = make()
    one = evicted(driver, "1")

    def lacks_memory(*given, **named):
        raise error

    if where == "decoded":
        monkeypatch.setattr(driver.engine._transfer._loads._coded.codec, "decode", lacks_memory)
    else:
        monkeypatch.setattr(Loader, "place", lacks_memory)
    two = turn(driver, "2", [*one.text, 5])
    # Of the first block and the last DRAM has rows, which are placed without being decoded.
    assert two.report.cached_tokens == (32 if where == "decoded" else 0)
    failures = driver.engine.stats().load_failures
    assert set(failures) == {"memory"}
    assert failures["memory"] >= 3
    assert_greedy(vanilla, two)


def test_flipped_bits_in_coded_slots_are_misses(make, vanilla):
    driver = make()
    one = evicted(driver, "1")
    coded = driver.engine._transfer._loads._coded
    for row in driver.cache.tiers.table:
        if "coded" in row.copies:
            coded.segment(1, row.copies.get("coded"))[7] ^= 1
            driver.cache.tiers.disk.drop(row)
    two = turn(driver, "2", [*one.text, 5])
    assert two.report.cached_tokens == 32  # the first block, which is not coded
    assert two.report.miss_reasons["load_failed"] > 90
    assert driver.engine.stats().load_failures["checksum"] == 3
    assert_greedy(vanilla, two)


def test_coded_blocks_are_loaded_out_of_dram_and_say_so(make):
    driver = make(verify_rate=1.0)
    one = evicted(driver, "1")
    two = turn(driver, "2", [*one.text, *random_ids(9, 2)])
    assert (two.report.dram_tokens, two.report.coded_tokens) == (len(one.text) - 1, 3 * 32)
    assert driver.engine.stats().moved_bytes["coded_to_hbm"] == 3 * driver.cache.tiers.dram.rows.slot_bytes
    again = turn(driver, "3", [*one.text, *random_ids(9, 2)], session="t")
    assert again.report.coded_tokens >= 3 * 32  # they are in HBM now
    [info] = [driver.cache.sessions.bytes_of(name) for name in driver.cache.sessions.contexts if name[2] == "s"]
    assert info["dram"] < info["hbm"]
    assert driver.engine.stats().verified_loads == 1  # what was loaded, not what was in HBM


def test_a_session_that_is_deleted_while_it_is_encoded_leaves_nothing(make):
    driver = make(disk_bytes=0, dram_bytes=1 << 22)
    tiers, codec = driver.cache.tiers, codec_of_encodes(driver)
    gate, encode = threading.Event(), codec.encode
    codec.encode = lambda *args: gate.wait(20) and encode(*args)
    driver.ask("1", random_ids(150, 1), session="s", max_tokens=3, ignore_eos=True)
    rows = [row for row in tiers.table if tiers.form.awaits(row)]
    assert not tiers.dram.encoder.encode(rows)
    driver.engine._transfer.carry_out(driver.cache.take_moves())
    assert driver.cache.sessions.deletions.delete("t", "s", "d") is None
    driver.engine.poll(driver.now)
    assert ("t", "", "s") in driver.cache.sessions.contexts  # waits for the encoding
    gate.set()
    driver.settle()
    assert not driver.cache.sessions.contexts
    assert not list(tiers.table)
    assert (tiers.dram.rows.resident, tiers.dram.coded.resident) == (0, 0)
    assert tiers.dram.rows.num_free == tiers.dram.rows.num_slots
    assert tiers.dram.coded.num_free == tiers.dram.coded.num_slots


def codec_of_encodes(driver: Driver) -> Any:
    return driver.engine._transfer._encodes._coded.codec


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("disk_bytes", [0, 1 << 28], ids=["alone", "with a disk"])
def test_encodings_race_with_loads_evictions_and_deletions(make, vanilla, seed, disk_bytes):
    """Slow encodings beside turns of sessions that come, go and are deleted, in a DRAM of few slots."""
    driver = make(
        hbm_tokens=256, max_context=224, dram_bytes=24 * 32 * KV_BYTES, staging_bytes=12 * 32 * KV_BYTES,
        disk_bytes=disk_bytes,
    )  # fmt: skip
    rng, codec, tiers = random.Random(seed), codec_of_encodes(driver), driver.cache.tiers
    encode = codec.encode

    def slowly(*args: Any) -> list[bool]:
        time.sleep(rng.random() * 0.004)
        return [rng.random() > 0.02 and taken for taken in encode(*args)]

    codec.encode = slowly
    texts: dict[str, list[int]] = {}
    for number in range(50):
        name = f"s{rng.randrange(6)}"
        known = texts.get(name, [])
        prompt = [*known[: rng.choice([len(known), len(known), len(known) // 2])], *random_ids(20, rng.randrange(99))]
        prompt = prompt if len(prompt) < 200 else prompt[:60]
        answer = driver.submit(f"r{number}", prompt, session=name, max_tokens=5, ignore_eos=True)
        for _ in range(rng.randrange(12)):
            driver.step()
        if rng.random() < 0.2:
            driver.cache.sessions.deletions.delete("t", f"s{rng.randrange(6)}", f"d{number}")
        if rng.random() < 0.7 or driver.engine.stats().waiting > 2:
            while driver.engine.has_work():
                driver.step()
            texts[name] = answer.text
            assert answer.finish_reason == "length"
            if not answer.report.coded_tokens and tiers.dram.rows.resident and not answer.report.cached_tokens:
                assert_greedy(vanilla, answer)
    driver.run()
    assert driver.cache.stats.encoded_blocks > 2
    assert set(driver.engine.stats().load_failures) <= {"late"}  # the disk of a busy machine
    for tier in (tiers.dram.rows, tiers.dram.coded):
        held = [row.copies[tier.name] for row in tiers.table if tier.name in row.copies]
        assert len(set(held)) == len(held) == tier.resident
        assert sorted([*held, *tier._slots._free]) == list(range(tier.num_slots))
        assert not any(tier._slots._pins)
