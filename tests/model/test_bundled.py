"""Tests that plain transformers loads the bundled model, and that it produces text."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.example_counts import examples
from tools.bundled_model import corpus

MODEL = Path(__file__).parent.parent.parent / "model"
BUNDLED = MODEL / "bundled"
SMALL_TALK = [
    {"role": "user", "content": "Hi, how are you today?"},
    {"role": "assistant", "content": "I am good, how about you? Do you like music?"},
    {"role": "user", "content": "Yes, I love music. Do you play any instruments?"},
    {"role": "assistant", "content": "No, I do not. But I like to listen to the radio."},
]


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(BUNDLED).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture(scope="module")
def plain_tokenizer():
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


def test_weights_are_small_half_precision_and_stored_once(model):
    assert (BUNDLED / "model.safetensors").stat().st_size < 32e6
    with safe_open(BUNDLED / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
        assert {stored.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "lm_head.weight" not in names
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert 5e6 <= sum(p.numel() for p in model.parameters()) <= 10e6
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_generation_ends_at_either_end_token(model, tokenizer):
    ends = [corpus.TURN_END, corpus.END_OF_TEXT]
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(ends)
    assert tokenizer.eos_token == corpus.TURN_END
    assert len(tokenizer) == model.config.vocab_size


def test_template_renders_what_the_model_was_trained_on(tokenizer):
    rendered = tokenizer.apply_chat_template([{"role": "system", "content": "Be kind."}, *SMALL_TALK], tokenize=False)
    assert rendered + corpus.END_OF_TEXT == corpus.render_dialogue(SMALL_TALK, "Be kind.")
    prompt = tokenizer.apply_chat_template(SMALL_TALK[:1], tokenize=False, add_generation_prompt=True)
    assert corpus.render_dialogue(SMALL_TALK[:2], None).startswith(prompt)


@settings(max_examples=examples(50))
@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(plain_tokenizer, text):
    assert plain_tokenizer.decode(plain_tokenizer.encode(text).ids, skip_special_tokens=False) == text


@torch.no_grad()
def mean_loss(model, ids: list[int]) -> float:
    inputs = torch.tensor([ids])
    return model(input_ids=inputs, labels=inputs).loss.item()


def test_small_talk_surprises_it_less_than_shuffled_words(model, tokenizer):
    """Uniform guessing is ln 4096 = 8.3 nats a token; a model that learnt only word counts would not mind the order."""
    ordered = mean_loss(model, tokenizer(corpus.render_dialogue(SMALL_TALK, None))["input_ids"])
    shuffled_turns = [{**m, "content": " ".join(sorted(m["content"].split()))} for m in SMALL_TALK]
    shuffled = mean_loss(model, tokenizer(corpus.render_dialogue(shuffled_turns, None))["input_ids"])
    assert ordered < 3.0
    assert shuffled > ordered + 0.5


COMMON = frozenset(
    """a about actually all am an and any are as at be been but can could did do does don't enjoy favorite for from fun
    get good great have he hello help hi how i i'm in is it it's just know like love lot me more movie movies much music
    my no not of on one or play really she so that that's the them there they thing think this to today too very was
    watch well what when who with would yeah yes you your""".split()  # noqa: SIM905
)


def test_answers_are_whole_english_sentences(model, tokenizer):
    """Most words of small talk are among the hundred commonest; a model that babbles syllables has hardly any there."""
    words = []
    for question in (
        "Hi, how are you?",
        "Do you like music?",
        "What is your favorite movie?",
        "What do you do for fun?",
    ):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=80, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answer = tokenizer.decode(output[:-1])
        assert output[-1] == tokenizer.eos_token_id, answer
        assert answer.isascii(), answer
        spoken = re.findall(r"[a-z']+", answer.lower())
        assert len(spoken) >= 2, answer
        words += spoken
    assert sum(word in COMMON for word in words) >= 0.6 * len(words), words


def test_card_describes_this_model(model):
    card = (MODEL / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert f"{sum(p.numel() for p in model.parameters()):,}" in card
    assert f"{json.loads((BUNDLED / 'config.json').read_text())['max_position_embeddings']} tokens" in card
    for source in corpus.SOURCES:
        assert f"| {source} |" in card
    for licence in ("public domain", "CC-BY-SA-4.0", "CDLA-Sharing-1.0", "CC-BY-4.0"):
        assert licence in card
    assert "loss_curve.png" in card
    assert (MODEL / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
