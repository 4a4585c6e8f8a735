"""Reads FP8 as DeepSeek, Qwen and MiniMax write it, and MXFP8."""

from torch import Tensor

from reprise.engine.packed.sources.parts import Kept, Matrix, Parts, Settings, block_of, scaled_by_blocks
from reprise.kernels.packed import Bits

_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


class Fp8(Matrix):
    """A weight in FP8 as DeepSeek, Qwen and MiniMax store it, or in MXFP8. weight e4m3 [outputs, inputs].
    weight_scale_inv, which is multiplied in spite of its name: one number, or one for each block of outputs and inputs,
    where blocks at the edges may be partial; or bytes uint8 [outputs, inputs / 32], which are exponents of two
    (MXFP8)."""

    has_codes = False
    kept: Kept = "dense"
    bits: Bits = 8

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self._parts = parts
        self.outputs, self.inputs = parts.matrix("weight", ["F8_E4M3"])
        self._scale = "weight_scale_inv" if "weight_scale_inv" in parts.found else "weight_scale"
        shape = parts.shape(self._scale)
        self._are_exponents = parts.dtype(self._scale) == "U8"
        if self._are_exponents:
            parts.check(self._scale, [(self.outputs, -(-self.inputs // 32))], ["U8"])
            self._block = 1, 32
        else:
            parts.check(self._scale, [shape], _SCALES)
            one = shape in ((), (1,), (1, 1))
            self._block = (
                (self.outputs, self.inputs) if one else block_of(parts, shape, self.outputs, self.inputs, settings)
            )

    @staticmethod
    def reads(parts: Parts) -> bool:
        exponents = {"weight", "weight_scale"} == parts.found and parts.dtype("weight_scale") == "U8"
        return "weight_scale_inv" in parts.found or exponents

    def rows(self, first: int, last: int) -> Tensor:
        from_block, to_block = first // self._block[0], (last - 1) // self._block[0] + 1
        raw = self._parts.read(self._scale)
        raw = raw.reshape(-1, -(-self.inputs // self._block[1]))[from_block:to_block]
        scales = self._parts.powers(raw) if self._are_exponents else self._parts.checked(raw)
        weight = self._parts.finite(self._parts.rows("weight", first, last))
        return scaled_by_blocks(weight, scales, first - from_block * self._block[0], self._block)
