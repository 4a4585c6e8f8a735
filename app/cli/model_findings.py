"""The findings of `reprise doctor --model X` about the model itself: whether it is served, and how much it needs.

What a configuration says is found out in a separate process, before any weights are fetched.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from reprise.app.cli.expected_sizes import Expected, ModelShape, packed_bytes
from reprise.app.cli.finding import Finding, Level
from reprise.app.settings.settings import GIB
from reprise.engine.config import INT8_SCALE_BYTES

DESCRIBE = ("-m", "reprise.engine.build.description")
DESCRIBE_TIMEOUT_S = 300.0  # a configuration and a tokenizer may have to be fetched
_MOST_CHARS = 1000  # length of a text that comes from a configuration


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model as its configuration describes it. refused: why it is not served; empty if it is. instead: what is served
    in its place. packing: the form in which its files already hold packed weights (weights of fewer bits); empty: they
    are not packed. Weights and KV are counted in numbers, not bytes; kv_numbers is None if only loading the model tells
    it."""

    refused: str
    instead: str = ""
    model_type: str = ""
    is_wrapper: bool = False
    is_tried: bool = False
    is_movable: bool | None = None
    packing: str = ""
    quantised: str = ""
    window_tokens: int | None = None
    parameters: int = 0
    table_weights: int = 0
    layer_weights: int = 0
    layers: int = 1
    kv_numbers: int | None = None
    kv_rows: int | None = None

    def weight_bytes(self, form: str, itemsize: int) -> int:
        """Return the bytes of all weights. form: q8 or q4, in which embeddings, heads and layers are packed into about
        8 or 4 bits a weight; in any other form every weight has `itemsize` bytes."""
        others = self.parameters - self.table_weights - self.layer_weights
        tables, layers = packed_bytes(self.table_weights, self.layer_weights, form, itemsize)
        return others * itemsize + tables + layers

    def shape(self, itemsize: int, max_context: int, form: str, hbm_dtype: str) -> ModelShape | None:
        """Return the sizes of the model, as a server would use it; None if they are not known. itemsize: bytes of a
        number that is not packed. max_context, form, hbm_dtype: the settings model.max_context, model.weights and
        cache.hbm_dtype."""
        if self.kv_numbers is None or self.kv_rows is None or not self.window_tokens:
            return None
        in_hbm = self.kv_numbers + self.kv_rows * INT8_SCALE_BYTES
        return ModelShape(
            weights=self.weight_bytes(form, itemsize),
            kv_bytes_per_token=self.kv_numbers * itemsize,
            hbm_bytes_per_token=in_hbm if hbm_dtype == "int8" else self.kv_numbers * itemsize,
            window_tokens=min(self.window_tokens, max_context or self.window_tokens),
            num_layers=self.layers,
            layer_weights=packed_bytes(0, self.layer_weights, form, itemsize)[1] // self.layers,
        )


