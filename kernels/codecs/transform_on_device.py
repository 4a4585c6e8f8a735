"""Decodes transform coding on the device of the pages: blocks cross the link to the device compressed, and are decoded
there."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from reprise.kernels.cpu.transform_format import COARSEST, FINEST, HEAD_WORDS, POWERS, ROWS, Layer, Tables


class TransformOnDevice:
    """A decoder of `TransformCodec` segments on a device. Implements `Decodes`. The decoded numbers equal those of the
    CPU's decoder; the rows made from them may differ by the order of a sum."""

    def __init__(
        self,
        layers: Sequence[Layer],
        tables: Tables,
        *,
        segment_bytes: Sequence[int],
        device: torch.device,
        kernels: ModuleType,
    ) -> None:
        """Set up. layers, tables, segment_bytes: those of the codec. kernels: the module
        `reprise.kernels.triton_transform`."""
        self.device, self._kernels = device, kernels
        self._segment_bytes = segment_bytes
        self._entries = torch.from_numpy(tables.entries.view(np.int32)).to(device)
        self._values = torch.from_numpy(tables.values).to(device)
        self._powers = torch.from_numpy(POWERS).to(device)
        self._layers = [_LayerOnDevice(layer, device) for layer in layers]

    def decode(self, layer: int, segments: Tensor, raw: Tensor, *, together: bool = False) -> None:
        """Decode blocks, as `Decodes.decode` demands. segments: on the processor or the device. Raises ValueError for
        segments of another size."""
        if segments.dtype != torch.uint8 or segments.dim() != 2 or segments.shape[1] != self._segment_bytes[layer]:
            raise ValueError(f"segments of {tuple(segments.shape)} {segments.dtype}")
        calibrated, words = self._layers[layer], segments.to(self.device).view(torch.int16)
        n, heads = calibrated.n, calibrated.heads
        blocks, split = len(words), ROWS * n
        begin = HEAD_WORDS + (ROWS * heads + 1) // 2
        numbers = self._kernels.decode(words, calibrated.classes, self._entries, self._values, begin, n)
        coarser = (words[:, 0].int() & 0xFF).clamp(max=FINEST + COARSEST) - FINEST
        keys = numbers[:, :n].transpose(1, 2) @ calibrated.back  # [blocks, ROWS, n]
        keys.mul_(self._power(coarser >> 1).float()[:, None, None]).add_(calibrated.k_mean)
        raw[:, :split].view(blocks, ROWS, n).copy_(keys)
        exponents = words[:, HEAD_WORDS:begin].contiguous().view(torch.int8)[:, : ROWS * heads].view(-1, ROWS, heads)
        scales = (calibrated.v_step * self._power(exponents.int() + ((coarser + 1) >> 1)[:, None, None])).float()
        values = numbers[:, n:].view(blocks, heads, -1, ROWS).permute(0, 3, 1, 2)  # [blocks, ROWS, heads, width]
        values.mul_(scales[..., None]).add_(calibrated.v_mean.view(heads, -1))
        raw[:, split:].view(values.shape).copy_(values)

    def _power(self, quarters: Tensor) -> Tensor:
        """Return 2^(quarters / 4), in fp64."""
        return self._powers[(quarters + len(POWERS) // 2).long()]


class _LayerOnDevice:
    def __init__(self, layer: Layer, device: torch.device) -> None:
        self.n, self.heads, self.v_step = len(layer.k_mean), layer.heads, float(layer.v_step)
        self.classes = torch.from_numpy(layer.classes.astype(np.int32)).to(device)
        self.k_mean, self.v_mean = (torch.from_numpy(mean).to(device) for mean in (layer.k_mean, layer.v_mean))
        self.back = torch.from_numpy(np.ascontiguousarray(layer.back[:, : self.n])).to(device)
