"""Reads MXFP4, as compressed-tensors writes it (`mxfp4-pack-quantized`)."""

from torch import Tensor

from reprise.engine.packed.sources.parts import Kept, Matrix, Parts, Settings, by_input, unpack_nibbles
from reprise.kernels.packed import GROUP, Bits, Codes, code_numbers


class Mxfp4Pack(Matrix):
    """A weight in MXFP4 as compressed-tensors stores it. weight_packed uint8 [outputs, inputs / 2]: codes of e2m1, the
    low half of a byte first. weight_scale uint8 [outputs, inputs / 32]: exponents of two, plus 127."""

    bits: Bits = 4

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self._parts = parts
        self.outputs, width = parts.matrix("weight_packed", ["U8"])
        self.inputs = 2 * width
        parts.check("weight_scale", [(self.outputs, -(-self.inputs // GROUP))], ["U8"])
        self.kept: Kept = "dense" if self.inputs % GROUP else "table"

    @staticmethod
    def reads(parts: Parts) -> bool:
        return {"weight_packed", "weight_scale"} == parts.found and parts.dtype("weight_packed") == "U8"

    def rows(self, first: int, last: int) -> Codes | Tensor:
        codes = unpack_nibbles(self._parts.rows("weight_packed", first, last))
        scales = self._parts.powers(self._parts.rows("weight_scale", first, last))
        if self.kept == "dense":
            return code_numbers(codes, 4, False, "e2m1") * by_input(scales, GROUP, self.inputs)
        return Codes(codes, scales, None, 4, "e2m1")
