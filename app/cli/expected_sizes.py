"""Estimates the memory and disk that a server will use without loading its model, from the model's files where
possible."""

import json
from dataclasses import dataclass
from pathlib import Path

from reprise.app.settings.settings import GIB, MIB, Settings
from reprise.engine.build.resources import Memory, disk_room
from reprise.engine.build.sizes import Sizes, automatic_sizes
from reprise.engine.config import INT8_SCALE_BYTES, WEIGHT_BUFFERS

# Bits of a number, with what scales and lows take: of embeddings and heads, and of layers.
_PACKED_BITS = {"q8": (8.5, 8.5), "q4": (8.5, 5.0)}
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    weights: int  # bytes of all weights
    kv_bytes_per_token: int
    hbm_bytes_per_token: int  # bytes of a token's KV in pages
    window_tokens: int
    num_layers: int
    layer_weights: int  # bytes of one layer's weights


@dataclass(frozen=True, slots=True)
class Expected:
    """The sizes of memory and disk that a server is expected to use, by its settings or chosen automatically."""

    shape: ModelShape
    sizes: Sizes
    on_cpu: bool

    @property
    def hbm_tokens(self) -> int:
        return self.sizes.hbm // self.shape.hbm_bytes_per_token

    @property
    def dram_tokens(self) -> int:
        return self.sizes.dram // self.shape.kv_bytes_per_token


def expected_sizes(settings: Settings, shape: ModelShape, memory: Memory, device_memory: int | None) -> Expected:
    """Return the sizes that a server will use. device_memory: bytes of the accelerator; None: the model runs on the
    CPU."""
    cache = settings.cache
    in_hbm, in_dram = weights_by_place(settings, shape)
    automatic = automatic_sizes(
        memory=memory.available,
        device_memory=None if device_memory is None else max(0, device_memory - in_hbm),
        disk=_disk_room(settings),
        weights=in_dram + (in_hbm if device_memory is None else 0),
        kv_bytes_per_token=shape.hbm_bytes_per_token,
        window_tokens=shape.window_tokens,
        hbm_tokens=cache.hbm_tokens,
        stored_bytes_per_token=shape.kv_bytes_per_token,
    )
    if cache.mode != "attentionstore":
        return Expected(shape, Sizes(hbm=automatic.hbm, dram=0, staging=0, disk=0), device_memory is None)
    dram = automatic.dram if cache.dram_gib == "auto" else int(cache.dram_gib * GIB)
    disk = automatic.disk if cache.disk_gib == "auto" else int(cache.disk_gib * GIB)
    staging = (settings.experiment.staging_mib * MIB or automatic.staging) if dram or disk else 0
    return Expected(shape, Sizes(hbm=automatic.hbm, dram=dram, staging=staging, disk=disk), device_memory is None)


def weights_by_place(settings: Settings, shape: ModelShape) -> tuple[int, int]:
    """Return (bytes of weights in HBM, bytes of weights in DRAM). The layers in DRAM are streamed through buffers in
    HBM, which the first number includes."""
    passing = max(0, shape.num_layers - settings.weights.hbm_layers) if settings.weights.offload == "dram" else 0
    in_dram = passing * shape.layer_weights
    return shape.weights - in_dram + (WEIGHT_BUFFERS * shape.layer_weights if passing else 0), in_dram


def packed_bytes(tables: int, layers: int, weights: str, itemsize: int) -> tuple[int, int]:
    """Return (bytes of embeddings and heads, bytes of layers). tables: number of weights of embeddings and heads.
    layers: number of weights of all layers. weights: the setting model.weights, whose values q8 and q4 pack weights
    into fewer bits. itemsize: bytes of a weight that is not packed."""
    of_tables, of_layers = _PACKED_BITS.get(weights, (8 * itemsize, 8 * itemsize))
    return int(tables * of_tables / 8), int(layers * of_layers / 8)


def _disk_room(settings: Settings) -> int:
    try:
        return disk_room(settings.state_dir, int(settings.cache.disk_min_free_gib * GIB))
    except OSError:  # reported as another finding
        return 0


def model_shape(
    directory: Path, itemsize: int, max_context: int, weights: str = "auto", hbm_dtype: str = "auto"
) -> ModelShape | None:
    """Return the shape of a model on this machine; None if its configuration does not give the shape in the usual
    fields. itemsize: bytes per element of the type that the model will be computed in. weights, hbm_dtype: the settings
    model.weights and cache.hbm_dtype."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        if "kv_lora_rank" in text:  # sizes of keys and values differ from what its heads suggest
            return None
        if "quantization_config" in config or "quantization_config" in text:  # unpacked, weights are larger than files
            return None
        heads = text["num_attention_heads"]
        head_dim = text.get("head_dim") or text["hidden_size"] // heads
        rows = 2 * text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads)  # rows of one head
        in_hbm = head_dim + INT8_SCALE_BYTES if hbm_dtype == "int8" else head_dim * itemsize
        stored = ITEMSIZE.get(config.get("dtype") or config.get("torch_dtype"), itemsize)
        files = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        window = text["max_position_embeddings"]
        unpacked = files * itemsize // stored
        tables = 1 if config.get("tie_word_embeddings") else 2  # embedding and head
        table_bytes = tables * text.get("vocab_size", 0) * text.get("hidden_size", 0) * itemsize
        in_tables, in_layers = packed_bytes(
            min(table_bytes, unpacked) // itemsize, max(0, unpacked - table_bytes) // itemsize, weights, itemsize
        )
        return ModelShape(
            weights=in_layers + in_tables,
            kv_bytes_per_token=int(rows * head_dim * itemsize),
            hbm_bytes_per_token=int(rows * in_hbm),
            window_tokens=min(window, max_context or window),
            num_layers=text["num_hidden_layers"],
            layer_weights=in_layers // text["num_hidden_layers"],
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return None
