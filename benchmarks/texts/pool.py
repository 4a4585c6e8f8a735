"""Measures what a pool costs that has no room for all KV, by which rows leave it: benchmarks/results/pool*.json.

    python -m benchmarks.texts pool --data DIR [--model smollm2] [--texts N] [--rooms 0.8 0.6]

InfiniGen (arXiv 2406.19707, section 4.4) keeps the KV of a context in a pool of main memory. When that is full, a row
leaves it for every new one, for each layer and KV head by itself, and does not come back:

    counter     the row that was chosen the fewest times; when a count is at its greatest, all are halved
    counter32   likewise, but the newest 32 rows stay: a new row's count is 0, so else it leaves before it can be chosen
    lru         the row that was chosen the longest ago
    fifo        the oldest row

Text: books, chats and WikiText-2. A history is computed as a prompt is, then tokens are decoded one by one, and read
what `infinigen` chooses of the rows that are in the pool. A pool of 0.8 has room for 80 % of the whole text's rows; one
of 1 has room for all, and is what the others are compared with: perplexity, and KL in nats a token. Neither end of the
context is kept as the server's selectors keep it (docs/selectors.md), because a policy that lets the first rows leave
would be spared. The first layer is read whole, as there.

Held: with room for 80 %, counting (counter32) raises perplexity by at most 1 %, and first in, first out by more.
"""

from argparse import ArgumentParser
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.models import name_of, result_name
from benchmarks.harness.tables import show_rows
from benchmarks.texts.history import summary
from benchmarks.texts.reader import Reader, compared_rows
from benchmarks.texts.reading import encoder, text_options, texts_of
from benchmarks.texts.selectors import SIDE_BY_SIDE
from reprise.engine.codec.quality import Quality
from reprise.kernels.attention.ragged_batch import KvPages, Selection
from reprise.kernels.attention.selection import Candidates, Selecting, as_selection, context_keys, most_rows
from reprise.kernels.selectors.infinigen import InfinigenSelector, how_many, skewed_weights

POLICIES = ("counter", "counter32", "lru", "fifo")
RECENT = 32
MOST_COUNT = 255  # limit of a counter of eight bits
ROOM, MOST_CHANGE = 0.8, 0.01


class Pool:
    """The rows of one layer of one text that are in the pool, for each KV head by itself."""

    def __init__(self, policy: str, *, kv_heads: int, rows: int, room: int) -> None:
        """policy: of POLICIES. rows: of the whole text. room: rows of a head that fit, at least one."""
        self.policy, self.room = policy, room
        self.is_in = torch.zeros(kv_heads, rows, dtype=torch.bool)
        self.counts = torch.zeros(kv_heads, rows, dtype=torch.int64)
        self.chosen_at = torch.zeros(kv_heads, rows, dtype=torch.int64)
        self._ages = torch.arange(rows).expand(kv_heads, rows)
        self._len = 0

    def grow(self, context: int) -> None:
        """Take the rows up to `context` in, the newest last. Rows leave until the others fit."""
        for row in range(self._len, context):
            self.is_in[:, row] = True
            self.chosen_at[:, row] = row
            if row >= self.room:
                self.is_in[torch.arange(len(self.is_in)), self._leaving(row)] = False
        self._len = context

    def note(self, chosen: Tensor) -> None:
        """Note what was chosen for the newest row, [kv_heads, rows] indices."""
        self.chosen_at.scatter_(1, chosen, self._len)
        self.counts.scatter_add_(1, chosen, torch.ones_like(chosen))
        full = self.counts.amax(1) >= MOST_COUNT
        self.counts[full] //= 2

    def _leaving(self, newest: int) -> Tensor:
        """Return the row of each head that leaves: never the newest, and of equals the oldest."""
        worth = {"lru": self.chosen_at, "fifo": self._ages}.get(self.policy, self.counts)
        last = max(1, newest - RECENT) if self.policy == "counter32" else newest
        found: Tensor = worth[:, :last].masked_fill(~self.is_in[:, :last], torch.iinfo(torch.int64).max).argmin(1)
        return found


