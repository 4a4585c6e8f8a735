"""Reads AWQ's layout for GEMM."""

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

_PER_WORD = 8
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # the place in a word, from the lowest bits, of each of its 8 outputs


class Awq(Matrix):
    """A weight as AWQ stores it. qweight int32 [inputs, outputs / 8]: codes of 4 bits, 8 outputs of one input in a
    word, in an order of their own. qzeros int32 [groups, outputs / 8] likewise; scales [groups, outputs]. A number is
    (code - zero) * scale."""

    bits: Bits = 4

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self._parts = parts
        self.inputs, words = parts.matrix("qweight", ["I32"])
        self.outputs = words * _PER_WORD
        groups = parts.matrix("scales", ["F16", "BF16", "F32"])[0]
        parts.check("scales", [(groups, self.outputs)], ["F16", "BF16", "F32"])
        parts.check("qzeros", [(groups, words)], ["I32"])
        self._group = group_of(parts, self.inputs, groups, settings)
        self.kept: Kept = "codes" if is_kept(self.inputs, self._group) else "dense"

    @staticmethod
    def reads(parts: Parts) -> bool:
        return "qweight" in parts.found

    def rows(self, first: int, last: int) -> Codes | Tensor:
        codes = self._outputs("qweight", first, last)
        zeros = self._outputs("qzeros", first, last).float()
        scales = self._parts.checked(self._parts.columns("scales", first, last)).T.contiguous()
        if self.kept == "dense":
            zeros, scales = by_input(zeros, self._group, self.inputs), by_input(scales, self._group, self.inputs)
            return (codes.float() - zeros) * scales
        scales, lows = (spread(x, self._group, self.inputs) for x in (scales, -zeros * scales))
        return Codes(codes.to(torch.int8), scales, lows, self.bits)

    def _outputs(self, part: str, first: int, last: int) -> Tensor:
        """Return the codes of some outputs, uint8 [outputs, rows of the tensor]."""
        start = first // _PER_WORD
        words = self._parts.columns(part, start, -(-last // _PER_WORD)).contiguous()
        codes = unpack_words(words, 4).unflatten(1, (-1, _PER_WORD))[..., _PLACES].flatten(1)
        some: Tensor = codes[:, first - start * _PER_WORD : last - start * _PER_WORD].T.contiguous()
        return some
