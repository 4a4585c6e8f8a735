"""Describes a model before its weights are read, or even fetched: whether it is served, and how large it is.

`python -m reprise.engine.build.description MODEL` prints the description as JSON, for a program without torch. A
configuration may be hostile, so this is a process of its own, with a limit on its memory and, by its caller, on its
time.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from reprise.engine.build.weights import DESCRIPTIONS, GGUF_SUFFIX, fetch, quantised_form, read_packed_config
from reprise.engine.gguf.configuration import config_of as config_of_gguf
from reprise.engine.gguf.reader import GgufRefused
from reprise.engine.model.known_types import KNOWN_TYPES, Service
from reprise.engine.model.loading import ModelRefused, load_config, read_architecture, rope_limit, text_of
from reprise.engine.model.outline import Outline, outline_of
from reprise.engine.model.refusals import refusal_of
from reprise.engine.packed.directory import DamagedDirectory, is_packed, read_index

_COUNTS = ("layers", "depth", "blocks", "experts")
_MOST_PARTS = 4096
_MOST_CONFIG_BYTES = 16 << 20
_MOST_MEMORY_BYTES = 6 << 30


@dataclass(frozen=True, slots=True)
class Description:
    """The facts about a model that its files tell before its weights are read. refused: why it is not served; empty: it
    is served. instead: what is served in its place."""

    model_type: str
    refused: str = ""
    instead: str = ""
    architecture: str = ""
    is_wrapper: bool = False
    is_tried: bool = False  # whether the table of known types has a verdict on a model of this type
    is_movable: bool | None = None  # whether saved keys survive truncation; None: the table does not know
    packing: str = ""  # how the weights of a directory are packed already
    quantised: str = ""  # the format in which a checkpoint is quantised; empty: it is not
    window: int | None = None  # tokens
    outline: Outline | None = None


def describe(model: str) -> Description:
    """Describe a model given as a directory, a GGUF file or a hub id. Of a hub model, only the configuration and the
    tokenizer are fetched. A model that is not served is described by its `refused`; nothing is raised for it."""
    path = Path(model).expanduser()
    try:
        if path.suffix == GGUF_SUFFIX and path.is_file():
            return _describe(config_of_gguf(path), lambda: None)
        directory = _directory(model, path)
        if is_packed(directory):
            packing = read_index(directory).weights
            described = _describe(load_config(directory), lambda: read_packed_config(directory))
            return replace(described, packing=packing)
        form = quantised_form(directory)
        return replace(_describe(load_config(directory), lambda: read_architecture(directory)), quantised=form)
    except (ModelRefused, GgufRefused, DamagedDirectory) as refusal:
        return Description(model_type="", refused=str(refusal))


def _directory(model: str, path: Path) -> Path:
    """Return the directory with a model's configuration. Raises ModelRefused."""
    if path.exists() and not path.is_dir():
        raise ModelRefused(f"{model} is neither a directory with a model in it nor a {GGUF_SUFFIX} file")
    if not path.exists():
        if model.startswith((".", "/", "~")):
            raise ModelRefused(f"there is no directory {model}")
        path = fetch(model, *DESCRIPTIONS)
    file = path / "config.json"
    if file.is_file() and (size := file.stat().st_size) > _MOST_CONFIG_BYTES:
        raise ModelRefused(f"{file} has {size:,} bytes, more than any configuration")
    return path


def _describe(config: Any, check: Callable[[], object]) -> Description:
    """Describe the model of a configuration. `check` and the configuration's contents may refuse it first, the table of
    known types after them. check: raises ModelRefused if the checkpoint is not served."""
    name = str(config.model_type)
    known = KNOWN_TYPES.get(name)
    try:
        check()
        text = config.get_text_config()
        if (reason := refusal_of(text)) is not None:
            raise ModelRefused(reason)
        layers = getattr(text, "num_hidden_layers", None)
        if not isinstance(layers, int) or layers < 1:
            raise ModelRefused(f"the configuration of {name} names {layers} layers")
        _check_counts(config.to_dict())
        if known is not None and known.service is Service.REFUSED:
            raise ModelRefused(f"{name} is not served: {known.reason}")
        found = text_of(config)
        outline = outline_of(found)
    except ModelRefused as refusal:
        return Description(name, refused=str(refusal), instead=known.instead if known is not None else "")
    except Exception as error:  # a configuration whose parts do not fit together
        problem = f"{type(error).__name__}: {error}"
        return Description(name, refused=f"no model can be made from this configuration of {name}: {problem}")
    window = getattr(text, "max_position_embeddings", None)
    limits = [limit for limit in (window, rope_limit(text)) if isinstance(limit, int)]
    inner = KNOWN_TYPES.get(str(text.model_type), known)
    return Description(
        model_type=name,
        architecture=found.kind.__name__,
        is_wrapper=found.is_wrapper,
        is_tried=known is not None and known.is_served,
        is_movable=None if inner is None else inner.is_movable,
        window=min(limits) if limits else None,
        outline=outline,
    )


def _check_counts(config: Mapping[str, Any]) -> None:
    """Raise ModelRefused for a configuration, or a part of one, with more layers or experts than any model has: making
    them would take hours."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        elif isinstance(value, int) and value > _MOST_PARTS and any(kind in name for kind in _COUNTS):
            raise ModelRefused(f"{name} is {value:,} in the configuration, more than any model has")


def _limit_memory() -> None:
    """Have allocations beyond a limit fail in this process, where the system has such limits."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _MOST_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MOST_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def main() -> None:
    _limit_memory()
    print(json.dumps(asdict(describe(sys.argv[1]))))


if __name__ == "__main__":
    main()
