"""Remembers the results of a model's first steps on this machine, so that the next start need not measure all of them
again.

There is one file in the state directory, for the models that were served last. An entry holds for the same weights,
settings, machine, libraries and code. If the file is missing, damaged or of another server, a start only takes longer.
"""

import functools
import hashlib
import logging
import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from reprise.engine.model.exactness import Exactness

log = logging.getLogger(__name__)

_KEPT_MODELS = 8  # models in the file
_FOLDERS = ("engine", "kernels", "cache")  # whose code decides what steps show
_LIBRARIES = ("torch", "numba", "llvmlite", "transformers", "numpy")


class FirstSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the trial steps at an engine's start. step_s: seconds that a step takes whatever its size is;
    token_s: additional seconds per token. least_chunk_tokens: fewest prompt tokens in a step with which the model is
    nearly as fast as it can be; 0: not measured. rows_agree: whether several rows of a sequence give the same bits
    together as one by one. proven: whether it is proven that rows depend on their own tokens alone; detail: a text
    about that for people."""

    step_s: float
    token_s: float
    least_chunk_tokens: int
    rows_agree: bool
    proven: bool
    detail: str

    @property
    def exactness(self) -> Exactness:
        return Exactness(self.proven, self.detail)


class Remembered:
    """The file that keeps the results of engines' trial steps, and this model's entry in it. The file has an entry for
    each of the models that were served last. `key` names this model's entry: a digest of all that its results depend on
    (`key_of`)."""

    def __init__(self, directory: Path, key: str) -> None:
        self._path, self._key = directory / "first_steps.json", key

    def recall(self) -> FirstSteps | None:
        return self._read().get(self._key)

    def keep(self, shown: FirstSteps) -> None:
        """Write `shown`, the results of this model's trial steps, to the file, in place of its earlier entry. Only the
        _KEPT_MODELS entries that were written last stay in the file. If it cannot be written, only log that."""
        entries = {key: entry for key, entry in self._read().items() if key != self._key}
        entries = dict([*entries.items(), (self._key, shown)][-_KEPT_MODELS:])
        new = self._path.with_suffix(f".{os.getpid()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(msgspec.json.encode(entries))
            new.replace(self._path)
        except OSError as error:
            log.info("what the first steps have shown is not kept: %s", error)
            with suppress(OSError):
                new.unlink(missing_ok=True)

    def _read(self) -> dict[str, FirstSteps]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, FirstSteps])
        except (OSError, msgspec.MsgspecError, ValueError):
            return {}


def key_of(*parts: object) -> str:
    """Return the key under which results of first steps are kept: a digest of these parts, the machine, the libraries
    and the code."""
    everything = (*parts, torch.get_num_threads(), _processor(), *map(_version_of, _LIBRARIES), _code())
    return hashlib.blake2b(repr(everything).encode(), digest_size=16).hexdigest()


def _version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


@functools.cache
def _code() -> str:
    """Return a digest of all code that decides what a step computes. Takes 2 ms."""
    root = Path(__file__).resolve().parents[2]
    files = sorted(file for folder in _FOLDERS for file in (root / folder).rglob("*.py"))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


@functools.cache
def _processor() -> str:
    """Return text that names the processor's model and abilities, as far as the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
