"""Tests sizes that fit machine and model, and generates the table of them in docs/sizes.md:

python -m tests.engine.build.test_sizes
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.requests.parking import chunk_pages
from reprise.engine.build.sizes import LEAST_PAGES, Sizes, automatic_sizes, coding_bytes, dram_warnings, parking_pages

DOC = Path(__file__).parents[3] / "docs" / "sizes.md"
GIB = 1 << 30
RAM_GIB = (8, 32, 128)
FREE_RAM = 7 / 8
GPU_GIB = 79.0  # memory of an 80 GB card as CUDA counts, without its context
FREE_DISK_GIB = 500


@dataclass(frozen=True)
class Model:
    name: str
    weights: float  # bytes in bf16
    kv_bytes_per_token: int
    window_tokens: int


MODELS = [
    Model("135 M (SmolLM2)", 0.269e9, 23_040, 8_192),
    Model("1 B (Llama 3.2)", 2.47e9, 32_768, 131_072),
    Model("8 B (Llama 3.1)", 16.06e9, 131_072, 131_072),
    Model("13 B (Llama 2)", 26.03e9, 819_200, 4_096),
]


def sizes(model: Model, ram_gib: float, gpu: bool) -> Sizes:
    weights = int(model.weights)
    return automatic_sizes(
        memory=int(ram_gib * GIB * FREE_RAM),
        device_memory=int(GPU_GIB * GIB) - weights if gpu else None,
        disk=FREE_DISK_GIB * GIB,
        weights=0 if gpu else weights,
        kv_bytes_per_token=model.kv_bytes_per_token,
        window_tokens=model.window_tokens,
        hbm_tokens=0,
    )


def window(model: Model, found: Sizes) -> int:
    """Tokens of the window that is served: what fits into HBM, whole pages less the one that may be copied from."""
    pages = found.hbm // model.kv_bytes_per_token // BLOCK_TOKENS
    return max(0, min(model.window_tokens, (pages - 1) * BLOCK_TOKENS))


@given(num_pages=st.integers(LEAST_PAGES + 1, 10**6), page_size=st.sampled_from([32, 64, 256]))
def test_a_context_larger_than_hbm_leaves_half_of_it_and_gets_on(num_pages: int, page_size: int) -> None:
    ring, most = parking_pages(num_pages, page_size)
    assert 1 <= ring <= max(1, 512 // page_size)
    assert num_pages - ring >= 2 * most
    assert most >= chunk_pages(most) + 1 + 2, "a chunk may begin inside of a page, behind one that is still being saved"


def table(gpu: bool) -> str:
    rows = ["| model | RAM | window | KV in HBM | KV in DRAM | staging | KV on disk |", "|---|---|---|---|---|---|---|"]
    for model in MODELS:
        for ram in RAM_GIB[1:] if gpu else RAM_GIB:  # a host with such a card has more than 8 GiB
            found = sizes(model, ram, gpu)
            served = window(model, found)
            if not served:
                rows.append(f"| {model.name} | {ram} GiB | the weights do not fit | | | | |")
                continue
            kv = model.kv_bytes_per_token
            short = " (less than HBM)" if dram_warnings(found.dram // kv, found.hbm // kv, served) else ""
            cells = [f"{size / GIB:.1f} GiB, {size // kv // 1000:,} k" for size in (found.hbm, found.dram, found.disk)]
            cut = "" if served == model.window_tokens else f" of {model.window_tokens:,}"
            staging = f"{found.staging / GIB:.1f} GiB"
            hbm, dram, disk = cells
            rows.append(f"| {model.name} | {ram} GiB | {served:,}{cut} | {hbm} | {dram}{short} | {staging} | {disk} |")
    return "\n".join(rows)


def tables() -> str:
    return f"## On the CPU\n\n{table(gpu=False)}\n\n## With one GPU of 80 GB\n\n{table(gpu=True)}\n"


def test_coding_takes_two_batches_and_an_extent():
    # 64 blocks of 30 bytes as coded and 100 of the largest layer as rows, twice.
    assert coding_bytes([80, 100], [10, 20]) == 2 * 64 * (30 + 100)
    assert coding_bytes([80, 100], None) == 0


def test_what_coding_takes_is_taken_from_dram():
    given = {"memory": 1 << 36, "device_memory": None, "disk": 1 << 36, "weights": 1 << 30}
    given |= {"kv_bytes_per_token": 1 << 17, "window_tokens": 8192, "hbm_tokens": 0}
    with_it, without = automatic_sizes(**given, coding=1 << 28), automatic_sizes(**given)
    assert without.dram - with_it.dram == 1 << 28
    assert (without.hbm, without.staging, without.disk) == (with_it.hbm, with_it.staging, with_it.disk)


def test_the_document_says_what_the_function_does() -> None:
    assert DOC.read_text(encoding="utf-8").endswith(tables())


def test_an_8_b_model_starts_on_a_host_of_32_gib() -> None:
    model = MODELS[2]
    assert window(model, sizes(model, 32, gpu=False)) > 8_000
    assert window(model, sizes(model, 32, gpu=True)) == model.window_tokens


MEMORY = st.integers(0, 1 << 40)


@given(
    memory=MEMORY, device=st.none() | MEMORY, disk=MEMORY, weights=MEMORY, kv=st.integers(64, 1 << 21),
    tokens=st.integers(1, 1 << 20), hbm_tokens=st.just(0) | st.integers(1, 1 << 20),
)  # fmt: skip
def test_all_of_it_fits_and_dram_holds_at_least_hbm(
    memory: int, device: int | None, disk: int, weights: int, kv: int, tokens: int, hbm_tokens: int
) -> None:
    found = automatic_sizes(
        memory=memory, device_memory=device, disk=disk, weights=weights, kv_bytes_per_token=kv, window_tokens=tokens,
        hbm_tokens=hbm_tokens,
    )  # fmt: skip
    assert min(found.hbm, found.dram, found.staging, found.disk) >= 0
    assert found.disk <= disk / 2
    assert found.staging <= 4 * GIB
    free = max(0, memory - weights)
    if device is not None:
        assert found.dram + found.staging <= free / 2
        assert hbm_tokens or found.hbm <= device
    elif not hbm_tokens:
        assert found.hbm + found.dram + found.staging <= free / 2 + 2
        most = min(1 << 18, memory // 20 // 2700) * BLOCK_TOKENS * kv  # blocks that the table may hold
        assert found.dram >= min(found.hbm, most)


@pytest.mark.parametrize(("memory_gib", "blocks"), [(1 << 10, 1 << 18), (4, 79_536)])
def test_tiers_hold_no_more_blocks_than_their_table_has_room_for(memory_gib: int, blocks: int) -> None:
    """A small model on a small machine with a large disk: a quarter of that would be a gigabyte of the table's rows."""
    found = automatic_sizes(
        memory=memory_gib * GIB, device_memory=None, disk=1 << 44, weights=0, kv_bytes_per_token=1024,
        window_tokens=1024, hbm_tokens=0,
    )  # fmt: skip
    assert found.disk == blocks * BLOCK_TOKENS * 1024
    assert found.dram <= blocks * BLOCK_TOKENS * 1024


