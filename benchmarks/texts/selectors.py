"""Measures what reading a part of long contexts changes, by selector: benchmarks/results/selectors*.json.

    python -m benchmarks.texts selectors --data DIR [--model smollm2] [--texts N] [--needles N]

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

import random
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.models import name_of, result_name
from benchmarks.harness.tables import show_rows
from benchmarks.texts.history import summary
from benchmarks.texts.reader import CHUNK, Counting, Reader, compared_rows
from benchmarks.texts.reading import Encode, books, encoder, text_options, texts_of
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.codec.quality import Quality
from reprise.kernels.attention.selection import Selecting
from reprise.kernels.selectors import SELECTORS

HISTORIES = 4096, 7680
SCORED = 96
HAYSTACK, NEEDLES = 6000, 12  # tokens, and needles in each
SIDE_BY_SIDE = 4  # texts that are decoded together
NAMES = (
    "Maria Peter Anna Thomas Julia Martin Laura Simon Helen David Alice Frank Clara Oscar Emma Henry Rosa Walter Nina "
    "Arthur Diana Philip Sarah Victor"
)
PASSWORDS = (
    "copper window garden silver orange thunder pepper castle mirror rocket violin tiger marble button candle forest "
    "bridge pencil honey desert ribbon anchor lemon hammer"
)
LEAST_FOUND, MOST_READ, MOST_KL = 0.95, 0.2, 0.02


def score_texts(run: Run, reader: Reader, arms: Mapping[str, Selecting], encode: Encode) -> dict[str, Any]:
    """Return length of history -> arm -> quality, over all texts of that length."""
    arguments, by_history = run.arguments, {}
    for history in arguments.histories:
        texts = texts_of(arguments.data, encode, [history + SCORED + 1] * arguments.texts)
        scores: dict[str, list[Quality]] = {name: [] for name in (*arms, "rounding")}
        groups = [texts[at : at + SIDE_BY_SIDE] for at in range(0, len(texts), SIDE_BY_SIDE)]
        for group in run.track(groups, f"texts of {history}"):
            reader.fill(group, history)
            plain = reader.read_behind(group, history, None)
            found = {name: reader.read_behind(group, history, selecting) for name, selecting in arms.items()}
            reader.begin(None)
            found["rounding"] = [
                reader.prompt(text, ids[history:-1].tolist(), history, logit_rows=SCORED).float().log_softmax(-1)
                for text, ids in enumerate(group)
            ]
            for name, by_text in found.items():
                for whole, part, ids in zip(plain, by_text, group, strict=True):
                    scores[name].append(compared_rows(whole, part, ids[history + 1 :]))
        by_history[str(history)] = {name: summary(parts) for name, parts in scores.items()} | {"texts": len(texts)}
    return by_history


@dataclass(frozen=True)
class Haystack:
    """A book with hidden sentences (needles), each of which tells the password of a name, and a question for each
    password."""

    ids: list[int]
    questions: list[tuple[list[int], list[int], int]]  # a prompt, the beginning of its answer, the password
    passwords: list[int]  # the first tokens of all


def haystack(book: str, encode: Encode, count: int, rng: random.Random) -> Haystack:
    """Hide `count` needles in a book. The passwords begin with different tokens."""
    first = {word: encode(f" {word}")[0] for word in PASSWORDS.split()}
    words = [word for word in first if list(first.values()).count(first[word]) == 1]
    pairs = list(zip(rng.sample(NAMES.split(), count), rng.sample(words, count), strict=True))
    ids, straw = list[int](), encode(book)
    needles = [encode(f"\n\nThe password of {name} is {word}.\n\n") for name, word in pairs]
    step = (HAYSTACK - sum(map(len, needles))) // (count + 1)
    for place, needle in enumerate([*needles, []]):
        ids += straw[place * step : (place + 1) * step] + needle
    rng.shuffle(pairs)
    questions = [
        (
            encode(f"\n\nQuestion: What is the password of {name}?\nAnswer:"),
            encode(f" The password of {name} is"), first[word],
        )
        for name, word in pairs
    ]  # fmt: skip
    return Haystack(ids, questions, [first[word] for _, word in pairs])


def ask_all(reader: Reader, hay: Haystack, selecting: Selecting | None) -> int:
    """Ask for all passwords, one after the other. Returns for how many the right one is the likeliest. The pages of
    text 0 must have the haystack's KV."""
    reader.begin(selecting)
    at, found = len(hay.ids), 0
    for prompt, beginning, password in hay.questions:
        reader.prompt(0, prompt, at)
        at += len(prompt)
        logits = torch.empty(0)
        for token in beginning:
            logits = reader.decode({0: token}, {0: at})[0]
            at += 1
        found += hay.passwords[int(logits[hay.passwords].argmax())] == password
        reader.decode({0: password}, {0: at})
        at += 1
    return found


