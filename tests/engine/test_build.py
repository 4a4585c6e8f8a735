"""What the composition root decides by itself: device, dtype, backend, context window, HBM, fingerprint."""

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine import build
from engine.build import build_engine
from engine.engine import Engine
from engine.hf_model import ModelRefused
from engine.messages import ModelInfo
from tests.engine.driver import Driver, assert_greedy, config
from tests.engine.models import FAMILIES, family_model, random_ids, save_tiny, tiny_model

KV_BYTES = 4 * 2 * (16 + 16) * 4  # layers x heads x (K + V) x fp32, of the tiny model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def built(path: Path, **changes: Any) -> ModelInfo:
    return build_engine(config(path, **changes)).model


def pages_of(engine: Engine) -> int:
    return int(engine._runner.pages[0].k.shape[0])


def test_what_is_said_of_a_model(path: Path) -> None:
    info = built(path)
    assert info.name == "tiny"
    assert info.path == str(path.resolve())
    assert info.architecture == "LlamaForCausalLM"
    assert info.parameters == sum(p.numel() for p in tiny_model().parameters())
    assert (info.dtype, info.device, info.attention_backend) == ("float32", "cpu", "torch")
    assert (info.max_context, info.vocab_size, info.eos_token_ids) == (256, 199, (2,))
    assert (info.decouplable, info.rope_layers, info.layers) == (True, 4, 4)
    assert (info.kv_bytes_per_token, info.hbm_tokens) == (KV_BYTES, 2048)
    assert (info.block_size, info.page_size) == (32, 32)
    assert info.warnings == ()


def test_the_dtype_of_the_machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    info = built(path, dtype="auto")
    assert info.dtype == "bfloat16"
    assert info.kv_bytes_per_token == KV_BYTES // 2
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert built(path, dtype="auto").dtype == "float32"
    assert built(path, dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_run(path: Path, dtype: str) -> None:
    driver = Driver(path, dtype=dtype, step_tokens=48)
    first = driver.ask("a", random_ids(100, 1), session="s", ignore_eos=True)
    again = driver.ask("b", random_ids(100, 1), session="s", ignore_eos=True)
    assert len(first.token_ids) == len(again.token_ids) == 16
    assert again.cached == 99


def test_a_device_that_is_not_there_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert built(path, device="auto").device == "cpu"
    with pytest.raises(ModelRefused, match="no CUDA device"):
        built(path, device="cuda")


def test_the_end_of_text_may_be_several_tokens(path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(path, tmp_path / "copy")
    generation = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [2, 7]}))
    assert built(copy).eos_token_ids == (2, 7)
    (copy / "generation_config.json").unlink()
    assert built(copy).eos_token_ids == (2,)


# --- context window ---------------------------------------------------------------------------------------------------


def test_a_shorter_window_is_a_choice(path: Path) -> None:
    info = built(path, max_context=100)
    assert info.max_context == 100
    assert info.warnings == ()


def test_a_window_beyond_the_models_is_lowered(path: Path) -> None:
    info = built(path, max_context=5000)
    assert info.max_context == 256
    [warning] = info.warnings
    assert "5000" in warning
    assert "256" in warning


