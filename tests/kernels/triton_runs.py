"""Runs Triton's kernels where there is no device: in its interpreter, and through its compiler."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def for_every_arch(test: Callable[..., None]) -> Callable[..., None]:
    """Have a test compile for the compute capabilities that matter. Interpreted kernels are not compiled."""
    for mark in (
        pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled"),
        pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
        pytest.mark.parametrize("arch", [80, 90, 100]),
    ):
        test = mark(test)
    return test


def in_parts(chosen: str, some: str, num_some: int, num_all: int) -> Decorator:
    """Have a test run its file's tests that `chosen` selects in two processes: the `num_some` that `some` selects among
    them, which always run, and the others, which are dear."""

    def in_both(test: Callable[..., None]) -> Callable[..., None]:
        parts = [
            pytest.param(f"({chosen}) and ({some})", num_some, marks=pytest.mark.always, id="some"),
            pytest.param(f"({chosen}) and not ({some})", num_all - num_some, id="rest"),
        ]
        for mark in (
            pytest.mark.triton,
            pytest.mark.skipif(INTERPRETED, reason="inside it already"),
            pytest.mark.timeout(300),
            pytest.mark.parametrize(("chosen", "number"), parts),
        ):
            test = mark(test)
        return test

    return in_both


def interpreted(file: str, chosen: str) -> int:
    """Run a file's tests that `chosen` selects in Triton's interpreter, which is switched on for a whole process when
    triton is imported: so in a process of its own. Returns how many passed; fails if one of them does."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", chosen, file],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = re.search(r"^(\d+) passed", ran.stdout, re.MULTILINE)
    assert passed, ran.stdout
    return int(passed[1])


def machine_code(kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int, **launched: int) -> bytes:
    """Return the machine code of a kernel, see `compiled`."""
    code: bytes = compiled(kernel, types, constants, arch, **launched)["cubin"]
    return code


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int, num_warps: int = 4, num_stages: int = 3
) -> Any:
    """Compile a kernel for CUDA by the assembler that comes with triton: no device needed. Returns its code by stage,
    "ptx" and "cubin" among them. types: of its arguments, i32 where nothing is said. As at a launch for a model's usual
    sizes, addresses and strides are multiples of 16, on which triton specialises what does not decline that."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    signature |= dict.fromkeys(constants, "constexpr")
    multiples = {
        (param.num,): [["tt.divisibility", 16]]
        for param in kernel.params
        if not param.do_not_specialize and (signature[param.name] in ("i32", "i64") or signature[param.name][0] == "*")
    }
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=multiples)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm


def spilled_bytes(code: bytes) -> int:
    """Return how many bytes of a thread's numbers a kernel keeps in memory because its registers do not suffice."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        ran = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return sum(int(size) for kind in ("STACK", "LOCAL") for size in re.findall(rf"\b{kind}:(\d+)", ran.stdout))
