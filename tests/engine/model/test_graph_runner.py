"""Runs decode steps through graphs that are replayed by calling what was captured: padding, buckets, rows to save."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from reprise.cache.transfer.capture import Captured, CaptureSink
from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.graph_runner import RETRY_AFTER_STEPS, GraphRunner
from reprise.engine.model.hf_model import ModelRunner, prepare
from reprise.engine.model.pages import make_pages
from reprise.engine.model.probe import probe
from reprise.engine.model.warm_up import WarmUp
from reprise.kernels.attention.naive import NaiveAttention
from reprise.kernels.attention.ragged_batch import AttentionMeta, AttentionParams, KvPages, PageFormat
from tests.engine.models import CPU, VOCAB, copied, family_model

PAGE, PAGES, MOST = 16, 24, 96


class NoPlan:
    """The plan of a backend that plans nothing before it attends."""

    def num_items(self, context_lens: Sequence[int]) -> int:
        return sum(-(-length // 32) for length in context_lens)

    def plans(self, scratch: dict[str, Any], most_items: int, most_sequences: int) -> dict[str, Any]:
        return {}


class CountedCapture:
    """Replays by calling, and counts."""

    held_bytes = 0

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        call()

        def replay() -> None:
            self.replays += 1
            logits, kept = runner_outputs(call)
            for target, source in zip(kept, logits, strict=True):
                target.copy_(source)

        outputs = [*cells(call)]

        def runner_outputs(call: Callable[[], None]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            call()
            return cells(call), outputs

        return replay


def cells(call: Callable[[], None]) -> list[torch.Tensor]:
    """The tensors that a captured call has left in its closure: what a graph has at fixed addresses."""
    found = next(cell.cell_contents for cell in call.__closure__ or () if isinstance(cell.cell_contents, list))
    logits, kept = found
    return [logits, *(kept or ())]


def runners(name: str, capture: Any, *, saving: bool) -> tuple[ModelRunner, GraphRunner]:
    """The same model on pages of its own each: eager, and by graphs."""
    made: list[Any] = []
    plain = family_model(name)
    for kind in (ModelRunner, GraphRunner):
        model = prepare(copied(plain))
        backend = NaiveAttention()
        found = probe(model, backend, PAGE)
        pages = make_pages(found.shapes, PAGES + 1, PAGE, PageFormat(torch.float32), CPU)
        for layer in pages:
            layer.k.zero_()
            layer.v.zero_()
        sink = CaptureSink() if saving else None
        extra: dict[str, Any] = {}
        if kind is GraphRunner:
            extra = {"scratch_page": PAGES, "max_context": MOST, "planner": NoPlan(), "capture": capture}
            extra["held_tokens"] = PAGES * PAGE
        made.append(kind(model=model, pages=pages, backend=backend, sink=sink, **extra))
    return made[0], made[1]


def saved(runner: ModelRunner) -> list[torch.Tensor]:
    assert isinstance(runner.sink, CaptureSink)
    assert runner.sink.step is not None
    return [*runner.sink.step.keys, *runner.sink.step.values]


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
def test_replayed_steps_are_eager_steps(name: str) -> None:
    """Sequences come, go and grow over pages; logits, pages and what is saved are those of steps without graphs, to the
    bit. These are given as many rows as a graph has, because numbers of rows are summed in other orders."""
    capture, rng = CountedCapture(), random.Random(0)
    eager, replaying = runners(name, capture, saving=True)
    tables = BlockTables(max_seqs=8, max_pages=MOST // PAGE)
    free = list(range(PAGES))
    rng.shuffle(free)
    texts: dict[str, list[int]] = {}
    pages: dict[str, list[int]] = {}
    for step in range(60):
        if (len(texts) < 3 and rng.random() < 0.5) or not texts:
            new_name = f"s{step}"
            texts[new_name], pages[new_name] = [], [free.pop() for _ in range(4)]
        elif rng.random() < 0.1:
            gone = rng.choice(sorted(texts))
            free += pages.pop(gone)
            del texts[gone]
            tables.drop(gone)
            continue
        items = []
        for key, text in texts.items():
            new = [rng.randrange(VOCAB) for _ in range(1 if text else 5)]
            items.append(BatchItem(key, new, len(text), pages[key], wants_logits=True))
            text += new
        for runner in (eager, replaying):
            assert isinstance(runner.sink, CaptureSink)
            runner.sink.step = Captured()
        found = replaying.forward(build_batch(items, tables, PAGE, CPU), None)
        if all(len(item.token_ids) == 1 for item in items):
            padding = (1 << (len(items) - 1).bit_length()) - len(items)
            items += [BatchItem(f"over{i}", [0], 0, [PAGES], wants_logits=True) for i in range(padding)]
        wanted = eager.forward(build_batch(items, tables, PAGE, CPU), None)
        assert torch.equal(found, wanted[: len(found)])
        for one, other in zip(saved(eager), saved(replaying), strict=True):
            assert torch.equal(other, one[: len(other)])
        for one_layer, other_layer in zip(eager.pages, replaying.pages, strict=True):
            assert torch.equal(other_layer.k[:PAGES], one_layer.k[:PAGES])
            assert torch.equal(other_layer.v[:PAGES], one_layer.v[:PAGES])
        for full in [name for name, text in texts.items() if len(text) >= 4 * PAGE - 1]:
            free += pages.pop(full)
            del texts[full]
            tables.drop(full)
    assert replaying.why_not == ""
    assert capture.replays > 30
    assert capture.captures < 10


def test_steps_before_any_request_capture_those_of_all_sizes() -> None:
    capture = CountedCapture()
    _, replaying = runners("llama", capture, saving=True)
    WarmUp(runner=replaying, most_rows=MOST, page_size=PAGE, device=CPU).decode(most_sequences=4)
    captured = capture.captures
    assert (captured >= 3, replaying.why_not) == (True, "")
    tables = BlockTables(max_seqs=4, max_pages=MOST // PAGE)
    for count in (1, 2, 3, 4):
        items = [
            BatchItem(f"{count}-{n}", [n], 32 + n, [3 * n, 3 * n + 1, 3 * n + 2], wants_logits=True)
            for n in range(count)
        ]
        assert isinstance(replaying.sink, CaptureSink)
        replaying.sink.step = Captured()
        replaying.forward(build_batch(items, tables, PAGE, CPU), None)
        for item in items:
            tables.drop(item.request_id)
    assert capture.captures == captured, "a turn has waited for a graph"


class Blind:
    """Attends to nothing, however long contexts are."""

    name, page_multiple = "blind", PAGE

    def forward(self, q: torch.Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> torch.Tensor:
        return q.new_zeros(*q.shape[:2], kv.v.shape[3])


class LongRanges:
    """Ranges of keys as Triton's attention has them, in tables that must not overflow."""

    def num_items(self, context_lens: Sequence[int]) -> int:
        return sum(-(-length // 512) for length in context_lens) + len(context_lens)

    def plans(self, scratch: dict[str, Any], most_items: int, most_sequences: int) -> dict[str, Any]:
        return {"ranges": self._Table(self, most_items, most_sequences)}

    class _Table:
        def __init__(self, planner: "LongRanges", most_items: int, most_sequences: int) -> None:
            self._planner, self._most_items, self._most_sequences = planner, most_items, most_sequences

        def launch(self, device: torch.device) -> None:
            pass

        def fill(self, launches: None, context_lens: Sequence[int]) -> None:
            assert len(context_lens) <= self._most_sequences
            assert self._planner.num_items(context_lens) <= self._most_items


WINDOW = 131_072


def long_runner(capture: Any, *, held_tokens: int = 1 << 22) -> GraphRunner:
    model = prepare(copied(family_model("llama")))
    pages = make_pages(probe(model, NaiveAttention(), PAGE).shapes, 3, PAGE, PageFormat(torch.float32), CPU)
    return GraphRunner(
        scratch_page=2,
        max_context=WINDOW,
        held_tokens=held_tokens,
        planner=LongRanges(),
        capture=capture,
        model=model,
        pages=pages,
        backend=Blind(),
        sink=None,
    )


def decode(runner: GraphRunner, contexts: Sequence[int]) -> None:
    """Run one step of sequences with contexts of these lengths."""
    tables = BlockTables(max_seqs=len(contexts), max_pages=WINDOW // PAGE)
    items = [
        BatchItem(f"s{n}", [5], context - 1, [0] * -(-context // PAGE), wants_logits=True)
        for n, context in enumerate(contexts)
    ]
    runner.forward(build_batch(items, tables, PAGE, CPU), None)


def test_no_context_waits_for_a_graph_after_the_start() -> None:
    """A turn that grows into 131k tokens passed a size, and its capture, at each doubling."""
    capture, rng = CountedCapture(), random.Random(1)
    runner = long_runner(capture)
    WarmUp(runner=runner, most_rows=2 * PAGE, page_size=PAGE, device=CPU).decode(most_sequences=6)
    captured, replays = capture.captures, capture.replays
    assert captured <= 32
    lengths = [1, 2, 511, 512, 513, 1025, 1536, 2048, 4097, 28_000, 65_537, WINDOW - 1, WINDOW]
    for sequences in range(1, 7):
        for context in lengths:
            decode(runner, [context] * sequences)
        decode(runner, [rng.choice(lengths) for _ in range(sequences)])
    assert capture.captures == captured
    assert capture.replays - replays == 6 * (len(lengths) + 1), "and all are replayed"
    assert runner.why_not == ""


def test_there_are_no_graphs_of_more_than_hbm_holds_several_times() -> None:
    capture = CountedCapture()
    WarmUp(runner=long_runner(capture), most_rows=2 * PAGE, page_size=PAGE, device=CPU).decode(most_sequences=8)
    small = CountedCapture()
    runner = long_runner(small, held_tokens=WINDOW)
    WarmUp(runner=runner, most_rows=2 * PAGE, page_size=PAGE, device=CPU).decode(most_sequences=8)
    assert small.captures < capture.captures
    captured = small.captures
    decode(runner, [WINDOW] * 8)  # sequences that share pages: computed eagerly
    assert small.captures == captured


def test_a_size_that_had_no_memory_at_the_start_is_captured_when_there_is() -> None:
    class FullAtFirst(CountedCapture):
        failures = 1

        def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
            if self.failures:
                self.failures -= 1
                raise torch.OutOfMemoryError("2 GiB")
            return super().__call__(call)

    capture = FullAtFirst()
    runner = long_runner(capture)
    WarmUp(runner=runner, most_rows=2 * PAGE, page_size=PAGE, device=CPU).decode(most_sequences=2)
    captured = capture.captures
    for _ in range(RETRY_AFTER_STEPS):
        decode(runner, [WINDOW, WINDOW])  # the largest is captured first
    assert capture.captures == captured + 1


def test_what_is_saved_outlives_the_next_replay() -> None:
    capture = CountedCapture()
    _, runner = runners("llama", capture, saving=True)
    tables = BlockTables(max_seqs=1, max_pages=MOST // PAGE)
    kept = []
    for row in range(3):
        assert isinstance(runner.sink, CaptureSink)
        runner.sink.step = Captured()
        runner.forward(build_batch([BatchItem("a", [5 + row], row, [0], wants_logits=True)], tables, PAGE, CPU), None)
        kept.append((saved(runner), [tensor.clone() for tensor in saved(runner)]))
    for now, then in kept:
        assert all(torch.equal(one, other) for one, other in zip(now, then, strict=True))


def test_a_model_that_cannot_be_captured_runs_eagerly() -> None:
    def refuse(call: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    eager, runner = runners("llama", refuse, saving=False)
    tables = BlockTables(max_seqs=1, max_pages=MOST // PAGE)
    batch = build_batch([BatchItem("a", [5], 0, [0], wants_logits=True)], tables, PAGE, CPU)
    assert torch.equal(runner.forward(batch, None), eager.forward(batch, None))
    assert "operation not permitted" in runner.why_not


def test_a_model_whose_layers_differ_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(tensors: list[torch.Tensor]) -> torch.Tensor:
        raise RuntimeError("stack expects each tensor to be equal size")

    eager, runner = runners("llama", CountedCapture(), saving=True)
    tables = BlockTables(max_seqs=1, max_pages=MOST // PAGE)
    batch = build_batch([BatchItem("a", [5], 0, [0], wants_logits=True)], tables, PAGE, CPU)
    monkeypatch.setattr(torch, "stack", differ)
    assert torch.equal(runner.forward(batch, None), eager.forward(batch, None))
    assert "equal size" in runner.why_not


def test_a_graph_that_computes_something_else_is_not_used() -> None:
    def spoil(call: Callable[[], None]) -> Callable[[], None]:
        call()
        outputs = cells(call)

        def replay() -> None:
            outputs[0].fill_(1.0)

        return replay

    eager, runner = runners("llama", spoil, saving=False)
    tables = BlockTables(max_seqs=1, max_pages=MOST // PAGE)
    batch = build_batch([BatchItem("a", [5], 0, [0], wants_logits=True)], tables, PAGE, CPU)
    assert torch.equal(runner.forward(batch, None), eager.forward(batch, None))
    assert "differ" in runner.why_not


def steps(runner: GraphRunner, count: int, sequences: int) -> None:
    """Run decode steps of so many sequences, each on a page of its own."""
    tables = BlockTables(max_seqs=sequences, max_pages=MOST // PAGE)
    for _ in range(count):
        items = [BatchItem(f"s{n}", [5 + n], 3, [n], wants_logits=True) for n in range(sequences)]
        runner.forward(build_batch(items, tables, PAGE, CPU), None)


def test_a_lack_of_memory_while_capturing_turns_nothing_off_for_good() -> None:
    class Full(CountedCapture):
        is_full = False

        def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
            if self.is_full:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().__call__(call)

    capture = Full()
    _, runner = runners("llama", capture, saving=False)
    steps(runner, 2, sequences=1)
    capture.is_full = True
    steps(runner, 2, sequences=4)
    assert (runner.why_not, capture.replays) == ("", 2)
    steps(runner, 2, sequences=1)
    assert capture.replays == 4, "steps of other sizes are replayed as before"
    capture.is_full = False
    steps(runner, RETRY_AFTER_STEPS, sequences=4)
    assert capture.captures == 2, "it is tried again, when there may be memory"


def test_a_device_that_has_failed_is_no_model_that_cannot_be_captured() -> None:
    def fail(call: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    _, runner = runners("llama", fail, saving=False)
    with pytest.raises(RuntimeError, match="illegal"):
        steps(runner, 1, sequences=1)
