"""Measures what a full window drops, by scorer, and what recall brings back.

    python -m benchmarks.texts keeping --data DIR [--model smollm2] [--parts perplexity,names]

perplexity      of the text after a cut, by scorer, as a ratio to the oldest leaving.
names           given in the older half of the window and asked for after a cut, by scorer and with recall: the user
                asks for a message of the assistant once more. A question counts if it is answered with the whole
                window before it, and not without the dialogue that it is from.

A text is cut as a server cuts it: by its own planning, scorers and choice of what is recalled. The result is written
after every part; `benchmarks.speed.truncation --parts recall` measures the first tokens of messages that recall.

Held: attended answers 15 points more than oldest, and its perplexity is at most 0.5 % above oldest's; recall answers
70 % of the questions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.harness.experiment import Run
from benchmarks.texts.after_cut import (
    KEEP_FIRST,
    WINDOW,
    Answer,
    OtherText,
    Question,
    answer,
    ask_names,
    cut_experiment,
    cuts_of,
    mean_loss,
    measure_parts,
    perplexities,
    rows_without,
)
from benchmarks.texts.history import CPU, History, Rows, load_subject
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import Range, blocks_of, merge_cuts, subtract
from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.cache.policies.keep.block_scorer import CutBlocks
from reprise.cache.policies.keep.recall import choose
from reprise.cache.requests.keeping import attention_now
from reprise.cache.requests.recalling import most_recalled
from reprise.engine.codec.quality import Subject
from reprise.engine.model.probe import single_sequence_meta
from reprise.kernels.attention.watched import WatchedAttention
from tools.bundled_model.corpus import TURN_END, TURN_START

HISTORY = WINDOW - 2 * BLOCK_TOKENS  # tokens before the message that does not fit
RESERVE = 4 * BLOCK_TOKENS  # for that message and its answer
OLDER_HALF = (KEEP_FIRST, KEEP_FIRST + WINDOW // 2)  # where the names lie: what `oldest` drops
RECALL = "oldest, recall"
BETTER, MAX_ABOVE, MIN_RECALL = 0.15, 0.005, 0.7


@dataclass(frozen=True, slots=True)
class Read:
    """A text with its KV, and how much attention each of its blocks got."""

    token_ids: list[int]
    saved: Rows
    attention: list[float]

    def without(self, cuts: Sequence[Range]) -> Rows:
        """Return the KV that is left after these cuts."""
        rows = rows_without(len(self.token_ids), cuts)
        return [(k[rows], v[rows]) for k, v in self.saved]


class WatchedHistory(History):
    """A history that also records, as a server does, how the last tokens of each chunk attend to the blocks before
    them."""

    def __init__(self, subject: Subject, *, most_tokens: int) -> None:
        layers = len(subject.found.shapes)
        self._watch = WatchedAttention(subject.backend, num_layers=layers, block_tokens=BLOCK_TOKENS)
        self._a_chunk = single_sequence_meta(CPU, 0, 2, subject.page_size)
        self._attention: list[float] = []
        self._is_reading = False
        super().__init__(replace(subject, backend=self._watch, go_on=self._note), most_tokens=most_tokens)

    def read(self, token_ids: list[int]) -> Read:
        """Compute a text from position 0 on, in chunks. Returns its KV and the attention that its blocks got."""
        self._watch.begin(self._a_chunk)
        self._attention, self._is_reading = [], True
        saved = self.compute(token_ids)
        self._note()
        self._is_reading = False
        return Read(token_ids, saved, self._attention)

    def _note(self) -> None:
        """Take what the chunk before has shown, and begin another."""
        if self._is_reading:
            shares = self._watch.take().get(0, [])
            before = [*self._attention, *[None] * (len(shares) - len(self._attention))]
            self._attention = [attention_now(old, now, len(shares)) for old, now in zip(before, shares, strict=True)]
        self._watch.begin(self._a_chunk)


def cut(read: Read, scorer: str, newest: Sequence[int], *, reserve: int) -> list[Range]:
    """Return the ranges of tokens that a server drops from a text to make room for `reserve` tokens. scorer: name of
    the scorer that says which blocks are wanted. newest: the tokens of the message that follows the text."""
    chosen = BLOCK_SCORERS[scorer]()

    def scores_of(starts: Sequence[int]) -> Sequence[float] | None:
        tokens = [read.token_ids[start : start + BLOCK_TOKENS] for start in starts]
        attention = [read.attention[start // BLOCK_TOKENS] for start in starts]
        return chosen.score(CutBlocks(tokens=tokens, newest=newest, attention=attention))

    return cuts_of(len(read.token_ids), reserve, scores_of)


def recall(token_ids: Sequence[int], cuts: Sequence[Range], newest: Sequence[int]) -> list[Range]:
    """Return `cuts` as they are after a recall: the server brings back dropped blocks that the message `newest` is
    about, and drops as many other blocks in their place, the oldest first."""
    blocks = [token_ids[start : start + BLOCK_TOKENS] for start in range(0, len(token_ids), BLOCK_TOKENS)]
    dropped = [start // BLOCK_TOKENS for start in blocks_of(cuts)]
    kept = sorted({*range(len(token_ids) // BLOCK_TOKENS)} - set(dropped))
    found = choose([(b, blocks[b]) for b in dropped], [blocks[b] for b in kept], newest, most_recalled(WINDOW))
    head = -(-KEEP_FIRST // BLOCK_TOKENS)
    victims = [block for block, spared in zip(kept, found.spared, strict=True) if block >= head and not spared]
    count = min(len(found.places), len(victims))
    return subtract(merge_cuts([], [*cuts, *_ranges(victims[:count])]), _ranges(found.places[:count]))


def _ranges(blocks: Sequence[int]) -> list[Range]:
    return [(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS) for block in blocks]


class Asker:
    """A user who asks the assistant to repeat one of its messages. The question quotes the message up to the name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._opening = len(self._ids(f"{TURN_START}assistant\n"))

    def fits(self, question: Question) -> bool:
        return len(self.asked(question)) + len(question.message) < RESERVE

    def asked(self, question: Question) -> list[int]:
        """Return the tokens of the user's message for a question."""
        words = self._tokenizer.decode(question.message[self._opening :]).strip()
        return self._ids(f"{TURN_START}user\nPlease tell me once more: {words}{TURN_END}\n")

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def answers(self, history: WatchedHistory, question: Question, others: OtherText) -> dict[str, Answer] | None:
        """Ask for the name after a window of text was cut in the way of each arm; the dialogue lies in the older half
        of the window. Returns the answers by arm. None if the question does not count, because the model does not find
        the name with the whole window, or finds it in a window without the dialogue."""
        asked, other, said = self.asked(question), others.draw(HISTORY), question.history
        place = others.rng.randrange(OLDER_HALF[0], OLDER_HALF[1] - len(said) + 1)
        ids = [*other[:place], *said, *other[place + len(said) :]]

        def score() -> Answer:
            return answer(history, [*asked, *question.message], question.candidates)

        history.compute(other)
        guessed, _ = score()
        read = history.read(ids)
        if guessed or not score()[0]:
            return None
        cuts = {scorer: cut(read, scorer, asked, reserve=RESERVE) for scorer in BLOCK_SCORERS}
        cuts[RECALL] = recall(ids, cuts["oldest"], asked)
        found = {}
        for arm, dropped in cuts.items():
            history.place(read.without(dropped))
            found[arm] = score()
        return found


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    history = WatchedHistory(load_subject(arguments.model, torch.float32, arguments.threads), most_tokens=2 * WINDOW)
    asker = Asker(Tokenizer.from_file(str(arguments.model / "tokenizer.json")))

    def losses(ids: list[int]) -> dict[str, float]:
        read, found = history.read(ids[:WINDOW]), {}
        for scorer in BLOCK_SCORERS:
            history.place(read.without(cut(read, scorer, (), reserve=arguments.scored)))
            found[scorer] = mean_loss(history, ids)
        return found

    def ask(question: Question, others: OtherText) -> dict[str, Answer] | None:
        return asker.answers(history, question, others)

    parts = {
        "perplexity": lambda: perplexities(run, losses, "oldest"),
        "names": lambda: ask_names(run, history, ask, asker.fits),
    }
    return measure_parts(run, parts, verdicts)


def verdicts(parts: Mapping[str, Any]) -> dict[str, bool]:
    """Return claim -> whether it holds, for the parts that were run."""
    held: dict[str, bool] = {}
    if "names" in parts:
        right = {arm: found["accuracy"] for arm, found in parts["names"]["arms"].items()}
        gained = right["attended"] - right["oldest"]
        held[f"attended answers {BETTER:.0%} of the questions more than oldest"] = gained >= BETTER
        held[f"recall answers {MIN_RECALL:.0%} of the questions"] = right[RECALL] >= MIN_RECALL
    for text, row in parts.get("perplexity", {"texts": {}})["texts"].items():
        above = row["arms"]["attended"]["ratio_to_oldest"] - 1
        held[f"{text}: the perplexity of attended at most {MAX_ABOVE:.1%} above oldest's"] = above <= MAX_ABOVE
    return held


EXPERIMENT = cut_experiment("keeping", __doc__, measure, ("perplexity", "names"))
