"""A layer's attention at the shapes of serving steps: ours, and FlashAttention 3 where it was carried; and whether a
graph truly waits for events that another stream records, on which loads beside graphs would stand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_day.carried import NotCarried, flash_attention_3
from benchmarks.gpu_day.items import Asked, Item, Values
from benchmarks.gpu_day.timing import device_ms
from reprise.kernels.attention import BACKENDS
from reprise.kernels.attention.ragged_batch import AttentionBackend, AttentionMeta, AttentionParams, KvPages

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
SCALE = DIM**-0.5
_DELAY_CYCLES = 60_000_000  # some 30 ms, after which a graph that does not wait has long ended
# (rows, context) of each sequence
_ON_GPU = {
    "1 x 1k": [(1, 1024)],
    "1 x 28k": [(1, 28_000)],
    "32 x 1k": [(1, 1024)] * 32,
    "64 x 1k": [(1, 1024)] * 64,
    "101 behind 28k": [(101, 28_101)],
    "512 behind 27.5k": [(512, 28_012)],
    "4096 behind nothing": [(4096, 4096)],
    "16 x 1k and 101 behind 28k": [(1, 1024)] * 16 + [(101, 28_101)],
}
_DRY = {"2 x 40": [(1, 40)] * 2, "8 behind 40": [(8, 48)]}


@dataclass(slots=True)
class Layer:
    """The attention backends that all items of the section use. why_not: why FlashAttention 3 is not used."""

    asked: Asked
    ours: AttentionBackend
    flash: Any = None
    why_not: str = ""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))


@dataclass(slots=True)
class Case:
    """The queries, pages and tables of one serving step."""

    q: Tensor
    pages: KvPages
    meta: AttentionMeta


def open_section(asked: Asked) -> Layer:
    layer = Layer(asked, BACKENDS["triton" if asked.on_gpu else "torch_cpu"]())
    try:
        layer.flash = flash_attention_3(asked.carried)
    except (NotCarried, ImportError, OSError) as error:
        layer.why_not = str(error)
    return layer


def items(asked: Asked) -> Sequence[Item]:
    shapes = _ON_GPU if asked.on_gpu else _DRY
    found = [Item(name, 12, partial(attention, sequences)) for name, sequences in shapes.items()]
    return [*found, Item("a graph waits for events outside", 15, outside_events)] if asked.on_gpu else found


def attention(sequences: list[tuple[int, int]], layer: Layer) -> Iterator[Values]:
    case, device = _case(sequences, layer), layer.asked.device
    params = AttentionParams(scale=SCALE, window=None, softcap=None, sinks=None)
    mine = layer.ours.forward(case.q, case.pages, case.meta, params)
    taken = device_ms(lambda: layer.ours.forward(case.q, case.pages, case.meta, params), device)
    found: dict[str, Any] = {"ours": layer.ours.name, "ours_ms": taken}
    if layer.flash is None:
        yield found | {"flash_attention_3": layer.why_not}
        return
    theirs = _flash(layer, case)
    found["fa3_ms"] = device_ms(lambda: _flash(layer, case), device)
    found["differ_by"] = round(float((mine.float() - theirs.float()).norm() / theirs.float().norm()), 5)
    yield found


def outside_events(layer: Layer) -> Iterator[Values]:
    """Test whether a CUDA graph waits for an external event: it copies data that another stream writes late, before it
    records the event."""
    device = layer.asked.device
    source, target = torch.zeros(1 << 20, device=device), torch.empty(1 << 20, device=device)
    arrived: Any = torch.cuda.Event(external=True)
    side, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    arrived.record(side)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.cuda.current_stream().wait_event(arrived)
        target.copy_(source)
    with torch.cuda.stream(side):
        torch.cuda._sleep(_DELAY_CYCLES)
        source.fill_(1)
        arrived.record(side)
    graph.replay()
    torch.cuda.synchronize(device)
    waits = bool((target == 1).all())
    yield {"waits": waits} | ({} if waits else {"error": "the graph read what lay there before"})


def _case(sequences: list[tuple[int, int]], layer: Layer) -> Case:
    device, draw = layer.asked.device, layer.generator
    rows, contexts = ([pair[place] for pair in sequences] for place in (0, 1))
    per_sequence = [-(-context // PAGE) for context in contexts]
    order = torch.randperm(sum(per_sequence), generator=draw, dtype=torch.int32)
    table = torch.zeros(len(sequences), max(per_sequence), dtype=torch.int32)
    for place, pages in enumerate(order.split(per_sequence)):
        table[place, : len(pages)] = pages
    pools = torch.randn(2, len(order), PAGE, KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32, device=device)
    meta = AttentionMeta(
        query_lens=rows,
        context_lens=contexts,
        query_start=starts,
        context_len=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slots=torch.zeros(sum(rows), dtype=torch.int64, device=device),
    )
    q = torch.randn(sum(rows), HEADS, DIM, device=device, dtype=torch.bfloat16)
    return Case(q, KvPages(pools[0], pools[1]), meta)


def _flash(layer: Layer, case: Case) -> Tensor:
    found: Tensor = layer.flash.flash_attn_with_kvcache(
        case.q,
        case.pages.k,
        case.pages.v,
        cache_seqlens=case.meta.context_len,
        page_table=case.meta.block_table,
        cu_seqlens_q=case.meta.query_start,
        max_seqlen_q=max(case.meta.query_lens),
        softmax_scale=SCALE,
        causal=True,
    )
    return found
