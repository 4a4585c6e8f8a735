"""Reads MXFP4 as gpt-oss has its experts in it."""

from torch import Tensor

from reprise.engine.packed.sources.parts import Kept, Parts, Settings, unpack_nibbles
from reprise.kernels.packed import GROUP, Bits, Codes


class GptOss:
    """A weight of experts in MXFP4 as gpt-oss stores it. blocks uint8 [experts, outputs of one, inputs / 32, 16]: codes
    of e2m1, the low half of a byte first. scales uint8 [experts, outputs of one, inputs / 32]: exponents of two, plus
    127. Here the outputs of all experts follow one another; the model wants [experts, inputs, outputs of one]."""

    has_codes = True
    kept: Kept = "table"
    bits: Bits = 4

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self._parts = parts
        if not {"blocks", "scales"} <= parts.found:
            raise parts.refuse("its blocks or its scales are missing")
        shape = parts.shape("blocks")
        if len(shape) != 4 or min(shape) < 1:
            raise parts.refuse(f"its blocks have the shape {shape}")
        self.experts, self._each, groups, _ = shape
        parts.check("blocks", [(self.experts, self._each, groups, GROUP // 2)], ["U8"])
        parts.check("scales", [(self.experts, self._each, groups)], ["U8"])
        self.outputs, self.inputs = self.experts * self._each, groups * GROUP

    @staticmethod
    def reads(parts: Parts) -> bool:
        return bool(parts.found & {"blocks", "scales"})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.experts, self.inputs, self._each

    def laid(self, numbers: Tensor) -> Tensor:
        return numbers.view(self.experts, self._each, self.inputs).transpose(1, 2).contiguous()

    def rows(self, first: int, last: int) -> Codes:
        start, end = first // self._each, (last - 1) // self._each + 1
        some = slice(first - start * self._each, last - start * self._each)
        blocks, scales = (self._parts.rows(part, start, end).flatten(0, 1)[some] for part in ("blocks", "scales"))
        return Codes(unpack_nibbles(blocks.flatten(1)), self._parts.powers(scales), None, 4, "e2m1")
