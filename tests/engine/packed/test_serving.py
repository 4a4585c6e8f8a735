"""Tests engines whose weights are packed: kept from a GGUF file, or packed at the first start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file
from torch import nn

from reprise.engine.build.weights import load_weights
from reprise.engine.gguf.convert import convert
from reprise.engine.model.cpu.quantised import QuantisedLinear
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.made_models import KEPT
from reprise.engine.packed.directory import is_packed
from reprise.engine.packed.from_directory import packed
from reprise.kernels.cpu.available import decode_kernels, product_kernels
from tests.engine.driver import Driver
from tests.engine.gguf import gguf_files
from tests.engine.models import random_ids, save_tiny, tiny_model

pytestmark = pytest.mark.skipif(decode_kernels() is None, reason="no numba or no AVX-512 here")

TURNS = 3


def driver(model: Path, tmp_path: Path, **changes: Any) -> Driver:
    return Driver(model, dtype="bfloat16", disk_dir=str(tmp_path / "state"), **changes)


def gguf_file(tmp_path: Path, kind: str) -> Path:
    model = gguf_files.random_llama(num_hidden_layers=3)
    return gguf_files.write(tmp_path / "tiny.gguf", model, kind=GGMLQuantizationType[kind])


def conversation(engine: Driver, session: str | None, vocab: int) -> list[list[int]]:
    """Return the answers of some turns. Without a session, every prompt is computed anew."""
    text, answers = [token % vocab for token in random_ids(40, seed=1)], []
    for turn in range(TURNS):
        answer = engine.submit(f"{session}/{turn}", text, session=session or f"{turn}", max_tokens=12, ignore_eos=True)
        engine.run()
        answers.append(answer.text[len(text) :])
        text = [*answer.text, *(token % vocab for token in random_ids(5, seed=turn))]
    return answers


@pytest.mark.sweep(5)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_a_gguf_files_weights_stay_as_they_are_packed(tmp_path: Path, kind: str) -> None:
    source = gguf_file(tmp_path, kind)
    engine = driver(source, tmp_path)
    info = engine.engine.model
    assert info.weights == kind
    kept = [module for module in engine.model.modules() if isinstance(module, QuantisedLinear)]
    assert kept
    convert(source, tmp_path / "unpacked")
    (file,) = (tmp_path / "unpacked").glob("*.safetensors")
    head = load_file(file)["model.embed_tokens.weight"]
    assert (kept[-1].weight.float() - head.float()).abs().max() <= head.abs().max() * 2**-7  # scales of K-formats


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_so_do_those_of_other_architectures(tmp_path: Path, kind: str) -> None:
    model = gguf_files.random_qwen2()
    source = gguf_files.write(tmp_path / "tiny.gguf", model, kind=GGMLQuantizationType[kind], architecture="qwen2")
    engine = driver(source, tmp_path)
    assert engine.engine.model.weights == kind
    assert sum(isinstance(module, QuantisedLinear) for module in engine.model.modules()) >= 1
    vocab = len(gguf_files.TOKENS)
    unpacked = driver(source, tmp_path, model_weights="bf16", cache_mode="recompute")
    assert unpacked.engine.model.parameters == engine.engine.model.parameters
    assert len(conversation(engine, "s", vocab)) == TURNS


def test_layers_with_biases_are_compiled_too(tmp_path: Path) -> None:
    model = tiny_model("qwen2", dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias)
    model.save_pretrained(tmp_path / "tiny")
    made = load_weights(packed(tmp_path / "tiny", tmp_path / "models", "q8"), torch.bfloat16, torch.device("cpu"))
    layers = [module for module in made.modules() if isinstance(module, QuantisedLinear) and module.bias is not None]
    assert layers
    assert all(layer.few is not None and layer.is_right() for layer in layers)


def test_how_weights_are_packed_tells_one_models_kv_from_anothers(tmp_path: Path) -> None:
    source = gguf_file(tmp_path, "Q4_1")
    ways = ("auto", "bf16", "q8", "q4")
    prints = {driver(source, tmp_path, model_weights=way).engine.model.fingerprint for way in ways}
    assert len(prints) == 4


@pytest.mark.parametrize("weights", ["auto", "q8", "q4"])
def test_reuse_gives_the_text_of_a_recompute(tmp_path: Path, weights: str) -> None:
    source = gguf_file(tmp_path, "Q4_K")
    vocab = len(gguf_files.TOKENS)
    reuse = driver(source, tmp_path, model_weights=weights, cache_mode="attentionstore", dram_bytes=1 << 24)
    anew = driver(source, tmp_path, model_weights=weights, cache_mode="recompute")
    assert conversation(reuse, "s", vocab) == conversation(anew, None, vocab)


@pytest.mark.skipif(product_kernels() is None, reason="no AVX512_BF16 here")
@pytest.mark.parametrize("weights", ["auto", "q8"])
def test_bits_are_proven_to_depend_on_a_rows_own_tokens(tmp_path: Path, weights: str) -> None:
    engine = driver(gguf_file(tmp_path, "Q4_1"), tmp_path, model_weights=weights, exact="on")
    assert engine.engine.model.exact, engine.engine.model.exactness


def test_a_directory_is_packed_once_and_read_after_that(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", dtype=torch.bfloat16)
    first = driver(model, tmp_path, model_weights="q4")
    (made,) = (tmp_path / "state" / "models").iterdir()
    assert is_packed(made)
    assert first.engine.model.name == "tiny"
    stamp = (made / "packed.json").stat().st_mtime_ns
    again = driver(model, tmp_path, model_weights="q4")
    assert (made / "packed.json").stat().st_mtime_ns == stamp
    assert first.engine.model.fingerprint == again.engine.model.fingerprint
    assert first.engine.model.parameters == driver(model, tmp_path).engine.model.parameters


def test_the_packed_models_that_are_kept_are_bounded(tmp_path: Path) -> None:
    for number in range(KEPT + 2):
        model = save_tiny(tmp_path / f"tiny{number}", seed=number, dtype=torch.bfloat16)
        made = packed(model, tmp_path / "models", "q8")
    assert len(list((tmp_path / "models").iterdir())) == KEPT
    assert made.is_dir()


def test_a_damaged_directory_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", dtype=torch.bfloat16)
    driver(model, tmp_path, model_weights="q8")
    (made,) = (tmp_path / "state" / "models").iterdir()
    (made / "packed-00000.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelRefused, match="delete that directory"):
        driver(model, tmp_path, model_weights="q8")


def test_where_packed_weights_cannot_be_computed_with_they_are_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    with pytest.raises(ModelRefused, match="bfloat16"):
        Driver(model, dtype="float32", model_weights="q4", disk_dir=str(tmp_path / "state"))
    engine = Driver(gguf_file(tmp_path, "Q4_1"), dtype="float32", disk_dir=str(tmp_path / "state"))
    assert not engine.engine.model.weights


def test_a_packed_directory_is_a_model_too(tmp_path: Path) -> None:
    """Serve it with the ends of texts that its generation_config.json names."""
    model = save_tiny(tmp_path / "tiny", dtype=torch.bfloat16)
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [7, 9]}))
    driver(model, tmp_path, model_weights="q8")
    (made,) = (tmp_path / "state" / "models").iterdir()
    engine = driver(made, tmp_path)
    assert engine.engine.model.weights == "q8"
    assert engine.engine.model.eos_token_ids == (7, 9)
    with pytest.raises(ModelRefused, match="packed, but"):
        Driver(made, dtype="float32", disk_dir=str(tmp_path / "state"))
    with pytest.raises(ModelRefused, match="packed already"):
        driver(made, tmp_path, model_weights="q4")
