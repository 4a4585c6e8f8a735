"""Replays decode steps on CUDA as graphs: one launch for a step, where Python needs 1,000 and more.

The model is captured as it is, with all that transformers' code and ours does; at a replay none of its Python code
runs. So everything that changes from step to step lies in tensors of a fixed size (`_Inputs`), which are filled before.
A graph serves steps of up to so many sequences and ranges of keys, into which attention splits each context. Both
numbers are rounded up to a power of two, and the surplus rows write to a page that belongs to no context.

Graphs of all sizes are captured before any request (`capture_all`), so that no turn waits for one. The step of a
capture is computed eagerly on the same padded tensors, then again by the graph. If both do not give the same bits, or
the model cannot be captured, no graphs are used, and the log says why.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from reprise.cache.transfer.capture import Captured, CaptureSink, SavedRows
from reprise.engine.model.batch import BatchInput
from reprise.engine.model.cuda.capture import Capture, Replay
from reprise.engine.model.hf_model import ModelRunner, Step, forward
from reprise.kernels.attention.ragged_batch import AttentionMeta
from reprise.kernels.device_errors import is_sticky, lacks_memory

log = logging.getLogger(__name__)

_MOST_ROWS = 256
RETRY_AFTER_STEPS = 256  # steps of a size whose graph had no memory, before it is captured again
_LEAST_ITEMS = 4  # least ranges of keys per sequence: an absent range costs little
_HELD_FACTOR = 4  # contexts together may be so many times as long as HBM, since sequences share pages


class FixedPlan(Protocol):
    """An attention backend's list of work (a plan), in tables of a fixed size, for steps in which every sequence has
    one query row. `triton_paged.DecodePlan` implements it."""

    def launch(self, device: torch.device) -> Any: ...

    def fill(self, launches: Any, context_lens: Sequence[int]) -> None: ...


@runtime_checkable
class PlanMaker(Protocol):
    """An attention backend that makes plans of a fixed size, as CUDA graphs need them. A plan says how attention's work
    is split in a step in which every sequence has one query row. `TritonPagedAttention` implements it."""

    def num_items(self, context_lens: Sequence[int]) -> int: ...

    def plans(self, scratch: dict[str, Any], most_items: int, most_sequences: int) -> dict[str, FixedPlan]: ...


class _Inputs:
    """The tensors that a captured step reads, and their counterparts on the host, page-locked where there is CUDA."""

    def __init__(self, rows: int, max_pages: int, scratch_slot: int, device: torch.device) -> None:
        self._scratch_slot = scratch_slot
        on_cuda = device.type == "cuda"
        # token, position and slot of each row; the rows of the block table
        self._host = torch.zeros(3, rows, dtype=torch.int64, pin_memory=on_cuda)
        self._host_table = torch.zeros(rows, max_pages, dtype=torch.int32, pin_memory=on_cuda)
        self._numbers = torch.zeros_like(self._host, device=device)
        self._table = torch.zeros_like(self._host_table, device=device)
        ones = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.token_ids, self.positions = self._numbers[0], self._numbers[1]
        self.logit_rows = torch.arange(rows, device=device)
        self.meta = AttentionMeta(
            query_lens=[1] * rows,
            context_lens=[1] * rows,
            query_start=ones,
            context_len=torch.ones(rows, dtype=torch.int32, device=device),
            block_table=self._table,
            slots=self._numbers[2],
        )

    def fill(self, batch: BatchInput) -> None:
        """Fill the tensors for a step. The previous step must have ended. batch: on the host."""
        rows = batch.token_ids.shape[0]
        numbers, table = self._host.numpy(), self._host_table.numpy()
        numbers[0, :rows], numbers[1, :rows] = batch.token_ids.numpy(), batch.positions.numpy()
        numbers[2, :rows] = batch.meta.slots.numpy()
        numbers[:2, rows:], numbers[2, rows:] = 0, self._scratch_slot
        given = batch.meta.block_table.numpy()
        table[:rows, : given.shape[1]] = given
        self._numbers.copy_(self._host, non_blocking=True)
        self._table.copy_(self._host_table, non_blocking=True)
        over = len(self.meta.query_lens) - rows
        self.meta.context_lens[:] = [*batch.meta.context_lens, *[1] * over]


@dataclass(slots=True)
class _Graph:
    """A captured step. kept: the K and V rows of the step that are to be saved below HBM, [layers, rows, kv_heads, dim]
    each."""

    inputs: _Inputs
    plans: dict[str, FixedPlan]
    replay: Replay
    logits: Tensor  # [rows, vocab]
    kept: tuple[Tensor, Tensor] | None

    def run(self, batch: BatchInput) -> None:
        self.inputs.fill(batch)
        for key, plan in self.plans.items():
            plan.fill(self.inputs.meta.scratch[key], batch.meta.context_lens)
        self.replay()


class GraphRunner(ModelRunner):
    """A ModelRunner that replays decode steps as graphs, if their batches are on the host. It computes all other steps
    as a ModelRunner does. Called by the engine's thread."""

    takes_host_batches = True

    def __init__(
        self,
        *,
        scratch_page: int,
        max_context: int,
        held_tokens: int,
        planner: PlanMaker,
        capture: Capture,
        **model: Any,
    ) -> None:
        """Set up without any graph. scratch_page: an HBM page that no context ever gets. max_context: longest context
        in tokens. held_tokens: number of tokens that all pages together have room for. planner: the attention backend.
        capture: records a computation as a CUDA graph. model: the arguments of ModelRunner."""
        super().__init__(**model)
        page_size = self.pages[0].k.shape[1]
        self._device = self.pages[0].k.device
        self._scratch_slot = scratch_page * page_size
        self._max_pages = -(-max_context // page_size)
        self._max_context = max_context
        self._planner, self._capture = planner, capture
        self._longest_items = planner.num_items([max_context])
        self._held_items = planner.num_items([_HELD_FACTOR * held_tokens])
        self._is_complete = False  # no graphs are to come, but for those that had no memory
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._refused: dict[tuple[int, int], int] = {}  # graphs that had no memory -> steps until they are tried again
        self.why_not = ""
        """The reason why no graphs are used; empty while they are used."""

    @torch.inference_mode()
    def forward(
        self, batch: BatchInput, arrive: Callable[[int], None] | None, saved: SavedRows | None = None
    ) -> Tensor:
        """Return logits as `ModelRunner.forward` does, by replaying a CUDA graph if there is one for the step."""
        if arrive is not None or saved is not None or not self._can_replay(batch):
            return super().forward(batch.to(self._device), arrive, saved)
        rows = batch.token_ids.shape[0]
        key = self._key(rows, self._planner.num_items(batch.meta.context_lens))
        graph = None if key is None else self._graphs.get(key)
        if graph is not None:
            graph.run(batch)
        elif key is not None and self._may_capture(key):
            graph = self._captured(key, batch)
        if graph is None:
            return super().forward(batch.to(self._device), arrive, saved)
        self.replayed_steps += 1
        if graph.kept is not None and isinstance(self.sink, CaptureSink):
            keys, values = (part[:, :rows].clone() for part in graph.kept)  # the next replay overwrites them
            for layer in range(len(self.pages)):
                self.sink.write(layer, keys[layer], values[layer])
        return graph.logits[:rows]

    @torch.inference_mode()
    def capture_all(self, most_sequences: int, batch_of: Callable[[int, int], BatchInput]) -> None:
        """Capture decode steps of up to `most_sequences` sequences, with contexts of any length, as CUDA graphs. The
        largest graphs come first, so that the others fit into their memory. batch_of(n, length): makes the step with
        which a graph for n sequences is captured, on the host and with contexts of about `length` tokens. If it makes
        fewer than n sequences, the graph's other rows are filled up with padding."""
        most_rows = _rounded_up(min(most_sequences, _MOST_ROWS))
        row_counts = [1 << power for power in range(most_rows.bit_length())]
        keys = [(rows, items) for rows in row_counts for items in self._item_counts(rows)]
        for rows, items in sorted(keys, key=lambda key: key[1], reverse=True):
            if self.why_not:
                break
            self._captured((rows, items), batch_of(rows, self._context_of(items // rows)))
        self._is_complete = True
        if self._graphs:
            log.info("captured %d graphs in %d MiB", len(self._graphs), self._capture.held_bytes >> 20)

    @property
    def graph_bytes(self) -> int:
        """The bytes of device memory that graphs take."""
        return self._capture.held_bytes

    def _context_of(self, items: int) -> int:
        """Return the length of a context whose keys attention splits into `items` ranges or slightly fewer."""
        context = min(self._max_context, self._max_context * items // self._longest_items)
        while context > 1 and self._planner.num_items([context]) > items:
            context -= context // 8 + 1
        return max(1, context)

    def _key(self, rows: int, items: int) -> tuple[int, int] | None:
        """Return the size, (rows, items), of the graph for so many sequences and ranges of keys; None if no graph is so
        large."""
        most_rows = _rounded_up(rows)
        return next(((most_rows, count) for count in self._item_counts(most_rows) if count >= items), None)

    def _item_counts(self, rows: int) -> list[int]:
        """Return the numbers of ranges of keys for which graphs of `rows` rows exist, each twice the previous one."""
        most = min(rows * self._longest_items, self._held_items + rows)
        counts = [_LEAST_ITEMS * rows]
        while counts[-1] < most:
            counts.append(min(2 * counts[-1], most))
        return counts

    def _can_replay(self, batch: BatchInput) -> bool:
        """Return whether a graph can compute this step: all of its sequences decode one token, and no option (a
        selector, watching attention, parked contexts, streamed weights, saved activations) needs host code between
        layers."""
        meta = batch.meta
        return (
            not self.why_not
            and batch.token_ids.device.type == "cpu"
            and all(length == 1 for length in meta.query_lens)
            and len(meta.query_lens) <= _MOST_ROWS
            and batch.logit_rows.shape[0] == len(meta.query_lens)
            and self.inputs is None
            and self.selecting is None
            and self.watch is None
            and self.stand_in is None
            and self.weights is None
        )

    def _captured(self, key: tuple[int, int], batch: BatchInput) -> _Graph | None:
        """Compute a step, capture it and compute it again by the graph. Return the graph, or None if the step cannot be
        captured or the graph gives other bits."""
        rows, most_items = key
        inputs = _Inputs(rows, self._max_pages, self._scratch_slot, self._device)
        inputs.fill(batch)
        found: list[Any] = []

        def compute() -> None:
            found[:] = self._compute(inputs)

        try:
            compute()  # compiles kernels and sets libraries up, which cannot be done while capturing
            eager = found[0].clone()
            plans = self._planner.plans(inputs.meta.scratch, most_items, rows)
            inputs.meta.scratch = {name: plan.launch(self._device) for name, plan in plans.items()}
            for name, plan in plans.items():
                plan.fill(inputs.meta.scratch[name], batch.meta.context_lens)
            replay = self._capture(compute)
        except RuntimeError as error:
            if is_sticky(error):
                raise
            if lacks_memory(error):
                self._refused[key] = RETRY_AFTER_STEPS
                log.warning("steps of %d sequences run without a graph for now: %s", rows, error)
            else:  # for example if layers differ in the shapes of their KV
                self._give_up(f"this model's steps cannot be captured: {str(error).splitlines()[0]}")
            return None
        graph = _Graph(inputs, plans, replay, found[0], found[1])
        graph.run(batch)
        count = batch.token_ids.shape[0]
        if not torch.equal(eager[:count], graph.logits[:count]):
            self._give_up("a graph's logits differ from those of the same step without it")
            return None
        self._graphs[key] = graph
        return graph

    def _may_capture(self, key: tuple[int, int]) -> bool:
        """Return whether a graph of this size may be captured now: at the engine's start, or when a number of steps
        have passed since a capture of it failed for want of memory."""
        left = self._refused.get(key, 0)
        if not left:
            return not self._is_complete
        self._refused[key] = left - 1
        return left == 1

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._graphs.clear()
        log.warning("decode steps run without graphs: %s", why)

    def _compute(self, inputs: _Inputs) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the logits and, if KV is saved below HBM, K and V before rotation, [layers, rows, kv_heads, dim]
        each."""
        sink = None if self.sink is None else CaptureSink()
        step = Step(meta=inputs.meta, pages=self.pages.__getitem__, backend=self.backend, sink=sink)
        kept = None
        if sink is not None:
            sink.step = Captured()
        logits = forward(self.model, step, inputs.token_ids, inputs.positions, inputs.logit_rows)
        if sink is not None and sink.step is not None:
            kept = torch.stack(sink.step.keys), torch.stack(sink.step.values)
        return logits, kept


def _rounded_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
