"""Reads integers of 8 bits, as compressed-tensors writes them (`int-quantized`)."""

from torch import Tensor

from reprise.engine.packed.sources.parts import Kept, Matrix, Parts, Settings, by_input, group_of, is_kept, spread
from reprise.kernels.packed import Bits, Codes


class IntQuantized(Matrix):
    """A weight in int8 as compressed-tensors stores it. weight int8 [outputs, inputs]; weight_scale and
    weight_zero_point: one number, or [outputs, groups]. A number is (code - zero) * scale."""

    bits: Bits = 8

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self._parts = parts
        self.outputs, self.inputs = parts.matrix("weight", ["I8"])
        shape = parts.shape("weight_scale")
        parts.check("weight_scale", [shape], ["F32", "BF16", "F16"])
        self._is_one = shape in ((), (1,), (1, 1))
        groups = 1 if self._is_one or len(shape) == 1 else shape[-1]
        if not self._is_one:
            parts.check("weight_scale", [(self.outputs, groups), (self.outputs,)], ["F32", "BF16", "F16"])
        self._group = group_of(parts, self.inputs, groups, settings)
        self._has_zeros = "weight_zero_point" in parts.found
        if self._has_zeros:
            parts.check("weight_zero_point", [shape], ["I8", "I32", "F32", "BF16", "F16"])
            self._has_zeros = bool(parts.read("weight_zero_point").any())
        self.kept: Kept = "codes" if is_kept(self.inputs, self._group) else "dense"

    @staticmethod
    def reads(parts: Parts) -> bool:
        return {"weight", "weight_scale"} <= parts.found and parts.dtype("weight") == "I8"

    def rows(self, first: int, last: int) -> Codes | Tensor:
        codes = self._parts.rows("weight", first, last)
        scales = self._parts.checked(self._of_rows("weight_scale", first, last))
        zeros = self._parts.checked(self._of_rows("weight_zero_point", first, last)) if self._has_zeros else None
        if self.kept == "dense":
            numbers = codes.float()
            if zeros is not None:
                numbers -= by_input(zeros, self._group, self.inputs)
            return numbers * by_input(scales, self._group, self.inputs)
        lows = None if zeros is None else spread(-zeros * scales, self._group, self.inputs)
        return Codes(codes, spread(scales, self._group, self.inputs), lows, self.bits)

    def _of_rows(self, part: str, first: int, last: int) -> Tensor:
        """Return the numbers that some outputs have for their groups, [outputs, groups]."""
        numbers = self._parts.read(part)
        if self._is_one:
            return numbers.reshape(1, 1).expand(last - first, 1)
        return numbers.reshape(self.outputs, -1)[first:last]
