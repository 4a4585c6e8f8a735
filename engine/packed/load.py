"""Makes a model of a packed directory: transformers' own modules, with packed linear layers and embeddings in them."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from engine.model.cpu.quantised import QuantisedEmbedding, QuantisedLinear
from engine.packed.directory import DamagedDirectory, read
from kernels.packed import PackedWeight, unpack

log = logging.getLogger(__name__)


def load_packed(directory: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return a transformers causal LM on the CPU. Raises DamagedDirectory."""
    with _large_weights_on_meta(), no_init_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    named = dict(model.named_parameters(remove_duplicate=False))
    missing = set(named)
    tied = config.get_text_config().tie_word_embeddings
    weights: dict[str, Tensor | PackedWeight] = {}
    for name, weight in read(directory):
        if name not in named:
            raise DamagedDirectory(f"{directory} has a weight that the model has not: {name[:80]}")
        weights[name] = weight
    output = model.get_output_embeddings()  # type: ignore[operator]
    if tied and output is not None:
        names = {module: name for name, module in model.named_modules()}
        head, embedding = f"{names[output]}.weight", f"{names[model.get_input_embeddings()]}.weight"  # type: ignore[operator]
        if embedding in weights:
            weights.setdefault(head, weights[embedding])
    for name, weight in weights.items():
        missing.discard(name)
        _set(model, name, weight, dtype)
    _check_kernels(model)
    if missing:
        raise DamagedDirectory(f"{len(missing)} weights are missing from {directory}, among them {min(missing)}")
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _set(model: nn.Module, name: str, weight: Tensor | PackedWeight, dtype: torch.dtype) -> None:
    """Give a weight to the module that has it. Raises DamagedDirectory."""
    path, _, leaf = name.rpartition(".")
    parent_path, _, child = path.rpartition(".")
    module = model.get_submodule(path)
    want = tuple(getattr(module, leaf).shape)
    found = (weight.outputs, weight.inputs) if isinstance(weight, PackedWeight) else tuple(weight.shape)
    if want != found:
        raise DamagedDirectory(f"the weight {name} has the shape {found}, the model wants {want}")
    parent = model.get_submodule(parent_path)
    if isinstance(weight, PackedWeight):
        if type(module) is nn.Linear and leaf == "weight":
            return setattr(parent, child, QuantisedLinear(weight, None if module.bias is None else module.bias.data))
        if type(module) is nn.Embedding and leaf == "weight":
            return setattr(parent, child, QuantisedEmbedding(weight, dtype))
        weight = unpack(weight, dtype)  # a module of another kind, which does its own arithmetic
    setattr(module, leaf, nn.Parameter(weight.to(dtype), requires_grad=False))
    return None


def _check_kernels(model: nn.Module) -> None:
    """Let layers do without compiled kernels that are wrong. One layer of each form is tried."""
    right: dict[tuple[Any, ...], bool] = {}
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            if (form := module.form) not in right:
                right[form] = module.is_right()
                if not right[form]:
                    log.warning("kernels for packed weights of %s are wrong and not used", form)
            if not right[form]:
                module.use_no_kernels()


@contextlib.contextmanager
def _large_weights_on_meta() -> Iterator[None]:
    """Let linear layers and embeddings be made without memory, and everything else as usual."""
    originals = {kind: kind.__init__ for kind in (nn.Linear, nn.Embedding)}

    def made_on_meta(kind: Any) -> Any:
        def init(self: Any, *args: Any, **options: Any) -> None:
            originals[kind](self, *args, **{**options, "device": "meta"})

        return init

    try:
        for kind in originals:
            kind.__init__ = made_on_meta(kind)  # type: ignore[method-assign]
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[method-assign]
