"""The engine's own path over a tiny model: pages, flat ragged batches, random chunks, and a sink that records rows."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.cpu.optimise import Optimised, optimise_for_cpu
from reprise.engine.model.hf_model import KvSink, ModelRunner, prepare
from reprise.engine.model.pages import make_pages
from reprise.engine.model.probe import KvShape, ProbeResult, probe
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.ragged_batch import AttentionBackend, KvPages, PageFormat
from reprise.kernels.kv_copy import gather_rows
from tests.engine.models import CPU, copied, random_ids
from tests.engine.raw_codec import RawCodec, Segment

PAGE = 32
NUM_PAGES = 24
# Two contexts lie in a row and are attended to in place, two are scattered and gathered first.
PLACES = [(75, [4, 5, 6]), (40, [12, 13]), (110, [9, 20, 1, 15]), (33, [19, 2])]


@dataclass(frozen=True)
class Served:
    """A model that we drive, and an independent one of the same weights that we must never touch."""

    ours: Any
    vanilla: Any
    probed: ProbeResult


def serve(model: Any, backend: AttentionBackend | None = None) -> Served:
    vanilla = copied(model)
    ours = prepare(model)
    return Served(ours, vanilla, probe(ours, backend or BACKENDS["torch_cpu"](), PAGE))


def optimise(model: Any, probed: ProbeResult) -> Optimised:
    """Put the engine's faster modules into a model, in place."""
    plain = PageFormat(next(model.parameters()).dtype)
    return optimise_for_cpu(model, probed, BACKENDS["torch_cpu"](), False, plain)


@dataclass(slots=True)
class Text:
    """A sequence on its way through the engine's path."""

    token_ids: list[int]
    pages: list[int]  # all that it will need, in order
    logits: Tensor  # [tokens, vocab], filled as it goes
    done: int = 0


class Pool:
    """Pages of a model, and steps over them built by the engine's own classes."""

    def __init__(
        self,
        model: Any,
        shapes: list[KvShape],
        *,
        sink: KvSink | None = None,
        backend: AttentionBackend | None = None,
    ) -> None:
        dtype = next(model.parameters()).dtype
        self.pages = make_pages(shapes, NUM_PAGES, PAGE, PageFormat(dtype), CPU)
        for layer in self.pages:
            layer.k.fill_(float("nan"))  # a row that is read before it is written shows
            layer.v.fill_(float("nan"))
        self.runner = ModelRunner(
            model=model, pages=self.pages, backend=backend or BACKENDS["torch_cpu"](), sink=sink
        )  # fmt: skip
        self.shares: list[tuple[Text, int]] = []  # shares of the step that runs: texts stand where it began
        self.reads_in_part = False  # whether single rows may
        self._tables = BlockTables(max_seqs=8, max_pages=8)
        self._vocab = model.config.get_text_config().vocab_size

    def text(self, token_ids: list[int], pages: list[int]) -> Text:
        return Text(token_ids, pages, torch.full((len(token_ids), self._vocab), float("nan")))

    def step(self, shares: Sequence[tuple[Text, int]]) -> None:
        """The next so many tokens of each text in one flat batch; keeps the logits of every row."""
        self.shares = list(shares)
        items = []
        for text, count in shares:
            pages = text.pages[: -(-(text.done + count) // PAGE)]
            tokens, partial = text.token_ids[text.done :][:count], self.reads_in_part and count == 1
            items.append(BatchItem(str(id(text)), tokens, text.done, pages, False, partial=partial))
        batch = build_batch(items, self._tables, PAGE, CPU)
        batch = replace(batch, logit_rows=torch.arange(len(batch.token_ids)))
        logits = self.runner.forward(batch, None).float()
        for (text, count), part in zip(shares, logits.split([count for _, count in shares]), strict=True):
            text.logits[text.done : text.done + count] = part
            text.done += count

    def run(self, texts: Sequence[Text], seed: int) -> None:
        """Every text to its end, in random steps that mix chunks of a prefill with single rows."""
        rng = random.Random(seed)
        while unfinished := [text for text in texts if text.done < len(text.token_ids)]:
            chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
            sizes = [rng.choice((1, 1, 2, rng.randint(5, 40))) for _ in chosen]
            shares = [
                (text, min(size, len(text.token_ids) - text.done)) for text, size in zip(chosen, sizes, strict=True)
            ]
            self.step(shares)

    def rows(self, layer: int, text: Text) -> tuple[Tensor, Tensor]:
        """K and V [tokens, kv_heads, dim] of a text as they lie in the pages."""
        slots = slots_of(text)
        return gather_rows(self.pages[layer].k, slots), gather_rows(self.pages[layer].v, slots)


def slots_of(text: Text) -> Tensor:
    """[tokens] int64: where the rows of a text are in the pool."""
    return torch.tensor([text.pages[row // PAGE] * PAGE + row % PAGE for row in range(len(text.token_ids))])


class Saver:
    """A save path: un-rotated KV of every text, encoded as it is computed."""

    def __init__(self, probed: ProbeResult) -> None:
        def rotate(layer: int, k_plain: Tensor, positions: Tensor) -> Tensor:
            rope = probed.ropes[layer]
            return k_plain if rope is None else rope.rotate(k_plain, positions)

        self.codec = RawCodec(rotate=rotate)
        self.pool: Pool
        self.segments: dict[tuple[int, int], list[Segment]] = defaultdict(list)  # (text, layer) -> its record

    def write(self, layer: int, k_plain: Tensor, v: Tensor) -> None:
        start = 0
        for text, count in self.pool.shares:
            rows = slice(start, start + count)
            self.segments[id(text), layer] += self.codec.encode(layer, k_plain[rows], v[rows], text.done)
            start += count
        assert start == len(k_plain) == len(v)

    def load(self, text: Text, layer: int, slots: Tensor, first_position: int, pages: KvPages) -> None:
        positions = torch.arange(first_position, first_position + len(text.token_ids))
        self.codec.materialise(self.segments[id(text), layer], slots, positions, pages)


@dataclass(frozen=True)
class Played:
    """Texts that a model was run over, everything of it saved."""

    served: Served
    saver: Saver
    pool: Pool
    texts: list[Text]


def play(served: Served, seed: int) -> Played:
    saver = Saver(served.probed)
    saver.pool = pool = Pool(served.ours, served.probed.shapes, sink=saver)
    texts = [pool.text(random_ids(length, seed + i), pages) for i, (length, pages) in enumerate(PLACES)]
    pool.run(texts, seed)
    return Played(served, saver, pool, texts)
