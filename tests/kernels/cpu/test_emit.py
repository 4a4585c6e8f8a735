"""Tests that compiled code is compiled anew once any file of its folder has changed, and sums of several vectors."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from reprise.kernels.cpu.available import decode_kernels
from reprise.kernels.views import Fp32

pytestmark = pytest.mark.skipif(decode_kernels() is None, reason="no numba or no AVX2 here")

ROOT = Path(__file__).parents[3]
ONE = """
from reprise.kernels.cpu.emit import compiled
@compiled()
def number():
    return {number}
"""
OTHER = """
from reprise.kernels.cpu.emit import compiled
from reprise.kernels.cpu.tried_one import number
@compiled()
def twice():
    return 2 * number()
"""


@pytest.mark.long
def test_a_change_of_another_file_is_noticed(tmp_path: Path) -> None:
    """Left to itself, numba looks at the file of the function alone, and would go on with what it has of `twice`."""
    shutil.copytree(ROOT / "kernels", tmp_path / "reprise/kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "reprise/__init__.py").touch()
    (tmp_path / "reprise/kernels/cpu/tried_two.py").write_text(OTHER)
    found = []
    for number in (3, 3, 5):
        (tmp_path / "reprise/kernels/cpu/tried_one.py").write_text(ONE.format(number=number))
        script = "from reprise.kernels.cpu.tried_two import twice; print(twice(), sum(twice.stats.cache_hits.values()))"
        # Without bytecode, which Python takes for that of a file of the same length changed within the same second.
        command = [sys.executable, "-B", "-c", script]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=True)
        found.append(ran.stdout.split())
    assert found == [["6", "0"], ["6", "1"], ["10", "0"]]


def test_sums_of_sixteen_vectors_are_those_of_each() -> None:
    """Scores are equal to the bit, so that none depends on the keys beside its own."""
    from llvmlite import ir

    from reprise.kernels.cpu.emit import F32, LANES, Emit, compiled, emitted

    def together(e: Emit, x: ir.Value, out: ir.Value) -> None:
        e.store(e.sums([e.load(e.at(x, 4 * LANES * row)) for row in range(LANES)]), e.at(out))

    def one_by_one(e: Emit, x: ir.Value, out: ir.Value) -> None:
        for row in range(LANES):
            total = e.sum_lanes(e.load(e.at(x, 4 * LANES * row)))
            e.b.store(total, e.b.bitcast(e.at(out, 4 * row), F32.as_pointer()))

    many, one = emitted(together), emitted(one_by_one)

    @compiled()
    def both(x: Fp32, found: Fp32, wanted: Fp32) -> None:
        many(x, found)
        one(x, wanted)

    x = np.random.default_rng(0).standard_normal((LANES, LANES)).astype(np.float32)
    found, wanted = np.zeros((2, LANES), np.float32)
    both(x, found, wanted)
    assert found.tobytes() == wanted.tobytes()
    assert np.allclose(found, x.sum(1), atol=1e-5)
