"""Converts GGUF files of other architectures with transformers' reader."""

import logging
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reprise.engine.gguf import blocks
from reprise.engine.gguf.blocks import WritePacked
from reprise.engine.gguf.reader import GgufFile, GgufRefused, TensorInfo
from reprise.kernels.packed import PackedWeight, pack, unpack

_ROUNDING_SHARE = 2**-8  # error of bf16 and of scales in fp16, as a share of the largest number

log = logging.getLogger(__name__)


def write(file: GgufFile, out: Path, write_packed: WritePacked | None = None) -> None:
    """Write into `out` the model in bfloat16, its tokenizer and its configuration, as transformers reads them from the
    file. write_packed: writes weights that stay packed as they are in the file, where they can be found in it. Raises
    GgufRefused, OSError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    architecture = file.get("general.architecture", str, "")
    refuse_what_would_be_lost(file, architecture)
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
    if write_packed is not None:
        model.config.save_pretrained(out)
        model.generation_config.save_pretrained(out)
        write_packed(out, file.formats, _weights(file, model))
    else:
        model.save_pretrained(out, max_shard_size="2GB")
    tokenizer.save_pretrained(out)


def refuse_what_would_be_lost(file: GgufFile, architecture: str) -> None:
    """Raise GgufRefused for a file with scaled positions (RoPE scaling). transformers' reader ignores the scaling, so
    the model would compute with other positions."""
    scaling = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    factors = [name for name in file.tensors if name.startswith("rope_f")]
    if scaling != "none" or factors:
        raise GgufRefused(f"{file.path}: scaled positions are converted for Llama's byte-level vocabularies only")


def _weights(file: GgufFile, model: Any) -> Iterator[tuple[str, Tensor | PackedWeight]]:
    """Yield the model's weights by transformers' names. A weight stays packed with the file's codes if the file's
    matrix has the same rows in the same order as transformers' weight."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = file.get("general.architecture", str, "")
    number = next((number for number, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    names = None if number is None else get_tensor_name_map(number, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings and "output.weight" not in file.tensors
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, _, leaf = name.rpartition(".")
        theirs = None if names is None else names.get_name(stem)
        info = file.tensors.get(f"{theirs}.{leaf}")
        yield name, weight if info is None else _kept(file, info, weight)


def _kept(file: GgufFile, info: TensorInfo, weight: Tensor) -> Tensor | PackedWeight:
    if len(info.shape) != 2 or not blocks.is_kept(info.kind) or info.shape != tuple(weight.shape):
        return weight
    try:
        packed = pack(blocks.codes_of(info.kind, torch.from_numpy(file.raw_rows(info))))
    except ValueError as error:
        raise GgufRefused(f"{file.path}: tensor {info.name}: {error}") from None
    off = (unpack(packed, torch.float32) - weight.float()).abs().max()
    return packed if off <= weight.float().abs().max() * _ROUNDING_SHARE else weight
