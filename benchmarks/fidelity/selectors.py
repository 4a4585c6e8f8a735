"""What reading a part of long contexts changes, by selector: benchmarks/results/selectors*.json.

    python -m benchmarks.fidelity.selectors --data DIR [--model smollm2] [--texts N] [--needles N]

Text: books, chats and WikiText-2, of which none calibrated anything. A history of 4,096 or of 7,680 tokens is computed
as a prompt is; the 96 tokens after it are decoded one by one, as an answer is, and read what the selector chooses.
Their next-token distributions are compared with those of an answer that reads everything (KL, nats a token), on the
same kernels, in bf16. `rounding` reads everything too, but computes these tokens together, as a prompt: what bf16
alone does.

Needles: sentences such as " The password of Maria is copper." at places all over a book of 6,000 tokens. They are asked
for one after the other, in one conversation: the question is a prompt; its answer is decoded up to the password, which
counts as found if it is the likeliest among the passwords of all. What earlier answers read stays in the KV.

`read` is the share of the context's rows that is read, in the mean of layers and heads; `index` what a selector reads
besides, as a share of the KV's bytes.

Held: pairs read at most 20 % and cost at most 0.02 nats, diverge no more than infinigen, and find at least 95 % of the
needles that are found by reading everything.
"""

import gzip
import json
import random
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.harness.documents import documents
from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.in_process import config
from benchmarks.harness.models import model_directory, name_of, result_name
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.build.model import LoadedModel, ProbedModel, load, probe_model
from reprise.engine.build.selector import build_selector
from reprise.engine.config import EngineConfig
from reprise.engine.model.batch import BatchItem, BlockTables, build_batch
from reprise.engine.model.hf_model import ModelRunner
from reprise.engine.model.pages import make_pages
from reprise.kernels.attention.ragged_batch import KvPages, PageFormat, Selection
from reprise.kernels.attention.selection import Candidates, KvSelector, Selecting
from reprise.kernels.selectors import SELECTORS

HISTORIES = 4096, 7680
SCORED = 96
HAYSTACK = 6000  # tokens
CHUNK = 512  # tokens of a prompt that are computed together
SIDE_BY_SIDE = 4  # texts that are decoded together
NAMES = (
    *("Maria", "Peter", "Anna", "Thomas", "Julia", "Martin", "Laura", "Simon", "Helen", "David", "Alice", "Frank"),
    *("Clara", "Oscar", "Emma", "Henry", "Rosa", "Walter", "Nina", "Arthur", "Diana", "Philip", "Sarah", "Victor"),
)
PASSWORDS = (
    *("copper", "window", "garden", "silver", "orange", "thunder", "pepper", "castle", "mirror", "rocket", "violin"),
    *("tiger", "marble", "button", "candle", "forest", "bridge", "pencil", "honey", "desert", "ribbon", "anchor"),
    *("lemon", "hammer"),
)
LEAST_FOUND, MOST_READ, MOST_KL = 0.95, 0.2, 0.02


@dataclass
class Counting:
    """A selector that counts what it chooses."""

    inner: KvSelector
    read: float = 0.0  # shares of contexts, summed
    asked: int = 0

    def __post_init__(self) -> None:
        self.name, self.looks_ahead = self.inner.name, self.inner.looks_ahead
        self.index_bytes_per_token = self.inner.index_bytes_per_token

    def choose(self, layer: int, queries: Tensor, kv: KvPages, candidates: Candidates) -> Selection | None:
        """See KvSelector."""
        found = self.inner.choose(layer, queries, kv, candidates)
        if found is not None:
            share = found.counts.float().mean(1) / torch.tensor(candidates.contexts)
            self.read, self.asked = self.read + float(share.sum()), self.asked + len(share)
        return found