@pytest.mark.parametrize("ram", [64, 256, 1024])
def test_with_room_dram_holds_hbm_and_whole_windows(ram: int) -> None:
    for model in MODELS:
        found = sizes(model, ram, gpu=False)
        assert found.dram >= found.hbm + window(model, found) * model.kv_bytes_per_token


def test_more_memory_never_makes_a_tier_smaller() -> None:
    for model in MODELS:
        for gpu in (False, True):
            ladder = [sizes(model, ram, gpu) for ram in range(4, 300, 3)]
            for smaller, larger in pairwise(ladder):
                assert smaller.hbm <= larger.hbm
                assert smaller.dram <= larger.dram
                assert smaller.staging <= larger.staging


def test_hbm_that_somebody_set_is_taken_off_the_share_on_cpu() -> None:
    given_sizes = {"memory": 40 * GIB, "disk": 0, "weights": 0, "kv_bytes_per_token": 1 << 20, "window_tokens": 1024}
    found = automatic_sizes(**given_sizes, device_memory=None, hbm_tokens=8 * 1024)
    assert (found.hbm, found.staging, found.dram) == (8 * GIB, 2 * GIB, 10 * GIB)
    assert automatic_sizes(**given_sizes, device_memory=None, hbm_tokens=30 * 1024).dram == 0


@pytest.mark.parametrize(
    ("dram", "hbm", "of_window", "said"),
    [(100, 200, 100, "the 200 of HBM"), (99, 50, 100, "one window of 100"), (200, 200, 100, "")],
)
def test_a_small_dram_tier_is_told(dram: int, hbm: int, of_window: int, said: str) -> None:
    assert said in "".join(dram_warnings(dram, hbm, of_window))
    assert bool(said) == bool(dram_warnings(dram, hbm, of_window))


if __name__ == "__main__":
    begin = DOC.read_text(encoding="utf-8").split("## On the CPU")[0]
    DOC.write_text(begin + tables(), encoding="utf-8")
