"""Runs the engine in fp32, on a CUDA device too if there is one: what comes from any tier is what a recompute gives."""

import random
from pathlib import Path

import pytest
import torch

from reprise.engine.step.compute import Computed
from tests.engine.driver import Driver
from tests.engine.models import VOCAB, family_model

MIB = 1 << 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / request.param
    family_model(request.param).save_pretrained(path)
    return path


def conversations(driver: Driver, *, sessions: int, turns: int) -> list[list[int]]:
    """All answers of conversations whose turns alternate; every turn waits until the tiers are at rest."""
    rng = random.Random(1)
    histories: list[list[int]] = [[] for _ in range(sessions)]
    answers = []
    for turn in range(turns):
        for number, history in enumerate(histories):
            prompt = history + [rng.randrange(3, VOCAB) for _ in range(20)]
            answer = driver.submit(f"{number}-{turn}", prompt, session=f"c{number}", max_tokens=6, ignore_eos=True)
            driver.run()
            driver.settle()
            histories[number] = answer.text
            answers.append(answer.token_ids)
    return answers


@pytest.mark.sweep(9)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tiers", ["hbm", "dram", "disk"])
def test_reuse_answers_as_a_recompute_does(model: Path, tmp_path: Path, tiers: str, device: str) -> None:
    """HBM holds one conversation, so that the others come from where `tiers` says."""
    room = {
        "hbm": {"hbm_tokens": 2048},
        "dram": {"hbm_tokens": 288, "dram_bytes": 64 * MIB},
        "disk": {"hbm_tokens": 288, "dram_bytes": 0, "disk_bytes": 64 * MIB, "disk_dir": str(tmp_path)},
    }[tiers]
    plain = Driver(model, device=device, cache_mode="recompute", hbm_tokens=2048)
    wanted = conversations(plain, sessions=4, turns=5)
    driver = Driver(model, device=device, cache_mode="attentionstore", **room)  # type: ignore[arg-type]
    driver.cache.rates.compute_s = lambda tokens: float(tokens)  # type: ignore[method-assign]  # loads always pay
    assert conversations(driver, sessions=4, turns=5) == wanted
    sources = driver.engine.stats().prompt_tokens
    assert sources.get(tiers, 0) > 500, sources


@pytest.mark.sweep(3)
@pytest.mark.parametrize("device", DEVICES)
def test_what_a_slow_device_has_not_written_yet_is_neither_found_nor_saved_wrongly(model: Path, device: str) -> None:
    """Chunks of prompts are committed, saved and given away while they are computed."""
    wanted = conversations(Driver(model, device=device, cache_mode="recompute", hbm_tokens=2048), sessions=4, turns=4)
    driver = Driver(
        model, device=device, cache_mode="attentionstore", hbm_tokens=288, dram_bytes=64 * MIB, step_tokens=8
    )
    driver.cache.rates.compute_s = lambda tokens: float(tokens)  # type: ignore[method-assign]
    compute = driver.compute
    inner, run, under_way = compute.runner.forward, compute.run, []

    def slow(*arguments: object) -> torch.Tensor:
        if device == "cuda":
            torch.cuda._sleep(10_000_000)  # cycles, some milliseconds
        return inner(*arguments)  # type: ignore[arg-type]

    def noted(*arguments: object) -> Computed:
        computed = run(*arguments)  # type: ignore[arg-type]
        under_way.append(not computed.done.is_done)
        return computed

    compute.runner.forward = slow  # type: ignore[method-assign,assignment]
    compute.run = noted  # type: ignore[method-assign]
    assert conversations(driver, sessions=4, turns=4) == wanted
    assert driver.engine.stats().prompt_tokens.get("dram", 0) > 300
    assert any(under_way) == (device == "cuda")
