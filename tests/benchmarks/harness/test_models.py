import argparse
import json
from pathlib import Path

import pytest

from benchmarks.fidelity.equality import MODES
from benchmarks.harness import models
from reprise.model.directories import BUNDLED


def test_models_have_names_and_results_of_their_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(models.NAMES, "smollm2", tmp_path / "SmolLM2")
    assert models.model_directory("bundled") == BUNDLED
    with pytest.raises(argparse.ArgumentTypeError, match="smollm2"):
        models.model_directory("smollm2")
    (tmp_path / "SmolLM2").mkdir()
    (tmp_path / "SmolLM2" / "config.json").write_text("{}")
    found = models.model_directory("smollm2")
    assert (models.name_of(found), models.result_name("equality", found)) == ("smollm2", "equality_smollm2")
    assert models.model_directory(str(found)) == found
    assert (models.name_of(BUNDLED), models.result_name("equality", BUNDLED)) == ("bundled", "equality")


def test_a_small_dram_holds_as_many_blocks_of_any_model(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for directory, size in ((BUNDLED, 3072), (tmp_path, 46_080)):
        assert models.kv_bytes_per_token(directory, value_bytes=4) == size
        for mode in MODES:
            if mode.dram_blocks:
                dram = int(mode.settings_for(size)["cache.dram_gib"] * (1 << 30))
                assert dram // (32 * size) == mode.dram_blocks
