"""Tests engines that pack what they write to disk: what comes back is the same, and so is what others wrote."""

from pathlib import Path

import pytest

from tests.engine.driver import Driver
from tests.engine.models import random_ids, save_tiny

HISTORY = 150


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), head_dim=32)


def engine(path: Path, directory: Path, packing: str, dtype: str) -> Driver:
    tiers = {"dram_bytes": 1 << 24, "disk_bytes": 1 << 28, "disk_dir": str(directory), "io_deadline_s": 20.0}
    driver = Driver(
        path, cache_mode="attentionstore", hbm_tokens=1024, max_context=512, dtype=dtype, disk_packing=packing, **tiers
    )
    driver.cache.rates.expect_steps(0.001, 0.02)  # so slow that every load is worth it
    driver.cache.rates.computed = lambda *_: None  # type: ignore[method-assign]
    return driver


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conversations_go_on_while_packing_is_turned_on_and_off(path, tmp_path, dtype):
    """Each session comes from disk in every later engine, whichever way it was written."""
    expected, history, sizes = {}, {}, {}
    for number, packing in enumerate(["raw", "lossless", "raw"]):
        driver = engine(path, tmp_path, packing, dtype)
        for name, text in history.items():
            again = driver.ask(f"{number} {name}", [*text, 5], session=f"look {number} {name}", max_tokens=4)
            assert again.report.disk_tokens >= len(text) - 32
            assert expected.setdefault(name, again.token_ids) == again.token_ids
        name = f"s{number}"
        first = driver.ask(name, random_ids(HISTORY, number), session=name, max_tokens=9, ignore_eos=True)
        history[name] = first.text
        driver.settle()
        [known] = [known for known in driver.cache.sessions.contexts if known[2] == name]
        sizes[name] = driver.cache.sessions.bytes_of(known)
        driver.close()
    assert sizes["s0"] == sizes["s2"]
    assert sizes["s1"]["hbm"] == sizes["s0"]["hbm"]
    most = {"float32": 0.95, "bfloat16": 0.80}[dtype]  # of a tiny model, whose extents are half header
    assert sizes["s1"]["disk"] < most * sizes["s0"]["disk"]


def test_packed_extents_are_uploaded_as_rows_are(path, tmp_path):
    """Redis has the extents of servers with any setting; only files are packed."""
    driver = engine(path, tmp_path, "lossless", "bfloat16")
    driver.ask("1", random_ids(HISTORY, 1), session="s", max_tokens=4)
    driver.settle()
    disk = driver.engine._transfer._writes._disk
    extents = {row.extent[0] for row in driver.cache.tiers.table if row.extent is not None}
    for extent in extents:
        with disk.reader(extent) as reader:
            assert reader.header.segment_bytes == tuple(driver.engine._transfer._slab.segment_bytes)
            assert reader._extent.layout.packed
    driver.close()
