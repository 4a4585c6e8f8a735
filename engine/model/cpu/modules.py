"""Provides faster replacements for a model's modules on CPU. The model's own code calls them as before.

Measured on one core with AVX-512 and AMX in bf16, us before -> after: linear 4096x768 on one row 470 -> 290, 1280x768
148 -> 94, lm_head 16384x768 2,665 -> 1,113; RMSNorm of 1,124x768 1,291 -> 769, compiled 230; the gated product of 1,124
rows 12,500 -> 9,800. fp32 weights are not packed, because that gains nothing on one row. Every replacement is compared
with the original before it is used.
"""

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reprise.engine.model.known_parts import agree
from reprise.kernels.cpu.available import decode_kernels, dots_of_pairs, product_kernels, tiles_of_pairs
from reprise.kernels.views import as_bits

# oneDNN lays weights out for a given number of rows; the layout for 16 is within 10 % of the best from 1 to 1,124 rows.
_PACK_FOR_ROWS = 16
# Up to this many rows the compiled products are faster than oneDNN's, which use AMX. All layers of the 125 M model, two
# threads, ms for 1 / 4 / 8 rows: 4.3 / 5.0 / 5.7 against 6.3 / 6.8 / 6.2.
FEW_ROWS = 32
_FIRST_FIELD = 8  # the place of a column in the fields of a product
_NOTHING = np.empty((0, 0), np.uint16)


