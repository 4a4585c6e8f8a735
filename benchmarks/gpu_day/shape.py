"""The model of the day: Qwen3-8B's shape with random weights, made where they are computed with; tiny on a CPU."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Qwen3Config

from reprise.engine.model.hf_model import prepare

TOKENIZER = Path(__file__).parent.parent.parent / "model" / "bundled" / "tokenizer.json"
# As transformers' configuration calls them. nano-vllm knows this architecture and no other.
QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12_288,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 4608,
    "max_position_embeddings": 1024,
}


def sizes(on_gpu: bool) -> dict[str, int]:
    return QWEN3_8B if on_gpu else TINY


def directory(on_gpu: bool) -> Path:
    """Return a new directory with the configuration of the day's model and a tokenizer, but no weights."""
    path = Path(tempfile.mkdtemp()) / ("random-qwen3-8b" if on_gpu else "random-qwen3-tiny")
    path.mkdir()
    config = Qwen3Config(
        **sizes(on_gpu),
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    config.save_pretrained(path)
    shutil.copy(TOKENIZER, path)
    return path


def random_model(path: Path, dtype: torch.dtype, device: torch.device, attention: str = "eager") -> nn.Module:
    """Return the model of a directory with random weights, which are drawn on the device. Writing 16 GB to disk and
    reading them back would take longer than all measurements."""
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                # A head three times as large has logits as peaked as a trained model's, and draws that take as long.
                parameter.normal_(0.0, 0.06 if name.startswith("lm_head") else 0.02)
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    return model  # type: ignore[no-any-return]


@contextmanager
def drawn_where_needed() -> Iterator[None]:
    """Have engines draw random weights instead of reading them, during the `with` block. The weights' digest is
    constant too; it only tells KV on disk apart, and these engines have no disk."""

    def load_weights(path: Path, dtype: torch.dtype, device: torch.device, num_ranks: int = 1) -> nn.Module:
        return prepare(random_model(path, dtype, device))

    with (
        patch("reprise.engine.build.model.load_weights", load_weights),
        patch("reprise.engine.build.model.weights_digest", lambda weights: bytes(16)),
    ):
        yield


def step_bytes(on_gpu: bool, context_tokens: int) -> int:
    """Return the least number of bytes that a decode step reads in bf16: all weights but the embedding, and the KV of
    `context_tokens` tokens."""
    shape = sizes(on_gpu)
    hidden, layers, middle = shape["hidden_size"], shape["num_hidden_layers"], shape["intermediate_size"]
    queries, keys = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * middle
    return 2 * (layers * layer + hidden * shape["vocab_size"] + context_tokens * layers * 2 * keys)
