"""Reads FP8 as compressed-tensors, FBGEMM and ModelOpt write it."""

from torch import Tensor

from reprise.engine.packed.sources.parts import Kept, Matrix, Parts, Settings, block_of, scaled_by_blocks
from reprise.kernels.packed import Bits


class FloatQuantized(Matrix):
    """A weight in FP8 as compressed-tensors, FBGEMM and ModelOpt store it. weight e4m3 [outputs, inputs]; weight_scale:
    one number, one for each output, or one for each block."""

    has_codes = False
    kept: Kept = "dense"
    bits: Bits = 8

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self._parts = parts
        self.outputs, self.inputs = parts.matrix("weight", ["F8_E4M3"])
        shape = parts.shape("weight_scale")
        parts.check("weight_scale", [shape], ["F32", "BF16", "F16"])
        if shape in ((), (1,), (1, 1)):
            self._block = self.outputs, self.inputs
        elif shape in ((self.outputs, 1), (self.outputs,)):
            self._block = 1, self.inputs
        else:
            self._block = block_of(parts, shape, self.outputs, self.inputs, settings)

    @staticmethod
    def reads(parts: Parts) -> bool:
        return {"weight", "weight_scale"} == parts.found and parts.dtype("weight").startswith("F8")

    def rows(self, first: int, last: int) -> Tensor:
        from_block, to_block = first // self._block[0], (last - 1) // self._block[0] + 1
        raw = self._parts.read("weight_scale").reshape(-1, -(-self.inputs // self._block[1]))[from_block:to_block]
        weight = self._parts.finite(self._parts.rows("weight", first, last))
        return scaled_by_blocks(weight, self._parts.checked(raw), first - from_block * self._block[0], self._block)
