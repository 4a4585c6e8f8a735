"""CUDA's memory checker over the tests of some kernels: last, since it may be cut."""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks.gpu_day.items import Asked, Item, Values

_LIMIT_S = 40
_TESTS = "tests/kernels/test_triton_rows.py"


def open_section(asked: Asked) -> Asked:
    return asked


def items(asked: Asked) -> Sequence[Item]:
    return [Item("fused rows", _LIMIT_S, check)]


def check(asked: Asked) -> Iterator[Values]:
    checker = shutil.which("compute-sanitizer")
    if checker is None or not asked.on_gpu:
        yield {"not_run": "there is no compute-sanitizer" if asked.on_gpu else "it needs CUDA"}
        return
    tests = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "0", "-x", "-p", "no:cacheprovider", _TESTS)
    ran = subprocess.run(
        (checker, "--tool", "memcheck", "--error-exitcode", "9", *tests), capture_output=True, text=True, check=False
    )
    end = [line[:200] for line in ran.stdout.splitlines()[-4:]]
    yield {"status": ran.returncode, "end": end} | ({"error": "memcheck found errors"} if ran.returncode else {})
