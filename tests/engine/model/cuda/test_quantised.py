"""Tests models whose weights stay packed on CUDA, with torch's operations in the place of Triton's kernels."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reprise.engine.build.weights import load_weights
from reprise.engine.model.cuda import optimise, quantised
from reprise.engine.model.cuda.layer import CudaLayer
from reprise.engine.model.cuda.optimise import optimise_for_cuda
from reprise.engine.model.cuda.quantised import (
    CudaQuantisedEmbedding,
    CudaQuantisedLinear,
    CudaQuantisedTogether,
    join_packed,
)
from reprise.engine.model.hf_model import Step, attention_implementation, forward, prepare
from reprise.engine.model.pages import blank_pages
from reprise.engine.model.probe import probe, single_sequence_meta
from reprise.engine.packed import load
from reprise.engine.packed.from_directory import packed
from reprise.engine.packed.load import ModulesOnCuda, size_of
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.ragged_batch import PageFormat
from reprise.kernels.packed import pack
from reprise.kernels.packed_rows import PackedRows, by_rows, unpacked
from tests.engine.driver import Driver
from tests.engine.models import random_ids, tiny_model, vanilla_logits
from tests.engine.paged import PAGE
from tests.kernels import packed_by_torch, rows_by_torch
from tests.kernels.packed_weights import ALL_FORMS, FORMS, Form, random_codes

BF16, CPU = torch.bfloat16, torch.device("cpu")
KINDS = ["llama", "qwen2", "qwen3", "phi3", "mistral"]
TOKENS = range(20)


def weight_of(form: Form, outputs: int, inputs: int, seed: int = 0) -> PackedRows:
    return by_rows(pack(random_codes(form, outputs, inputs, seed)), CPU)


def layer_of(weight: PackedRows, bias: Tensor | None, kernels: ModuleType | None) -> CudaQuantisedLinear:
    return CudaQuantisedLinear(weight, bias, BF16, kernels)


def is_near(got: Tensor, wanted: Tensor) -> bool:
    return bool((got.float() - wanted.float()).norm() <= 0.02 * wanted.float().norm())


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("kernels", [packed_by_torch, None])
@pytest.mark.parametrize("shape", [(1,), (2, 3), (65,), (2, 40), (0,)])
def test_a_layer_gives_the_product_with_its_unpacked_weight(
    form: Form, kernels: ModuleType | None, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and many, of which the weight is unpacked in several parts."""
    monkeypatch.setattr(quantised, "_UNPACKED_BYTES", 64 * 2 * 20)
    torch.manual_seed(0)
    weight, bias = weight_of(form, 50, 64), torch.randn(50).bfloat16()
    layer = layer_of(weight, bias, kernels)
    x, more = torch.randn(*shape, 64).bfloat16(), torch.randn(*shape, 50).bfloat16()
    wanted = F.linear(x, unpacked(weight, slice(None), BF16), bias)
    assert layer(x).shape == wanted.shape
    assert is_near(layer(x), wanted)
    assert is_near(layer(x, more), wanted + more)
    plain = layer_of(weight, None, kernels)
    assert torch.equal(plain(x, more), layer_of(weight, None, packed_by_torch)(x, more))  # rounded once
    assert torch.equal(layer.weight, unpacked(weight, slice(None), BF16))
    assert layer.is_right()


@pytest.mark.parametrize("name", ["product", "unpack"])
def test_kernels_that_give_something_else_are_seen(name: str) -> None:
    kernels: Any = SimpleNamespace(**{one: getattr(packed_by_torch, one) for one in ("MOST_ROWS", "product", "unpack")})
    setattr(kernels, name, lambda *given: 1.1 * getattr(packed_by_torch, name)(*given))
    layer = layer_of(weight_of(FORMS[0], 50, 64), None, kernels)
    assert not layer.is_right()
    layer.use_no_kernels()
    assert layer.is_right()


def test_kernels_that_do_not_run_are_not_right() -> None:
    def breaks(*_: object) -> Tensor:
        raise RuntimeError("out of resources")

    kernels: Any = SimpleNamespace(MOST_ROWS=64, product=breaks, unpack=packed_by_torch.unpack)
    assert not layer_of(weight_of(FORMS[0], 50, 64), None, kernels).is_right()


def test_layers_that_are_packed_alike_are_joined_to_one_product() -> None:
    layers = [
        layer_of(weight_of(FORMS[1], outputs, 64, outputs), torch.randn(outputs).bfloat16(), packed_by_torch)
        for outputs in (40, 8, 8)
    ]
    one = join_packed(layers)
    assert isinstance(one, CudaQuantisedLinear)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(one(x), torch.cat([layer(x) for layer in layers], -1))


def test_layers_that_are_packed_in_different_ways_follow_one_another() -> None:
    layers = [layer_of(weight_of(form, 40, 64), None, packed_by_torch) for form in (FORMS[1], FORMS[4])]
    one = join_packed(layers)
    assert isinstance(one, CudaQuantisedTogether)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(one(x), torch.cat([layer(x) for layer in layers], -1))


