"""Converts GGUF files of other architectures with transformers' reader."""

import logging
from math import prod
from pathlib import Path
from typing import Any

import torch

from engine.gguf.reader import GgufFile, GgufRefused

log = logging.getLogger(__name__)


def write(file: GgufFile, out: Path) -> None:
    """Write the model in bfloat16, its tokenizer and configuration. Raises GgufRefused, OSError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    architecture = file.get("general.architecture", str, "")
    _refuse_what_would_be_lost(file, architecture)
    disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": file.path.name}
    try:
        # Without dequantising, the weights would stay packed and could not be saved.
        model = AutoModelForCausalLM.from_pretrained(
            file.path.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **where
        )
        tokenizer = AutoTokenizer.from_pretrained(file.path.parent, **where)
    except Exception as error:
        what = f"{architecture or 'its architecture'} with this vocabulary"
        raise GgufRefused(f"{file.path}: transformers does not read {what}: {error}"[:1000]) from error
    stored = sum(prod(info.shape) for info in file.tensors.values())
    known = sum(parameter.numel() for parameter in model.parameters())
    if stored != known:  # transformers' reader skips tensors that it has no name for
        raise GgufRefused(f"{file.path} holds {stored:,} weights, transformers' model of it {known:,}")
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out, max_shard_size="2GB")
    tokenizer.save_pretrained(out)


def _refuse_what_would_be_lost(file: GgufFile, architecture: str) -> None:
    """Refuse files with scaled positions: transformers' reader ignores the scaling, so the model would compute other
    positions."""
    scaling = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    factors = [name for name in file.tensors if name.startswith("rope_f")]
    if scaling != "none" or factors:
        raise GgufRefused(f"{file.path}: scaled positions are converted for Llama's byte-level vocabularies only")
