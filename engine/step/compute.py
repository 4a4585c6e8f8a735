"""Computes a step: makes its batch, launches the forward pass, and decides where its KV is saved."""

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reprise.cache.manager import CacheManager
from reprise.cache.moves import CapturePiece
from reprise.cache.transfer.capture import Captured, CaptureSink
from reprise.cache.transfer.device_streams import Fence
from reprise.cache.transfer.transfer import Transfer
from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.step.arrival import Arrival
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.engine.step.ports import ParkedReader
from reprise.engine.step.prompt_logprobs import note_prompts
from reprise.kernels.attention.ragged_batch import AttentionMeta
from reprise.scheduler.sequence import Chunk


@dataclass(slots=True)
class Computed:
    """A batch whose forward pass was launched, with its results, which may not be computed yet."""

    chunks: list[Chunk]
    ready: list[RunningChoice]  # choices for which a token may be drawn
    logits: Tensor  # [rows, vocab]: of each of `ready` one, and another for every token of its draft
    late: set[str]  # requests whose load was not there in time: what was computed for them is void
    waited_s: float  # time waited for loads
    pieces: list[CapturePiece] | None  # where the rows are saved to, if that had to be decided before
    attention: dict[str, list[float]]  # request -> the part of its attention that each block of its context got
    reads_parked: bool  # the step took as long as DRAM needed
    drafts: dict[str, list[int]]  # sequence -> tokens that were computed after its newest one
    saves_drafts: bool  # whether `pieces` has their rows
    begun: Fence  # before the forward pass
    done: Fence  # after the forward pass

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks) + sum(map(len, self.drafts.values()))

    @property
    def only_decodes(self) -> bool:
        return all(chunk.num_tokens == 1 for chunk in self.chunks)

    @property
    def first_rows(self) -> list[int]:
        """The index in `logits` of the row from which each choice in `ready` (those that draw a token in this step)
        draws its next token. The rows of a choice's draft come right after it."""
        if not self.drafts:
            return list(range(len(self.ready)))
        return [0, *itertools.accumulate(1 + len(choice.draft) for choice in self.ready)][:-1]

    @property
    def first_logits(self) -> Tensor:
        """The logits of `first_rows`: [len(ready), vocab]."""
        return self.logits[self.first_rows] if self.drafts else self.logits

    def batch_row(self, request_id: str) -> int:
        """Return the index of a sequence's first row in the batch."""
        row = 0
        for chunk in self.chunks:
            name = chunk.sequence.request_id
            if name == request_id:
                return row
            row += chunk.num_tokens + len(self.drafts.get(name, ()))
        raise KeyError(request_id)

    def forget_drafts(self) -> None:
        """Drop all drafts, so that only the next token is drawn for each choice."""
        firsts = self.first_rows
        for choice in self.ready:
            choice.draft = []
        if self.drafts:
            self.logits = self.logits[firsts]

    def drop(self, request_ids: Container[str]) -> None:
        """Remove these requests from `ready`, so that no token is drawn for them."""
        ready: list[RunningChoice] = []
        kept: list[int] = []
        for choice, row in zip(self.ready, self.first_rows, strict=True):
            if choice.sequence.request_id not in request_ids:
                ready.append(choice)
                kept += range(row, row + 1 + len(choice.draft))
        for choice in self.ready:
            if choice.sequence.request_id in request_ids:
                choice.draft = []
        if len(ready) < len(self.ready):
            self.ready, self.logits = ready, self.logits[kept]


