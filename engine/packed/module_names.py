"""Finds which weights of a model the tensors of its checkpoint become. Checkpoints have the names that transformers
once had; where it joins weights today, as those of experts, it converts them when it loads a model, and so does
this."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from reprise.engine.model.text_of_wrapper import TextModel, on_meta
from reprise.engine.packed.sources.checkpoint import SourceRefused
from reprise.kernels.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class Target:
    """A weight of the model, and the tensors of the checkpoint that it is made of. A converter of transformers may make
    several weights of these tensors; `name` is one of them."""

    name: str
    converter: Any | None
    sources: list[tuple[str, str]] = field(default_factory=list)  # (tensor, the converter's pattern that it matches)


class ModuleNames:
    """The names and shapes of a model's weights, and transformers' rules that make these weights of a checkpoint's
    tensors."""

    def __init__(self, text: TextModel) -> None:
        """Make the model without memory for its weights. Of a multimodal model only the language model is made."""
        self._model: nn.Module = on_meta(text)
        self._weights = self._model.state_dict()
        mapping = get_model_conversion_mapping(self._model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}

    def targets(self, tensors: Iterable[str]) -> tuple[list[Target], list[str]]:
        """Return (the weights that a checkpoint's tensors become, the tensors that the model does not use). Tensors are
        unused if they belong to encoders of images, for example, or to layers that only guess further tokens. Raises
        SourceRefused if a weight is there twice."""
        targets: dict[str, Target] = {}
        unused: list[str] = []
        for tensor in sorted(tensors, key=dot_natural_key):  # experts in the order of their numbers
            name, pattern = self._renamed(tensor)
            if name not in self._weights:
                unused.append(tensor)
                continue
            converter = None if pattern is None else self._by_pattern[pattern]
            target = targets.setdefault(name, Target(name, converter))
            if target.converter is not converter:
                raise SourceRefused(
                    f"the weight {name[:120]} is there twice: {tensor[:120]} and {target.sources[0][0]}"
                )
            target.sources.append((tensor, pattern or ""))
        return list(targets.values()), unused

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._weights[name].shape)

    def check_shape(self, name: str, weight: Tensor | PackedWeight) -> None:
        """Raise SourceRefused if the model has no weight of that name, or has it in another shape."""
        wanted, found = self.shape(name) if name in self._weights else (), tuple(weight.shape)
        if isinstance(weight, PackedWeight) and weight.experts and self.module_of(name).is_transposed:
            wanted = wanted[0], wanted[2], wanted[1]
        if found != wanted:
            raise SourceRefused(f"the weight {name[:120]} has the shape {found}, the model wants {wanted}")

    def check_all(self, made: set[str]) -> None:
        """Raise SourceRefused if the model has weights that are neither in `made` nor tied to a weight in it."""
        tied: dict[str, str] = self._model.all_tied_weights_keys  # type: ignore[assignment]
        missing = {name for name in self._weights if name not in made and tied.get(name) not in made}
        if missing:
            raise SourceRefused(f"{len(missing)} weights are missing, among them {min(missing)}")

    def module_of(self, name: str) -> Any:
        """Return the module that has a weight, in the model without memory."""
        return self._model.get_submodule(name.rpartition(".")[0])

    def _renamed(self, tensor: str) -> tuple[str, str | None]:
        """Return the model's name of a tensor, or of the first weight that it becomes a part of, and the pattern of the
        converter that it matches, if any."""
        prefix: str = self._model.base_model_prefix  # type: ignore[assignment]
        name, pattern = rename_source_key(tensor, self._renamings, self._converters, prefix, self._weights)
        if name not in self._weights and tensor in self._weights:
            return tensor, None
        return name, pattern

    def converted(self, target: Target, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) for each weight that a target's converter makes of the target's tensors. read: returns a
        tensor of the checkpoint, called when the converter asks for it. Raises SourceRefused if the tensors do not fit
        together."""
        assert target.converter is not None
        converter = deepcopy(target.converter)  # it collects what it converts
        for tensor, pattern in target.sources:
            converter.add_tensor(target.name, tensor, pattern, lambda tensor=tensor: read(tensor))
        try:
            made = converter.convert(target.name, model=self._model, config=self._model.config)
        except (RuntimeError, IndexError, KeyError, TypeError) as error:  # torch raises these for tensors of odd shapes
            raise SourceRefused(f"the weight {target.name[:120]} cannot be made: {error}") from error
        for name, weight in made.items():
            yield name, weight[0] if isinstance(weight, list) else weight