def describe(source: str) -> DescribedModel:
    """Describe a model from its configuration, in a separate process. source: a directory, a GGUF file or a hub id."""
    try:
        done = subprocess.run(
            [sys.executable, *DESCRIBE, source],
            capture_output=True,
            text=True,
            timeout=DESCRIBE_TIMEOUT_S,
            check=False,
        )
        return _read(json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return DescribedModel(f"looking at its configuration took longer than {DESCRIBE_TIMEOUT_S:g} s")
    except (IndexError, ValueError, KeyError, TypeError, OSError):
        return DescribedModel("looking at its configuration ended the process that tried it")


def _read(said: dict[str, Any]) -> DescribedModel:
    """Read what the other process has printed. Raises KeyError, TypeError."""
    outline = said["outline"] or {}
    names = ("parameters", "table_weights", "layer_weights", "layers", "kv_numbers", "kv_rows")
    return DescribedModel(
        refused=_shown(said["refused"]),
        instead=_shown(said["instead"]),
        model_type=_shown(said["model_type"]),
        is_wrapper=said["is_wrapper"],
        is_tried=said["is_tried"],
        is_movable=said["is_movable"],
        packing=_shown(said["packing"]),
        quantised=_shown(said["quantised"]),
        window_tokens=said["window"],
        **{name: outline[name] for name in names if name in outline},
    )


def _shown(text: str) -> str:
    """Return a text without what a terminal could obey, and not longer than a reader can take."""
    return "".join(char if char.isprintable() else " " for char in text[:_MOST_CHARS])


def look_at_described(
    model: DescribedModel, expected: Expected | None, form: str, memory_bytes: int
) -> Iterator[Finding]:
    """Report whether a model is served and what it needs. expected: the sizes of a server of it; None if they are not
    known. form: the setting model.weights. memory_bytes: of the device that computes with the weights."""
    if model.refused:
        yield Finding("served", Level.FAIL, model.refused, model.instead)
        return
    yield _served(model)
    yield _weights(model, form, memory_bytes)
    if expected is None:
        yield Finding("KV", Level.NOTE, "how much a token takes is known only when the model is loaded")
    else:
        yield from _kv(expected)
    yield _truncation(model)


def _served(model: DescribedModel) -> Finding:
    what = "as the language model in it; images and sounds are not read" if model.is_wrapper else "yes"
    if not model.is_tried:
        found = f"{model.model_type}: perhaps; no model of its type was tried yet"
        return Finding("served", Level.NOTE, found, "the start loads it, and says whether its text is right")
    return Finding("served", Level.OK, f"{model.model_type}: {what}")


def _weights(model: DescribedModel, form: str, memory_bytes: int) -> Finding:
    """Report the bytes of the weights by form, and whether they fit."""
    if model.packing:
        return Finding(
            "weights", Level.OK, f"{model.parameters / 1e9:.2f} billion numbers, packed already: {model.packing}"
        )
    sizes = {form: model.weight_bytes(form, 2) for form in ("bf16", "q8", "q4")}
    listed = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in sizes.items())
    found = f"{model.parameters / 1e9:.2f} billion numbers: {listed}"
    if model.quantised:
        found += f"; auto keeps those of {model.quantised}, where weights can stay packed"
    chosen = sizes.get(form, sizes["bf16"])
    fits = [name for name, size in sizes.items() if size < memory_bytes]
    if not fits:
        advice = "take a smaller model, or a machine with more memory"
        return Finding("weights", Level.FAIL, f"{found}; this machine has {memory_bytes / GIB:.1f} GiB", advice)
    if chosen >= memory_bytes:
        return Finding(
            "weights",
            Level.WARN,
            f"{found}; this machine has {memory_bytes / GIB:.1f} GiB",
            f"--model.weights {fits[0]}",
        )
    return Finding("weights", Level.OK, found)


def _kv(expected: Expected) -> Iterator[Finding]:
    """Report the KV of a token, of a conversation that fills the window, and of this machine."""
    shape = expected.shape
    a_token, window = shape.kv_bytes_per_token, shape.window_tokens
    found = f"{a_token:,} bytes a token, {a_token * window / GIB:.1f} GiB for a conversation of {window:,} tokens"
    yield Finding("KV", Level.OK, found)
    on_disk = expected.sizes.disk // a_token
    held = {"in HBM": expected.hbm_tokens, "in DRAM": expected.dram_tokens, "on disk": on_disk}
    listed = ", ".join(f"{tokens:,} tokens {where}" for where, tokens in held.items() if tokens)
    most = max(held.values()) // max(1, window)
    found = f"{listed or 'none'}: {most:,} conversations that fill the window"
    yield Finding("room", Level.OK if expected.hbm_tokens >= window else Level.NOTE, found)


def _truncation(model: DescribedModel) -> Finding:
    if model.is_movable is None:
        return Finding("truncation", Level.NOTE, "whether saved KV survives it is known only when the model is loaded")
    if model.is_movable:
        return Finding("truncation", Level.OK, "keeps saved KV when the earliest messages leave a full window")
    found = "computes the history again when the earliest messages leave a full window"
    return Finding("truncation", Level.NOTE, found, "this model's keys carry their positions; a longer window helps")