class Reader:
    """A model on pages of its own, without an engine: texts side by side, each in pages of its own."""

    def __init__(self, arguments: Any) -> None:
        flags: dict[str, str | int | float] = {"selector.name": "infinigen", "selector.share": arguments.share}
        if arguments.threads:
            flags["engine.threads"] = arguments.threads
        self.config: EngineConfig = config(str(arguments.model), flags)
        self.loaded: LoadedModel = load(self.config)
        self.probed: ProbedModel = probe_model(self.loaded, self.config)
        most = max(HISTORIES) + SCORED + CHUNK
        self.per_text = -(-most // self.probed.page_size)
        num_pages = SIDE_BY_SIDE * self.per_text
        plain = PageFormat(self.loaded.dtype)
        pages = make_pages(self.probed.found.shapes, num_pages, self.probed.page_size, plain, self.loaded.device)
        self.runner = ModelRunner(model=self.loaded.module, pages=pages, backend=self.probed.backend, sink=None)
        self._room = {"num_pages": num_pages, "max_context": most}
        self._tables = BlockTables(max_seqs=SIDE_BY_SIDE, max_pages=self.per_text)

    def selectors(self) -> dict[str, Selecting]:
        """Return every selector but `none`, calibrated. Writes to the pages."""
        made = {}
        for name, make in SELECTORS.items():
            if make is not None:
                selector = msgspec.structs.replace(self.config.selector, name=name)
                settings = msgspec.structs.replace(self.config, selector=selector)
                found = build_selector(settings, self.loaded, self.probed, self.runner, **self._room)
                assert found is not None
                made[name] = Selecting(Counting(found.selector), found.min_context)
        return made

    def begin(self, selecting: Selecting | None) -> None:
        """Let what is decoded from now on read what a selector chooses; whatever it knew of the pages is void."""
        self.runner.selecting = selecting
        self._tables = BlockTables(max_seqs=SIDE_BY_SIDE, max_pages=self.per_text)

    @torch.inference_mode()
    def prompt(self, text: int, ids: Sequence[int], first: int, logit_rows: int = 1) -> Tensor:
        """Compute tokens of a text from row `first` on. Returns the logits of the last rows [logit_rows, vocab]; more
        than one only of a single chunk."""
        logits = None
        for start in range(0, len(ids), CHUNK):
            chunk = list(ids[start : start + CHUNK])
            item = BatchItem(
                f"text {text}", chunk, first + start, self._pages(text), True,
                prompt_rows=len(chunk) - 1 if logit_rows > 1 else 0,
            )  # fmt: skip
            logits = self.runner.forward(self._batch([item]), None)
        assert logits is not None
        return logits[-logit_rows:]

    @torch.inference_mode()
    def decode(self, ids: Mapping[int, int], first: Mapping[int, int]) -> Tensor:
        """Compute one token of some texts, which may read a part. Returns logits [texts, vocab] in their order."""
        items = [
            BatchItem(f"text {text}", [token], first[text], self._pages(text), True, partial=True)
            for text, token in ids.items()
        ]
        return self.runner.forward(self._batch(items), None)

    def _pages(self, text: int) -> list[int]:
        return list(range(text * self.per_text, (text + 1) * self.per_text))

    def _batch(self, items: list[BatchItem]) -> Any:
        return build_batch(items, self._tables, self.probed.page_size, self.loaded.device)


@dataclass
class Scores:
    """What one arm did to the scored tokens of all texts."""

    divergence: list[Tensor] = field(default_factory=list)
    same_choice: list[Tensor] = field(default_factory=list)
    change: list[Tensor] = field(default_factory=list)  # of the loss

    def add(self, plain: Tensor, found: Tensor, wanted: Tensor) -> None:
        """Log probabilities [tokens, vocab] of reading everything and of the arm; the tokens that follow."""
        self.divergence.append((plain.exp() * (plain - found)).sum(-1))
        self.same_choice.append(plain.argmax(-1) == found.argmax(-1))
        self.change.append((plain - found).gather(1, wanted[:, None])[:, 0])

    def summary(self) -> dict[str, float]:
        divergence, change = torch.cat(self.divergence), torch.cat(self.change)
        same, root = torch.cat(self.same_choice).float(), sqrt(len(divergence))
        return {
            "kl": float(divergence.mean()), "kl_error": float(divergence.std()) / root,
            "kl_p99": float(divergence.quantile(0.99)), "same_choice": float(same.mean()),
            "perplexity_change": float(change.mean().exp()) - 1, "perplexity_error": float(change.std()) / root,
        }  # fmt: skip


def score_texts(run: Run, reader: Reader, arms: Mapping[str, Selecting], encode: Any) -> dict[str, Any]:
    """By history: KL and the like of every arm, over all texts of that length."""
    arguments, by_history = run.arguments, {}
    for history in arguments.histories:
        texts = list(long_texts(arguments, encode, history + SCORED + 1))
        scores: dict[str, Scores] = {name: Scores() for name in (*arms, "rounding")}
        groups = [texts[at : at + SIDE_BY_SIDE] for at in range(0, len(texts), SIDE_BY_SIDE)]
        for group in run.track(groups, f"texts of {history}"):
            reader.begin(None)
            for text, ids in enumerate(group):
                reader.prompt(text, ids[:history], 0)
            plain = _decoded(reader, group, history, None)
            for name, selecting in arms.items():
                for of_text, one, ids in zip(plain, _decoded(reader, group, history, selecting), group, strict=True):
                    scores[name].add(of_text, one, torch.tensor(ids[history + 1 :]))
            reader.begin(None)
            for text, ids in enumerate(group):
                together = reader.prompt(text, ids[history:-1], history, logit_rows=SCORED).float().log_softmax(-1)
                scores["rounding"].add(plain[text], together, torch.tensor(ids[history + 1 :]))
        by_history[str(history)] = {name: found.summary() for name, found in scores.items()} | {"texts": len(texts)}
    return by_history


def _decoded(reader: Reader, group: Sequence[list[int]], history: int, selecting: Selecting | None) -> list[Tensor]:
    """Return by text the log probabilities [SCORED, vocab] behind its tokens after a history, decoded one by one."""
    reader.begin(selecting)
    found: list[list[Tensor]] = [[] for _ in group]
    for place in range(history, history + SCORED):
        ids = {text: tokens[place] for text, tokens in enumerate(group)}
        logits = reader.decode(ids, dict.fromkeys(ids, place)).float().log_softmax(-1)
        for text, row in enumerate(logits):
            found[text].append(row)
    return [torch.stack(rows) for rows in found]


def long_texts(arguments: Any, encode: Any, length: int) -> Iterator[list[int]]:
    left = arguments.texts
    for text in documents(arguments.data):
        ids = encode(text, add_special_tokens=False).ids[:length]
        if len(ids) == length and left:
            left -= 1
            yield ids
        if not left:
            return


@dataclass(frozen=True)
class Haystack:
    """A book with needles in it, and how they are asked for."""

    ids: list[int]
    questions: list[tuple[list[int], list[int], int]]  # a prompt, the beginning of its answer, the password
    passwords: list[int]  # the first tokens of all


def haystack(book: str, encode: Any, count: int, rng: random.Random) -> Haystack:
    """count: needles, whose passwords begin with different tokens."""

    def ids_of(text: str) -> list[int]:
        return list(encode(text, add_special_tokens=False).ids)

    first = {word: ids_of(f" {word}")[0] for word in PASSWORDS}
    words = [word for word in PASSWORDS if list(first.values()).count(first[word]) == 1]
    pairs = list(zip(rng.sample(NAMES, count), rng.sample(words, count), strict=True))
    ids, straw = [], ids_of(book)
    needles = [ids_of(f"\n\nThe password of {name} is {word}.\n\n") for name, word in pairs]
    step = (HAYSTACK - sum(map(len, needles))) // (count + 1)
    for place, needle in enumerate([*needles, []]):
        ids += straw[place * step : (place + 1) * step] + needle
    rng.shuffle(pairs)
    questions = []
    for name, word in pairs:
        prompt = ids_of(f"\n\nQuestion: What is the password of {name}?\nAnswer:")
        questions.append((prompt, ids_of(f" The password of {name} is"), first[word]))
    return Haystack(ids, questions, [first[word] for _, word in pairs])


def ask_all(reader: Reader, hay: Haystack, selecting: Selecting | None) -> int:
    """Return how many passwords are the likeliest where they are asked for, one after the other. The haystack is in the
    pages of text 0."""
    reader.begin(selecting)
    at, found = len(hay.ids), 0
    for prompt, beginning, password in hay.questions:
        reader.prompt(0, prompt, at)
        at, logits = at + len(prompt), torch.empty(0)
        for token in beginning:
            logits = reader.decode({0: token}, {0: at})[0]
            at += 1
        found += hay.passwords[int(logits[hay.passwords].argmax())] == password
        reader.decode({0: password}, {0: at})
        at += 1
    return found


def find_needles(run: Run, reader: Reader, arms: Mapping[str, Selecting], encode: Any) -> dict[str, Any]:
    arguments, rng = run.arguments, random.Random(0)
    per_hay = 12
    hays = [
        haystack(book, encode, per_hay, rng)
        for book, _ in zip(books(arguments.data), range(-(-arguments.needles // per_hay)), strict=False)
    ]
    found = dict.fromkeys(("none", *arms), 0)
    for hay in run.track(hays, "needles"):
        reader.begin(None)
        reader.prompt(0, hay.ids, 0)
        for name in found:
            found[name] += ask_all(reader, hay, arms.get(name))
    return {"asked": len(hays) * per_hay, "found": found, "context": HAYSTACK}


def books(data: Path) -> Iterator[str]:
    with gzip.open(data / "long_docs/books.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            if len(text) > 150_000:
                yield text[len(text) // 4 :][:50_000]


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    reader = Reader(arguments)
    encode = Tokenizer.from_file(str(arguments.model / "tokenizer.json")).encode
    arms = reader.selectors()
    texts = score_texts(run, reader, arms, encode)
    needles = find_needles(run, reader, arms, encode) if arguments.needles else None
    read = {}
    for name, selecting in arms.items():
        counting = selecting.selector
        assert isinstance(counting, Counting)
        index = counting.index_bytes_per_token / reader.probed.kv_bytes_per_token
        read[name] = {"rows": counting.read / max(1, counting.asked), "index": index}
    return {
        "settings": {
            "model": name_of(arguments.model), "share": arguments.share, "scored": SCORED, "block": BLOCK_TOKENS,
            "min_context": reader.config.selector.min_context,
        },
        "texts": texts, "read": read, "needles": needles, "held": _held(texts, read, needles),
    }  # fmt: skip


def _held(texts: Any, read: Any, needles: Any) -> dict[str, bool]:
    held = {f"pairs read at most {MOST_READ:.0%} of the rows": read["pairs"]["rows"] <= MOST_READ}
    for history, arms in texts.items():
        kl = {name: arm["kl"] for name, arm in arms.items() if name != "texts"}
        held[f"{history}: pairs cost at most {MOST_KL} nats"] = kl["pairs"] <= MOST_KL
        held[f"{history}: pairs diverge no more than infinigen"] = kl["pairs"] <= kl["infinigen"]
    if needles is not None:
        found = needles["found"]
        held[f"pairs find {LEAST_FOUND:.0%} of what reading everything finds"] = (
            found["pairs"] >= LEAST_FOUND * found["none"] > 0
        )
    return held


def show(console: Console, result: Any) -> None:
    settings = result["settings"]
    for history, arms in result["texts"].items():
        table = Table(title=f"{settings['model']}, {arms['texts']} texts, {SCORED} tokens behind {history}")
        for heading in ("selector", "rows read", "index", "KL, nats", "p99", "same choice", "perplexity"):
            table.add_column(heading, justify="left" if heading == "selector" else "right")
        for name, row in arms.items():
            if name == "texts":
                continue
            read = result["read"].get(name, {"rows": 1.0, "index": 0.0})
            table.add_row(
                name, f"{read['rows']:.1%}", f"{read['index']:.1%}", f"{row['kl']:.5f} ± {row['kl_error']:.5f}",
                f"{row['kl_p99']:.4f}", f"{row['same_choice']:.1%}",
                f"{row['perplexity_change']:+.2%} ± {row['perplexity_error']:.2%}",
            )  # fmt: skip
        console.print(table)
    if result["needles"] is not None:
        found, asked = result["needles"]["found"], result["needles"]["asked"]
        console.print("needles: " + ", ".join(f"{name} {count} of {asked}" for name, count in found.items()))


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="directory of the texts")
    parser.add_argument("--model", type=model_directory, default="smollm2", help="bundled, smollm2 or a directory")
    parser.add_argument("--texts", type=int, default=24, help="of each length")
    parser.add_argument("--histories", type=int, nargs="+", default=list(HISTORIES), choices=HISTORIES)
    parser.add_argument("--needles", type=int, default=108, help="at least; 0: none")
    parser.add_argument("--share", type=float, default=0.1, help="selector.share")
    parser.add_argument("--threads", type=int, help="of torch")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("selectors", arguments.model),
    about=__doc__,
    measure=measure,
    show=show,
    options=options,
    quick=Quick(
        {"texts": 1, "histories": [HISTORIES[0]], "needles": 12},
        (Figure("KL of pairs behind 4,096", lambda r: r["texts"]["4096"]["pairs"]["kl"], 2.5),),
        holds=False,
    ),
)

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
