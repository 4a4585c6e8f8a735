"""Moves the weights of a model's layers to DRAM, and lets each layer find them in HBM while it runs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reprise.cache.storage.throttle import Throttle
from reprise.engine.config import WEIGHT_BUFFERS
from reprise.engine.model.decoder_layers import decoder_layers
from reprise.engine.model.offload.weight_stream import WeightStream

_ALIGNMENT = 64  # bytes: every weight in a buffer begins at a multiple


class OffloadedWeights:
    """The weights of some of a model's layers, kept in DRAM. While such a layer runs, its parameters are views of a
    buffer in HBM that has its weights. At other times the buffer can hold the weights of another layer. Used by one
    thread at a time: the one that runs the model."""

    def __init__(
        self, model: nn.Module, *, num_layers: int, hbm_layers: int, device: torch.device, throttle: Throttle
    ) -> None:
        """Move weights to DRAM. model: on the CPU; its other weights move to `device`. hbm_layers: how many layers'
        weights stay in HBM, fewer than there are layers. throttle: cap of the link from DRAM. Raises ValueError if the
        layers cannot be moved one by one."""
        layers = decoder_layers(model, num_layers)
        numbers = streamed_layers(num_layers, hbm_layers)
        self.modules = frozenset(module for number in numbers for module in layers[number].modules())
        _check_apart(model, self.modules)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        on_gpu = device.type == "cuda"
        self._layers = {number: _Layer(number, layers[number], names, pinned=on_gpu) for number in numbers}
        sizes = {number: layer.size for number, layer in self._layers.items()}
        self._buffers = torch.empty(WEIGHT_BUFFERS, max(sizes.values()), dtype=torch.uint8, device=device)
        self._link, self._throttle = _Link(device), throttle
        self.dram_bytes, self.buffer_bytes = sum(sizes.values()), self._buffers.numel()
        for layer in self._layers.values():
            layer.lay_out(self._buffers)
        model.to(device)
        self.stream = WeightStream(sizes=sizes, num_buffers=WEIGHT_BUFFERS, copy=self._copy)
        for layer in self._layers.values():
            layer.hook(self.stream, self._link)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the weights in DRAM, by their names in the model."""
        return {name: tensor for layer in self._layers.values() for name, tensor in layer.tensors()}

    def _copy(self, number: int, buffer: int) -> None:
        memory = self._layers[number].memory
        passed = self._throttle.book(len(memory))
        self._link.copy(memory, self._buffers[buffer, : len(memory)], buffer)
        self._throttle.wait(passed)


def streamed_layers(num_layers: int, hbm_layers: int) -> list[int]:
    """Return the indices of the layers whose weights are copied into HBM in every step, while the weights of
    `hbm_layers` others stay there. They are spread evenly, so that each copy overlaps with as much computation."""
    streamed = max(0, num_layers - hbm_layers)
    return [place * num_layers // streamed for place in range(streamed)]


def _check_apart(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raise ValueError if other layers, or the embedding, share weights with these modules."""
    used = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    if any(used[id(p)] > 1 for module in modules for p in module.parameters(recurse=False)):
        raise ValueError("its layers share weights")


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter of a layer, and where its bytes begin among those of the layer."""

    name: str  # name in the model
    parameter: nn.Parameter
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    def view(self, memory: Tensor) -> Tensor:
        """Return the parameter's values in a layer's bytes, uint8."""
        size = self.shape.numel() * self.dtype.itemsize
        return memory[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class _Layer:
    """One layer: its weights in DRAM, and the buffer in HBM of which its parameters are views while it runs."""

    def __init__(self, number: int, module: nn.Module, names: Mapping[int, str], *, pinned: bool) -> None:
        self._number, self._module = number, module
        self._places, self.size = list[_Place](), 0
        for parameter in module.parameters():
            place = _Place(names[id(parameter)], parameter, parameter.dtype, parameter.shape, self.size)
            self._places.append(place)
            self.size += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.memory = torch.zeros(self.size, dtype=torch.uint8, pin_memory=pinned)
        for place in self._places:
            view = place.view(self.memory)
            view.copy_(place.parameter.data)
            place.parameter.data = view  # frees what it was read to
        self._views: list[list[Tensor]] = []
        self._bound = 0
        self._is_inside = False

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [(place.name, place.view(self.memory)) for place in self._places]

    def lay_out(self, buffers: Tensor) -> None:
        """Bind the layer's parameters to these buffers, uint8 [buffers, bytes], from now on."""
        self._views = [[place.view(buffer) for place in self._places] for buffer in buffers]
        self._bind(0)

    def hook(self, stream: WeightStream, link: "_Link") -> None:
        """Make each call of the layer wait for its weights first, and give their buffer back afterwards."""

        def enter(*_: Any) -> None:
            buffer = stream.enter(self._number)
            self._is_inside = True
            if buffer != self._bound:
                self._bind(buffer)

        def leave(*_: Any) -> None:
            if self._is_inside:
                self._is_inside = False
                link.note_use(self._bound)
                stream.leave(self._number)

        self._module.register_forward_pre_hook(enter)
        self._module.register_forward_hook(leave, always_call=True)  # also where the call raised

    def _bind(self, buffer: int) -> None:
        for place, view in zip(self._places, self._views[buffer], strict=True):
            place.parameter.data = view
        self._bound = buffer


class _Link:
    """A copier of bytes from DRAM to buffers of HBM. On CUDA the copy runs on a stream of its own, after the
    computation that the engine's thread has queued with the buffer's former weights."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._used: dict[int, torch.cuda.Event] = {}

    def note_use(self, number: int) -> None:
        """Note that the work queued so far may read buffer `number`. Called by the engine's thread."""
        if self._stream is not None:
            self._used[number] = torch.cuda.current_stream(self._stream.device).record_event()

    def copy(self, memory: Tensor, buffer: Tensor, number: int) -> None:
        """Copy `memory` to `buffer`, the one with this number, and return when the copy has ended. Called by the
        WeightStream's thread."""
        if self._stream is None:
            np.copyto(buffer.numpy(), memory.numpy())  # uses this thread alone, because the others compute
            return
        with torch.cuda.stream(self._stream):
            if number in self._used:
                self._stream.wait_event(self._used[number])
            buffer.copy_(memory, non_blocking=True)
        self._stream.synchronize()
