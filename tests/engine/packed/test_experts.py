"""Tests that layers of experts whose weights stay packed compute what their unpacked weights would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reprise.engine.build.weights import load_weights, pack_weights
from reprise.engine.model.cpu import quantised as quantised_layers
from reprise.engine.model.cpu import quantised_experts
from reprise.engine.model.cpu.quantised_experts import QuantisedProjection, is_right, packed_experts, projections_of
from reprise.engine.model.loading import ModelRefused
from reprise.engine.model.probe import probe
from reprise.engine.packed.directory import read_index, write
from reprise.engine.packed.load import size_of
from reprise.kernels.attention.torch_cpu import TorchAttention
from reprise.kernels.cpu.available import expert_kernels
from reprise.kernels.packed import PackedWeight, expert_of, pack, stacked, unpack
from tests.engine.models import CPU, FAMILIES, random_ids, tiny_model, vanilla_logits
from tests.engine.packed import quantised_models as quantised
from tests.engine.packed.quantised_models import FORMATS
from tests.kernels.packed_weights import Form, random_codes

_FEW: dict[str, Any] = {"num_hidden_layers": 2, "num_experts_per_tok": 2}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_FEW, "num_experts": 12, "moe_intermediate_size": 32, "head_dim": 16},  # a checkpoint's one by one
    "mixtral": {**_FEW, "num_local_experts": 4},  # the same, under other names
    "gpt_oss": FAMILIES["gpt_oss"].config,  # transposed, biases, gates that are no SiLU and lie between each other
}
IDS = random_ids(40, seed=3)


def saved(model_type: str, path: Path) -> Any:
    model = tiny_model(model_type, **TYPES[model_type])
    model.save_pretrained(path / "tiny")
    return model


def loaded(path: Path, weights: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return load_weights(pack_weights(path / "tiny", path / "models", weights, CPU), dtype, CPU)


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def numbers(experts: Any, projection: QuantisedProjection) -> Tensor:
    """The parameter that a packed projection stands for."""
    each = [unpack(expert_of(projection.packed, n), torch.float32) for n in range(projection.packed.experts)]
    return torch.stack([one.T if experts.is_transposed else one for one in each])


def routed(experts: Any, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(experts.num_experts, generator=generator)[:2] for _ in range(rows)])
    return x, index, torch.rand(index.shape, generator=generator)


@pytest.mark.parametrize("weights", ["q8", "q4"])
@pytest.mark.parametrize("model_type", TYPES)
def test_packed_experts_compute_as_transformers_does_with_their_numbers(
    tmp_path: Path, model_type: str, weights: str
) -> None:
    plain = saved(model_type, tmp_path)
    model = loaded(tmp_path, weights)
    assert len(experts_of(model)) == model.config.num_hidden_layers
    for own, packed in zip(experts_of(plain), experts_of(model), strict=True):
        assert {projection.packed.bits for projection in projections_of(packed)} == {8 if weights == "q8" else 4}
        for name, parameter in list(own.named_parameters()):
            if parameter.dim() == 3:
                got = numbers(packed, getattr(packed, name))
                assert (got - parameter).norm() <= (0.01 if weights == "q8" else 0.1) * parameter.norm()
                parameter.data.copy_(got)
        for rows in (1, 5, 40):
            given = routed(packed, rows, torch.float32)
            wanted = own(*given)
            assert (packed(*given) - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.skipif(expert_kernels() is None, reason="no numba or no AVX2 here")
@pytest.mark.parametrize("weights", ["q8", "q4"])
@pytest.mark.parametrize("model_type", TYPES)
def test_compiled_experts_agree_with_torch(tmp_path: Path, model_type: str, weights: str) -> None:
    saved(model_type, tmp_path)
    model = loaded(tmp_path, weights, torch.bfloat16)
    for experts in experts_of(model):
        assert all(projection.fields is not None for projection in projections_of(experts))
        assert is_right(experts)
        x, index, given = routed(experts, 40, torch.bfloat16)
        together = packed_experts(experts, x, index, given)
        for row in (0, 7, 39):  # a row's bits do not depend on other rows
            alone = packed_experts(experts, x[row : row + 1], index[row : row + 1], given[row : row + 1])
            assert torch.equal(alone[0], together[row])


@pytest.mark.skipif(expert_kernels() is None, reason="no numba or no AVX2 here")
@pytest.mark.parametrize("model_type", TYPES)
def test_the_load_time_probe_unpacks_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """Torch takes minutes to unpack all experts of a large model."""
    saved(model_type, tmp_path)
    model = loaded(tmp_path, "q8", torch.bfloat16)
    for module in (quantised_experts, quantised_layers):
        monkeypatch.setattr(module, "unpack", None)
    found = probe(model, TorchAttention(), 16)
    assert 0 < found.logit_error <= found.logit_tolerance


@pytest.mark.skipif(expert_kernels() is None, reason="no numba or no AVX2 here")
def test_kernels_are_checked_with_few_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("qwen3_moe", tmp_path)
    experts = experts_of(loaded(tmp_path, "q8", torch.bfloat16))[0]
    seen = set()

    def listening(weight: PackedWeight, expert: int) -> PackedWeight:
        seen.add(expert)
        return expert_of(weight, expert)

    monkeypatch.setattr(quantised_experts, "expert_of", listening)
    assert is_right(experts)
    assert seen == {0, 6, 11}


@pytest.mark.skipif(expert_kernels() is None, reason="no numba or no AVX2 here")
def test_kernels_that_are_wrong_are_found(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    experts = experts_of(loaded(tmp_path, "q8", torch.bfloat16))[0]
    experts.down_proj.fields = experts.gate_up_proj.fields.copy()
    experts.down_proj.fields[5:7] = [32, 64 * 12]  # inputs and outputs of down, read from the memory of the other
    assert not is_right(experts)


def test_a_number_that_is_no_experts_is_left_out(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        experts = experts_of(loaded(tmp_path, "q8", dtype))[0]
        x, index, given = routed(experts, 5, dtype)
        both = packed_experts(experts, x, index, given)
        index[2, 1] = experts.num_experts
        without = packed_experts(experts, x, index, given)
        assert torch.allclose(without[[0, 1, 3, 4]], both[[0, 1, 3, 4]], atol=1e-6)
        given[2, 1] = 0
        index[2, 1] = 0 if index[2, 0] else 1
        assert torch.allclose(without[2], packed_experts(experts, x, index, given)[2], atol=1e-6)


@pytest.mark.parametrize("model_type", TYPES)
def test_what_a_module_claims_moves_no_kernel_out_of_its_weights(tmp_path: Path, model_type: str) -> None:
    """Kernels read by address. A module may know of more experts than it has weights of: such as do nothing."""
    saved(model_type, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        experts = experts_of(loaded(tmp_path, "q8", dtype))[0]
        x, index, given = routed(experts, 5, dtype)
        wanted = packed_experts(experts, x, index, given)
        experts.num_experts *= 2
        assert torch.equal(packed_experts(experts, x, index, given), wanted)
        index[2] = experts.num_experts - 1
        assert not packed_experts(experts, x, index, given)[2].any()
        for width in (32, 96):
            with pytest.raises((ValueError, RuntimeError)):
                packed_experts(experts, x.repeat(1, 2)[:, :width], index, given)


@pytest.mark.parametrize(
    ("model_type", "weight", "says"),
    [
        ("jetmoe", "mlp.input_linear.weight", "no projection of experts"),
        ("qwen3_moe", "mlp.experts.gate_up_proj", "to some of .*, not to all"),
        ("qwen3_moe", "mlp.experts.down_proj", "to some of .*, not to all"),
    ],
)
def test_experts_that_an_index_gives_to_other_weights_are_refused(
    tmp_path: Path, model_type: str, weight: str, says: str
) -> None:
    model = tiny_model(model_type, **{**TYPES["qwen3_moe"], "intermediate_size": 32})
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights: dict[str, Any] = dict(model.named_parameters())
    name = f"model.layers.0.{weight}"
    experts, outputs, inputs = weights[name].shape
    weights[name] = stacked([pack(random_codes(Form(8, 32, False), outputs, inputs, n)) for n in range(experts)])
    write(tmp_path, "hostile", weights.items())
    with pytest.raises(ModelRefused, match=f"experts .*{says}"):
        load_weights(tmp_path, torch.bfloat16, CPU)


def test_sizes_count_the_numbers_of_all_experts(tmp_path: Path) -> None:
    plain = saved("qwen3_moe", tmp_path)
    numbers_of_plain, bytes_of_plain = size_of(plain)
    count, size = size_of(loaded(tmp_path, "q4"))
    assert count == numbers_of_plain
    assert size < bytes_of_plain / 2


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FORMATS)
def test_experts_keep_the_codes_of_a_quantised_checkpoint(tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    pair = quantised.qwen3_moe(tmp_path, form)
    made = pack_weights(pair.quantised, tmp_path / "models", "auto", CPU)
    model = load_weights(made, torch.float32, CPU)
    wanted = vanilla_logits(load_weights(pair.plain, torch.float32, CPU), IDS)
    got = vanilla_logits(model, IDS)
    assert (got - wanted).norm() <= (4 * form.error + 1e-6) * wanted.norm()
    packed = [projection.packed for module in experts_of(model) for projection in projections_of(module)]
    assert len(packed) == 4
    assert {weight.table for weight in packed} == {"e2m1" if form.keeps == "table" else None}
    assert {how["experts"] for how in read_index(made).tensors.values()} == {0, 12}


def test_gpt_oss_keeps_its_experts_in_fp4(tmp_path: Path) -> None:
    pair = quantised.gpt_oss(tmp_path)
    made = pack_weights(pair.quantised, tmp_path / "models", "auto", CPU)
    model = load_weights(made, torch.float32, CPU)
    wanted = vanilla_logits(load_weights(pair.plain, torch.float32, CPU), IDS)
    got = vanilla_logits(model, IDS)
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    assert all(p.packed.table == "e2m1" for module in experts_of(model) for p in projections_of(module))
    assert read_index(made).weights.startswith("fp4 (kept from ")
