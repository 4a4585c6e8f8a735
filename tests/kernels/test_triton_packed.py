"""Tests that Triton's products with packed weights give what torch gives: interpreted, and on CUDA compiled."""

from pathlib import Path

import pytest
import torch

from reprise.kernels.packed import pack
from reprise.kernels.packed_rows import by_rows
from tests.kernels import packed_by_torch
from tests.kernels.packed_weights import ALL_FORMS, Form, random_codes
from tests.kernels.triton_runs import INTERPRETED, for_every_arch, in_parts, interpreted, machine_code, spilled_bytes

in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernels_in_tritons_interpreter")
# (rows, outputs, inputs): parts of tiles, several programs for an output, a row alone
SHAPES = [(1, 64, 64), (3, 100, 160), (17, 70, 2112), (1, 24, 4096), (64, 130, 288)]
CASES = [(form, shape) for form in ALL_FORMS for shape in SHAPES]
DTYPES = [torch.float16, torch.bfloat16]


def multiplied(device: str, form: Form, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Beyond x and what is added lies NaN, which nobody may read."""
    from reprise.kernels.triton_packed import product, shares

    rows, outputs, inputs = shape
    weight = by_rows(pack(random_codes(form, outputs, inputs, seed=rows)), torch.device(device))
    parts, part = shares(weight)
    assert (parts - 1) * part < weight.scales.shape[1] <= parts * part
    assert (parts > 1) == (inputs * form[0] >= 8 * 2048)
    torch.manual_seed(0)
    x = torch.full((rows + 1, inputs + 64), torch.nan, dtype=dtype, device=device)
    x[:rows, :inputs] = torch.randn(rows, inputs).to(dtype)
    more = torch.full((rows + 1, outputs + 8), torch.nan, dtype=dtype, device=device)
    more[:rows, :outputs] = torch.randn(rows, outputs).to(dtype)
    bias = torch.randn(outputs).to(dtype).to(device)
    x, more = x[:rows, :inputs], more[:rows, :outputs]
    for given in ((None, more), (bias, None)):
        wanted = packed_by_torch.product(x, weight, *given).float()
        got = product(x, weight, *given).float()
        # Where an output is near 0, the order of its sum shows more.
        torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-3 * float(wanted.std()))
    assert product(x[:0], weight, bias).shape == (0, outputs)


def unpacks(device: str, form: Form, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    from reprise.kernels.triton_packed import unpack

    rows, outputs, inputs = shape
    weight = by_rows(pack(random_codes(form, outputs, inputs, seed=rows)), torch.device(device))
    for first, count in ((0, outputs), (outputs // 2, outputs - outputs // 2), (3, 0)):
        assert torch.equal(unpack(weight, first, count, dtype), packed_by_torch.unpack(weight, first, count, dtype))


@in_interpreter
@pytest.mark.parametrize(("form", "shape"), CASES)
def test_the_kernel_multiplies(form: Form, shape: tuple[int, int, int]) -> None:
    multiplied("cpu", form, shape, torch.float16)  # bf16 is cut off there


@in_interpreter
@pytest.mark.parametrize(("form", "shape"), CASES)
def test_the_kernel_unpacks(form: Form, shape: tuple[int, int, int]) -> None:
    unpacks("cpu", form, shape, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "shape"), [*CASES, *((form, (32, 4096, 14_336)) for form in ALL_FORMS)])
def test_packed_weights_multiply_on_cuda(form: Form, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    multiplied("cuda", form, shape, dtype)
    unpacks("cuda", form, shape, dtype)


@in_parts("the_kernel_", "form6 or form18 or form27", 6, 2 * len(CASES))
def test_the_kernels_in_tritons_interpreter(chosen: str, number: int) -> None:
    assert interpreted(__file__, chosen) == number


@pytest.mark.triton
@for_every_arch
def test_the_kernels_compile_for_cuda(arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It compiles to machine code without a device, and registers suffice."""
    pytest.importorskip("triton")
    from reprise.kernels.triton_packed import _WARPS, _product, _sum, _unpack, stages

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plain = {"has_bias": False, "adds": True, "tile_outputs": 64}
    unpacks = {"tile_outputs": 2, "tile_groups": 64}
    kernels = [(_sum, {"has_bias": False, "adds": True, "parts": 4, "tile": 512})]
    for bits, group, has_lows, table in ALL_FORMS:
        form = {"bits": bits, "group": group, "has_lows": has_lows, "is_e2m1": table is not None}
        for rows, is_part in ((16, True), (32, False), (64, False)):
            size = {"tile_rows": rows, "tile_groups": 1024 // bits // group, "is_part": is_part}
            kernels.append((_product, form | plain | size))
        kernels.append((_unpack, form | unpacks))
    for kernel, constants in kernels:
        types = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
        types |= {"codes_ptr": "*u8", "scales_ptr": "*fp16", "lows_ptr": "*fp16"}
        types |= {"parts_ptr": "*fp32"} | ({"out_ptr": "*fp32"} if constants.get("is_part") else {})
        types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        launched = {}
        if kernel is _product:
            launched = {
                "num_warps": _WARPS,
                "num_stages": stages(constants["tile_rows"], constants["bits"], constants["group"]),
            }
        code = machine_code(kernel, types, constants, arch, **launched)
        assert spilled_bytes(code) == 0, (kernel.fn.__name__, constants)
