"""Tests that Triton's survey of logits is torch's: interpreted, and on CUDA compiled."""

from pathlib import Path

import pytest
import torch

from reprise.kernels import draws
from reprise.kernels.draws import MOST_LIKELY, NO_KEY, Survey
from tests.kernels.triton_runs import INTERPRETED, for_every_arch, interpreted, machine_code, spilled_bytes

in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernel_in_tritons_interpreter")
# (rows, vocab, how far logits are apart): all likely, none, some of each level; more than fit the list
SHAPES = [(3, 40, 1.0), (2, 5000, 3.0), (2, 2500, 0.0), (2, 4100, 12.0)]


def surveyed(device: str, rows: int, vocab: int, spread: float) -> None:
    from reprise.kernels.triton_draws import survey

    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(device)
    logits[0, 5] = -torch.inf  # as of a token that a grammar forbids
    temperatures = torch.tensor([1.0, 0.7, 2.0][:rows], device=device)
    starts = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), generator=generator).to(device)
    same(survey(logits, temperatures, starts), draws.survey(logits, temperatures, starts))


def same(found: Survey, wanted: Survey) -> None:
    assert torch.equal(found.counts, wanted.counts)
    assert torch.equal(found.ids[wanted.times.isfinite()], wanted.ids[wanted.times.isfinite()])
    torch.testing.assert_close(found.times, wanted.times, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.masses, wanted.masses, rtol=1e-5, atol=0)
    for mine, theirs, count in zip(found.keys, wanted.keys, wanted.counts.tolist(), strict=True):
        if count <= MOST_LIKELY:  # else nobody reads them
            listed = mine.sort().values[:count], theirs[:count]
            assert all(bool((keys != NO_KEY).all()) for keys in listed)
            ids = [keys & 0xFFFFFFFF for keys in listed]
            assert torch.equal(ids[0].sort().values, ids[1].sort().values)


@in_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of divisions by the probability 0
@pytest.mark.parametrize(("rows", "vocab", "spread"), SHAPES)
def test_the_kernel_surveys(rows: int, vocab: int, spread: float) -> None:
    surveyed("cpu", rows, vocab, spread)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab", "spread"), [*SHAPES, (3, 128_256, 3.0)])
def test_logits_are_surveyed_on_cuda(rows: int, vocab: int, spread: float) -> None:
    surveyed("cuda", rows, vocab, spread)


@pytest.mark.skipif(INTERPRETED, reason="inside it already")
@pytest.mark.timeout(300)
def test_the_kernel_in_tritons_interpreter() -> None:
    assert interpreted(__file__, "the_kernel_surveys") == len(SHAPES)


@pytest.mark.triton
@for_every_arch
def test_the_kernel_compiles_for_cuda(arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It compiles to machine code without a device, and registers suffice."""
    pytest.importorskip("triton")
    from reprise.kernels.triton_draws import _TILE, _survey

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("starts_ptr", "keys_ptr", "counts_ptr", "ids_ptr"), "*i64")
    types |= {"logits_ptr": "*fp32", "temperatures_ptr": "*fp32", "times_ptr": "*fp64", "masses_ptr": "*fp64"}
    code = machine_code(_survey, types, {"most": MOST_LIKELY, "tile": _TILE}, arch, num_warps=8)
    assert spilled_bytes(code) == 0
