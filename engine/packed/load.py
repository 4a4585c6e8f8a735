"""Makes a model from a packed directory: transformers' own modules, with packed linear layers and embeddings in
them."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.initialization import no_init_weights

from reprise.engine.model.cpu.quantised import QuantisedEmbedding, QuantisedLinear
from reprise.engine.model.cpu.quantised_experts import (
    PROJECTIONS,
    QuantisedProjection,
    compute_packed,
    is_right,
    projections_of,
)
from reprise.engine.model.cuda.quantised import CudaQuantisedEmbedding, CudaQuantisedLinear
from reprise.engine.model.loading import text_of
from reprise.engine.packed.directory import INDEX, DamagedDirectory, read
from reprise.kernels.packed import PackedWeight, on_device, unpack
from reprise.kernels.packed_rows import PackedRows, by_rows
from reprise.kernels.triton_kernels import triton_packed

log = logging.getLogger(__name__)
_PACKED = (QuantisedLinear, QuantisedEmbedding, CudaQuantisedLinear, CudaQuantisedEmbedding)


class ModulesOnCpu:
    """A maker of modules on CPU whose weights stay packed: codes of 4 or 8 bits with scales, in the layout of
    `PackedWeight`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def linear(self, weight: PackedWeight, bias: Tensor | None) -> nn.Module:
        return QuantisedLinear(weight, bias)

    def embedding(self, weight: PackedWeight) -> nn.Module:
        return QuantisedEmbedding(weight, self._dtype)

    def experts(self, weight: PackedWeight) -> QuantisedProjection:
        return QuantisedProjection(weight)


class ModulesOnCuda:
    """A maker of modules on CUDA whose weights stay packed: codes of 4 or 8 bits with scales. A weight is converted to
    the layout of CUDA's kernels (`PackedRows`) when a linear layer or an embedding first needs it; all modules that
    share the weight get that one copy."""

    def __init__(self, dtype: torch.dtype, device: torch.device, kernels: ModuleType | None) -> None:
        self._dtype, self._device, self._kernels = dtype, device, kernels
        # Laid-out weights, by the address of their codes.
        self._laid_out: dict[int, tuple[PackedWeight, PackedRows]] = {}

    def linear(self, weight: PackedWeight, bias: Tensor | None) -> nn.Module:
        moved = None if bias is None else bias.to(self._device)
        return CudaQuantisedLinear(self._rows(weight), moved, self._dtype, self._kernels)

    def embedding(self, weight: PackedWeight) -> nn.Module:
        return CudaQuantisedEmbedding(self._rows(weight), self._dtype)

    def experts(self, weight: PackedWeight) -> QuantisedProjection:
        return QuantisedProjection(on_device(weight, self._device))

    def _rows(self, weight: PackedWeight) -> PackedRows:
        address = weight.codes.data_ptr()
        if address not in self._laid_out:
            self._laid_out[address] = weight, by_rows(weight, self._device)
        return self._laid_out[address][1]