class PooledSelector:
    """A selector that chooses as InfiniGen does, of what is in the pools. Sequence i of a step is text i."""

    name = "pooled"
    index_bytes_per_token = 0
    looks_ahead = True

    def __init__(self, inner: InfinigenSelector, *, share: float, policy: str, rows: int, room: int) -> None:
        self._inner, self._share = inner, share
        self._policy, self._rows, self._room = policy, rows, room
        self._pools: dict[tuple[int, int], Pool] = {}  # (text, layer) -> its pool

    def choose(self, layer: int, queries: Tensor, kv: KvPages, candidates: Candidates) -> Selection | None:
        """Implement `KvSelector.choose`."""
        rows = {}
        for at, context in enumerate(candidates.contexts):
            keys = context_keys(kv, candidates.table[at], context)
            pool = self._pool(candidates.sequences[at], layer, keys.shape[1])
            pool.grow(context)
            weight = skewed_weights(queries[at], keys, self._inner.skews[layer])
            weight = weight.masked_fill(~pool.is_in[:, :context], -torch.inf)
            weight -= weight.amax(1, keepdim=True)
            weight[:, -1] = torch.inf
            most = min(how_many(weight, most_rows(context, self._share)), self._room)
            chosen = weight.topk(most, dim=1).indices.sort(1).values
            pool.note(chosen)
            rows[at] = chosen.int()
        return as_selection(candidates, rows)

    def _pool(self, text: int, layer: int, kv_heads: int) -> Pool:
        if (pool := self._pools.get((text, layer))) is None:
            pool = Pool(self._policy, kv_heads=kv_heads, rows=self._rows, room=self._room)
            self._pools[text, layer] = pool
        return pool


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    history, length = arguments.history, arguments.history + arguments.scored
    reader = Reader(
        arguments.model, texts=SIDE_BY_SIDE, most_tokens=length + 1, share=arguments.share, threads=arguments.threads
    )
    inner = reader.selecting("infinigen").selector
    assert isinstance(inner, InfinigenSelector)
    texts = texts_of(arguments.data, encoder(arguments.model), [length + 1] * arguments.texts)
    arms = {f"{policy} {room:g}": (policy, room) for room in arguments.rooms for policy in POLICIES}
    scores: dict[str, list[Quality]] = {name: [] for name in arms}

    def pooled(policy: str, room: float) -> Selecting:
        fits = max(1, int(room * length))
        return Selecting(PooledSelector(inner, share=arguments.share, policy=policy, rows=length, room=fits), 0)

    groups = [texts[at : at + SIDE_BY_SIDE] for at in range(0, len(texts), SIDE_BY_SIDE)]
    for group in run.track(groups, "texts"):
        reader.fill(group, history)
        whole = reader.read_behind(group, history, pooled("fifo", 1))
        for name, arm in arms.items():
            for plain, found, ids in zip(whole, reader.read_behind(group, history, pooled(*arm)), group, strict=True):
                scores[name].append(compared_rows(plain, found, ids[history + 1 :]))
    pools = {name: summary(parts) for name, parts in scores.items()}
    return {
        "settings": {
            "model": name_of(arguments.model), "share": arguments.share, "texts": len(texts), "history": history,
            "scored": arguments.scored,
        },
        "pools": pools, "held": verdicts(pools),
    }  # fmt: skip


def verdicts(pools: dict[str, dict[str, float]]) -> dict[str, bool]:
    """Judge what is held, of the room for which it is."""
    counter, fifo = pools.get(f"counter32 {ROOM:g}"), pools.get(f"fifo {ROOM:g}")
    if counter is None or fifo is None:
        return {}
    room = f"room for {ROOM:.0%}"
    return {
        f"{room}: counting costs at most {MOST_CHANGE:.0%} of perplexity": counter["perplexity_change"] <= MOST_CHANGE,
        f"{room}: first in, first out costs more": fifo["perplexity_change"] > MOST_CHANGE,
    }


def show(console: Console, result: Any) -> None:
    settings = result["settings"]
    title = f"{settings['model']}, {settings['texts']} texts, {settings['scored']} tokens behind {settings['history']}"
    show_rows(console, title, result["pools"])


def options(parser: ArgumentParser) -> None:
    text_options(parser)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--history", type=int, default=1024, help="tokens before those that are decoded")
    parser.add_argument("--scored", type=int, default=512, help="tokens that are decoded")
    parser.add_argument("--rooms", type=float, nargs="+", default=[0.8, 0.6], help="shares of a text's rows")
    parser.add_argument("--share", type=float, default=0.2, help="of the rows that may be read, the paper's greatest")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("pool", arguments.model),
    about=__doc__, measure=measure, show=show, options=options,
)  # fmt: skip
