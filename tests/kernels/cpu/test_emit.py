"""Tests that compiled code is compiled anew once any file of its folder has changed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.available import decode_kernels

pytestmark = pytest.mark.skipif(decode_kernels() is None, reason="no numba or no AVX-512 here")

ROOT = Path(__file__).parents[3]
ONE = """
from kernels.cpu.emit import compiled
@compiled()
def number():
    return {number}
"""
OTHER = """
from kernels.cpu.emit import compiled
from kernels.cpu.tried_one import number
@compiled()
def twice():
    return 2 * number()
"""


def test_a_change_of_another_file_is_noticed(tmp_path: Path) -> None:
    """By itself numba looks at the file of the function alone, and would go on with what it has of `twice`."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kernels/cpu/tried_two.py").write_text(OTHER)
    found = []
    for number in (3, 3, 5):
        (tmp_path / "kernels/cpu/tried_one.py").write_text(ONE.format(number=number))
        script = "from kernels.cpu.tried_two import twice; print(twice(), sum(twice.stats.cache_hits.values()))"
        ran = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=tmp_path, check=True
        )
        found.append(ran.stdout.split())
    assert found == [["6", "0"], ["6", "1"], ["10", "0"]]
