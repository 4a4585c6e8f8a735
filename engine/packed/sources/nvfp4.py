"""Reads NVFP4, as compressed-tensors and ModelOpt write it."""

from torch import Tensor

from reprise.engine.packed.sources.parts import Kept, Matrix, Parts, Settings, by_input, unpack_nibbles
from reprise.kernels.packed import Bits, Codes, code_numbers

_GROUP = 16


class Nvfp4(Matrix):
    """A weight in NVFP4. Codes of e2m1 in bytes [outputs, inputs / 2], the low half first; weight_scale e4m3 [outputs,
    inputs / 16]; one fp32 number for the whole weight. compressed-tensors calls the codes weight_packed, and divides
    scales by that number, weight_global_scale. ModelOpt calls them weight, and multiplies by its weight_scale_2."""

    bits: Bits = 4

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self._parts = parts
        self._divides = "weight_packed" in parts.found
        self._codes = "weight_packed" if self._divides else "weight"
        self._whole = "weight_global_scale" if self._divides else "weight_scale_2"
        self.outputs, width = parts.matrix(self._codes, ["U8"])
        self.inputs = 2 * width
        parts.check("weight_scale", [(self.outputs, -(-self.inputs // _GROUP))], ["F8_E4M3"])
        parts.check(self._whole, [(), (1,)], ["F32"])
        self.kept: Kept = "dense" if self.inputs % _GROUP else "table"

    @staticmethod
    def reads(parts: Parts) -> bool:
        found = parts.found - {"weight_scale"}
        return found in ({"weight_packed", "weight_global_scale"}, {"weight", "weight_scale_2"})

    def rows(self, first: int, last: int) -> Codes | Tensor:
        codes = unpack_nibbles(self._parts.rows(self._codes, first, last))
        scales, whole = self._parts.rows("weight_scale", first, last).float(), self._parts.read(self._whole).reshape(())
        scales = self._parts.checked(scales / whole if self._divides else scales * whole)
        if self.kept == "dense":
            return code_numbers(codes, 4, False, "e2m1") * by_input(scales, _GROUP, self.inputs)
        return Codes(codes, scales, None, 4, "e2m1")
