"""Tests that Triton's kernels of rows give what torch gives: interpreted, and on CUDA compiled."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from reprise.engine.model import hf_model
from tests.kernels import rows_by_torch
from tests.kernels.triton_runs import INTERPRETED, for_every_arch, in_parts, interpreted, machine_code, spilled_bytes

in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernels_in_tritons_interpreter")
# (tokens, heads, dims, R): all dims turn, some, none; numbers that are no powers of two
TURNS = [(5, 4, 16, 16), (1, 9, 24, 10), (3, 2, 8, 0), (2, 32, 128, 128)]
WIDTHS = [16, 100, 1500]
# (tokens, query heads, key heads, dims, R, whether heads are normed)
PLACES = [(5, 4, 2, 16, 16, False), (3, 9, 3, 24, 10, True), (2, 8, 8, 32, 0, False), (4, 32, 8, 128, 128, True)]
DTYPES = [torch.float16, torch.bfloat16]


def turned(device: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    from reprise.kernels.triton_rows import turn_halves

    tokens, heads, dims, turns = shape
    torch.manual_seed(0)
    x = torch.randn(heads, tokens, dims + 8).to(dtype).to(device)[..., :dims].transpose(0, 1)
    cos, sin = torch.randn(2, 1, tokens, turns).to(dtype).to(device)[:, 0]
    assert torch.equal(turn_halves(x, cos, sin), rows_by_torch.turn_halves(x, cos, sin))


def normed(device: str, width: int, dtype: torch.dtype) -> None:
    from reprise.kernels.triton_rows import norm

    torch.manual_seed(0)
    theirs = LlamaRMSNorm(width, eps=1e-5).to(dtype).to(device)
    theirs.weight.data = torch.randn(width).to(dtype).to(device)
    x = (3 * torch.randn(2, 7, width + 8)).to(dtype).to(device)[..., :width]
    # The order of a sum may move x / rms(x) to a neighbouring number.
    torch.testing.assert_close(norm(x, theirs.weight, 1e-5), theirs(x), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert norm(x[:0], theirs.weight, 1e-5).shape == (0, 7, width)


def sum_normed(device: str, width: int, dtype: torch.dtype) -> None:
    from reprise.kernels.triton_rows import add_norm

    torch.manual_seed(0)
    x, added = ((3 * torch.randn(7, width)).to(dtype).to(device) for _ in range(2))
    weight = torch.randn(width).to(dtype).to(device)
    (total, got), (wanted_total, wanted) = (way(x, added, weight, 1e-5) for way in (add_norm, rows_by_torch.add_norm))
    assert torch.equal(total, wanted_total)
    torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def placed(device: str, shape: tuple[int, int, int, int, int, bool], dtype: torch.dtype) -> None:
    """The rest of the pools stays what it was, NaN."""
    from reprise.kernels.triton_rows import place

    tokens, num_q, num_k, dims, turns, has_norms = shape
    torch.manual_seed(0)
    rows = torch.randn(tokens, num_q + 2 * num_k, dims).to(dtype).to(device)
    cos, sin = torch.randn(2, 1, tokens, turns).to(dtype).to(device)[:, 0]
    weights = torch.randn(2, dims).to(dtype).to(device)
    norms = (weights[0], 1e-5, weights[1], 1e-6) if has_norms else None
    slots = torch.randperm(3 * 16, device=device)[:tokens]
    pools = [torch.full((2, 3, 16, num_k, dims), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    found = (*place(rows, cos, sin, norms, slots, *pools[0]), *pools[0])
    wanted = (*rows_by_torch.place(rows, cos, sin, norms, slots, *pools[1]), *pools[1])
    for one, other in zip(found, wanted, strict=True):
        if has_norms:  # the order of a sum may move a number to its neighbour, and rotations add two of them
            torch.testing.assert_close(one, other, rtol=8 * torch.finfo(dtype).eps, atol=0.02, equal_nan=True)
        else:
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


def gate_opened(device: str, width: int, dtype: torch.dtype) -> None:
    from reprise.kernels.triton_rows import gated

    torch.manual_seed(0)
    both = (3 * torch.randn(2, 3, 2 * width)).to(dtype).to(device)
    gate, up = both.split(width, -1)
    torch.testing.assert_close(gated(both), F.silu(gate) * up, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@in_interpreter
@pytest.mark.parametrize("shape", TURNS)
def test_the_kernel_turns(shape: tuple[int, int, int, int]) -> None:
    turned("cpu", shape, torch.float16)  # bf16 is cut off there


@in_interpreter
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_norms(width: int) -> None:
    normed("cpu", width, torch.float16)


@in_interpreter
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_gates(width: int) -> None:
    gate_opened("cpu", width, torch.float16)


@in_interpreter
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_norms_a_sum(width: int) -> None:
    sum_normed("cpu", width, torch.float16)


@in_interpreter
@pytest.mark.parametrize("shape", PLACES)
def test_the_kernel_places(shape: tuple[int, int, int, int, int, bool]) -> None:
    placed("cpu", shape, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PLACES)
def test_rows_are_placed_on_cuda(shape: tuple[int, int, int, int, int, bool], dtype: torch.dtype) -> None:
    placed("cuda", shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*WIDTHS, 4096])
def test_sums_are_normed_on_cuda(width: int, dtype: torch.dtype) -> None:
    sum_normed("cuda", width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TURNS)
def test_rows_turn_on_cuda(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    turned("cuda", shape, dtype)
    x, table = torch.randn(2, 3, 16, device="cuda").to(dtype), torch.randn(2, 1, 16, device="cuda").to(dtype)
    assert torch.equal(hf_model.turn_halves(x, table, table).cpu(), _by_torch(x.cpu(), table.cpu()))


def _by_torch(x: Tensor, table: Tensor) -> Tensor:
    return hf_model.turn_halves(x, table, table)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*WIDTHS, 4096, 32768])
def test_rows_are_normed_on_cuda(width: int, dtype: torch.dtype) -> None:
    normed("cuda", width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*WIDTHS, 14336])
def test_gates_open_on_cuda(width: int, dtype: torch.dtype) -> None:
    gate_opened("cuda", width, dtype)


@in_parts("the_kernel_", "shape0 or 100", 5, len(TURNS) + len(PLACES) + 3 * len(WIDTHS))
def test_the_kernels_in_tritons_interpreter(chosen: str, number: int) -> None:
    assert interpreted(__file__, chosen) == number


@pytest.mark.triton
@for_every_arch
def test_the_kernels_compile_for_cuda(arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It compiles to machine code without a device, and registers suffice."""
    pytest.importorskip("triton")
    from reprise.kernels.triton_rows import _gated, _norm, _place, _turn

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    turns = {"heads": 32, "dims": 128, "half": 64, "tile": 8, "half_padded": 64, "rest_padded": 1}
    places = {name: value for name, value in turns.items() if name != "heads"} | {"num_q": 32, "num_k": 8}
    places |= {"padded": 128, "has_norms": True}
    for kernel, constants in (
        (_norm, {"columns": 4096, "padded": 4096, "adds": False}),
        (_norm, {"columns": 4096, "padded": 4096, "adds": True}),
        (_gated, {"columns": 14336, "tile": 1024}),
        (_turn, turns),
        (_place, places),
        (_place, places | {"has_norms": False}),
    ):
        types = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
        types |= {"eps": "fp32", "q_eps": "fp32", "k_eps": "fp32", "slots_ptr": "*i64"}
        types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        assert spilled_bytes(machine_code(kernel, types, constants, arch)) == 0