def pack_weight(weight: Tensor) -> Tensor:
    """Return the weight in oneDNN's blocked layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
    return packed


@dataclass(frozen=True, slots=True)
class FewProduct:
    """A linear layer as the compiled kernels for at most FEW_ROWS rows read it. fields: the addresses and sizes of its
    packed weight and its bias, in the order that `reprise.kernels.cpu.blocks` defines."""

    fields: tuple[int, ...]
    memory: tuple[Any, ...]  # what `fields` has the addresses of, kept alive
    width: int  # inputs
    outputs: int
    block: int  # outputs per block

    def starting_at(self, column: int) -> "FewProduct":
        """Return the same layer, writing its outputs from column `column` on. Several layers with the same input write
        side by side into one array of rows."""
        return replace(self, fields=(*self.fields[:_FIRST_FIELD], column, *self.fields[_FIRST_FIELD + 1 :]))

    @property
    def first(self) -> int:
        """The column of the layer's first output in an array of rows that several layers write side by side."""
        return self.fields[_FIRST_FIELD]

    @property
    def inputs(self) -> int:
        return -(-self.width // 32) * 32

    @property
    def padded_outputs(self) -> int:
        return -(-self.outputs // self.block) * self.block


def few_row_product(packed: Tensor, weight: Tensor, bias: Tensor | None) -> FewProduct | None:
    """Return a linear layer as the compiled kernels for a few rows read it. It uses the memory of `packed`, the weight
    in oneDNN's layout, and keeps it alive. weight: the same weight, unpacked. None if there are no such kernels, or
    they cannot read oneDNN's layout."""
    kernels = decode_kernels()
    found = None if kernels is None else words_of(packed, weight)
    if kernels is None or found is None:
        return None
    words, lanes = found
    outputs, inputs = weight.shape
    biases = None if bias is None else bias.detach().float().contiguous()
    at = 0 if biases is None else biases.data_ptr()
    kernel = kernels.words_kernel(lanes, dots_of_pairs())
    padded, size = -(-inputs // 32) * 32, lanes * 16
    fields = (kernel.address, words.ctypes.data, 0, 0, at, padded, outputs, size, 0, 0, 0, 0)
    return FewProduct(fields, (kernel, packed, biases), inputs, outputs, size)


def words_of(packed: Tensor, weight: Tensor) -> tuple[np.ndarray, int] | None:
    """Return the memory of a weight in oneDNN's layout as pairs of bf16, uint32 [blocks * pairs * outputs of a block],
    and how many vectors of 16 outputs a block has. None if oneDNN's layout is a different one. packed: must be kept
    alive as long as the result is used. weight: the same weight, unpacked."""
    outputs, inputs = weight.shape
    size = torch.ops.mkldnn._nbytes(packed)
    memory = (ctypes.c_uint32 * (size // 4)).from_address(torch.ops.mkldnn.data_ptr(packed))
    words = np.ctypeslib.as_array(memory)
    for lanes in (1, 2, 3, 4):
        blocks, pairs = -(-outputs // (16 * lanes)), -(-inputs // 32) * 16
        if size != blocks * lanes * 16 * pairs * 4:
            continue
        padded = F.pad(weight, (0, pairs * 2 - inputs, 0, blocks * lanes * 16 - outputs))
        expected = padded.view(blocks, lanes * 16, pairs, 2).transpose(1, 2).contiguous().view(torch.int32)
        if np.array_equal(expected.view(-1).numpy().view(np.uint32), words):
            return words, lanes
    return None


class FewLinear:
    """A linear layer for at most FEW_ROWS rows of bf16, by a compiled kernel. x [..., in] -> [..., out]."""

    def __init__(self, product: FewProduct) -> None:
        self._kernels: Any = decode_kernels()
        self._product, self._fields = product, np.array([product.fields], np.int64)
        self._dots = (0,) if dots_of_pairs() else ()

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], self._product.outputs)
        rows = as_bits(x.reshape(-1, x.shape[-1])), as_bits(out.view(-1, self._product.outputs))
        self._kernels.linear(rows[0], self._fields, self._dots, _NOTHING, rows[1])
        return out


class PackedLinear(nn.Module):
    """A linear layer whose weight is in oneDNN's blocked layout. x [..., in] -> [..., out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = pack_weight(weight)
        self._bias = bias
        self._few_linear = None
        self.few = few_row_product(self._packed, weight, bias)
        if self.few is not None:
            self._few_linear = FewLinear(self.few)

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        if self._few_linear is not None and 0 < x.numel() <= FEW_ROWS * width:
            return self._few_linear(x)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


class ExactLinear(nn.Module):
    """A linear layer that computes each row in the same way however many rows there are
    (`reprise.kernels.cpu.products`). Slower than `PackedLinear` for one row and for hundreds. x [..., in], plus a
    residual [tokens, out] to add -> [..., out]. Raises RuntimeError if there are no such kernels."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._kernels: Any = product_kernels()
        self._packed = pack_weight(weight)
        found = words_of(self._packed, weight)
        if self._kernels is None or found is None:
            raise RuntimeError("no products of one order on this machine")
        tiles = (0,) if tiles_of_pairs() else ()
        biases = np.empty(0, np.float32) if bias is None else bias.detach().float().numpy()
        outputs, inputs = weight.shape
        self.product = self._kernels.ExactProduct(found[0], biases, inputs, outputs, (0,) * found[1], tiles)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = x.new_empty(*x.shape[:-1], self.product.outputs)
        if x.numel():
            rows, sums = as_bits(x.reshape(-1, self.product.inputs)), as_bits(out.view(-1, self.product.outputs))
            added = _NOTHING if residual is None else as_bits(residual.contiguous())
            self._kernels.linear(rows, self.product, added, sums)
        return out


class ExactGate(nn.Module):
    """A module that computes silu(gate(x)) * up(x) with products that, like `ExactLinear`'s, do not depend on the
    number of rows. x [tokens, in] -> [tokens, out]."""

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        super().__init__()
        self.gate, self.up = ExactLinear(gate.weight, gate.bias), ExactLinear(up.weight, up.bias)
        one, other = self.gate.product, self.up.product
        kernels: Any = product_kernels()
        self._together = one.lanes == other.lanes and len(one.lanes) % 2 == 0 and not len(one.bias) + len(other.bias)
        self._together = self._together and one.outputs == other.outputs and one.outputs % kernels.COLUMNS == 0
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        if not self._together:
            return F.silu(self.gate(x)).mul_(self.up(x))
        out = x.new_empty(len(x), self.gate.product.outputs)
        if len(x):
            self._kernels.gated(as_bits(x.contiguous()), self.gate.product, self.up.product, as_bits(out))
        return out


class PlainLinear(nn.Module):
    """A linear layer with the concatenated weights of several projections of the same input, used where weights cannot
    be packed for the processor."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight, self._bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class SummedLinear(nn.Module):
    """A linear layer that adds a residual: x [tokens, in], residual [tokens, out] -> [tokens, out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._packed, self._bias = pack_weight(linear.weight), linear.bias
        self.few = few_row_product(self._packed, linear.weight, linear.bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")
        return out


class Gate(nn.Module):
    """A module that computes silu(gate(x)) * up(x), with the activation and the product inside the two matrix
    products."""

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        super().__init__()
        self._gate, self._gate_bias = pack_weight(gate.weight), gate.bias
        self._up, self._up_bias = pack_weight(up.weight), up.bias
        self.few = (
            few_row_product(self._gate, gate.weight, gate.bias),
            few_row_product(self._up, up.weight, up.bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.ops.mkldnn._linear_pointwise(x, self._gate, self._gate_bias, "swish", [], "")
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, gate, self._up, self._up_bias, "mul")
        return out


class GatedMlp(nn.Module):
    """A module that computes down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self._gate = Gate(gate, up)
        self.down_proj = PackedLinear(down.weight, down.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._gate(x))
        return out


class RmsNorm(nn.Module):
    """A module that computes weight * x / rms(x) in fp32 with one rounding at the end. In bf16 this is one compiled
    pass over x where available, else four passes instead of seven."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps, self._dim = weight.detach().float(), eps, weight.shape[0]
        self._kernels = decode_kernels() if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" else None
        if self._kernels is not None:
            x = torch.randn(3, self._dim, generator=torch.Generator().manual_seed(0)).bfloat16()
            if not agree(self._compiled(self._kernels, x), self._plain(x)):
                self._kernels = None

    def forward(self, x: Tensor) -> Tensor:
        if self._kernels is not None and x.dtype == torch.bfloat16 and x.numel():
            return self._compiled(self._kernels, x)
        return self._plain(x)

    def _compiled(self, kernels: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, normed = (as_bits(y.view(-1, self._dim)) for y in (x, out))
        kernels.norm(rows, self.weight.numpy(), self.eps, normed)
        return out

    def _plain(self, x: Tensor) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(self._dim).add_(self.eps).rsqrt_()
        return torch.mul(wide, scale).mul_(self.weight).to(x.dtype)


def packing_works() -> bool:
    """Return whether oneDNN's packed linear, a private operator of torch, exists and gives correct results."""
    try:
        weight, x = torch.randn(48, 32).bfloat16(), torch.randn(3, 32).bfloat16()
        return agree(PackedLinear(weight, None)(x), F.linear(x, weight))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