def test_positions_that_depend_on_other_requests_limit_the_window(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    path = save_tiny(tmp_path / "dynamic", rope_parameters=rope, max_position_embeddings=128)
    info = built(path)
    assert info.max_context == 64
    assert any("64" in warning for warning in info.warnings)


def test_a_model_that_cannot_move_its_kv_says_so(tmp_path: Path) -> None:
    family_model("opt").save_pretrained(tmp_path / "opt")
    driver = Driver(tmp_path / "opt")
    info = driver.engine.model
    assert not info.decouplable
    assert info.rope_layers == 0
    assert any("recomputed" in warning for warning in info.warnings)
    first = driver.ask("a", random_ids(40, 1), session="s", ignore_eos=True)
    second = driver.ask("b", [*first.text, 5, 6], session="s", ignore_eos=True)
    assert second.cached == len(first.text) - 1
    assert_greedy(family_model("opt"), second)


# --- HBM --------------------------------------------------------------------------------------------------------------


def test_pages_are_whole(path: Path) -> None:
    engine = build_engine(config(path, hbm_tokens=32 * 10 + 31))
    assert engine.model.hbm_tokens == 320
    assert engine.stats().hbm_pages_total == pages_of(engine) == 10
    assert engine.stats().hbm_pages_free == 10


def test_the_window_shrinks_to_what_hbm_holds(path: Path) -> None:
    """Less one page: the first rows of the longest context may have to be copied from somebody else's."""
    info = built(path, hbm_tokens=5 * 32)
    assert info.max_context == 4 * 32
    assert any("128" in warning and "hbm_tokens" in warning for warning in info.warnings)
    assert built(path, hbm_tokens=9 * 32).max_context == 256


@pytest.mark.parametrize("tokens", [1, 31, 32, 63])
def test_too_little_hbm_is_refused(path: Path, tokens: int) -> None:
    with pytest.raises(ModelRefused, match="64 is the least"):
        built(path, hbm_tokens=tokens)


def test_the_least_hbm_is_enough_to_answer(path: Path) -> None:
    driver = Driver(path, hbm_tokens=64)
    assert driver.engine.model.max_context == 32
    for i in range(3):
        answer = driver.ask(f"r{i}", random_ids(20, i), max_tokens=50, ignore_eos=True)
        assert len(answer.text) == 32
        assert_greedy(tiny_model(), answer)


@pytest.mark.parametrize(
    ("available", "tokens"), [(400 * KV_BYTES * 4, 400 // 32 * 32), (1 << 50, (2 << 30) // KV_BYTES)]
)
def test_hbm_is_a_share_of_free_memory_up_to_a_cap(
    path: Path, monkeypatch: pytest.MonkeyPatch, available: int, tokens: int
) -> None:
    memory = psutil.virtual_memory()._replace(available=available)
    monkeypatch.setattr(build.psutil, "virtual_memory", lambda: memory)
    assert built(path, hbm_tokens=0).hbm_tokens == tokens


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_the_models_not_its_places(path: Path, tmp_path: Path) -> None:
    """The same model is found again after a move and a restart, another one is not taken for it."""
    original = built(path).fingerprint
    moved = shutil.copytree(path, tmp_path / "moved")
    assert built(moved).fingerprint == original
    assert built(path, hbm_tokens=320, max_context=64, cache_mode="recompute").fingerprint == original
    assert built(path, dtype="bfloat16").fingerprint != original
    assert built(save_tiny(tmp_path / "other", seed=1)).fingerprint != original
    assert len(original) == 32


def test_the_warm_up_leaves_nothing_behind(path: Path) -> None:
    driver = Driver(path)
    driver.check()
    stats = driver.engine.stats()
    assert (stats.steps, stats.generated_tokens, stats.hbm_pages_free) == (0, 0, stats.hbm_pages_total)
    assert driver.engine._tables._rows == {}
    assert_greedy(tiny_model(), driver.ask("a", [0] * 40, ignore_eos=True))


@pytest.mark.parametrize("given", [0, 24])
def test_the_step_budget(path: Path, given: int) -> None:
    """Automatic: larger while nobody decodes, and so nobody waits for the end of the step."""
    driver = Driver(path, step_tokens=given, max_context=256)
    prompt = random_ids(250, 1)
    sizes = []
    forward = driver.engine._runner.forward

    def listening(batch: Any, arrive: Any) -> torch.Tensor:
        sizes.append(len(batch.token_ids))
        return forward(batch, arrive)

    driver.engine._runner.forward = listening  # type: ignore[method-assign]
    driver.ask("a", prompt, max_tokens=2, ignore_eos=True)
    assert sizes == ([24] * 10 + [10, 1] if given else [250, 1])


@pytest.mark.parametrize("name", [n for n in FAMILIES if n in ("gemma2", "gpt_oss", "phi3", "smollm3", "gpt_neox")])
def test_families_are_served_from_their_directories(tmp_path: Path, name: str) -> None:
    family_model(name).save_pretrained(tmp_path / name)
    driver = Driver(tmp_path / name, step_tokens=32)
    first = driver.ask("a", random_ids(50, 1), session="s", ignore_eos=True)
    second = driver.ask("b", first.text + random_ids(30, 2), session="s", ignore_eos=True)
    assert second.cached == len(first.text) - 1
    for answer in (first, second):
        assert_greedy(family_model(name), answer)
