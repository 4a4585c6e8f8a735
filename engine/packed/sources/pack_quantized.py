"""Reads integers of 4 and 8 bits in words, as compressed-tensors writes them (`pack-quantized`)."""

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


class PackQuantized(Matrix):
    """A weight of 4- or 8-bit integers in words, as compressed-tensors stores it. weight_packed int32 [outputs,
    ceil(inputs / codes of a word)]: codes plus 2 ** (bits - 1), lowest bits first. weight_scale [outputs, groups];
    weight_zero_point int32, packed along outputs likewise [ceil(outputs / codes of a word), groups], or int8 [outputs,
    groups]; weight_shape (outputs, inputs); weight_g_idx int32 [inputs]: the group of each input, -1 where they are in
    order. A number is (code - zero) * scale."""

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self._parts = parts
        parts.check("weight_shape", [(2,)], ["I64", "I32"])
        self.outputs, self.inputs = parts.read("weight_shape").tolist()
        words = parts.matrix("weight_packed", ["I32"])
        by_words = {(self.outputs, -(-self.inputs * bits // 32)): bits for bits in (8, 4)}
        if min(self.outputs, self.inputs) < 1 or words not in by_words:
            raise parts.refuse(f"words {words} do not hold ({self.outputs}, {self.inputs}) codes of 4 or 8 bits")
        self.bits: Bits = 4 if by_words[words] == 4 else 8
        if "weight_scale" not in parts.found:
            raise parts.refuse("it has no weight_scale")
        groups = parts.shape("weight_scale")[-1] if parts.shape("weight_scale") else 1
        parts.check("weight_scale", [(self.outputs, groups)], ["F32", "BF16", "F16"])
        self._group = group_of(parts, self.inputs, groups, settings)
        per_word = 32 // self.bits
        self._zeros_in_words = False
        if "weight_zero_point" in parts.found:
            packed = -(-self.outputs // per_word), groups
            parts.check("weight_zero_point", [packed, (self.outputs, groups)], ["I32", "I8"])
            self._zeros_in_words = parts.dtype("weight_zero_point") == "I32" and self._zeros_shape() == packed
        self._order = self._read_order(groups)
        in_order = self._order is None and is_kept(self.inputs, self._group)
        self.kept: Kept = "codes" if in_order else "dense"

    @staticmethod
    def reads(parts: Parts) -> bool:
        return "weight_packed" in parts.found and parts.dtype("weight_packed") == "I32"

    def _zeros_shape(self) -> tuple[int, ...]:
        return self._parts.shape("weight_zero_point")

    def _read_order(self, groups: int) -> Tensor | None:
        """Return the group of each input, int64 [inputs]; None where inputs are in order."""
        if "weight_g_idx" not in self._parts.found:
            return None
        self._parts.check("weight_g_idx", [(self.inputs,)], ["I32", "I64"])
        return self._parts.order("weight_g_idx", self._group, groups)

    def rows(self, first: int, last: int) -> Codes | Tensor:
        words = self._parts.rows("weight_packed", first, last)
        codes = unpack_words(words, self.bits)[:, : self.inputs]
        scales = self._parts.checked(self._parts.rows("weight_scale", first, last))
        middle = 1 << (self.bits - 1)
        zeros = self._zeros(first, last)
        if self.kept == "dense":
            numbers = codes.float() - middle
            if zeros is not None:
                numbers -= self._by_input(zeros)
            return numbers * self._by_input(scales)
        if self.bits == 8:
            codes = (codes.to(torch.int16) - middle).to(torch.int8)
            lows = None if zeros is None else -zeros * scales
        else:
            codes = codes.to(torch.int8)
            lows = None if zeros is None else -(zeros + middle) * scales
        spread_lows = None if lows is None else spread(lows, self._group, self.inputs)
        return Codes(codes, spread(scales, self._group, self.inputs), spread_lows, self.bits)

    def _by_input(self, numbers: Tensor) -> Tensor:
        """Repeat what groups have for each of their inputs: [outputs, groups] -> [outputs, inputs]."""
        return by_input(numbers, self._group, self.inputs) if self._order is None else numbers[:, self._order]

    def _zeros(self, first: int, last: int) -> Tensor | None:
        """Return the zero points of some outputs, fp32 [outputs, groups], less 2 ** (bits - 1)."""
        if "weight_zero_point" not in self._parts.found:
            return None
        if not self._zeros_in_words:
            return self._parts.rows("weight_zero_point", first, last).float()
        per_word = 32 // self.bits
        start = first // per_word
        words = self._parts.rows("weight_zero_point", start, -(-last // per_word))
        codes = unpack_words(words.T.contiguous(), self.bits).T
        return codes[first - start * per_word : last - start * per_word].float() - (1 << (self.bits - 1))
