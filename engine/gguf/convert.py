"""Converts a GGUF file into a directory with safetensors, tokenizer and configuration (`reprise convert FILE.gguf
DIR`).

Files with Llama's architecture and a known vocabulary are read by our own code, layer by layer. All others go through
transformers' reader, which loads the whole model into memory.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from reprise.engine.gguf import blocks, llama, vocabulary
from reprise.engine.gguf.blocks import WritePacked
from reprise.engine.gguf.reader import GgufFile, GgufRefused
from reprise.engine.model.made_models import fresh_directory
from reprise.kernels.packed import PackedWeight

SHARD_BYTES = 2 << 30  # most of a model that is in memory while it is converted
# The names in generation_config.json of a file's sampling parameters.
_SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_SAMPLING |= {"repetition_penalty": "penalty_repeat"}


def convert(
    source: Path,
    out: Path,
    *,
    write_packed: WritePacked | None = None,
    sampling: Mapping[str, float] | None = None,
    chat_template: str | None = None,
) -> None:
    """Write the model directory `out`, completely or not at all. write_packed: if given, writes weights that stay
    packed as they are in the file, where `can_keep` is true. `sampling` (for generation_config.json) and
    `chat_template` override the file's. Raises GgufRefused."""
    if out.exists():
        raise GgufRefused(f"{out} already exists; name another directory, or delete it")
    file = GgufFile(source)
    if not can_keep(file):
        write_packed = None
    try:
        with fresh_directory(out) as fresh:
            if is_ours(file):
                _write_llama(file, fresh, write_packed)
            else:
                from reprise.engine.gguf import foreign

                foreign.write(file, fresh, write_packed)
            if chat_template is not None:
                _set_template(fresh, chat_template)
            _tell_sampling(fresh / "generation_config.json", {**_sampling_of(file), **(sampling or {})})
    except OSError as error:
        raise GgufRefused(f"{out} cannot be written: {error.strerror or error}") from None


def can_keep(file: GgufFile) -> bool:
    """Return whether most of a file's weights can stay packed as they are."""
    matrices = [info for info in file.tensors.values() if len(info.shape) == 2]
    kept = sum(info.elements for info in matrices if blocks.is_kept(info.kind))
    return 2 * kept > sum(info.elements for info in matrices)


def is_ours(file: GgufFile) -> bool:
    return file.metadata.get("general.architecture") == llama.ARCHITECTURE and vocabulary.is_known(file)


def _write_llama(file: GgufFile, out: Path, write_packed: WritePacked | None) -> None:
    shape = llama.read_shape(file)
    words = vocabulary.Vocabulary(file)
    if len(words.tokens) > shape.vocab:
        raise GgufRefused(f"{file.path}: {len(words.tokens)} tokens, but the model knows {shape.vocab}")
    dtype = llama.dtype_of(file)
    needs = sum(info.elements for info in file.tensors.values()) * dtype.itemsize
    if write_packed is not None:
        needs = 2 * sum(info.size_bytes for info in file.tensors.values())
    if needs > (free := shutil.disk_usage(out).free):
        raise GgufRefused(f"the weights take {needs / 1e9:.1f} GB, {out.parent} has {free / 1e9:.1f} GB left")
    words.tokenizer().save(str(out / "tokenizer.json"))
    _write_json(out / "tokenizer_config.json", words.config(shape.context))
    ids = {"bos_token_id": words.special["bos_token"], "pad_token_id": words.special["pad_token"]}
    ids = {name: token_id for name, token_id in ids.items() if token_id is not None}
    _write_json(out / "config.json", {**shape.config(dtype), **ids, "eos_token_id": words.end_ids})
    _write_json(out / "generation_config.json", {**ids, "eos_token_id": words.end_ids})
    if write_packed is not None:
        write_packed(out, file.formats, _kept_weights(file, shape, dtype))
    else:
        _write_weights(file, shape, dtype, out)


def _kept_weights(
    file: GgufFile, shape: llama.LlamaShape, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor | PackedWeight]]:
    for name, weight in shape.weights():
        info = file.tensors[name]
        if len(info.shape) == 2 and blocks.is_kept(info.kind):
            yield weight.name, llama.keep_weight(file, info, weight)
        else:
            yield weight.name, llama.read_weight(file, info, weight, dtype)


def _write_weights(file: GgufFile, shape: llama.LlamaShape, dtype: Any, out: Path) -> None:
    """Write model.safetensors, or several files of about SHARD_BYTES with their index."""
    shards: list[list[tuple[str, llama.Weight]]] = [[]]
    room = SHARD_BYTES
    for name, weight in shape.weights():
        size = file.tensors[name].elements * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append((name, weight))
        room -= size
    held: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        path = out / ("model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors")
        tensors = {w.name: llama.read_weight(file, file.tensors[name], w, dtype) for name, w in shard}
        save_file(tensors, path, metadata={"format": "pt"})
        held |= dict.fromkeys(tensors, path.name)
    if len(shards) > 1:
        total = sum(info.elements for info in file.tensors.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": held}
        _write_json(out / "model.safetensors.index.json", index)


def _sampling_of(file: GgufFile) -> dict[str, Any]:
    said = {name: file.metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return {name: value for name, value in said.items() if isinstance(value, int | float)}


def _tell_sampling(path: Path, sampling: Mapping[str, float]) -> None:
    if sampling:
        said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        _write_json(path, {**said, "do_sample": True, **sampling})


def _set_template(directory: Path, template: str) -> None:
    # the file that transformers wrote, which would take precedence
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    path = directory / "tokenizer_config.json"
    _write_json(path, {**json.loads(path.read_text(encoding="utf-8")), "chat_template": template})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
