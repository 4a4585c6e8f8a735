"""Tests the proof made at load in bf16, and that its claim holds for conversations that run together and return."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reprise.engine.build import first_steps, model
from reprise.engine.build.engine import build_engine
from reprise.engine.model.exactness import Exactness, Proof
from reprise.engine.model.loading import ModelRefused
from reprise.kernels.cpu.available import flash_kernels, product_kernels
from tests.engine.driver import Driver, config
from tests.engine.models import family_model

BUNDLED = Path(__file__).parents[3] / "model" / "bundled"
has_kernels = pytest.mark.skipif(
    product_kernels() is None or flash_kernels(exact=True) is None, reason="no numba or no AVX512_BF16 here"
)
ON: dict[str, Any] = {"dtype": "bfloat16", "exact": "on", "threads": 1}


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def saved(name: str, path: Path, **changes: Any) -> Path:
    """Make a model with heads of 32 dims, which the kernels take."""
    family_model(name, num_attention_heads=2, num_key_value_heads=1, **changes).save_pretrained(path)
    return path


@has_kernels
def test_in_bf16_it_is_proven_where_it_is_asked_for() -> None:
    info = build_engine(config(BUNDLED, **ON)).model
    assert info.exact
    assert "1, 2, 8, 9, 41, 300 rows" in info.exactness
    assert info.attention_backend.startswith("torch-exact")
    assert info.fingerprint != build_engine(config(BUNDLED, dtype="bfloat16", exact="off")).model.fingerprint


def test_nothing_is_claimed_that_nobody_asked_for() -> None:
    info = build_engine(config(BUNDLED, dtype="bfloat16", exact="off")).model
    assert not info.exact
    assert "not asked for" in info.exactness


@has_kernels
@pytest.mark.parametrize("name", ["qwen2_sliding", "qwen3", "gpt_neox"])
def test_other_kinds_of_models(name: str, tmp_path: Path) -> None:
    """A window, norms of heads and biases; layers that stay the model's own."""
    path = saved(name, tmp_path)
    assert build_engine(config(path, **ON)).model.exact


@has_kernels
def test_what_cannot_be_proven_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proof, "run", lambda self: Exactness(False, "logits differ"))
    with pytest.raises(ModelRefused, match=r"model\.exact is on, but logits differ"):
        build_engine(config(BUNDLED, **ON))


def test_without_kernels_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "product_kernels", lambda: None)
    with pytest.raises(ModelRefused, match="AVX512_BF16"):
        build_engine(config(BUNDLED, **ON))


def test_a_proof_that_takes_long_is_not_tried_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_steps, "_FREE_PROOF_S", 0.0)
    monkeypatch.setattr(Proof, "run", lambda self: pytest.fail("nobody asked"))
    info = build_engine(config(BUNDLED, exact="auto")).model
    assert not info.exact
    assert "not tried" in info.exactness


@has_kernels
@pytest.mark.parametrize(
    ("what", "where"), [("rows", "in short chunks"), ("logits", "logits"), ("company", "beside other sequences")]
)
def test_the_proof_sees_a_last_bit(what: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(BUNDLED, hbm_tokens=1024, **ON)
    runner = driver.compute.runner
    layers = runner.model.model.layers
    before, after = runner.forward, layers[2].forward

    def other_last_bit(x: Tensor) -> Tensor:
        return (x.view(torch.int16) ^ 1).view(torch.bfloat16)

    def altered(hidden: Tensor, **rest: Any) -> Tensor:
        out: Tensor = after(hidden, **rest)
        if what == "rows" and hidden.shape[1] == 8:
            out[0, 3] = other_last_bit(out[0, 3])
        return out

    def forward(batch: Any, *rest: Any) -> Tensor:
        logits: Tensor = before(batch, *rest)
        if what == "logits" and len(batch.token_ids) == 9:
            return other_last_bit(logits)
        if what == "company" and len(batch.meta.query_lens) > 2:
            runner.pages[1].v[:] = other_last_bit(runner.pages[1].v)
        return logits

    monkeypatch.setattr(layers[2], "forward", altered)
    monkeypatch.setattr(runner, "forward", forward)
    found = Proof(
        runner=runner, num_pages=32, page_size=32, max_context=1024, vocab_size=4096, device=torch.device("cpu")
    ).run()
    assert not found.proven
    assert where in found.detail
    driver.close()


@pytest.mark.long
@has_kernels
def test_conversations_that_return_in_a_crowd_say_what_a_recompute_says() -> None:
    """HBM for two of six: most of their histories come out of DRAM, and chunks fall as they may."""
    chance = random.Random(3)
    firsts = [[chance.randrange(5, 4000) for _ in range(chance.randrange(40, 260))] for _ in range(6)]
    seconds = [[chance.randrange(5, 4000) for _ in range(chance.choice([1, 5, 9, 41, 90]))] for _ in range(6)]
    crowd = Driver(BUNDLED, cache_mode="attentionstore", dram_bytes=1 << 27, hbm_tokens=1088, step_tokens=96, **ON)
    texts = [list(text) for text in firsts]
    loaded = 0
    for turn in range(3):
        answers = [
            crowd.submit(f"{turn}/{i}", text, session=f"s{i}", max_tokens=12 + i, ignore_eos=True)
            for i, text in enumerate(texts)
        ]
        crowd.run()
        loaded += sum(answer.report.dram_tokens for answer in answers if answer.report is not None)
        texts = [[*answer.text, *seconds[i]] for i, answer in enumerate(answers)]
    crowd.close()
    assert loaded > 500
    alone = Driver(BUNDLED, cache_mode="recompute", hbm_tokens=2048, **ON)
    for i, text in enumerate(texts):
        behind = list(firsts[i])
        for turn in range(3):
            answer = alone.ask(f"{turn}/{i}", behind, max_tokens=12 + i, ignore_eos=True)
            behind = [*answer.text, *seconds[i]]
        assert behind == text
    alone.close()
