"""Defines a model directory whose weights are packed. It is written once, and mapped into memory at every start.

Besides configuration and tokenizer it has safetensors files. They hold a packed weight NAME (scale * code + low) as
NAME.codes, NAME.scales and in some formats NAME.lows, in the layout of `reprise.kernels.packed`, and any other tensor
under its own name. `packed.json` says which weights are packed, and how.

Format 2 adds to each weight its `table` (null where codes are numbers themselves), `experts` (how many matrices of the
same shape it has; 0: it is a matrix) and `from`: the format of the checkpoint that it was read in, empty for one that
was not quantised. Format 1, without these, is still read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from reprise.kernels.packed import BLOCK, GROUP, TABLES, PackedWeight

INDEX = "packed.json"
FORMAT = 2
_READ = (1, 2)  # formats that this version reads
_SHARD_BYTES = 2 << 30
# The forms that kernels know: (bits of a code, inputs of a group, whether there are no lows).
_FORMS = ((4, 32, True), (4, 32, False), (8, 32, True), (8, 32, False), (8, 16, True))
_TABLE_FORMS = ((4, 32, True), (4, 16, True))


class DamagedDirectory(Exception):
    """A packed directory cannot be read. The message says why."""


@dataclass(frozen=True, slots=True)
class PackedDirectory:
    """The contents of `packed.json`, the index of a directory of packed weights. tensors: name of a weight -> how it is
    packed. files: name of a tensor -> the file that has it."""

    weights: str  # what the directory was packed to, for people: q4, q8, or GGUF formats
    tensors: dict[str, dict[str, Any]]
    files: dict[str, str]


def is_packed(directory: Path) -> bool:
    return (directory / INDEX).is_file()


def write(
    directory: Path,
    weights: str,
    tensors: Iterable[tuple[str, Tensor | PackedWeight]],
    formats: Mapping[str, str] | None = None,
) -> None:
    """Write the weights of a model into an existing directory, in several files one after the other. weights: text for
    people that says how they are packed. formats: name of a weight -> the quantised format in which the checkpoint had
    it. Raises OSError."""
    packed: dict[str, dict[str, Any]] = {}
    files: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    number, size = 0, 0

    def flush() -> None:
        nonlocal number, size
        if shard:
            name = f"packed-{number:05}.safetensors"
            save_file(shard, directory / name, metadata={"format": "pt"})
            files.update(dict.fromkeys(shard, name))
            shard.clear()
            number, size = number + 1, 0

    for name, tensor in tensors:
        if isinstance(tensor, PackedWeight):
            parts = {"codes": tensor.codes, "scales": tensor.scales, "lows": tensor.lows}
            shard.update({f"{name}.{part}": x for part, x in parts.items() if x is not None})
            packed[name] = {
                "bits": tensor.bits,
                "group": tensor.group,
                "outputs": tensor.outputs,
                "inputs": tensor.inputs,
                "lows": tensor.lows is not None,
                "table": tensor.table,
                "experts": tensor.experts,
                "from": (formats or {}).get(name, ""),
            }
            size += tensor.size_bytes
        else:
            shard[name] = tensor.contiguous()
            size += tensor.numel() * tensor.element_size()
        if size >= _SHARD_BYTES:
            flush()
    flush()
    index = {"format": FORMAT, "weights": weights, "tensors": packed, "files": files}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def read_index(directory: Path) -> PackedDirectory:
    """Read `packed.json`. Raises DamagedDirectory."""
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        if index["format"] not in _READ:
            raise DamagedDirectory(f"{directory} is packed in format {index['format']}, this version reads {FORMAT}")
        found = PackedDirectory(index["weights"], index["tensors"], index["files"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise DamagedDirectory(f"{directory / INDEX} cannot be read: {error}") from error
    parts = found.tensors, found.files
    if not isinstance(found.weights, str) or not all(isinstance(part, dict) for part in parts):
        raise DamagedDirectory(f"{directory / INDEX} has a weights, tensors or files of another type")
    if not all(isinstance(file, str) for file in found.files.values()):
        raise DamagedDirectory(f"{directory / INDEX} has files that are no names")
    return found


def read(directory: Path) -> Iterator[tuple[str, Tensor | PackedWeight]]:
    """Yield all weights, mapped from the files, not copied. Raises DamagedDirectory."""
    index = read_index(directory)
    parts: dict[str, Tensor] = {}
    try:
        for file in sorted(set(index.files.values())):
            if Path(file).name != file:
                raise DamagedDirectory(f"{directory / INDEX} names a file elsewhere: {file[:80]}")
            with safe_open(directory / file, framework="pt") as opened:
                parts |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedDirectory(f"weights of {directory} cannot be read: {error}") from error
    try:
        for name, how in index.tensors.items():
            yield name, _weight(name, how, parts)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedDirectory(f"weights of {directory} are incomplete: {error}") from error
    yield from parts.items()


def _weight(name: str, how: dict[str, Any], parts: dict[str, Tensor]) -> PackedWeight:
    """Remove one weight's tensors from `parts` and return the weight. Sizes are checked, because kernels read by
    address. Raises DamagedDirectory, KeyError, TypeError, ValueError, OverflowError."""
    outputs, inputs, bits, group = (int(how[field]) for field in ("outputs", "inputs", "bits", "group"))
    codes, scales = parts.pop(f"{name}.codes"), parts.pop(f"{name}.scales")
    lows = parts.pop(f"{name}.lows") if how["lows"] else None
    table = how.get("table")
    experts = int(how.get("experts", 0))
    blocks, padded = max(1, experts) * -(-outputs // BLOCK), -(-inputs // GROUP) * GROUP
    fits = (
        min(outputs, inputs) > 0
        and experts >= 0
        and (bits, group, lows is None) in (_FORMS if table is None else _TABLE_FORMS)
        and (table is None or table in TABLES)
        and (codes.dtype, list(codes.shape)) == (torch.uint8, [blocks * BLOCK * padded * bits // 8])
        and all(x is None or list(x.shape) == [blocks, padded // group, BLOCK] for x in (scales, lows))
        and all(x is None or x.dtype == torch.float16 for x in (scales, lows))
    )
    if not fits:
        raise DamagedDirectory(f"the weight {name[:80]} has not the size that its shape asks for")
    return PackedWeight(codes, scales, lows, outputs, inputs, bits, group, table, experts)  # type: ignore[arg-type]
