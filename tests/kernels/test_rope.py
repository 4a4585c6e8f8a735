import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.rope import RopeStyle, rope_scatter, rotate

STYLES: tuple[RopeStyle, ...] = ("half", "interleaved")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# (heads, k_dim, pairs, v_dim): full, partial, none, a head that is no power of two, an odd rest, values of another size
SHAPES = [(2, 16, 8, 16), (1, 32, 5, 32), (2, 8, 0, 8), (3, 24, 12, 24), (1, 7, 2, 16), (2, 16, 8, 12)]


def angles(positions: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    turns = positions[:, None].double() * 10000.0 ** -(torch.arange(pairs).double() / max(pairs, 1))
    return turns.cos().float(), turns.sin().float()


def turned(x: Tensor, cos: Tensor, sin: Tensor, style: RopeStyle) -> Tensor:
    """Each pair as a complex number, one at a time, in double precision."""
    out = x.double().clone()
    pairs = cos.shape[1]
    for i in range(pairs):
        one, two = (i, i + pairs) if style == "half" else (2 * i, 2 * i + 1)
        angle = torch.complex(cos[:, None, i].double(), sin[:, None, i].double())
        point = torch.complex(x[..., one].double(), x[..., two].double()) * angle
        out[..., one], out[..., two] = point.real, point.imag
    return out


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("heads", "k_dim", "pairs", "v_dim"), SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_pairs_turn_by_their_angle_and_the_rest_stays(style, heads, k_dim, pairs, v_dim, dtype, tolerance):
    x = torch.randn(9, heads, k_dim).to(dtype)
    before = x.clone()
    cos, sin = angles(torch.randint(0, 5000, (9,)), pairs)
    rotated = rotate(x, cos, sin, style)
    assert rotated.dtype == dtype
    assert torch.equal(x, before)
    assert torch.equal(rotated[..., 2 * pairs :], x[..., 2 * pairs :])
    torch.testing.assert_close(rotated.double(), turned(x, cos, sin, style), rtol=tolerance, atol=tolerance)


def test_half_style_is_that_of_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    k = torch.randn(5, 2, 16)
    cos, sin = angles(torch.tensor([0, 1, 7, 100, 3000]), 8)
    full = torch.cat((cos, cos), dim=1)[None], torch.cat((sin, sin), dim=1)[None]
    _, expected = apply_rotary_pos_emb(k.transpose(0, 1)[None], k.transpose(0, 1)[None], *full)
    torch.testing.assert_close(rotate(k, cos, sin, "half"), expected[0].transpose(0, 1), rtol=0, atol=1e-6)


def test_interleaved_style_is_that_of_transformers():
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb

    k = torch.randn(5, 2, 16)
    cos, sin = angles(torch.tensor([0, 1, 7, 100, 3000]), 8)
    full = cos.repeat_interleave(2, dim=1)[None], sin.repeat_interleave(2, dim=1)[None]
    _, expected = apply_rotary_pos_emb(k.transpose(0, 1)[None], k.transpose(0, 1)[None], *full)
    torch.testing.assert_close(rotate(k, cos, sin, "interleaved"), expected[0].transpose(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_the_opposite_angle_undoes_a_rotation(style):
    k = torch.randn(4, 1, 12)
    cos, sin = angles(torch.tensor([3, 0, 900, 12]), 5)
    torch.testing.assert_close(rotate(rotate(k, cos, sin, style), cos, -sin, style), k, rtol=0, atol=1e-6)


def test_attention_sees_distances_only():
    """q at m against k at n depends on m - n: what makes a moved history valid."""
    q, k = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def score(m: int, n: int) -> float:
        turned_q, turned_k = (rotate(x, *angles(torch.tensor([at]), 16), "half") for x, at in ((q, m), (k, n)))
        return float((turned_q * turned_k).sum())

    assert score(700, 650) == pytest.approx(score(50, 0), abs=1e-4)
    assert not math.isclose(score(700, 650), score(700, 651), abs_tol=1e-3)


def test_angles_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="need cos and sin"):
        rotate(torch.zeros(3, 1, 8), torch.zeros(3, 5), torch.zeros(3, 5), "half")
    with pytest.raises(ValueError, match="need cos and sin"):
        rotate(torch.zeros(3, 1, 8), torch.zeros(2, 4), torch.zeros(2, 4), "half")


def scattered(device: str, style: RopeStyle, shape: tuple[int, int, int, int], dtype: torch.dtype, fused: bool) -> None:
    heads, k_dim, pairs, v_dim = shape
    tokens, pages, page_size = 5, 3, 4
    k_plain = torch.randn(tokens, heads + 1, k_dim, device=device).to(dtype)[:, 1:]  # rows of a wider staging buffer
    v = torch.randn(tokens, heads, v_dim, device=device).to(dtype)
    k_pool = torch.randn(pages, page_size, heads, k_dim, device=device).to(dtype)
    v_pool = torch.randn(pages, page_size, heads, v_dim, device=device).to(dtype)
    slots = torch.randperm(pages * page_size)[:tokens].to(device)
    cos, sin = (table.to(device) for table in angles(torch.randint(0, 5000, (tokens,)), pairs))
    k_expected, v_expected = k_pool.clone(), v_pool.clone()
    k_expected.view(-1, heads, k_dim)[slots] = rotate(k_plain, cos, sin, style)
    v_expected.view(-1, heads, v_dim)[slots] = v
    if fused:
        from kernels.rope_triton import rope_reembed_scatter

        rope_reembed_scatter(k_plain, v, cos, sin, slots, k_pool, v_pool, style == "interleaved")
    else:
        rope_scatter(k_plain, v, cos, sin, slots, k_pool, v_pool, style)
    # One rounding more or less: fused multiply-add on CUDA.
    torch.testing.assert_close(k_pool, k_expected, rtol=2**-7 if dtype != torch.float32 else 1e-5, atol=1e-5)
    assert torch.equal(v_pool, v_expected)
    untouched = torch.ones(pages * page_size, dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert torch.equal(k_pool.view(-1, heads, k_dim)[untouched], k_expected.view(-1, heads, k_dim)[untouched])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rotated_into_their_slots(style, shape, dtype):
    scattered("cpu", style, shape, dtype, fused=False)


@pytest.mark.gpu
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rotated_into_their_slots_on_cuda(style, shape, dtype):
    scattered("cuda", style, shape, dtype, fused=False)


@pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernel_in_tritons_interpreter")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_rotates_rows_into_their_slots(style, shape, dtype):
    scattered("cpu", style, shape, dtype, fused=True)


@pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernel_in_tritons_interpreter")
def test_the_kernel_refuses_what_it_cannot_address():
    from kernels.rope_triton import rope_reembed_scatter

    k, angle, slots, pool = torch.zeros(2, 1, 8), torch.zeros(2, 4), torch.tensor([0, 1]), torch.zeros(2, 4, 1, 8)
    for bad in [
        (k, k, angle[:, :3], angle, slots, pool, pool),
        (k, k, angle, angle, slots[:1], pool, pool),
        (k, k, angle, angle, slots, pool[..., :6], pool),
        (k, k, angle, angle, slots, pool.bfloat16(), pool),
        (k, k, angle, angle, slots, torch.zeros(4, 2, 1, 8).transpose(0, 1), pool),
    ]:
        with pytest.raises(ValueError, match=r"dense|dtype|belong"):
            rope_reembed_scatter(*bad, False)


@pytest.mark.skipif(INTERPRETED, reason="inside it already")
@pytest.mark.timeout(300)  # 15 s on a core of its own
def test_the_kernel_in_tritons_interpreter():
    """The interpreter is switched on for a whole process, when triton is imported: so in a process of its own."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-k",
            "the_kernel and not compiles",
            str(Path(__file__)),
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{2 * len(SHAPES) * 2 + 1} passed" in ran.stdout


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_compiles_for_cuda(interleaved, monkeypatch, tmp_path):
    """To machine code, by the assembler that comes with triton: no device needed."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from kernels.rope_triton import _rope_scatter

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("k_ptr", "v_ptr", "k_pool_ptr", "v_pool_ptr"), "*bf16")
    types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64"}
    constants = {
        "pairs": 12, "k_dim": 25, "v_dim": 25, "pairs_padded": 16, "rest_padded": 1, "v_padded": 32,
        "interleaved": interleaved,
    }  # fmt: skip
    names = _rope_scatter.arg_names
    source = triton.compiler.ASTSource(
        fn=_rope_scatter,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    assert triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]
