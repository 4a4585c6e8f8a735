"""Tests keeping a calibrated codec in a file."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from reprise.engine.codec.calibration import Calibrated
from reprise.engine.codec.calibration_file import load, save
from reprise.kernels.codecs.transform import LayerStatistics, TransformCodec, basis_of

MODEL = b"\x01" * 16


@pytest.fixture(scope="module")
def calibrated():
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((300, 2, 16)).astype(np.float32) for _ in range(4)]
    bases = [basis_of(LayerStatistics(k, v, np.ones((2, 16), np.float32))) for k, v in (rows[:2], rows[2:])]
    codec = TransformCodec.fitted(bases, k_step=0.4, v_step=0.3, dtype=torch.bfloat16)
    return Calibrated(codec, 0.4, 0.3, 0.0009, 0.98, 512)


def loaded(path, **changes):
    return load(path, **{"model": MODEL, "budget": 0.001, "dtype": torch.bfloat16, **changes})


def test_what_is_loaded_reads_the_same_bytes(tmp_path, calibrated):
    save(tmp_path / "codec", calibrated, model=MODEL, budget=0.001)
    again = loaded(tmp_path / "codec")
    assert again is not None
    assert again.codec.name == calibrated.codec.name
    assert (again.divergence, again.tokens) == (0.0009, 512)
    raw = torch.randn(3, 32 * 64).bfloat16()
    segments = torch.zeros(3, calibrated.codec.segment_bytes[1], dtype=torch.uint8)
    assert calibrated.codec.encode(1, raw, segments) == [True] * 3
    backs = [torch.empty_like(raw) for _ in range(2)]
    calibrated.codec.decode(1, segments, backs[0])
    again.codec.decode(1, segments, backs[1])
    assert torch.equal(*backs)
    assert [path.name for path in tmp_path.iterdir()] == ["codec"]


@pytest.mark.parametrize("changes", [{"model": b"\x02" * 16}, {"budget": 0.002}, {"dtype": torch.float32}])
def test_what_was_calibrated_for_something_else_is_not_used(tmp_path, calibrated, changes):
    save(tmp_path / "codec", calibrated, model=MODEL, budget=0.001)
    assert loaded(tmp_path / "codec", **changes) is None


def test_a_file_that_was_altered_anywhere_is_not_used(tmp_path, calibrated):
    path = tmp_path / "codec"
    save(path, calibrated, model=MODEL, budget=0.001)
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    for place in [*range(0, 600, 7), *rng.integers(0, len(whole), 200)]:
        altered = bytearray(whole)
        altered[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(altered)
        found = loaded(path)
        assert found is None or (found.codec.name == calibrated.codec.name and bytes(altered) != whole)
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert loaded(path) is None
    assert loaded(tmp_path / "missing") is None
