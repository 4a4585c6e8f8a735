"""Reads GPTQ."""

import torch
from torch import Tensor

from reprise.engine.packed.sources.parts import (
    Kept,
    Matrix,
    Parts,
    Settings,
    by_input,
    group_of,
    is_kept,
    spread,
    unpack_words,
)
from reprise.kernels.packed import Bits, Codes

_SCALES = ("F16", "BF16", "F32")


class Gptq(Matrix):
    """A weight as GPTQ stores it. qweight int32 [ceil(inputs / codes of a word), outputs]: inputs of one output in a
    word, lowest bits first. qzeros int32 [groups, ceil(outputs / codes of a word)], less one in version 1; scales
    [groups, outputs]; g_idx int32 [inputs]: the group of each input, in order or (`desc_act`) not. A number is (code -
    zero) * scale."""

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self._parts = parts
        self.bits: Bits = 4 if settings.bits == 4 else 8
        self._per_word = 32 // self.bits
        self._less = 1 if settings.zeros_less_one else 0
        words, self.outputs = parts.matrix("qweight", ["I32"])
        groups = parts.matrix("scales", _SCALES)[0]
        parts.check("scales", [(groups, self.outputs)], _SCALES)
        parts.check("qzeros", [(groups, -(-self.outputs // self._per_word))], ["I32"])
        self.inputs = words * self._per_word
        if "g_idx" in parts.found:  # says how many inputs the last word has
            shape = parts.shape("g_idx")
            least = self.inputs - self._per_word + 1
            parts.check(
                "g_idx",
                [shape if len(shape) == 1 and least <= shape[0] <= self.inputs else (self.inputs,)],
                ["I32", "I64"],
            )
            self.inputs = shape[0]
        self._group = group_of(parts, self.inputs, groups, settings)
        self._order = parts.order("g_idx", self._group, groups) if "g_idx" in parts.found else None
        in_order = self._order is None and is_kept(self.inputs, self._group)
        self.kept: Kept = "codes" if in_order else "dense"
        # As most checkpoints are: then nothing is added to scale * code.
        self._is_symmetric = bool((self._zeros(0, self.outputs) == 1 << (self.bits - 1)).all())

    @staticmethod
    def reads(parts: Parts) -> bool:
        return "qweight" in parts.found

    def rows(self, first: int, last: int) -> Codes | Tensor:
        words = self._parts.columns("qweight", first, last).T.contiguous()
        codes = unpack_words(words, self.bits)[:, : self.inputs]
        zeros = self._zeros(first, last)
        scales = self._parts.checked(self._parts.columns("scales", first, last)).T.contiguous()
        if self.kept == "dense":
            return (codes.float() - self._by_input(zeros)) * self._by_input(scales)
        if self.bits == 8:
            codes = (codes.to(torch.int16) - 128).to(torch.int8)
            zeros = zeros - 128
        lows = None if self._is_symmetric else spread(-zeros * scales, self._group, self.inputs)
        return Codes(codes.to(torch.int8), spread(scales, self._group, self.inputs), lows, self.bits)

    def _by_input(self, numbers: Tensor) -> Tensor:
        """Repeat what groups have for each of their inputs: [outputs, groups] -> [outputs, inputs]."""
        return by_input(numbers, self._group, self.inputs) if self._order is None else numbers[:, self._order]

    def _zeros(self, first: int, last: int) -> Tensor:
        """Return the zero points of some outputs, fp32 [outputs, groups]."""
        start = first // self._per_word
        words = self._parts.columns("qzeros", start, -(-last // self._per_word)).contiguous()
        codes = unpack_words(words, self.bits)[:, first - start * self._per_word : last - start * self._per_word]
        return codes.T.float() + self._less
