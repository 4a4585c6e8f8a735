"""Perplexity after a truncation, on text the model was not trained on (AttentionStore Table 1).

Windows of running text: the first `history` tokens fill the window, half of it is dropped after the first
`keep_first` tokens, and the tokens that follow are scored on what is left.
"""

import gzip
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.harness.measures import interval
from benchmarks.truncation.quality import ARMS, Bench, kept_rows
from tools.bundled_model.corpus import documents, is_held_out

TEXTS = ("topical_chat", "books", "wikitext2")
DRAWS = 2000  # of the bootstrap


def read_text(data: Path, name: str, tokenizer: Tokenizer) -> list[list[int]] | None:
    """Token ids of each held-out document of a text, or None where the text is missing."""
    if name == "wikitext2":
        file = data / "text" / "wikitext2_valid.txt.gz"
        if not file.exists():
            return None
        with gzip.open(file, "rt", encoding="utf-8") as text:
            return [tokenizer.encode(text.read(), add_special_tokens=False).ids]
    try:
        texts = [text for key, text in documents(data, name) if is_held_out(key)]
    except FileNotFoundError:
        return None
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def draw_windows(documents_ids: Sequence[Sequence[int]], length: int, count: int, seed: int) -> list[list[int]]:
    """`count` windows of running text, documents laid end to end. A text that is too short for so many is used again
    with its documents in another order. Raises ValueError if it is too short for one."""
    rng = random.Random(seed)
    order = list(range(len(documents_ids)))
    windows: list[list[int]] = []
    while len(windows) < count:
        ids = [token for place in order for token in documents_ids[place]]
        starts = range(0, len(ids) - length + 1, length)
        if not starts:
            raise ValueError(f"{len(ids)} tokens are too few for a window of {length}")
        if len(starts) >= count:  # spread over the whole text
            starts = range(0, len(ids) - length + 1, (len(ids) - length) // max(1, count - 1))
        windows += [ids[start : start + length] for start in starts]
        rng.shuffle(order)
    return windows[:count]


def score_window(bench: Bench, token_ids: Sequence[int], history: int, keep_first: int) -> dict[str, float]:
    """Mean NLL per arm of the tokens after the first `history` + 1 (the one at `history` is given, not scored)."""
    following, targets = token_ids[history:-1], torch.tensor(token_ids[history + 1 :])
    rows = kept_rows(bench.window, history, len(following), keep_first)
    kept = [token_ids[row] for row in rows.tolist()]
    saved = bench.compute(token_ids[:history])
    losses = {}
    for arm in ARMS:
        if arm == "TT":
            bench.compute(kept)
        else:
            bench.place(arm, saved, rows)
        picked = bench.go_on(following).gather(1, targets[:, None])
        losses[arm] = -float(picked.mean())
    return losses


def summarize(windows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Perplexity per arm, and its ratio to TT's, with 95 % bootstrap intervals over windows. A ratio's is of the
    differences window by window."""
    arms = {}
    for arm in windows[0]:
        losses = [window[arm] for window in windows]
        apart = [window[arm] - window["TT"] for window in windows]
        arms[arm] = {
            "ppl": math.exp(_mean(losses)),
            "ppl_95": _interval(losses),
            "ratio_to_tt": math.exp(_mean(apart)),
            "ratio_to_tt_95": _interval(apart),
        }
    return {"windows": len(windows), "arms": arms}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """exp of the mean: 2.5 % and 97.5 % of the bootstrap."""
    low, high = interval(lambda rng: _mean(rng.choices(values, k=len(values))), DRAWS)
    return math.exp(low), math.exp(high)


def measure(
    bench: Bench,
    tokenizer: Tokenizer,
    data: Path,
    *,
    windows: int,
    scored: int,
    keep_first: int,
    seed: int,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """All texts; `missing` names those that the data directory lacks. `advance` is called once per window."""
    out: dict[str, Any] = {"scored_tokens": scored, "keep_first": keep_first, "texts": {}, "missing": []}
    for name in TEXTS:
        found = read_text(data, name, tokenizer)
        if found is None:
            out["missing"].append(name)
            continue
        losses = []
        for ids in draw_windows(found, bench.window + scored + 1, windows, seed):
            losses.append(score_window(bench, ids, bench.window, keep_first))
            advance()
        out["texts"][name] = summarize(losses)
    return out
