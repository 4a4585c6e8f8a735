"""Provides modules for CUDA whose weights stay packed to 4 or 8 bits."""

import logging
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reprise.engine.model.known_parts import agree
from reprise.kernels.packed import Table, table_of
from reprise.kernels.packed_rows import PackedRows, joined, unpacked

log = logging.getLogger(__name__)
_UNPACKED_BYTES = 64 << 20  # most of a weight unpacked at once, for products of many rows
_ALIGNED_OUTPUTS = 64  # outputs: what libraries multiply fast begins at a multiple of 16 bytes
_CHECK_ROWS = (1, 20, 64)  # some of each size that the kernel is compiled for
_CHECK_OUTPUTS = 4096


class CudaQuantisedLinear(nn.Module):
    """A linear layer whose weight stays packed: codes of 4 or 8 bits with scales. x [..., in] of 16 bits, plus a
    residual of the result's shape to add -> [..., out]. Products of few rows read the packed codes; those of many rows
    unpack a part of the weight at a time. Without kernels, torch unpacks it."""

    def __init__(self, weight: PackedRows, bias: Tensor | None, dtype: torch.dtype, kernels: ModuleType | None) -> None:
        """Take over a packed weight. dtype: type of the unpacked weight. kernels: the module
        `reprise.kernels.triton_packed`."""
        super().__init__()
        self.in_features, self.out_features = weight.inputs, weight.outputs
        self.packed, self._dtype, self._kernels = weight, dtype, kernels
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("lows", weight.lows)
        self.register_buffer("table", table_of(weight))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """A new tensor of the unpacked weight, for modules that do arithmetic of their own with it."""
        return unpacked(self.packed, slice(None), self._dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        added = None if residual is None else residual.reshape(-1, self.out_features)
        if self._kernels is not None and len(rows) <= self._kernels.MOST_ROWS:
            few: Tensor = self._kernels.product(rows, self.packed, self.bias, added)
            return few.view(*x.shape[:-1], self.out_features)
        out = rows.new_empty(len(rows), self.out_features)
        most = _UNPACKED_BYTES // (self.in_features * rows.element_size())
        step = max(_ALIGNED_OUTPUTS, most // _ALIGNED_OUTPUTS * _ALIGNED_OUTPUTS)
        start = added if self.bias is None else self.bias  # summed before it is rounded
        for first in range(0, self.out_features, step):
            some = slice(first, min(first + step, self.out_features))
            weight = self._unpacked(some).T
            if start is None:
                torch.mm(rows, weight, out=out[:, some])
            else:
                torch.addmm(start[..., some], rows, weight, out=out[:, some])
        if self.bias is not None and added is not None:
            out += added
        return out.view(*x.shape[:-1], self.out_features)

    def _unpacked(self, outputs: slice) -> Tensor:
        if self._kernels is None:
            return unpacked(self.packed, outputs, self._dtype)
        some: Tensor = self._kernels.unpack(self.packed, outputs.start, outputs.stop - outputs.start, self._dtype)
        return some

    @property
    def form(self) -> tuple[int, int, bool, int, Table | None, int, bool]:
        """The properties that decide which kernels the layer uses: (bits of a code, inputs per group, whether groups
        have lows (offsets added to scale * code), inputs, table, outputs, whether there is a bias)."""
        return *self.packed.form, self.out_features, self.bias is not None

    def is_right(self) -> bool:
        """Return whether the kernels run here and agree with torch."""
        if self._kernels is None:
            return True
        try:
            return self._agrees()
        except Exception as error:  # Triton's have no kind in common
            log.warning("a kernel for packed weights does not run here: %s", error)
            return False

    def _agrees(self) -> bool:
        generator, most = torch.Generator().manual_seed(0), min(self.out_features, _CHECK_OUTPUTS)
        weight = unpacked(self.packed, slice(0, most), self._dtype)
        bias = None if self.bias is None else self.bias[:most]
        if not torch.equal(self._unpacked(slice(0, most)), weight):
            return False
        for rows in _CHECK_ROWS:
            x = torch.randn(rows, self.in_features, generator=generator).to(weight)
            more = torch.randn(rows, self.out_features, generator=generator).to(weight)
            wanted = F.linear(x, weight, bias)
            if not agree(self(x)[:, :most], wanted) or not agree(self(x, more)[:, :most], wanted + more[:, :most]):
                return False
        return True

    def use_no_kernels(self) -> None:
        self._kernels = None


class CudaQuantisedEmbedding(nn.Module):
    """An embedding whose weight stays packed (codes of 4 or 8 bits with scales). ids [...] int64, from 0 to its number
    of rows - 1 -> [..., width]."""

    def __init__(self, weight: PackedRows, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self._dtype = weight, dtype
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("lows", weight.lows)
        self.register_buffer("table", table_of(weight))

    def forward(self, ids: Tensor) -> Tensor:
        return unpacked(self.packed, ids.reshape(-1), self._dtype).view(*ids.shape, self.packed.inputs)


class CudaQuantisedTogether(nn.Module):
    """Linear layers of the same inputs, packed in different ways. x [..., in] -> [..., out of all]."""

    def __init__(self, layers: Sequence[CudaQuantisedLinear]) -> None:
        super().__init__()
        self._layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self._layers], -1)


def join_packed(layers: Sequence[CudaQuantisedLinear]) -> nn.Module:
    """Return one layer with the outputs of all `layers`: a single product if their weights are packed in the same
    way."""
    first = layers[0]
    if len({(layer.packed.form, layer._kernels is None) for layer in layers}) > 1:
        return CudaQuantisedTogether(layers)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat([one.data for one in biases]) if biases else None
    return CudaQuantisedLinear(joined([layer.packed for layer in layers]), bias, first._dtype, first._kernels)
