"""Holds the KV of steps, or the activations from which it is made, until it is copied into DRAM."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from reprise.cache.moves import CapturePiece
from reprise.cache.transfer.device_streams import Fence


@dataclass(slots=True)
class Captured:
    """The KV of one step before rotation, per layer [tokens, kv_heads, dim]; or the input of its layers' attention,
    [tokens, 1, width]. These are the step's own tensors, not copies. layers: the layers whose rows (KV of one token
    each) are here; the kernels of the other layers have written theirs to DRAM themselves."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors to save, in the order of `Slab.parts`."""
        return self.inputs or [*self.keys, *self.values]

    @property
    def num_layers(self) -> int:
        return len(self.inputs or self.keys)

    @property
    def num_rows(self) -> int:
        return (self.inputs or self.keys)[0].shape[0]


@dataclass(frozen=True, slots=True)
class SavedRows:
    """The slots into which the kernels of layers save the rows of a step while they compute them. blocks: by layer, the
    DRAM slots as uint16 [slots, K of a block's rows, then V]. spots int64 [rows, 2]: for each row of the batch, the
    slot and the row in it; slot -1 where it is not to be saved."""

    blocks: Sequence[np.ndarray]
    spots: np.ndarray


class CaptureSink:
    """A receiver of a step's KV (a sink), which keeps it alive until it is saved (AttentionStore §3.2.2). Implements
    `reprise.engine.model.hf_model.KvSink`; layers come in order."""

    def __init__(self) -> None:
        self.step: Captured | None = None
        """The record into which layers write. The runner of a step sets an empty one here, and takes it afterwards.
        None: what layers write is not saved, for instance while the model is tried out."""

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None:
        """Keep a layer's K, before rotation, and V of a step, [tokens, kv_heads, dim] each, if the step is captured."""
        if self.step is not None:
            self.step.keys.append(k_plain)
            self.step.values.append(v)
            self.step.layers.append(layer)

    def write_input(self, layer: int, x: Tensor) -> None:
        """Record the input of a layer's attention, [tokens, width], where that is saved instead of KV."""
        if self.step is not None:
            self.step.inputs.append(x[:, None])
            self.step.layers.append(layer)


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """The KV of one step (a row per token of its batch) with orders which of the rows to save in DRAM. step: refers to
    the step's own tensors, and so keeps them alive; nothing is copied yet. pieces: which rows go to which DRAM slots.
    ready: a fence, which is passed when the rows have been computed."""

    step: Captured
    pieces: list[CapturePiece]
    ready: Fence
