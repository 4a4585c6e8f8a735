"""Computes decoder layers for a few rows, which is what a decode step of a few streams has: several layers in one
compiled call.

The model's own code calls the layers one after the other. The first layer of a run (adjacent layers that one call
computes) computes the whole run, and the others return their input. A run ends where another thread or another part of
the engine must act between two layers: where KV is still being loaded, where chosen parts of contexts are read, or
where a part of the engine wants to see rows.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reprise.engine.model.cpu.modules import FEW_ROWS, FewProduct, RmsNorm
from reprise.engine.model.hf_model import Step, current_step, is_in_step
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages
from reprise.kernels.attention.selection import StepSelection
from reprise.kernels.attention.torch_cpu import TorchAttention, attend_selected, fits_kernels
from reprise.kernels.cpu.available import decode_kernels, dots_of_pairs, select_kernels
from reprise.kernels.views import as_bits

_NOWHERE = np.empty((0, 2), np.int64)
_K_POOL, _V_POOL, _SAVED = -3, -2, -1  # fields of a layer that are filled in later


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer. norms: before attention, of queries, of keys, and before the MLP."""

    params: AttentionParams
    heads: tuple[int, int, int]  # number of heads of queries, keys and values
    head_dim: int
    products: tuple[FewProduct | None, ...]  # queries, keys, values, output, gate, up, down; None: part of queries'
    norms: tuple[RmsNorm | None, ...]

    @property
    def fields(self) -> list[int]:
        """Return the layer's row in the table that the kernels read: addresses of memory that `products` and `norms`
        keep alive."""
        weights = [0 if norm is None else norm.weight.data_ptr() for norm in self.norms]
        nothing = (0,) * len(self.q.fields)
        products = (nothing if product is None else product.fields for product in self.products)
        return [*itertools.chain.from_iterable(products), *weights, 0, 0, 0]

    @property
    def q(self) -> FewProduct:
        """The matrix product that gives queries, and in some models keys and values as well."""
        assert self.products[0] is not None
        return self.products[0]

    @property
    def numbers(self) -> list[float]:
        return [*(0.0 if norm is None else norm.eps for norm in self.norms), self.params.scale]

    @property
    def form(self) -> tuple[Any, ...]:
        """The properties that adjacent layers must share to be computed by one call: (numbers of heads, dims of a head,
        attention window in tokens, sizes of the matrix products)."""
        sizes = [p and (p.inputs, p.outputs, p.padded_outputs, p.first) for p in self.products]
        return (self.heads, self.head_dim, self.params.window, sizes)