def find_needles(run: Run, reader: Reader, arms: Mapping[str, Selecting], encode: Encode) -> dict[str, Any]:
    """Return how many needles were found with each arm, of how many."""
    rng = random.Random(0)
    long = (book[len(book) // 4 :][:50_000] for book in books(run.arguments.data) if len(book) > 150_000)
    hays = [haystack(book, encode, NEEDLES, rng) for book in islice(long, -(-run.arguments.needles // NEEDLES))]
    found = dict.fromkeys(("none", *arms), 0)
    for hay in run.track(hays, "needles"):
        reader.begin(None)
        reader.prompt(0, hay.ids, 0)
        for name in found:
            found[name] += ask_all(reader, hay, arms.get(name))
    return {"asked": len(hays) * NEEDLES, "found": found, "context": HAYSTACK}


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    most = max(*arguments.histories, HAYSTACK) + SCORED + CHUNK
    reader = Reader(
        arguments.model, texts=SIDE_BY_SIDE, most_tokens=most, share=arguments.share, threads=arguments.threads
    )
    encode = encoder(arguments.model)
    arms, counting = {}, {}
    for name, make in SELECTORS.items():
        if make is not None:
            found = reader.selecting(name)
            counting[name] = Counting(found.selector)
            arms[name] = Selecting(counting[name], found.min_context)
    texts = score_texts(run, reader, arms, encode)
    needles = find_needles(run, reader, arms, encode) if arguments.needles else None
    read = {
        name: {
            "rows": one.read / max(1, one.asked), "index": one.index_bytes_per_token / reader.probed.kv_bytes_per_token
        }
        for name, one in counting.items()
    }  # fmt: skip
    return {
        "settings": {
            "model": name_of(arguments.model), "share": arguments.share, "scored": SCORED, "block": BLOCK_TOKENS,
            "min_context": reader.config.selector.min_context,
        },
        "texts": texts, "read": read, "needles": needles, "held": verdicts(texts, read, needles),
    }  # fmt: skip


def verdicts(texts: Any, read: Any, needles: Any) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    held = {f"pairs read at most {MOST_READ:.0%} of the rows": read["pairs"]["rows"] <= MOST_READ}
    for history, arms in texts.items():
        ours, theirs = arms["pairs"]["kl"], arms["infinigen"]["kl"]
        held[f"{history}: pairs cost at most {MOST_KL} nats"] = ours <= MOST_KL
        held[f"{history}: pairs diverge no more than infinigen"] = ours <= theirs
    if needles is not None:
        found = needles["found"]
        enough = found["pairs"] >= LEAST_FOUND * found["none"] > 0
        held[f"pairs find {LEAST_FOUND:.0%} of what reading everything finds"] = enough
    return held


def show(console: Console, result: Any) -> None:
    for history, arms in result["texts"].items():
        title = f"{result['settings']['model']}, {arms['texts']} texts, {SCORED} tokens behind {history}"
        show_rows(console, title, {name: row for name, row in arms.items() if name != "texts"})
    show_rows(console, "Read, as a share of rows and of bytes", result["read"])
    console.print("needles:", result["needles"])


def options(parser: ArgumentParser) -> None:
    text_options(parser)
    parser.add_argument("--texts", type=int, default=24, help="of each length")
    parser.add_argument("--histories", type=int, nargs="+", default=list(HISTORIES), help="tokens")
    parser.add_argument("--needles", type=int, default=108, help="at least; 0: none")
    parser.add_argument("--share", type=float, default=0.1, help="selector.share")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("selectors", arguments.model),
    about=__doc__, measure=measure, show=show, options=options,
)  # fmt: skip
