"""Runs the engine in fp32, on a CUDA device too if there is one: what comes from any tier is what a recompute gives."""

import random
from pathlib import Path

import pytest
import torch

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


@pytest.mark.gpu
def test_blocks_are_written_before_they_are_found(model: Path) -> None:
    """A step of a long prompt whose rows nobody draws from returns only when the device has done it."""
    driver = Driver(model, device="cuda")
    driver.submit("a", [random.Random(2).randrange(3, VOCAB) for _ in range(150)])
    compute = driver.engine._compute
    inner = compute.runner.forward

    def slow(*arguments: object) -> torch.Tensor:
        logits = inner(*arguments)  # type: ignore[arg-type]
        torch.cuda._sleep(200_000_000)  # cycles, a tenth of a second
        return logits

    compute.runner.forward = slow  # type: ignore[method-assign,assignment]
    driver.step()
    assert torch.cuda.current_stream().query()