def load_packed(directory: Path, config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the language model of a configuration, with the weights of a packed directory. Raises DamagedDirectory,
    ModelRefused."""
    made: ModulesOnCpu | ModulesOnCuda = ModulesOnCpu(dtype)
    if device.type != "cpu":
        made = ModulesOnCuda(dtype, device, triton_packed())
    return _load(directory, config, dtype, made).to(device)


def _load(directory: Path, config: Any, dtype: torch.dtype, made: ModulesOnCpu | ModulesOnCuda) -> nn.Module:
    """Make the model and fill in its weights. Raises DamagedDirectory."""
    text = text_of(config)
    with _large_weights_on_meta(), no_init_weights():
        model = text.make(dtype)
    named = dict(model.named_parameters(remove_duplicate=False)) | _persistent_buffers(model)
    weights: dict[str, Tensor | PackedWeight] = {}
    for name, weight in read(directory):
        if name not in named:
            raise DamagedDirectory(f"{directory} has a weight that the model has not: {name[:80]}")
        weights[name] = weight
    tied: dict[str, str] = model.all_tied_weights_keys  # type: ignore[assignment]
    for name, source in tied.items():
        if name in named and source in weights:
            weights.setdefault(name, weights[source])
    if missing := set(named).difference(weights):
        raise DamagedDirectory(f"{len(missing)} weights are missing from {directory}, among them {min(missing)}")
    # Biases come first: a packed layer is made with its bias.
    for name, weight in sorted(weights.items(), key=lambda named: isinstance(named[1], PackedWeight)):
        _set(model, name, weight, dtype, made)
    _check_experts(model)
    if tied:
        _share_embedding(model)
    _check_kernels(model)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _share_embedding(model: nn.Module) -> None:
    """Have embedding and head use one tensor, if they share a weight that is not packed."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if type(embedding) is nn.Embedding and type(output) is nn.Linear:
        output.weight = embedding.weight


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that checkpoints have, by name, such as corrections of the scores of experts."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers}


def _set(
    model: nn.Module,
    name: str,
    weight: Tensor | PackedWeight,
    dtype: torch.dtype,
    made: ModulesOnCpu | ModulesOnCuda,
) -> None:
    """Put a weight into the module that the model has for it. Raises DamagedDirectory."""
    path, _, leaf = name.rpartition(".")
    parent_path, _, child = path.rpartition(".")
    module = model.get_submodule(path)
    want, found = tuple(getattr(module, leaf).shape), tuple(weight.shape)
    are_experts = isinstance(weight, PackedWeight) and weight.experts > 0
    if are_experts and getattr(module, "is_transposed", False):
        want = want[0], want[2], want[1]
    if want != found:
        raise DamagedDirectory(f"the weight {name} has the shape {found}, the model wants {want}")
    parent = model.get_submodule(parent_path)
    if isinstance(weight, PackedWeight) and are_experts:
        if leaf not in PROJECTIONS or not hasattr(module, "is_transposed"):
            raise DamagedDirectory(f"{INDEX} gives experts to {name[:120]}, which is no projection of experts")
        return compute_packed(module, leaf, made.experts(weight))
    if isinstance(weight, PackedWeight):
        if type(module) is nn.Linear and leaf == "weight":
            return setattr(parent, child, made.linear(weight, None if module.bias is None else module.bias.data))
        if type(module) is nn.Embedding and leaf == "weight":
            return setattr(parent, child, made.embedding(weight))
        weight = unpack(weight, dtype)  # a module of another kind, which does its own arithmetic
    if leaf in module._buffers:
        # In no fewer bits than the checkpoint has: transformers keeps some of them in fp32.
        wide = torch.promote_types(weight.dtype, module._buffers[leaf].dtype)  # type: ignore[union-attr]
        module.register_buffer(leaf, weight.to(wide))
        return None
    setattr(module, leaf, nn.Parameter(weight.to(dtype), requires_grad=False))
    return None


def _check_experts(model: nn.Module) -> None:
    """Raise DamagedDirectory if some projections of a module of experts are packed and others are not."""
    for name, module in model.named_modules():
        there = [leaf for leaf in PROJECTIONS if getattr(module, leaf, None) is not None]
        if (projections := projections_of(module)) and len(projections) < len(there):
            raise DamagedDirectory(f"{INDEX} gives experts to some of {name[:120]}'s {', '.join(there)}, not to all")


def _check_kernels(model: nn.Module) -> None:
    """Compare what the kernels compute for one layer of each packed format with torch's result. Layers of a format
    whose compiled kernel is wrong use torch instead."""
    right: dict[tuple[Any, ...], bool] = {}
    for module in model.modules():
        if (projections := projections_of(module)) and projections[0].fields is not None:
            if (form := tuple(projection.form for projection in projections)) not in right:
                right[form] = is_right(module)
                if not right[form]:
                    log.warning("kernels for packed experts of %s are wrong and not used", form)
            if not right[form]:
                for projection in projections:
                    projection.use_no_kernels()
        if isinstance(module, QuantisedLinear | CudaQuantisedLinear):
            if (form := module.form) not in right:
                right[form] = module.is_right()
                if not right[form]:
                    log.warning("kernels for packed weights of %s are wrong and not used", form)
            if not right[form]:
                module.use_no_kernels()


def size_of(model: nn.Module) -> tuple[int, int]:
    """Return the number of a model's parameters and their bytes. Shared parameters count once."""
    seen: set[int] = set()
    numbers = size_bytes = 0
    packed = [m.packed for m in model.modules() if isinstance(m, (*_PACKED, QuantisedProjection))]
    for weight in packed:
        if weight.codes.data_ptr() not in seen:
            seen.add(weight.codes.data_ptr())
            experts = weight.experts if isinstance(weight, PackedWeight) else 0
            numbers += max(1, experts) * weight.outputs * weight.inputs
            size_bytes += weight.size_bytes
    for parameter in model.parameters():
        numbers, size_bytes = numbers + parameter.numel(), size_bytes + parameter.numel() * parameter.element_size()
    return numbers, size_bytes


@contextlib.contextmanager
def _large_weights_on_meta() -> Iterator[None]:
    """Have linear layers and embeddings made without memory, and everything else as usual, until the end of the
    block."""
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
