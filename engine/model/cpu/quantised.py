"""Provides modules for CPU whose weights stay packed to 4 or 8 bits."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reprise.engine.model.cpu.modules import FewProduct
from reprise.engine.model.known_parts import agree
from reprise.kernels.cpu.available import decode_kernels, dots_of_pairs
from reprise.kernels.packed import BLOCK, GROUP, PackedWeight, first_outputs, table_of, unpack, unpack_rows
from reprise.kernels.views import as_bits

_NOTHING = np.empty((0, 0), np.uint16)
_CHECK_ROWS = (1, 3, 20)  # unpacked in registers by one, by some, and unpacked into memory
_CHECK_OUTPUTS = 4096


class QuantisedLinear(nn.Module):
    """A linear layer whose weight stays packed: codes of 4 or 8 bits with scales. x [..., in] bf16, plus a residual of
    the result's shape to add -> [..., out]. Every row is computed in the same way, however many rows there are. The
    load-time probe has it compute in fp32. Where compiled kernels cannot run or are off, the weight is unpacked for
    every call."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.inputs, weight.outputs
        self.packed = weight
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("lows", weight.lows)
        self.register_buffer("table", table_of(weight))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.few = few_product(weight, bias)
        self._kernels: Any = decode_kernels()
        self._dots = (0,) if dots_of_pairs() else ()
        self._fields = None if self.few is None else np.array([self.few.fields], np.int64)
        self._in_float32 = None if self.few is None else product_in_float32(self.few)

    @property
    def weight(self) -> Tensor:
        """A new tensor of the unpacked weight, for modules that do arithmetic of their own with it."""
        return unpack(self.packed, torch.bfloat16)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._in_float32 is not None and x.dtype == torch.float32:
            out = self._wide(x, np.array(self._in_float32.fields, np.int64))
            return out if residual is None else out + residual
        if self._fields is None or x.dtype != torch.bfloat16:
            out = self.unpacked(x)
            return out if residual is None else out + residual
        out = x.new_empty(*x.shape[:-1], self.out_features)
        if x.numel():
            added = _NOTHING if residual is None else as_bits(residual.reshape(-1, self.out_features).contiguous())
            rows, result = as_bits(x.reshape(-1, self.in_features)), as_bits(out.view(-1, self.out_features))
            self._kernels.linear(rows, self._fields, self._dots, added, result)
        return out

    def _wide(self, x: Tensor, fields: np.ndarray) -> Tensor:
        out = x.new_empty(*x.shape[:-1], self.out_features)
        if x.numel():
            rows, result = x.reshape(-1, self.in_features), out.view(-1, self.out_features)
            self._kernels.linear_in_float32(rows.contiguous().numpy(), fields, result.numpy())
        return out

    def unpacked(self, x: Tensor, outputs: int | None = None) -> Tensor:
        """Return the layer's result for x, computed by torch with the unpacked weight. outputs: how many of the first
        outputs to compute; None: all."""
        weight = self.packed if outputs is None else first_outputs(self.packed, outputs)
        bias = None if self.bias is None else self.bias[:outputs].to(x.dtype)
        return F.linear(x, unpack(weight, x.dtype), bias)

    @property
    def form(self) -> tuple[Any, ...]:
        """The properties that decide which kernels the layer uses: (bits of a code, inputs per group, whether groups
        have lows (offsets added to scale * code), table, inputs, outputs, whether there is a bias)."""
        weight = self.packed
        form = weight.bits, weight.group, weight.lows is not None, weight.table
        return *form, weight.inputs, weight.outputs, self.bias is not None

    def is_right(self) -> bool:
        """Return whether the compiled kernels agree with the unpacked weight. Only the first few thousand outputs are
        compared: to unpack a whole head of 200,000 takes seconds and gigabytes."""
        if self._fields is None:
            return True
        generator = torch.Generator().manual_seed(0)
        some = min(self.out_features, _CHECK_OUTPUTS)
        for rows in _CHECK_ROWS:
            x = torch.randn(rows, self.in_features, generator=generator).bfloat16()
            for given in (x, x.float()):
                if not agree(self(given)[:, :some], self.unpacked(given, some)):
                    return False
        return True

    def use_no_kernels(self) -> None:
        self._fields = self.few = self._in_float32 = None