@pytest.mark.parametrize("form", ALL_FORMS)
def test_an_embedding_gives_rows_of_its_weight(form: Form) -> None:
    weight = weight_of(form, 50, 64)
    ids = torch.tensor([[3, 49], [0, 3]])
    assert torch.equal(CudaQuantisedEmbedding(weight, BF16)(ids), unpacked(weight, slice(None), BF16)[ids])


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packed models are made as for CUDA, though on the CPU."""
    monkeypatch.setattr(load, "ModulesOnCpu", lambda dtype: ModulesOnCuda(dtype, CPU, packed_by_torch))
    names = ("takes_norm", "norm", "add_norm", "gated", "place")
    rows = SimpleNamespace(**{name: getattr(rows_by_torch, name) for name in names})
    monkeypatch.setattr(optimise, "triton_rows", lambda: rows)
    return


def model_of(kind: str, tmp_path: Path, **changes: Any) -> Path:
    """Its biases are no zeros."""
    model = tiny_model(kind, dtype=BF16, **changes)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias)
    path = tmp_path / kind
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("weights", ["q8", "q4"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_layers_answer_as_a_models_own_with_the_same_weights(
    kind: str, weights: str, tmp_path: Path, on_cuda: None
) -> None:
    path = packed(model_of(kind, tmp_path), tmp_path / "packed", weights)
    model = load_weights(path, BF16, CPU)
    probed, wanted = probe(model, NaiveAttention(), PAGE), vanilla_logits(model, TOKENS).float()
    done = optimise_for_cuda(model, probed, NaiveAttention())
    assert done.layers == sum(isinstance(module, CudaLayer) for module in model.modules()) == len(probed.shapes)
    pages, tokens = blank_pages(probed.shapes, 1, PAGE, PageFormat(BF16)), torch.tensor(TOKENS)
    step = Step(single_sequence_meta(CPU, 0, len(TOKENS), PAGE), pages.__getitem__, NaiveAttention(), None)
    with torch.inference_mode():
        found = forward(model, step, tokens, tokens, tokens).float()
    assert (found - wanted).square().mean().sqrt() < 0.03 * wanted.std()


def test_a_model_takes_the_memory_of_its_codes_once(tmp_path: Path, on_cuda: None) -> None:
    """Embedding and head are tied."""
    path = model_of("llama", tmp_path, tie_word_embeddings=True)
    model = load_weights(packed(path, tmp_path / "packed", "q8"), BF16, CPU)
    parameters, size = size_of(model)
    whole, whole_size = size_of(load_weights(path, BF16, CPU))
    assert parameters == whole
    assert size < 0.6 * whole_size
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    assert head.packed is embedding.packed


def test_no_weight_is_unpacked_whole_to_be_looked_at(
    tmp_path: Path, on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 128,256 x 4,096 would take 3 GB."""

    def unpacks(layer: CudaQuantisedLinear) -> Tensor:
        raise AssertionError("unpacked")

    model = load_weights(packed(model_of("llama", tmp_path), tmp_path / "packed", "q8"), BF16, CPU)
    probed = probe(model, NaiveAttention(), PAGE)
    monkeypatch.setattr(CudaQuantisedLinear, "weight", property(unpacks))
    assert optimise_for_cuda(model, probed, NaiveAttention()).layers == len(probed.shapes)


def test_kernels_that_are_wrong_are_not_used(
    tmp_path: Path, on_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_by_torch, "product", lambda x, weight, *_: x.new_ones(len(x), weight.outputs))
    path = packed(model_of("llama", tmp_path), tmp_path / "packed", "q8")
    model = load_weights(path, BF16, CPU)
    assert "are wrong and not used" in caplog.text
    layers = [module for module in model.modules() if isinstance(module, CudaQuantisedLinear)]
    assert layers
    for layer in layers:
        x = torch.randn(2, layer.in_features).bfloat16()
        assert is_near(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("weights", ["q8", "q4"])
def test_reuse_gives_the_text_of_a_recompute(weights: str, tmp_path: Path, on_cuda: None) -> None:
    path = model_of("qwen2", tmp_path)

    def answers(mode: str) -> list[list[int]]:
        state = {"disk_dir": str(tmp_path / mode), "dram_bytes": 1 << 24}
        engine = Driver(path, dtype="bfloat16", model_weights=weights, cache_mode=mode, **state)
        assert engine.engine.model.weights == weights
        assert any(isinstance(module, CudaQuantisedLinear) for module in engine.model.modules())
        text, said = random_ids(40, seed=1), []
        for turn in range(3):
            answer = engine.submit(f"r/{turn}", text, session="s", max_tokens=12, ignore_eos=True)
            engine.run()
            said.append(answer.text[len(text) :])
            text = [*answer.text, *random_ids(5, seed=turn)]
        return said

    assert answers("attentionstore") == answers("recompute")


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["q8", "q4"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
def test_a_packed_model_answers_on_cuda_as_its_unpacked_weights_do(kind: str, weights: str, tmp_path: Path) -> None:
    path = packed(model_of(kind, tmp_path), tmp_path / "packed", weights)
    device, backend = torch.device("cuda"), BACKENDS["triton"]()
    model = load_weights(path, BF16, device)
    probed, tokens = probe(model, backend, PAGE), torch.tensor(TOKENS, device="cuda")
    with torch.inference_mode(), attention_implementation(model, "eager"):
        wanted = prepare(model)(input_ids=tokens[None], use_cache=False).logits[0]
    assert optimise_for_cuda(model, probed, backend).layers == len(probed.shapes)
    pages = blank_pages(probed.shapes, 1, PAGE, PageFormat(BF16), device)
    step = Step(single_sequence_meta(device, 0, len(TOKENS), PAGE), pages.__getitem__, backend, None)
    with torch.inference_mode():
        found = forward(model, step, tokens, tokens, tokens)
    assert (found - wanted).norm() <= 0.03 * wanted.norm()
