"""Packs the weights of experts, which a model has as parameters of three dimensions: all experts of a projection in one
packed weight. One expert is read at a time."""

from collections.abc import Iterator

from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist

from reprise.engine.model.cpu.quantised_experts import PROJECTIONS
from reprise.engine.packed.module_names import ModuleNames, Target
from reprise.engine.packed.quantise import quantise
from reprise.engine.packed.sources.checkpoint import SourceRefused
from reprise.engine.packed.sources.source import Source
from reprise.kernels.packed import GROUP, Bits, Codes, PackedWeight, joined_codes, pack, stacked


class ExpertsPacker:
    """A packer of a model's experts: reads their weights from a checkpoint, one expert at a time, and packs them. For
    one thread."""

    def __init__(self, source: Source, names: ModuleNames) -> None:
        self._source, self._names = source, names

    def can_pack(self, target: Target) -> bool:
        """Return whether a weight can be packed: it is a projection in a module of experts that transformers computes
        by a replaceable function, and the inputs of all projections of that module are a multiple of GROUP."""
        module, leaf = self._names.module_of(target.name), target.name.rpartition(".")[2]
        if leaf not in PROJECTIONS or not hasattr(module, "is_transposed"):
            return False
        weights = [getattr(module, name) for name in PROJECTIONS if hasattr(module, name)]
        of_inputs = 1 if module.is_transposed else 2
        return all(weight.dim() == 3 and weight.shape[of_inputs] % GROUP == 0 for weight in weights)

    def packed(self, target: Target, bits: Bits | None) -> PackedWeight:
        """Pack a weight of experts. bits: number of bits to round to; None: keep the codes of a quantised checkpoint,
        and round weights without codes to 8 bits. Raises SourceRefused, ValueError."""
        return stacked([pack(codes) for codes in self._experts(target, bits)])

    def _experts(self, target: Target, bits: Bits | None) -> Iterator[Codes]:
        """Yield the matrix of each expert [outputs, inputs]. Raises SourceRefused."""
        if target.converter is None:
            ((name, _),) = target.sources
            self._check_shape(target, self._source.shape(name))
            if self._source.is_quantised(name):
                experts = self._names.shape(target.name)[0]
                each = self._source.matrix(name)[0] // experts
                for expert in range(experts):
                    yield self._source.codes(name, expert * each, (expert + 1) * each, bits)
                return
            yield from self._of_numbers(target, self._source.dense(name), bits)
        elif _only_joins(target) and not self._names.module_of(target.name).is_transposed:
            experts, _, inputs = self._names.shape(target.name)
            check_numbers(target, experts)
            for parts in zip(*_by_pattern(target).values(), strict=True):
                yield joined_codes([self._matrix(name, inputs, bits) for name in parts])
        else:
            ((_, weight),) = self._names.converted(target, self._source.dense)
            self._check_shape(target, tuple(weight.shape))
            yield from self._of_numbers(target, weight, bits)

    def _of_numbers(self, target: Target, weight: Tensor, bits: Bits | None) -> Iterator[Codes]:
        is_transposed = self._names.module_of(target.name).is_transposed
        for expert in weight:
            yield quantise((expert.T if is_transposed else expert).contiguous(), bits or 8)

    def _matrix(self, name: str, inputs: int, bits: Bits | None) -> Codes:
        shape = self._source.shape(name)
        if len(shape) != 2 or shape[1] != inputs:
            raise SourceRefused(f"the weight {name[:120]} has the shape {shape}, the model wants {inputs} inputs")
        if self._source.is_quantised(name):
            return self._source.codes(name, 0, self._source.matrix(name)[0], bits)
        return quantise(self._source.dense(name), bits or 8)

    def _check_shape(self, target: Target, shape: tuple[int, ...]) -> None:
        if shape != (wanted := self._names.shape(target.name)):
            raise SourceRefused(f"the weight {target.name[:120]} has the shape {shape}, the model wants {wanted}")


def check_numbers(target: Target, experts: int) -> None:
    """Raise SourceRefused unless a weight that is joined from tensors of single experts has one of each expert from 0
    to `experts` - 1. If one were missing and another were too many, a router would choose an expert and get another."""
    if not _only_joins(target):
        return
    for names in _by_pattern(target).values():
        numbers = [int(part) for name in names for part in name.split(".")[-3:] if part.isdecimal()]
        if numbers != list(range(experts)):
            what = f"its experts are {str(numbers)[:120]}, the model wants 0 to {experts - 1}"
            raise SourceRefused(f"the weight {target.name[:120]} cannot be read: {what}")


def _by_pattern(target: Target) -> dict[str, list[str]]:
    """Return the tensors of a converted weight by the converter's pattern that they match, in its order."""
    assert target.converter is not None
    found: dict[str, list[str]] = {pattern: [] for pattern in target.converter.source_patterns}
    for name, pattern in target.sources:
        found[pattern].append(name)
    return found


def _only_joins(target: Target) -> bool:
    """Return whether a weight is made by stacking matrices of single experts, without any other conversion."""
    assert target.converter is not None
    operations = target.converter.operations
    kinds = [type(operation) for operation in operations]
    if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]):
        return False
    return operations[0].dim == 0 and (len(kinds) == 1 or operations[1].dim == 1)
