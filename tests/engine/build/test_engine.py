"""Tests the decisions of the composition root: device, dtype, backend, context window, HBM, fingerprint."""

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from reprise.engine.build import model, room, tiers
from reprise.engine.build.engine import build_engine
from reprise.engine.build.resources import Memory
from reprise.engine.engine import Engine
from reprise.engine.messages import ModelInfo
from reprise.engine.model.loading import ModelRefused
from reprise.kernels.cpu.available import decode_kernels
from tests.engine.driver import Driver, assert_greedy, config
from tests.engine.models import FAMILIES, family_model, random_ids, save_tiny, tiny_model

KV_BYTES = 4 * 2 * (16 + 16) * 4  # layers x heads x (K + V) x fp32, of the tiny model


def built(path: Path, **changes: Any) -> ModelInfo:
    return build_engine(config(path, **changes)).model


def pages_of(engine: Engine) -> int:
    return int(engine._step._compute.runner.pages[0].k.shape[0])


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


@pytest.mark.timeout(400)  # kernels that only it needs may be compiled in it
def test_the_dtype_of_the_machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    info = built(path, dtype="auto")
    assert info.dtype == "bfloat16"
    assert info.kv_bytes_per_token == KV_BYTES // 2
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert built(path, dtype="auto").dtype == "float32"
    assert built(path, dtype="bfloat16").dtype == "bfloat16"
    if decode_kernels() is not None:
        assert built(path, dtype="auto", model_weights="q8", disk_dir=str(path.parent)).dtype == "bfloat16"


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
    assert (info.max_context, info.own_context) == (64, 64)
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


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """A machine that has so much memory beside the tiny model's weights."""
    weights = 4 * sum(p.numel() for p in tiny_model().parameters())
    monkeypatch.setattr(model, "memory", lambda: Memory(1 << 60, num_bytes + weights))


@pytest.mark.parametrize(("free", "tokens"), [(1000 * KV_BYTES, 150 // 32 * 32), (1 << 50, (2 << 30) // KV_BYTES)])
def test_hbm_is_a_share_of_free_memory_up_to_a_cap(
    path: Path, monkeypatch: pytest.MonkeyPatch, free: int, tokens: int
) -> None:
    with_free(monkeypatch, free)
    assert built(path, hbm_tokens=0).hbm_tokens == tokens


def test_a_window_that_free_memory_cuts_is_said_to_be(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1000 * KV_BYTES)
    info = built(path, hbm_tokens=0)
    assert info.max_context == 96
    [warning] = info.warnings
    assert "96 of 256" in warning
    assert "memory that is free" in warning


def test_weights_that_leave_no_memory_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, -1)
    with pytest.raises(ModelRefused, match="memory that is free holds no more beside the weights"):
        built(path, hbm_tokens=0)


# --- automatic tiers --------------------------------------------------------------------------------------------------


def test_tiers_are_shares_of_what_is_free(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 10_000 * KV_BYTES)
    monkeypatch.setattr(room, "disk_room", lambda directory, floor: 1 << 24)
    automatic = {"dram_bytes": None, "disk_bytes": None, "disk_dir": str(tmp_path)}
    info = built(path, hbm_tokens=0, cache_mode="attentionstore", **automatic)
    block = 32 * KV_BYTES
    assert info.memory_plan["hbm"] == 1500 // 32 * block
    assert info.memory_plan["staging"] == 500 // 32 * block + block  # the least there is
    assert info.memory_plan["dram"] == 3000 // 32 * block
    assert info.memory_plan["disk"] == 1 << 22
    assert info.warnings == ()
    assert built(path, cache_mode="prefix", **automatic).memory_plan["dram"] == 0


def test_a_full_disk_is_said_to_keep_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "disk_room", lambda directory, floor: 0)
    given = {"cache_mode": "attentionstore", "dram_bytes": 64 * 32 * KV_BYTES, "disk_dir": str(tmp_path)}
    info = built(path, disk_bytes=None, **given)
    assert info.memory_plan["disk"] == 0
    [warning] = info.warnings
    assert "cache.disk_min_free_gib" in warning
    assert built(path, disk_bytes=0, **given).warnings == ()


def test_a_directory_that_cannot_be_looked_at_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path, floor: int) -> int:
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr(room, "disk_room", refuse)
    with pytest.raises(ModelRefused, match="cannot be used"):
        built(path, cache_mode="attentionstore", disk_bytes=None, disk_dir=str(tmp_path))


def test_large_tiers_take_no_memory_before_they_are_used(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, 4 << 30)
    built(path)  # what a first engine takes besides
    before = psutil.Process().memory_info().rss
    engine = build_engine(config(path, hbm_tokens=0, cache_mode="attentionstore", dram_bytes=None))
    plan = engine.model.memory_plan
    assert plan["hbm"] + plan["dram"] > 1.9 * (1 << 30)
    assert psutil.Process().memory_info().rss - before < 1 << 28


def test_what_is_set_stays_and_0_is_off(path: Path, tmp_path: Path) -> None:
    given = {"cache_mode": "attentionstore", "disk_dir": str(tmp_path), "staging_bytes": 64 * 32 * KV_BYTES}
    plan = built(path, dram_bytes=100 * 32 * KV_BYTES, disk_bytes=12345678, **given).memory_plan
    assert (plan["dram"], plan["disk"]) == (100 * 32 * KV_BYTES, 12345678)
    assert plan["staging"] == given["staging_bytes"]
    plan = built(path, dram_bytes=0, disk_bytes=0, **given).memory_plan
    assert (plan["dram"], plan["disk"], plan["staging"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("blocks", "warning"), [(63, "less than the 2,048 of HBM"), (7, "less than one window of 256"), (64, None)]
)
def test_a_dram_tier_that_is_too_small_is_said_to_be(path: Path, blocks: int, warning: str | None) -> None:
    info = built(path, cache_mode="attentionstore", dram_bytes=blocks * 32 * KV_BYTES)
    assert [warning in text for text in info.warnings] == [True] * bool(warning) if warning else info.warnings == ()


def test_more_dram_than_there_is_is_refused_and_more_than_is_free_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "memory", lambda: Memory(total=1 << 26, available=1 << 10))
    given = {"cache_mode": "attentionstore", "hbm_tokens": 320}
    assert built(path, dram_bytes=1 << 24, **given).memory_plan["dram"] == 1 << 24
    with pytest.raises(ModelRefused, match=r"asks for 0\.1 GiB, 0\.1 GiB is all"):
        built(path, dram_bytes=1 << 26, **given)


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
    assert driver.compute.tables._rows == {}
    assert_greedy(tiny_model(), driver.ask("a", [0] * 40, ignore_eos=True))


@pytest.mark.parametrize("given", [0, 24])
def test_the_step_budget(path: Path, given: int) -> None:
    """Automatic: larger while nobody decodes, and so nobody waits for the end of the step."""
    driver = Driver(path, step_tokens=given, max_context=256)
    prompt = random_ids(250, 1)
    sizes = []
    forward = driver.compute.runner.forward

    def listening(batch: Any, *arguments: Any) -> torch.Tensor:
        sizes.append(len(batch.token_ids))
        return forward(batch, *arguments)

    driver.compute.runner.forward = listening  # type: ignore[method-assign]
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