class StepCompute:
    """A runner of forward passes. Called by `BatchStep`, once for each step, in the engine's loop.

    On CUDA a forward pass is launched and not waited for. While it still runs, its KV rows are recorded as computed,
    their saves are ordered, and room is made for them; only drawing a token waits for it. A pass is launched when the
    previous one has ended, so that no request waits for more than one pass, and the host memory that a pass reads may
    be filled anew.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        cache: CacheManager,
        transfer: Transfer,
        tables: BlockTables,
        device: torch.device,
        sink: CaptureSink | None,
        parked: ParkedReader | None,
    ) -> None:
        """Set up. sink: None while there is no tier below HBM. parked: None if HBM holds every context."""
        self.runner = runner
        self.tables = tables
        self._cache, self._page_size = cache, cache.page_size
        self._transfer = transfer
        self._stream = transfer.compute
        self._device = device
        self._sink = sink
        self._parked = parked
        self._last: Fence | None = None  # fence after the last pass
        self.eager_decode_steps = 0
        """Number of steps on CUDA that only decoded, and whose kernels Python launched one by one instead of as a
        graph."""

    def run(self, chunks: list[Chunk], choices: RunningChoices, drafts: dict[str, list[int]]) -> Computed:
        """Launch a forward pass, when the previous one has ended. One call of `capture` has to follow. drafts: sequence
        id -> tokens to compute after its newest one, all within that token's block."""
        found = [choices[chunk.sequence.request_id] for chunk in chunks]
        items = [
            self._item(chunk, choice, drafts.get(chunk.sequence.request_id, []))
            for chunk, choice in zip(chunks, found, strict=True)
        ]
        on_host = self.runner.takes_host_batches and self._parked is None
        device = torch.device("cpu") if on_host else self._device
        batch = build_batch(items, self.tables, self._page_size, device)
        jobs = {i.request_id: load.job for i in items if (load := self._cache.requests.context(i.request_id).load)}
        arrival = None
        if jobs:
            arrival = Arrival(
                self._transfer, jobs, patience_s=self._cache.requests.patience_s, has_bystanders=len(jobs) < len(items)
            )
        if self._sink is not None:
            self._sink.step = Captured()
        pieces, saved = None, None
        if self._sink is not None and self.runner.saves_rows and not jobs:
            # Rows that need no load under way are written to their slots by the kernels that compute them.
            pieces = self._pieces(chunks, (), drafts)
            saved = self._transfer.places(pieces, batch.token_ids.shape[0])
        reads_parked = self._reads_parked(batch.meta, items)
        if self._last is not None:
            self._last.wait()
        begun, replayed = self._stream.fence(), self.runner.replayed_steps
        try:
            logits = self.runner.forward(batch, arrival, saved)
        finally:
            self.runner.stand_in = None
            done = self._last = self._stream.fence()
        is_decode = self._device.type == "cuda" and all(chunk.num_tokens == 1 for chunk in chunks) and not drafts
        self.eager_decode_steps += is_decode and self.runner.replayed_steps == replayed
        if reads_parked and self._parked is not None:
            done.wait()  # it reads slots, and what comes later does not wait for a step to have read them
            for request_id, keys in self._parked.take_lost().items():
                self._cache.lost(request_id, keys)
        for choice, item in zip(found, items, strict=True):
            choice.selected_tokens += item.partial
        return Computed(
            chunks=chunks,
            ready=[choice for choice, item in zip(found, items, strict=True) if item.wants_logits],
            logits=note_prompts(items, found, logits) if any(item.prompt_rows for item in items) else logits,
            late=set() if arrival is None else arrival.late,
            waited_s=0.0 if arrival is None else arrival.waited_s,
            pieces=pieces,
            attention={items[place].request_id: shares for place, shares in self._watched().items()},
            reads_parked=reads_parked,
            drafts=drafts,
            saves_drafts=pieces is not None,
            begun=begun,
            done=done,
        )

    def close(self) -> None:
        """End the thread that copies layers' weights to HBM, if there is one. No other call follows."""
        if self.runner.weights is not None:
            self.runner.weights.close()

    def free_memory(self) -> None:
        """Give back the memory that the allocator keeps, after a pass has failed for lack of memory."""
        if self._sink is not None:
            self._sink.step = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _reads_parked(self, meta: AttentionMeta, items: Sequence[BatchItem]) -> bool:
        """Prepare reading parked blocks, which lie in DRAM only. Returns whether a sequence of the step has any."""
        if self._parked is None or not self._parked.begin(
            meta, [self._cache.requests.context(item.request_id) for item in items]
        ):
            return False
        self.runner.stand_in = self._parked
        return True

    def _watched(self) -> dict[int, list[float]]:
        """Return the attention that was recorded in the step that has just run: for each watched sequence, by its index
        in the batch, the share of its attention that each of its blocks got, in order."""
        return self.runner.watch.take() if self.runner.watch is not None else {}

    def capture(self, computed: Computed, failed: Container[str]) -> tuple[Captured | None, list[CapturePiece]]:
        """Return (captured, pieces), which `StepMoves.hold` takes. captured: the step's own tensors of KV, for the
        layers that do not write their rows to DRAM themselves; None if there are no such layers. pieces: which rows of
        the batch go to which DRAM slots, for all sequences but `failed`. failed: ids of the sequences whose rows are
        void."""
        pieces = computed.pieces
        if pieces is None or failed:
            pieces = computed.pieces = self._pieces(computed.chunks, failed, computed.drafts, only_newest=True)
            computed.saves_drafts = False
        shown = None
        if self._sink is not None:
            shown, self._sink.step = self._sink.step, None
        return shown if shown is not None and shown.layers else None, pieces

    def capture_accepted(self, computed: Computed, request_id: str, accepted: int) -> None:
        """Add the rows of a draft's accepted tokens to the rows of the step that are saved below HBM, unless they are
        among them already. accepted: how many of the draft's tokens were right. Call it after `capture`, and before
        these rows are counted as part of the computed context."""
        if computed.pieces is not None and not computed.saves_drafts:
            row = computed.batch_row(request_id) + 1
            computed.pieces += self._cache.requests.capture(request_id, accepted, row)

    def _pieces(
        self,
        chunks: list[Chunk],
        failed: Container[str],
        drafts: dict[str, list[int]],
        *,
        only_newest: bool = False,
    ) -> list[CapturePiece]:
        """Return which rows of a step go to which DRAM slots. The rows of drafts are saved too, before it is known
        whether they are right; a later step overwrites wrong rows before their block is complete. only_newest: leave
        rows of drafts out."""
        pieces: list[CapturePiece] = []
        batch_row = 0
        for chunk in chunks:
            name = chunk.sequence.request_id
            drafted = len(drafts.get(name, ()))
            if name not in failed:
                count = chunk.num_tokens + (0 if only_newest else drafted)
                pieces += self._cache.requests.capture(name, count, batch_row)
            batch_row += chunk.num_tokens + drafted
        return pieces

    def _item(self, chunk: Chunk, choice: RunningChoice, draft: list[int]) -> BatchItem:
        sequence, selecting = chunk.sequence, self.runner.selecting
        first, context = sequence.computed_tokens, self._cache.requests.context(sequence.request_id)
        return BatchItem(
            request_id=sequence.request_id,
            token_ids=sequence.token_ids[first : first + chunk.num_tokens] + draft,
            first_row=first,
            # Tables hold valid numbers; no page that is parked is looked up.
            pages=context.rows.pages if self._parked is None else [max(0, page) for page in context.rows.pages],
            wants_logits=chunk.is_last,
            prompt_rows=choice.prompt_rows(first, chunk.num_tokens),
            draft_rows=len(draft),
            partial=selecting is not None
            and choice.reads_in_part
            and chunk.num_tokens == 1
            and not draft
            and sequence.output_tokens > 0  # false for the last token of a prompt
            and context.load is None  # what is still being loaded may come to nothing, with what was chosen of it
            and selecting.takes(first + 1),
        )
