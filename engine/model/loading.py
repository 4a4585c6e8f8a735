"""Loads a model from disk, refuses models that cannot be served, and computes the fingerprint that tells models
apart."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from torch import nn
from transformers import AutoConfig

from reprise.cache.blocks.keys import LAYOUT_VERSION, typed_fields
from reprise.engine.model.checkpoint_files import checkpoint_files
from reprise.engine.model.hf_model import prepare
from reprise.engine.model.refusals import refusal_of, refusal_of_type
from reprise.engine.model.text_of_wrapper import NoTextModel, TextModel, text_model_of

_EACH = "num_experts_per_tok"
_TOTALS = ("num_local_experts", "num_experts", "n_routed_experts")


class ModelRefused(Exception):
    """The model cannot be served correctly. The message says why and what would help."""


def load_model(path: Path, dtype: torch.dtype, device: torch.device, num_ranks: int = 1) -> nn.Module:
    """Load a transformers causal LM, or the text model of a wrapper, in eval mode, with our attention. num_ranks:
    number of processes that share the model. If there are several, connect them before (`join_ranks`); each loads its
    own part. Raises ModelRefused."""
    config = read_config(path)
    transformers.utils.logging.disable_progress_bar()  # it would mix with our log lines
    check_safetensors(path)
    text = text_of(config)
    shared: dict[str, Any] = {}
    if num_ranks > 1:
        from transformers.distributed import DistributedConfig

        shared["distributed_config"] = DistributedConfig(tp_size=num_ranks)  # uses the model's own plan
    try:
        with torch.device("cpu") if not shared else nullcontext():
            model, report = text.kind.from_pretrained(
                path,
                config=text.config,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation="eager",
                output_loading_info=True,
                **shared,
            )
    except Exception as error:
        raise ModelRefused(f"transformers cannot load {path}: {error}") from error
    if missing := sorted(report["missing_keys"]):  # transformers has filled these with random numbers
        raise ModelRefused(f"{len(missing)} weights are missing from {path}, among them {', '.join(missing[:3])}")
    return prepare(model.to(device))


def text_of(config: Any) -> TextModel:
    """Return the class that runs the language model of a configuration, without the encoders of images or sounds that a
    multimodal model has. Raises ModelRefused if transformers has no class that can run it."""
    try:
        return text_model_of(config)
    except NoTextModel as error:
        raise ModelRefused(str(error)) from error


def check_safetensors(path: Path) -> None:
    """Raise ModelRefused if a directory has no weights that can be read safely, or an index that names files
    elsewhere."""
    if not any(path.glob("*.safetensors")):
        raise ModelRefused(f"{path} has no safetensors weights; other formats are not read, they can run code")
    try:
        checkpoint_files(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"the weights of {path} cannot be found: {error}") from error


def read_config(path: Path) -> Any:
    """Return the configuration of the model in a directory whose weights are not quantised. Raises ModelRefused for a
    model that is not served, or whose configuration says that its weights are quantised."""
    config = read_architecture(path)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = getattr(quantised, "quant_method", None) or dict(quantised).get("quant_method", "unknown")
        raise ModelRefused(f"quantised weights ({method}) have to be unpacked or packed before they are loaded")
    return config


def read_architecture(path: Path) -> Any:
    """Return the configuration of the model in a directory, whether its weights are quantised or not. Raises
    ModelRefused for a model that is not served."""
    config = load_config(path)
    _check_config(config)
    if (problem := _problem_of_experts(config.get_text_config())) is not None:
        raise ModelRefused(f"{path / 'config.json'}: {problem}")
    return config


def load_config(path: Path) -> Any:
    """Return the configuration of the model in a directory, even of a model that is not served. Raises ModelRefused if
    transformers cannot read it."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelRefused(f"{path} needs code of its own, which is never run; transformers has none") from error
        raise ModelRefused(f"{path} has no configuration that transformers can read: {error}") from error


def _check_config(config: Any) -> None:
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{name} is an encoder-decoder model; only causal language models are served")
    if (reason := refusal_of_type(name) or refusal_of(config.get_text_config())) is not None:
        raise ModelRefused(reason)


def _problem_of_experts(text: Any) -> str | None:
    """Return what is wrong with the number of experts that a row gets; None if nothing is, or if there are none."""
    each = getattr(text, _EACH, None)
    name, total = next(((name, n) for name in _TOTALS if (n := getattr(text, name, None)) is not None), ("", 0))
    dense = getattr(text, "first_k_dense_replace", None) or 0
    if type(total) is not int or total < 1 or each is None or dense >= text.num_hidden_layers:
        return None  # a model of a type that may have experts, without any
    for one in each if isinstance(each, list | tuple) else (each,):
        if type(one) is not int or not 1 <= one <= total:
            return f"{_EACH} is {str(each)[:40]!r}, but has to be a whole number from 1 to {name}, {total}"
    return None


def check_split(path: Path, num_ranks: int) -> None:
    """Raise ModelRefused if the heads of the model in a directory cannot be divided evenly among the ranks."""
    text = load_config(path).get_text_config()
    heads = {"attention": text.num_attention_heads}
    heads["KV"] = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    for kind, count in heads.items():
        if count % num_ranks:
            raise ModelRefused(f"model.tensor_parallel is {num_ranks}, which does not divide {count} {kind} heads")


def rope_limit(config: Any) -> int | None:
    """Return the context length up to which rotary positions mean the same in every request; None if there is no limit.
    `dynamic` and `longrope` change their frequencies with the length of the context, so beyond the limit cached keys
    would be wrong."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(v for v in parameters.values() if isinstance(v, dict))]
    if not any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds):
        return None
    original = [kind.get("original_max_position_embeddings") for kind in kinds]
    limits: list[int] = [value for value in original if value]
    limits.append(getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings)
    return min(limits)


def weights_digest(weights: Mapping[str, Any]) -> bytes:
    """Hash the names, shapes and bytes of all of a model's weights, which tell checkpoints of one architecture apart.
    Reads the weights once, at memory speed; must be called before they are packed."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(weights.items()):
        data = _own_part(tensor).detach().cpu().contiguous()
        digest.update(typed_fields(name, str(tuple(data.shape)), str(data.dtype)))
        digest.update(memoryview(data.flatten().view(torch.uint8).numpy()))
    return digest.digest()


def _own_part(tensor: Any) -> Any:
    """Return the part of a tensor that this process has; all of it if the model is not shared."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def fingerprint(model: nn.Module, weights: bytes, backend: str) -> bytes:
    """Return the fingerprint, 16 bytes that identify everything a KV row depends on besides its tokens. weights: from
    `weights_digest`. backend: the attention backend's name, included because its rounding matters; changing it only
    costs the cached KV."""
    text = model.config.to_json_string(use_diff=False)  # type: ignore[operator,union-attr]
    config = json.dumps(json.loads(text, object_hook=_without_path), sort_keys=True)
    dtype = str(next(model.parameters()).dtype)
    fields = typed_fields("reprise-model", LAYOUT_VERSION, weights, config, dtype, backend)
    return hashlib.blake2b(fields, digest_size=16).digest()


def _without_path(config: dict[str, Any]) -> dict[str, Any]:
    """Drop the path that transformers notes in the config: a model that was moved is still the same model."""
    return {name: value for name, value in config.items() if name != "_name_or_path"}


def version() -> str:
    return str(transformers.__version__)
