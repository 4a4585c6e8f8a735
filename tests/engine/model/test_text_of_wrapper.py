"""Tests that the text of vision-language wrappers is served: with the logits of the whole wrapper, and without its
towers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from reprise.engine.model.loading import ModelRefused, load_model, read_config
from reprise.engine.model.text_of_wrapper import NoTextModel, media_token_ids, text_model_of
from tests.engine.driver import Driver
from tests.engine.model_zoo import tiny_config
from tests.engine.models import CPU, WINDOW, random_ids, save_tiny, tiny_model, vanilla_logits
from tests.engine.paged import PLACES, Pool, optimise, serve
from tests.engine.wrappers import IMAGE_ID, REFUSED, SERVED, save_wrapper, wrapper_config

SOME = 5  # one of so many wrappers is tried in `make test`


class Reads:
    """Counts the bytes that transformers reads of weights, and keeps their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[str, int] = {}
        reads = self

        class Slice:
            def __init__(self, opened: Any, name: str) -> None:
                self._opened, self._name, self._slice = opened, name, opened.get_slice(name)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._slice, name)

            def __getitem__(self, index: Any) -> torch.Tensor:
                part: torch.Tensor = self._slice[index]
                reads.sizes[self._name] = part.numel() * part.element_size()
                return part

        class File:
            def __init__(self, *args: Any, **keywords: Any) -> None:
                self._opened = safe_open(*args, **keywords)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._opened, name)

            def get_slice(self, name: str) -> Slice:
                return Slice(self._opened, name)

        monkeypatch.setattr("transformers.modeling_utils.safe_open", File)


def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Return the logits of the engine's own path: pages, flat batches, random chunks."""
    served = serve(model)
    pool = Pool(served.ours, served.probed.shapes)
    text = pool.text(token_ids, PLACES[0][1])
    pool.run([text], seed=1)
    return text.logits


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.sweep(SOME)
@pytest.mark.parametrize("model_type", SERVED)
def test_the_text_of_a_wrapper_is_served_without_its_towers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = save_wrapper(tmp_path, model_type)
    reads = Reads(monkeypatch)
    model = load_model(tmp_path, torch.float32, CPU)
    own = {weight.data_ptr(): weight.numel() * weight.element_size() for weight in model.state_dict().values()}
    assert sum(reads.sizes.values()) == sum(own.values())
    assert len(own) < len({weight.data_ptr() for weight in whole.state_dict().values()})
    ids = random_ids(75, seed=1)
    assert error(logits_of(model, ids), vanilla_logits(whole, ids)) < 1e-5


@pytest.mark.parametrize("model_type", ["qwen3_vl", "llava", "idefics3"])
def test_transformers_does_not_warn_of_the_weights_of_towers(model_type: str, tmp_path: Path) -> None:
    """It lists weights for which a model has no place, hundreds of lines for a real tower."""
    save_wrapper(tmp_path, model_type)
    text = text_model_of(read_config(tmp_path))
    _, report = text.kind.from_pretrained(tmp_path, config=text.config, output_loading_info=True)
    assert not report["unexpected_keys"]


def test_the_modules_that_make_a_wrapper_fast_leave_its_logits_as_they_are(tmp_path: Path) -> None:
    whole = save_wrapper(tmp_path, "gemma3")
    served = serve(load_model(tmp_path, torch.float32, CPU))
    assert {params.window for params in served.probed.params} == {WINDOW, None}
    optimise(served.ours, served.probed)
    pool = Pool(served.ours, served.probed.shapes)
    text = pool.text(random_ids(75, seed=2), PLACES[0][1])
    pool.run([text], seed=2)
    assert error(text.logits, vanilla_logits(whole, text.token_ids)) < 1e-5


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_wrapper_whose_text_is_refused_is_refused_by_its_configuration(model_type: str, tmp_path: Path) -> None:
    wrapper, reason = REFUSED[model_type]
    wrapper_config(model_type, wrapper).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=reason):
        read_config(tmp_path)


