"""Tests that the random model matches its description and accepts text."""

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness.make_model import BUNDLED, SHAPES, make_model, random_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model(directory, SHAPES["tiny"], seed=0)
    return directory


def test_the_same_seed_gives_the_same_weights_and_another_one_does_not(tiny):
    stored = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    again, other = (random_llama(SHAPES["tiny"], seed).state_dict() for seed in (0, 1))
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    assert not torch.equal(stored["lm_head.weight"], other["lm_head.weight"])


def test_its_tokenizer_reads_text_as_the_bundled_one_does(tiny):
    ours, bundled = (Tokenizer.from_file(str(directory / "tokenizer.json")) for directory in (tiny, BUNDLED))
    text = "Hello there, 42 times! <4100> Ġ<4200> 你好"
    assert ours.encode(text).ids == bundled.encode(text).ids
    assert ours.get_vocab_size() == SHAPES["tiny"].vocab > bundled.get_vocab_size()
    assert all(ours.id_to_token(index) is not None for index in range(SHAPES["tiny"].vocab))
    assert ours.decode([4100, 4607]) == " <4100> <4607>"
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n"