class QuantisedEmbedding(nn.Module):
    """An embedding whose weight stays packed (codes of 4 or 8 bits with scales). ids [...] int64 -> [..., width]."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self._dtype = weight, dtype
        self._kernels: Any = decode_kernels() if dtype == torch.bfloat16 else None
        product = few_product(weight, None)
        self._fields = None if product is None else np.array(product.fields, np.int64)
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("lows", weight.lows)
        self.register_buffer("table", table_of(weight))

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids.reshape(-1)
        if self._kernels is None or self._fields is None:
            return unpack_rows(self.packed, rows, self._dtype).view(*ids.shape, self.packed.inputs)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.packed.outputs:
            raise IndexError("a token beyond the embedding")
        out = torch.empty(*ids.shape, self.packed.inputs, dtype=self._dtype)
        self._kernels.embed(self._fields, rows.numpy(), as_bits(out.view(-1, self.packed.inputs)))
        return out


class QuantisedTogether(nn.Module):
    """Several packed linear layers with the same input, computed in one call where kernels allow. x [..., in] -> [...,
    outputs of all layers side by side]."""

    def __init__(self, layers: list[QuantisedLinear]) -> None:
        super().__init__()
        self._layers = layers
        self._kernels: Any = decode_kernels()
        self._dots = (0,) if dots_of_pairs() else ()
        self.few: list[FewProduct] | None = None
        if all(layer.few is not None and layer.out_features % BLOCK == 0 for layer in layers):
            firsts = np.cumsum([0, *(layer.out_features for layer in layers)]).tolist()
            self.few = [layer.few.starting_at(first) for layer, first in zip(layers, firsts, strict=False) if layer.few]
            self._fields = np.array([product.fields for product in self.few], np.int64)
        self._outputs = sum(layer.out_features for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.few is None or x.dtype != torch.bfloat16 or not x.numel():
            return torch.cat([layer(x) for layer in self._layers], -1)
        out = x.new_empty(*x.shape[:-1], self._outputs)
        rows, result = as_bits(x.reshape(-1, x.shape[-1])), as_bits(out.view(-1, self._outputs))
        self._kernels.linear(rows, self._fields, self._dots, _NOTHING, result)
        return out


class QuantisedGate(nn.Module):
    """A module that computes silu(gate(x)) * up(x) with packed weights. x [tokens, in] -> [tokens, out]."""

    def __init__(self, gate: QuantisedLinear, up: QuantisedLinear) -> None:
        super().__init__()
        self._gate, self._up = gate, up
        self.few = gate.few, up.few
        self._kernels: Any = decode_kernels()
        self._dots = (0,) if dots_of_pairs() else ()
        self._fields = [None if few is None else np.array(few.fields, np.int64) for few in self.few]

    def forward(self, x: Tensor) -> Tensor:
        if self._fields[0] is None or self._fields[1] is None or x.dtype != torch.bfloat16 or not x.numel():
            return F.silu(self._gate(x)).mul_(self._up(x))
        out = x.new_empty(len(x), self._gate.out_features)
        self._kernels.gated(as_bits(x.contiguous()), *self._fields, self._dots, as_bits(out))
        return out


def few_product(weight: PackedWeight, bias: Tensor | None) -> FewProduct | None:
    """Return a packed linear layer as the compiled kernels for a few rows read it, or None if there are no such
    kernels. weight, bias: of the layer; the result keeps the weight alive."""
    kernels: Any = decode_kernels()
    if kernels is None:
        return None
    kind = kernels.E2M1 if weight.table == "e2m1" else kernels.PLAIN if weight.lows is None else kernels.WITH_LOWS
    kernel = kernels.packed_kernel(weight.bits, kind, weight.group, dots_of_pairs())
    biases = None if bias is None else bias.detach().float().contiguous()
    addresses = [0 if x is None else x.data_ptr() for x in (weight.codes, weight.scales, weight.lows, biases)]
    padded = -(-weight.inputs // GROUP) * GROUP
    fields = (kernel.address, *addresses, padded, weight.outputs, BLOCK, 0, weight.bits, weight.group, kind)
    return FewProduct(fields, (kernel, weight, biases), weight.inputs, weight.outputs, BLOCK)


def product_in_float32(product: FewProduct) -> FewProduct:
    """Return the same packed layer, from `few_product`, with a kernel that computes in fp32 even where the processor
    has dot products of bf16 pairs."""
    kernels: Any = decode_kernels()
    bits, group, kind = product.fields[-3:]
    kernel = kernels.packed_kernel(bits, kind, group, False)
    return replace(product, fields=(kernel.address, *product.fields[1:]), memory=(kernel, *product.memory))
