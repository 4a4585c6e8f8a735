"""Finds the class that serves the text of a configuration, and what stands beside the text in it.

A wrapper joins a language model with towers (encoders of images or sounds) and projectors that text never calls. Such a
checkpoint is served as the language model in it: a subclass leaves the towers out, so that transformers neither makes
nor reads them. Names of weights, tied weights and positions stay transformers' business.
"""

import contextlib
import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from reprise.engine.model.shape_run import run_shapes

_TEXT_CONFIG = "text_config"
_MEDIA = ("image", "video", "audio", "vision", "boi_", "eoi_", "boa_", "eoa_")
_IDS = ("_token_id", "_token_index", "_token_ids")


class NoTextModel(Exception):
    """transformers has no class that runs the text of a configuration. The message says why."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """A class that runs a language model, and the configuration that it takes. towers: names of the modules (encoders
    of images or sounds) that the class leaves out."""

    kind: type[Any]  # a class of transformers, or its subclass without towers
    config: Any
    towers: tuple[str, ...] = field(default=())

    @property
    def is_wrapper(self) -> bool:
        return bool(self.towers)

    def make(self, dtype: torch.dtype) -> nn.Module:
        """Make the model with random weights, on torch's current default device and under the context managers that are
        active."""
        model: nn.Module = self.kind._from_config(self.config, dtype=dtype, attn_implementation="eager")
        return model

    def has_tower_of(self, weight: str) -> bool:
        """Return whether a weight belongs to a tower (an encoder that is left out). weight: its name in the checkpoint
        of the whole multimodal model."""
        return any(weight.startswith(f"{tower}.") for tower in self.towers)


def text_model_of(config: Any) -> TextModel:
    """Return the class that runs the language model of a configuration: transformers' own class for it if there is one,
    otherwise the multimodal class without its towers (encoders of images or sounds). To find the towers, makes that
    model without memory, on the meta device. Raises NoTextModel."""
    kind = _class_in(MODEL_FOR_CAUSAL_LM_MAPPING, config)
    if kind is not None:
        text_class = config.sub_configs.get(_TEXT_CONFIG)
        if text_class is not None and getattr(kind, "config_class", None) is text_class:
            return TextModel(kind, config.get_text_config())
        if not set(config.sub_configs) - {_TEXT_CONFIG}:
            return TextModel(kind, config)
    is_causal = kind is not None
    kind = kind or _class_in(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, config)
    if kind is None:
        raise NoTextModel(
            f"{config.model_type} is no language model that transformers {transformers.__version__} knows"
        )
    try:
        model = on_meta(TextModel(kind, config))
    except ImportError as error:  # a tower of another package, which would be left out anyway
        text = config.get_text_config()
        if (plain := _class_in(MODEL_FOR_CAUSAL_LM_MAPPING, text)) is None:
            raise NoTextModel(f"{kind.__name__} cannot be made: {_first_line(error)}") from error
        return TextModel(plain, text)
    except Exception as error:
        raise NoTextModel(f"{kind.__name__} cannot be made from its configuration: {_first_line(error)}") from error
    try:
        towers = _towers(model)
    except NoTextModel:
        if not is_causal:
            raise
        towers = ()  # a language model that cannot run without numbers: the load-time probe will judge it
    return TextModel(_without(kind, towers), config, towers) if towers else TextModel(kind, config)


def on_meta(text: TextModel, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the model in eval mode without memory for its weights, on the meta device, as transformers makes it before
    it loads weights. Leaves the configuration as it is."""
    config = copy.deepcopy(text.config)
    config._attn_implementation = "eager"
    with contextlib.ExitStack() as contexts:
        for context in text.kind.get_init_context(dtype, False, False, None):
            contexts.enter_context(context)
        return text.kind(config).eval()


def media_token_ids(config: Any) -> tuple[int, ...]:
    """Return, in ascending order, the ids of the tokens that stand for images, videos and sounds in prompts of a
    multimodal model; none for a language model. A text model would read such a token as a word."""
    if not set(config.sub_configs) - {_TEXT_CONFIG}:
        return ()
    found: set[int] = set()
    for name, value in config.to_dict().items():
        if name.endswith(_IDS) and any(kind in name for kind in _MEDIA):
            found |= {one for one in (value if isinstance(value, list) else [value]) if _is_id(one)}
    return tuple(sorted(found))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _towers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the largest modules with weights that stand beside the language model and that text never
    calls. Raises NoTextModel if the model cannot run text alone."""
    ran = run_shapes(model)
    if ran.error is not None and not ran.attended:
        raise NoTextModel(f"{type(model).__name__} cannot run text alone: {_first_line(ran.error)}") from ran.error
    called = ran.called
    if ran.error is not None:
        # Experts that look at numbers have ended the run: what comes before the language model has been seen, and
        # after it comes the head alone.
        called.add(model.get_output_embeddings())  # type: ignore[operator]
    attending = [call.module for call in ran.attended]
    path = _language_model({module: name for name, module in model.named_modules()}, attending)
    towers: list[str] = []
    parent, prefix = model, ""
    for step in path:
        for name, child in parent.named_children():
            has_weights = any(True for _ in child.parameters())
            if name != step and has_weights and not any(module in called for module in child.modules()):
                towers.append(f"{prefix}{name}")
        parent, prefix = getattr(parent, step), f"{prefix}{step}."
    return tuple(towers)


def _language_model(names: Mapping[nn.Module, str], attending: list[nn.Module]) -> list[str]:
    """Return the path to the module that holds the list of layers in which text attends; empty if none attends."""
    paths = [names[module].split(".") for module in attending if module in names]
    common: list[str] = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1 or steps[0].isdigit():
            break
        common.append(steps[0])
    return common[:-1]  # the last step is the list itself


def _without(kind: type[Any], towers: tuple[str, ...]) -> type[Any]:
    """Return a subclass of the same name that has None in the place of each tower, and of whose weights in checkpoints
    transformers does not warn."""
    expected = [*(kind._keys_to_ignore_on_load_unexpected or ()), *(rf"^{re.escape(tower)}\." for tower in towers)]

    def init(self: Any, config: Any) -> None:
        kind.__init__(self, config)
        for tower in towers:
            path, _, leaf = tower.rpartition(".")
            setattr(self.get_submodule(path), leaf, None)

    own = {"__init__": init, "__module__": kind.__module__, "_keys_to_ignore_on_load_unexpected": expected}
    return type(kind.__name__, (kind,), own)


def _class_in(mapping: Any, config: Any) -> type[Any] | None:
    """Return the class that transformers names for a configuration; None if it names none."""
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    return found[0] if isinstance(found, (list, tuple)) else found  # type: ignore[no-any-return]


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
