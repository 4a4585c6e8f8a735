"""Tests packing the text of wrappers: towers are left out, and weights get the names of today's modules."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reprise.engine.model.loading import read_config, text_of
from reprise.engine.model.text_of_wrapper import text_model_of
from reprise.engine.packed.directory import read
from reprise.engine.packed.from_directory import packed
from reprise.engine.packed.load import load_packed
from reprise.engine.packed.module_names import ModuleNames
from reprise.kernels.packed import PackedWeight, unpack
from tests.engine.models import CPU
from tests.engine.wrappers import save_wrapper


@pytest.mark.parametrize("model_type", ["qwen3_vl", "llava", "gemma3"])
def test_the_text_of_a_wrapper_is_packed_and_its_towers_are_not(model_type: str, tmp_path: Path) -> None:
    whole = save_wrapper(tmp_path / "whole", model_type)
    made = packed(tmp_path / "whole", tmp_path / "models", "q8")
    names = {name for name, _ in read(made)}
    towers = text_model_of(read_config(tmp_path / "whole")).towers
    assert not [name for name in names if name.startswith(towers)]
    model = load_packed(made, read_config(made), torch.bfloat16, CPU)
    theirs = whole.state_dict()
    for name, weight in read(made):
        ours = unpack(weight, torch.float32) if isinstance(weight, PackedWeight) else weight.float()
        assert (ours - theirs[name]).abs().max() <= theirs[name].abs().max() / 100
    assert {name for name, _ in model.named_modules()} < {name for name, _ in whole.named_modules()}


@pytest.mark.parametrize("model_type", ["qwen3_vl", "llava", "gemma3", "mistral3"])
def test_every_weight_of_the_text_is_found_in_the_checkpoint_of_the_whole(model_type: str, tmp_path: Path) -> None:
    whole = save_wrapper(tmp_path, model_type)
    text = text_of(read_config(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    targets, unused = ModuleNames(text).targets(stored)
    found = {target.name: stored[target.sources[0][0]] for target in targets}
    assert len(unused) == len(stored) - len(found)
    theirs = whole.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in found.items())
    left_out = theirs.keys() - found.keys()
    assert all(text.has_tower_of(name) or name == "lm_head.weight" for name in left_out)
    assert len(found) < len(stored)