class Run:
    """Adjacent layers with equal `LayerParts.form` (heads, window and sizes), as tables for the kernels, which compute
    all of them in one call. Used by the thread that runs the model."""

    def __init__(self, parts: Sequence[LayerParts], first: int) -> None:
        """Make the tables of the layers. first: the first layer's index in the model."""
        kernels: Any = decode_kernels()
        self.kernels, self.parts, self.first = kernels, list(parts), first
        self._table = np.array([part.fields for part in parts], np.int64)
        self._numbers = np.array([part.numbers for part in parts], np.float64)
        num_q, num_k, _ = parts[0].heads
        self.group, self.lanes = (0,) * (num_q // num_k), (0,) * (parts[0].head_dim // 16)
        self.dots = (0,) if dots_of_pairs() else ()
        self._pages: list[KvPages | None] = [None] * len(parts)  # pages whose addresses are in the table
        self._saved: Sequence[np.ndarray] | None = None  # slots whose addresses are in the table
        self._seen_pages: KvPages | None = None
        self._fits = False  # whether the kernels can attend to `_seen_pages`
        self._shape: Any = None
        self._slot = (0, 0)

    @property
    def end(self) -> int:
        return self.first + len(self.parts)

    def takes(self, pages: KvPages) -> bool:
        """Return whether the kernels can attend to these pages. The answer is kept for the next call, because nearly
        every step has the same pages."""
        if pages is not self._seen_pages:
            self._seen_pages, self._fits = pages, fits_kernels(self.parts[0].heads[0], pages)
        return self._fits

    def prepare(self, step: Step, end: int, save: bool) -> None:
        """Write the addresses of this step's pages into the table, for layers up to `end` - 1. save: whether KV also
        goes to DRAM."""
        for place in range(end - self.first):
            pages = step.pages(self.first + place)
            if self._pages[place] is not pages:
                self._pages[place] = pages
                self._table[place, _K_POOL], self._table[place, _V_POOL] = pages.k.data_ptr(), pages.v.data_ptr()
                self._shape = None
        if save and step.saved is not None and self._saved is not step.saved.blocks:
            self._saved = step.saved.blocks
            blocks = self._saved[self.first : self.end]
            self._table[:, _SAVED] = [slots.ctypes.data for slots in blocks]
            self._slot, self._shape = (blocks[0].strides[0], blocks[0].shape[1] // 2 * 2), None
        if self._shape is None:
            self._shape = self._make_shape()

    def _make_shape(self) -> Any:
        pages = next(pages for pages in self._pages if pages is not None)
        k, v = ([x.itemsize * stride for stride in x.stride()[:3]] for x in (pages.k, pages.v))
        num_q, num_k, _ = self.parts[0].heads
        return self.kernels.Shape(num_q, num_k, pages.k.shape[1], *k, *v, pages.is_packed, *self._slot)

    def __call__(self, first: int, end: int, begin: int, stop: int, rows: Any, tasks: Any) -> None:
        """Compute layers `first` to `end` - 1 of the model. begin: the part (PROJECT, TURN, ATTEND or COMPLETE) at
        which the first layer begins. stop: the last part that is computed of the last layer. rows, tasks: the step's
        rows and the tasks of its attention, from `FewRows._rows`."""
        self.kernels.run(
            *(self._table, self._numbers, first - self.first, end - self.first, begin, stop, self._shape),
            *(rows, tasks, self.group, self.lanes, self.dots, torch.get_num_threads()),
        )


class FewRows:
    """A decoder layer for steps of at most FEW_ROWS rows, by compiled kernels: hidden [rows, width] -> the same shape,
    inside a step. Sums that the layer's own code rounds to bf16 stay in fp32. Called by the thread that runs the
    model."""

    def __init__(self, index: int, parts: LayerParts) -> None:
        self.parts = parts
        self.run = Run([parts], index)
        self._index = index
        self._input_norm = parts.norms[0]

    @property
    def width(self) -> int:
        return self.parts.q.width

    def takes(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Return whether these kernels can compute the layer in the present step, correctly and faster than its own
        code. hidden, cos, sin: the arguments with which the layer would be called."""
        has_dtype = cos.dtype == sin.dtype == hidden.dtype == torch.bfloat16
        return has_dtype and self.takes_rows(current_step(), len(hidden))

    def takes_rows(self, step: Step, num_rows: int) -> bool:
        """Return whether this implementation is correct and faster for a step of `num_rows` rows."""
        return (
            0 < num_rows <= FEW_ROWS
            and type(step.backend) is TorchAttention
            and self.run.takes(step.pages(self._index))
            and (step.selection is None or select_kernels() is not None)
        )

    def is_undisturbed(self, step: Step) -> bool:
        """Return whether no other part of the engine must act between the layers of a run (those that one call
        computes), for example to wait for KV."""
        shows_rows = step.saved is None and step.sink is not None
        return not (shows_rows or step.inputs is not None or step.arrive is not None or step.selection is not None)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute this layer and those after it that one call can compute, and set `step.computed_layers` to the number
        of layers that are done. hidden, result [rows, width]; cos, sin [1, rows, head_dim]."""
        step, kernels, run = current_step(), self.run.kernels, self.run
        is_alone = not self.is_undisturbed(step)
        end = self._index + 1 if is_alone else run.end
        run.prepare(step, end, step.saved is not None)
        out = hidden.clone(memory_format=torch.contiguous_format)
        rows, heads, tasks = self._rows(step, out, cos, sin)
        step.computed_layers = end
        if not is_alone:
            run(self._index, end, kernels.PROJECT, kernels.COMPLETE, rows, tasks)
            return out
        run(self._index, end, kernels.PROJECT, kernels.PROJECT, rows, tasks)
        if step.inputs is not None and self._input_norm is not None:
            step.inputs(self._index, self._input_norm(hidden))
        if step.saved is None and step.sink is not None:
            _, keys, values = heads.split_with_sizes(self.parts.heads, 1)  # takes half the time of two slices
            step.sink.write(self._index, keys, values)
        if step.arrive is not None:
            step.arrive(self._index)
        if step.selection is None:
            run(self._index, end, kernels.TURN, kernels.COMPLETE, rows, tasks)
        else:
            run(self._index, end, kernels.TURN, kernels.TURN, rows, tasks)
            self._read_in_part(step, step.selection, rows, tasks)
            run(self._index, end, kernels.COMPLETE, kernels.COMPLETE, rows, tasks)
        return out

    def _rows(self, step: Step, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Any, Tensor, Any]:
        """Return (rows, heads, tasks): the step's rows as the structure of arrays that the compiled kernels read; the
        tensor that receives the rows' queries, keys and values, [rows, heads, head_dim]; and the tasks into which
        attention is split."""
        num_q, count, dim = self.parts.heads[0], len(hidden), self.parts.head_dim
        table, slots, tasks = self._plan(step)
        heads = torch.empty(count, sum(self.parts.heads), dim, dtype=hidden.dtype)
        rows = self.run.kernels.Rows(
            as_bits(hidden),
            as_bits(heads),
            np.empty((count, num_q, dim), np.float32),
            np.empty((count, num_q, dim), np.float32),
            as_bits(cos[0].contiguous()),
            as_bits(sin[0].contiguous()),
            slots,
            table,
            _NOWHERE if step.saved is None else step.saved.spots,
        )
        return rows, heads, tasks

    def _read_in_part(self, step: Step, selection: StepSelection, rows: Any, tasks: Any) -> None:
        """Attend with the queries `rows.q`, and write the results to `rows.mixed`, where some rows may read only the
        chosen parts of their contexts. tasks: the attention tasks of all rows, for whole contexts."""
        candidates, pages, params = selection.candidates, step.pages(self._index), self.parts.params
        attend, queries = self.run.kernels.attend, rows.q
        pool = as_bits(pages.k), as_bits(pages.v)
        sizes = (self.run.group, self.run.lanes, self.run.lanes, False)
        tokens = candidates.tokens.numpy()
        chosen = selection.of_layer(self._index, torch.from_numpy(queries[tokens]), pages, params)
        if chosen is None:
            attend(queries, *pool, rows.table, tasks, *sizes, rows.mixed)
            return
        kernels = select_kernels()
        assert kernels is not None  # else `takes` is False
        rows.mixed[tokens] = attend_selected(kernels, queries[tokens], pages, candidates.table.numpy(), chosen).numpy()
        if len(tokens) == len(queries):
            return
        rest = np.setdiff1d(np.arange(len(queries)), tokens)
        key, meta = f"few rows but those in part {params.window}", step.meta
        if key not in meta.scratch:
            contexts = _contexts(meta)
            meta.scratch[key] = self.run.kernels.plan([contexts[row] for row in rest], params.window)
        others = np.empty((len(rest), *queries.shape[1:]), np.float32)
        attend(queries[rest], *pool, rows.table[rest], meta.scratch[key], *sizes, others)
        rows.mixed[rest] = others

    def _plan(self, step: Step) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return each row's pages, each row's slot, and the tasks into which attention is split; computed once per step
        and attention window. Where a sequence has several rows (a draft), each row is treated as a sequence of its own,
        whose context ends with that row."""
        window, meta = self.parts.params.window, step.meta
        key = f"few rows {window}"
        plan: tuple[np.ndarray, np.ndarray, Any] | None = meta.scratch.get(key)
        if plan is None:
            table = meta.block_table.numpy()
            if max(meta.query_lens) > 1:
                table = np.repeat(table, meta.query_lens, axis=0)
            plan = meta.scratch[key] = (table, meta.slots.numpy(), self.run.kernels.plan(_contexts(meta), window))
        return plan


def join_runs(ways: Sequence[FewRows | None], together: Sequence[bool]) -> None:
    """Join adjacent layers with equal `LayerParts.form` into runs, each of which one call of a compiled kernel
    computes. ways: the FewRows of each layer, or None where a layer has none. together: whether each layer gets the
    same rotary tables as the one before it."""
    run: list[FewRows] = []
    for index, way in enumerate((*ways, None)):
        if run and (way is None or not together[index] or way.parts.form != run[0].parts.form):
            joined = Run([each.parts for each in run], index - len(run))
            for each in run:
                each.run = joined
            run = []
        if way is not None:
            run.append(way)


class Layers(nn.ModuleList):
    """A model's list of layers, whose iteration within a step ends as soon as all of them have been computed. Calling
    each of thirty layers for nothing takes 0.4 ms."""

    def __iter__(self) -> Iterator[nn.Module]:
        return _left(tuple(self._modules.values()))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and is_in_step():
            return _left(tuple(self._modules.values())[index])
        return super().__getitem__(index)


def _left(layers: Sequence[Any]) -> Iterator[nn.Module]:
    for layer in layers:
        if is_in_step() and current_step().computed_layers == len(layers):
            return
        yield layer


def _contexts(meta: AttentionMeta) -> list[int]:
    """Return the length of each row's context, which ends with the row."""
    lens = zip(meta.query_lens, meta.context_lens, strict=True)
    return [context - query + row + 1 for query, context in lens for row in range(query)]
