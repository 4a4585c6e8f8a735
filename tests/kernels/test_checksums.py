import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from reprise.kernels import checksums as module
from reprise.kernels.checksums import checksums
from tests.example_counts import examples


@settings(max_examples=examples(40), deadline=None)
@given(
    size=st.sampled_from([1, 7, 240, 241, 242, 1000, 4096, 70_000]),
    chosen=st.lists(st.integers(0, 8), max_size=40),
    few=st.sampled_from([0, 1 << 18]),
    each=st.sampled_from([1, 4 << 20]),
)
def test_they_are_those_of_every_segment_however_they_are_shared_out(
    size: int, chosen: list[int], few: int, each: int
) -> None:
    memory = np.random.default_rng(size).integers(0, 256, 9 * size, np.uint8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_FEW_BYTES", few)
        patched.setattr(module, "_BYTES_EACH", each)
        patched.setattr(module, "_num_helpers", lambda: 3)
        patched.setattr(module, "_helpers", _three)
        found = checksums(memory, size, np.array(chosen, np.int64))
    assert found.dtype == np.uint64
    assert found.tolist() == [xxh3_64_intdigest(memory[n * size :][:size].tobytes()) for n in chosen]


_pool = module.ThreadPoolExecutor(3)


def _three() -> module.ThreadPoolExecutor:
    return _pool


@pytest.mark.parametrize("chosen", [[-1], [3]])
def test_a_segment_that_there_is_not_is_refused(chosen: list[int]) -> None:
    with pytest.raises(IndexError):
        checksums(np.zeros(300, np.uint8), 100, np.array(chosen))


@pytest.mark.parametrize("size", [1 << 14, 1 << 18])
def test_where_cuda_computes_nothing_is_compiled_for_the_processors(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take half a minute at the start, or of the first turn whose KV is loaded."""
    monkeypatch.setattr(module, "load_kernels", lambda: pytest.fail("the processors' kernels were compiled"))
    monkeypatch.setattr(module, "_num_helpers", lambda: 3)
    monkeypatch.setattr(module, "_helpers", _three)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module._compiled.cache_clear()
    try:
        memory = np.random.default_rng(size).integers(0, 256, 60 * size, np.uint8)
        found = checksums(memory, size, np.arange(60)[::-1])
    finally:
        module._compiled.cache_clear()
    assert found.tolist() == [xxh3_64_intdigest(memory[n * size :][:size].tobytes()) for n in range(60)][::-1]