def test_an_engine_serves_a_wrapper_and_reuses_its_history(tmp_path: Path) -> None:
    whole = save_wrapper(tmp_path / "model", "qwen3_vl")
    engine = Driver(tmp_path / "model", dtype="float32", disk_dir=str(tmp_path / "state"), dram_bytes=1 << 24)
    assert engine.engine.model.architecture == "Qwen3VLForConditionalGeneration"
    assert engine.engine.model.decouplable
    assert engine.engine.model.eos_token_ids == (2,)
    assert engine.engine.model.media_token_ids == tuple(range(IMAGE_ID, IMAGE_ID + 5))
    text = random_ids(40, seed=3)
    for turn in range(3):
        answer = engine.submit(f"turn{turn}", text, session="s", max_tokens=8, ignore_eos=True)
        engine.run()
        logits = vanilla_logits(whole, answer.text)
        assert answer.token_ids == logits[len(text) - 1 : -1].argmax(-1).tolist()
        assert answer.cached >= (len(text) - 6 if turn else 0)
        text = [*answer.text, *random_ids(5, seed=turn)]


def test_a_plain_language_model_has_no_towers(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(save_tiny(tmp_path))
    found = text_model_of(config)
    assert (found.kind.__name__, found.towers, found.config) == ("LlamaForCausalLM", (), config)
    assert media_token_ids(config) == ()


def test_a_wrapper_that_has_a_language_model_of_its_own_is_loaded_as_that() -> None:
    wrapper, _ = REFUSED["qwen3_5"]
    found = text_model_of(wrapper_config("qwen3_5", wrapper))
    assert (found.kind.__name__, found.towers) == ("Qwen3_5ForCausalLM", ())
    assert found.config.model_type == "qwen3_5_text"


def test_a_wrapper_whose_tower_wants_another_package_is_loaded_as_its_text(tmp_path: Path) -> None:
    """The tower of Gemma 3n comes from timm. Its checkpoints name the language model inside of the wrapper."""
    shared = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199}
    own = {"activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8, "altup_num_inputs": 2}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
    text = tiny_model("gemma3n_text", intermediate_size=[96] * 4, head_dim=16, **shared, **own, **layers)
    AutoConfig.for_model("gemma3n", text_config=text.config.to_dict()).save_pretrained(tmp_path)
    inside = {
        name.replace("model.", "model.language_model.", 1): weight.clone()
        for name, weight in text.state_dict().items()
        if name != "lm_head.weight"
    }
    tower = {"model.vision_tower.timm_model.conv_stem.conv.weight": torch.ones(2, 2)}
    save_file({**inside, **tower}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path, torch.float32, CPU)
    assert type(model).__name__ == "Gemma3nForCausalLM"
    ids = random_ids(60, seed=4)
    assert error(logits_of(model, ids), vanilla_logits(text, ids)) < 1e-5


def test_experts_that_look_at_numbers_hide_no_towers() -> None:
    """The experts of Step 3.7 end the run on the meta device, before its head is called."""
    found = text_model_of(tiny_config("step3p7"))
    assert found.towers
    assert not [tower for tower in found.towers if "head" in tower or "language_model" in tower]


@pytest.mark.parametrize("model_type", ["dbrx", "mpt"])
def test_parts_of_a_configuration_that_are_no_towers_hold_nothing_up(model_type: str) -> None:
    """MPT cannot run on the meta device at all, which is for the probe to judge."""
    assert text_model_of(tiny_config(model_type)).towers == ()


@pytest.mark.parametrize("model_type", ["vit", "clip", "siglip"])
def test_a_type_that_runs_no_text_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(NoTextModel, match=f"{model_type} is no language model that transformers"):
        text_model_of(AutoConfig.for_model(model_type))


def test_a_configuration_that_transformers_cannot_make_a_model_of_is_refused(tmp_path: Path) -> None:
    save_wrapper(tmp_path, "llava")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"patch_size": 14', '"patch_size": 0'))
    with pytest.raises(ModelRefused, match="LlavaForConditionalGeneration cannot be made from its configuration"):
        load_model(tmp_path, torch.float32, CPU)


def test_the_ids_of_images_are_known() -> None:
    config = wrapper_config("qwen3_vl", SERVED["qwen3_vl"])
    assert set(media_token_ids(config)) >= {IMAGE_ID, IMAGE_ID + 1, IMAGE_ID + 2, IMAGE_ID + 3}
