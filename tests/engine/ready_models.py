"""Engines in the tests' own process, which share models that were loaded and probed once."""

import atexit
import shutil
import tempfile
from pathlib import Path

from reprise.engine.build.engine import ReadyModel, build_engine
from reprise.engine.build.model import load, probe_model
from reprise.engine.config import EngineConfig
from reprise.engine.engine import Engine
from reprise.kernels.attention import BACKENDS

_READY: dict[str, ReadyModel] = {}


def engine_of(config: EngineConfig) -> Engine:
    """Build an engine. Take its model, and what its first steps show, from an earlier engine of this process that had
    the same files, settings and attention backends, unless the settings ask for more than a plain model."""
    return build_engine(config, ready=_ready_model(config) if _may_share(config) else None)


def _may_share(config: EngineConfig) -> bool:
    """Whether neither loading nor probing leaves anything that belongs to one engine, its directory or its tiers."""
    cache = config.cache
    is_plain = (cache.codec, cache.hbm_dtype, config.selector.name) == ("raw", "auto", "none")
    is_as_filed = config.model.weights == "auto" and Path(config.model.source).is_dir()
    return is_plain and is_as_filed and config.weights.offload == "none" and config.model.tensor_parallel == 1


def _ready_model(config: EngineConfig) -> ReadyModel:
    key = repr((config.model, config.device, config.threads, _files(Path(config.model.source)), BACKENDS))
    if key not in _READY:
        loaded = load(config)
        directory = Path(tempfile.mkdtemp(prefix="reprise-first-steps-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        _READY[key] = ReadyModel(loaded, probe_model(loaded, config), directory)
    return _READY[key]


def _files(source: Path) -> list[tuple[str, int, int]]:
    """Return the files of a model with their sizes and times: another test may write others in their place."""
    files = sorted(file for file in source.rglob("*") if file.is_file())
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def forget(source: Path) -> None:
    """Let go of the models that were loaded from a directory."""
    for key in [key for key in _READY if repr(str(source)) in key]:
        del _READY[key]
