"""Writes the weights of a quantised checkpoint as numbers of bf16, for machines that cannot compute with packed
ones."""

import json
import logging
import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from reprise.engine.model.checkpoint_files import INDEX
from reprise.engine.model.loading import read_config, text_of
from reprise.engine.model.made_models import forget_old, fresh_directory
from reprise.engine.packed.from_directory import check_fit, copy_descriptions, stamp_of
from reprise.engine.packed.module_names import ModuleNames
from reprise.engine.packed.sources.source import Source

_WRITTEN_BY = 1  # version of this writer; increase it to discard older results
_SHARD_BYTES = 2 << 30

log = logging.getLogger(__name__)


def dequantised(source: Source, directory: Path) -> Path:
    """Return a directory with the weights of `source` in bf16, as a checkpoint that was never quantised, made by this
    start or an earlier one. Raises ModelRefused, OSError, and ValueError. If the weights do not fit the model, raises
    before any is written."""
    found = dequantised_path(source, directory)
    if not found.is_dir():
        log.info("unpacking %s to bf16, once: %s", source.path, found)
        with fresh_directory(found) as fresh:
            copy_descriptions(source.path, fresh)
            check_fit(source, ModuleNames(text_of(read_config(fresh))))
            _write(source, fresh)
    os.utime(found)
    forget_old(directory)
    return found


def dequantised_path(source: Source, directory: Path) -> Path:
    """Return where `dequantised` writes; the directory is there if an earlier start has made it."""
    return directory / f"{stamp_of(source.path)}-bf16-{_WRITTEN_BY}"


def _write(source: Source, fresh: Path) -> None:
    """Write all weights, one file after the other, and their index. Raises OSError, ValueError."""
    files: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    number, size, total = 0, 0, 0
    for name in source.names:
        shard[name] = source.dense(name).contiguous()
        size += shard[name].numel() * shard[name].element_size()
        if size >= _SHARD_BYTES or name == source.names[-1]:
            file = f"model-{number:05}.safetensors"
            save_file(shard, fresh / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(shard, file))
            shard.clear()
            number, size, total = number + 1, 0, total + size
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (fresh / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
