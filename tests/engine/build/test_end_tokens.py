"""Tests which tokens end an answer beside those that a model's settings name."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from reprise.engine.build.end_tokens import further_end_ids

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write(directory: Path, tokens: list[str], *, listed: bool = False, **config: Any) -> Path:
    """Write a tokenizer whose special tokens have the ids 0, 1, ... listed: whether the configuration lists them."""
    directory.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_str(
        json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []})
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    if listed:
        config["added_tokens_decoder"] = {str(n): {"content": token} for n, token in enumerate(tokens)}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"eos_token": "<|im_end|>"}, {2}),
        ({"eos_token": {"content": "<|im_end|>"}}, {2}),
        ({"eos_token": "<|endoftext|>", "chat_template": CHATML}, {0, 2}),
        ({"chat_template": CHATML}, {2}),
        ({"chat_template": [{"name": "default", "template": CHATML}]}, {2}),
        ({"chat_template": "{{ messages[0].content }}"}, set()),
        ({"eos_token": "<none>"}, set()),
        ({"eos_token": None}, set()),
        ({}, set()),
    ],
)
def test_the_tokenizer_and_the_template_are_asked(tmp_path: Path, config: dict[str, Any], ids: set[int], listed: bool):
    directory = write(tmp_path / "m", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], listed=listed, **config)
    assert set(further_end_ids(directory, vocab_size=10)) == ids


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_templates_in_files_of_their_own_are_read(tmp_path: Path, name: str):
    directory = write(tmp_path / "m", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text(CHATML)
    assert further_end_ids(directory, vocab_size=10) == (2,)


@pytest.mark.parametrize(("tokens", "ids"), [(["<|end|>"], {0}), (["<|end|>", "<|return|>"], set())])
def test_the_end_of_a_channel_ends_no_answer(tmp_path: Path, tokens: list[str], ids: set[int]):
    directory = write(tmp_path / "m", tokens, chat_template="<|assistant|>{{ messages[0].content }}<|end|>")
    assert set(further_end_ids(directory, vocab_size=10)) == ids


def test_what_the_model_has_no_row_for_ends_nothing(tmp_path: Path):
    directory = write(tmp_path / "m", ["<|endoftext|>", "<|im_end|>"], eos_token="<|im_end|>")
    assert further_end_ids(directory, vocab_size=1) == ()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"eos_token": 5}', '{"chat_template": {"a": [1]}}', "[" * 100_000])
def test_files_that_cannot_be_read_add_nothing(tmp_path: Path, text: str):
    (tmp_path / "tokenizer_config.json").write_text(text)
    assert further_end_ids(tmp_path, vocab_size=10) == ()
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert further_end_ids(tmp_path, vocab_size=10) == ()
