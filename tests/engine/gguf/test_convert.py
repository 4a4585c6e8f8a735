"""Tests the conversion of files written here against their original model and transformers' own reader."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from reprise.engine.build.end_tokens import further_end_ids
from reprise.engine.gguf import convert as convert_module
from reprise.engine.gguf import foreign
from reprise.engine.gguf.convert import convert
from reprise.engine.gguf.reader import GgufFile, GgufRefused
from tests.engine.gguf import gguf_files

TEXTS = ("the thing in the tin", " 12 0123", "<|im_start|>user\nthe<|im_end|>", "ünï ☃ \n\n  a", "a <think> b")


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def read_by_transformers(source: Path, out: Path) -> Path:
    out.mkdir()
    foreign.write(GgufFile(source), out)
    return out


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_in_float32_gives_the_very_model_back(tmp_path, tied):
    model = gguf_files.random_llama(tie_word_embeddings=tied)
    convert(gguf_files.write(tmp_path / "a.gguf", model), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[5, 3, 9, 100, 41]])
    assert again.dtype == torch.float32
    assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
    assert again.config.rms_norm_eps == 1e-5  # not 9.999999747378752e-06, which is how a float32 has it
    assert again.config.tie_word_embeddings is tied


KINDS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_transformers_bit_for_bit(tmp_path, kind):
    source = gguf_files.write(tmp_path / "a.gguf", gguf_files.random_llama(), kind=GGMLQuantizationType[kind])
    convert(source, tmp_path / "ours")
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(read_by_transformers(source, tmp_path / "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.isfinite(weight).all() for weight in ours.values())
    if kind == "F16":  # we keep it, and they were asked to make bfloat16; norms, in float32, would be rounded twice
        assert {weight.dtype for weight in ours.values()} == {torch.float16}
        ours = {name: weight.to(torch.bfloat16) for name, weight in ours.items() if weight.dim() > 1}
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_text_becomes_the_tokens_that_transformers_makes_of_it(tmp_path):
    source = gguf_files.write(tmp_path / "a.gguf", gguf_files.random_llama())
    convert(source, tmp_path / "ours")
    read_by_transformers(source, tmp_path / "theirs")
    ours, theirs = (Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("ours", "theirs"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        if "12" not in text:  # SmolLM splits digits, for which their reader knows no way
            assert ids == theirs.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert len(ours.encode("12").ids) == 2
    assert ours.encode("<|im_end|>").ids == [2]
    assert ours.decode([2], skip_special_tokens=True) == ""
    said = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert said["chat_template"] == gguf_files.TEMPLATE
    assert (said["bos_token"], said["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_a_beginning_is_put_first_where_the_file_asks_for_it(tmp_path):
    model = gguf_files.random_llama()
    convert(gguf_files.write(tmp_path / "a", model, changes={"tokenizer.ggml.add_bos_token": True}), tmp_path / "out")
    made = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert made.encode("the").ids[0] == 1
    assert made.encode("the", add_special_tokens=False).ids == made.encode("the").ids[1:]


def test_llama_3_positions_are_carried_over(tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = gguf_files.random_llama(rope_parameters=scaling)
    # As llama.cpp has them: by how much each frequency is slower than without scaling.
    plain = 500_000.0 ** (-np.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    source = gguf_files.write(tmp_path / "a.gguf", model, add={"rope_freqs.weight": factors})
    convert(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"] == scaling
    odd = gguf_files.write(tmp_path / "b.gguf", model, add={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(GgufRefused, match="not what Llama 3"):
        convert(odd, tmp_path / "odd")


def test_answers_end_at_every_end_token_and_are_sampled_as_the_file_says(tmp_path):
    changes = {"tokenizer.ggml.eot_token_id": 0, "general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    source = gguf_files.write(tmp_path / "a.gguf", gguf_files.random_llama(), changes=changes)
    convert(source, tmp_path / "out", sampling={"temperature": 0.25})
    said = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert said["eos_token_id"] == [2, 0]
    assert (said["temperature"], said["top_k"], said["do_sample"]) == (0.25, 20, True)


def test_large_models_are_written_in_parts(tmp_path, monkeypatch):
    source = gguf_files.write(tmp_path / "a.gguf", gguf_files.random_llama())
    convert(source, tmp_path / "one")
    monkeypatch.setattr(convert_module, "SHARD_BYTES", 1 << 20)
    convert(source, tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many"))
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_another_architecture_goes_through_transformers(tmp_path):
    model = gguf_files.random_qwen2()
    convert(gguf_files.write(tmp_path / "a.gguf", model, architecture="qwen2"), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(again).__name__ == "Qwen2ForCausalLM"
    assert all(torch.equal(w.to(torch.bfloat16).float(), again.state_dict()[n]) for n, w in model.state_dict().items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("<|im_end|>").ids == [2]


def test_weights_that_transformers_would_pass_over_are_no_model(tmp_path):
    add = {"blk.0.attn_q.lora": np.ones((4, 4), np.float32)}
    source = gguf_files.write(tmp_path / "a.gguf", gguf_files.random_qwen2(), architecture="qwen2", add=add)
    with pytest.raises(GgufRefused, match="weights"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"leave_out": ("blk.1.attn_v.weight",)}, "blk.1.attn_v.weight is missing"),
        ({"leave_out": ("token_embd.weight",)}, "token_embd.weight"),
        ({"add": {"blk.0.attn_q.bias": np.ones(256, np.float32)}}, "not belong to a Llama model"),
        ({"add": {"output_norm.weight": np.ones(128, np.float32)}}, "has the shape"),
        ({"add": {"output_norm.weight": np.full(256, np.nan, np.float32)}}, "not finite"),
        ({"changes": {"llama.expert_count": 8}}, "mixtures of experts"),
        ({"changes": {"llama.block_count": 1 << 30}}, "too few for"),
        ({"changes": {"llama.block_count": "two"}}, "llama.block_count is 'two'"),
        ({"changes": {"llama.attention.head_count": 3}}, "no Llama's"),
        ({"changes": {"llama.attention.head_count_kv": 0}}, "head_count_kv"),
        ({"changes": {"llama.embedding_length": None}}, "llama.embedding_length is missing"),
        ({"changes": {"llama.rope.dimension_count": 32}}, "no Llama's"),
        ({"changes": {"llama.rope.freq_base": float("nan")}}, "rope.freq_base"),
        ({"changes": {"llama.rope.scaling.type": "yarn"}}, "'yarn'"),
        ({"changes": {"llama.attention.layer_norm_rms_epsilon": None}}, "layer_norm_rms_epsilon"),
        ({"changes": {"tokenizer.ggml.merges": ["q zz"]}}, "merges do not fit"),
        ({"changes": {"tokenizer.ggml.merges": ["t h e"]}}, "of two tokens"),
        ({"changes": {"tokenizer.ggml.merges": None}}, "tokenizer.ggml.merges is missing"),
        ({"changes": {"tokenizer.ggml.tokens": ["a", "a"]}}, "two tokens"),
        ({"changes": {"tokenizer.ggml.eos_token_id": 5000}}, "5000 is no token"),
        ({"changes": {"tokenizer.ggml.pre": "unheard-of", "llama.rope.scaling.type": "yarn"}}, "scaled positions"),
    ],
)
def test_what_does_not_fit_together_is_refused_and_leaves_nothing(tmp_path, options, says):
    source = gguf_files.write(tmp_path / "a.gguf", gguf_files.random_llama(), **options)
    with pytest.raises(GgufRefused) as refused:
        convert(source, tmp_path / "out")
    assert says in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(GgufRefused, match="already exists"):
        convert(gguf_files.write(tmp_path / "a.gguf", gguf_files.random_llama()), tmp_path / "out")


@pytest.mark.skipif("REPRISE_TEST_GGUF" not in os.environ, reason="REPRISE_TEST_GGUF names no file")
def test_a_real_file_is_read_as_transformers_reads_it(tmp_path):
    source = Path(os.environ["REPRISE_TEST_GGUF"])
    convert(source, tmp_path / "ours")
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(read_by_transformers(source, tmp_path / "theirs"))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    made = [Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("ours", "theirs")]
    text = Path(__file__).read_text(encoding="utf-8")
    assert made[0].encode(text).ids == made[1].encode(text).ids


@pytest.mark.parametrize("eos", [0, None])
def test_a_turn_ends_where_the_template_says_whatever_end_the_file_names(tmp_path, eos):
    changes = {"tokenizer.ggml.eos_token_id": eos, "tokenizer.ggml.padding_token_id": 0}
    convert(gguf_files.write(tmp_path / "a.gguf", gguf_files.random_llama(), changes=changes), tmp_path / "out")
    assert gguf_files.TOKENS[2] == "<|im_end|>"
    assert 2 in further_end_ids(tmp_path / "out", vocab_size=len(gguf_files.TOKENS))
