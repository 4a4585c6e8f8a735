"""Measures whether a codec's errors add up over a conversation, and whether names survive in coded KV.

    python -m benchmarks.texts drift --data DIR [--model smollm2] [--texts 12] [--conversations 30]

drift   texts cut into a beginning and ten turns. Every turn is computed on the history of all before it as a server
        would load it: each block coded once, from the rows that were computed on coded history, and the first block
        exact. Scored: the KL of what the model says in a turn from what it says after raw history, nats a token.
names   chats of ten turns. The first gives four names, eight are of other chats, and the tenth asks for each name. An
        answer is right where the right name is the likeliest of ten. Asked after raw history and after coded.

Held: the KL of the tenth turn is at most three times the first's; there are at least 100 questions, and after coded
history at most 2 points fewer are right. Computed in fp32 with KV stored in bf16, as by `codecs`.
"""

import random
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.models import name_of, result_name
from benchmarks.harness.tables import show_rows
from benchmarks.texts.history import History, Rows, load_subject
from benchmarks.texts.reading import Encode, as_chat, chats, encoder, text_options, texts_of
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.codec.calibration import calibrate
from reprise.engine.codec.quality import Subject, coded, compared
from reprise.engine.codec.text import calibration_text
from reprise.kernels.codecs.codec import Codec

TURNS, MOST_DRIFT = 10, 3.0
LEAST_QUESTIONS, MOST_POINTS = 100, 0.02
CANDIDATES = 10
NAMES = {
    "dog": "Biscuit Rocky Daisy Shadow Ginger Pepper Cookie Bandit Maple Ziggy Hazel",
    "sister": "Clara Naomi Ingrid Felicia Harriet Joanna Miriam Paula Renata Sylvia",
    "town": "Bergen Toledo Galway Lucerne Verona Bruges Odense Tampere Utrecht Porto",
    "teacher": "Morrison Delgado Fischer Bennett Okafor Petrov Sullivan Tanaka Ramirez Lee",
}
ASKED = {  # what gives the name, what asks for it, and the beginning of the answer
    "dog": ("My dog is called {}.", "What is my dog called?", "Your dog is called"),
    "sister": ("My sister's name is {}.", "What is my sister's name?", "Your sister's name is"),
    "town": (
        "I grew up in a town called {}.", "In which town did I grow up?", "You grew up in a town called"
    ),
    "teacher": (
        "My favourite teacher was called {}.", "What was my favourite teacher called?",
        "Your favourite teacher was called",
    ),
}  # fmt: skip
Conversation = tuple[list[Tensor], list[tuple[Tensor, list[int]]]]
"""Ids of each turn but the last, whole blocks each; (what is asked, ids of candidates, the right one first)."""


class GrowingHistory(History):
    """A history to which turns are added. The KV of each turn is coded when it is stored, or stays raw if there is no
    codec."""

    def __init__(self, subject: Subject, codec: Codec | None, *, most_tokens: int) -> None:
        super().__init__(subject, most_tokens=most_tokens)
        self._codec, self._rows = codec, Rows()

    def forget(self) -> None:
        """Make the history empty."""
        self._rows, self.length = Rows(), 0

    def turn(self, token_ids: Tensor) -> Tensor:
        """Compute a turn of whole blocks after the history, and add it to the history. Returns the log probabilities of
        the next token after each of its tokens [tokens, vocab]."""
        logprobs, rows = self.go_on(token_ids)
        if self._codec is not None:
            rows = self._as_coded(self._codec, rows)
        self._rows = _joined(self._rows, rows) if self._rows else rows
        self.place(self._rows)
        return logprobs

    def _as_coded(self, codec: Codec, rows: Rows) -> Rows:
        """Code a turn's blocks. `coded` spares the first block that it gets: the text's, or one put before the rest."""
        if not self._rows:
            return coded(codec, rows)[0] if len(rows[0][0]) > BLOCK_TOKENS else rows
        last = [(k[-BLOCK_TOKENS:], v[-BLOCK_TOKENS:]) for k, v in self._rows]
        return [(k[BLOCK_TOKENS:], v[BLOCK_TOKENS:]) for k, v in coded(codec, _joined(last, rows))[0]]


def _joined(first: Rows, second: Rows) -> Rows:
    return [(torch.cat([k, a]), torch.cat([v, b])) for (k, v), (a, b) in zip(first, second, strict=True)]


def drift_of(raw: GrowingHistory, through: GrowingHistory, pieces: Sequence[Tensor]) -> list[float]:
    """Return by how much predictions after the coded history (`through`) diverge from those after the uncompressed one
    (`raw`): the mean KL divergence in each turn but the first, which has no history. pieces: the tokens of each turn,
    in whole blocks."""
    raw.forget()
    through.forget()
    found = [compared(raw.turn(piece), through.turn(piece), piece, 0.0) for piece in pieces]
    return [float(turn.divergence.mean()) for turn in found[1:]]


def conversations(data: Path, encode: Encode, turn_tokens: int, seed: int) -> Iterator[Conversation]:
    """Yield conversations made of recorded chats. In the first turn the user gives names, for which the questions at
    the end ask."""
    rng = random.Random(seed)
    recorded = list(map(as_chat, chats(data)))
    rng.shuffle(recorded)
    for start in range(0, len(recorded) - TURNS, TURNS - 2):
        given = {kind: rng.choice(names.split()) for kind, names in NAMES.items()}
        said = " ".join(ASKED[kind][0].format(name) for kind, name in given.items())
        first = as_chat([{"role": "user", "content": said}, {"role": "assistant", "content": "Good to know!"}])
        # Turns are whole blocks: what a turn lacks is taken from the chat after it.
        filling = (encode(chat)[:turn_tokens] for chat in recorded[start : start + TURNS - 2])
        ids = [*encode(first), *(token for chat in filling for token in chat)]
        blocks = len(ids) // BLOCK_TOKENS
        ends = [BLOCK_TOKENS * (blocks * number // (TURNS - 1)) for number in range(TURNS)]
        questions = []
        for kind, name in given.items():
            _, asked, answer = ASKED[kind]
            others = rng.sample([other for other in NAMES[kind].split() if other != name], CANDIDATES - 1)
            prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}"
            candidates = [encode(f" {each}")[0] for each in (name, *others)]
            if len(set(candidates)) == CANDIDATES:
                questions.append((torch.tensor([*ids[ends[-1] :], *encode(prompt)]), candidates))
        yield [torch.tensor(ids[a:b]) for a, b in pairwise(ends) if a < b], questions


def answers_of(history: GrowingHistory, conversation: Conversation) -> list[tuple[bool, float]]:
    """Play a conversation. Returns for each question whether the right name is the likeliest candidate, and its log
    probability."""
    history.forget()
    pieces, questions = conversation
    for piece in pieces:
        history.turn(piece)
    answers = []
    for asked, candidates in questions:
        among = history.score(asked)[-1][torch.tensor(candidates)]
        answers.append((int(among.argmax()) == 0, float(among[0])))
    return answers


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    subject = load_subject(arguments.model, threads=arguments.threads)
    learned, scored = calibration_text(arguments.model / "tokenizer.json")
    made = calibrate(subject, budget=arguments.budget, learned=learned, scored=scored)
    if made is None:
        raise SystemExit(f"no steps keep to {arguments.budget} nats a token on this model")
    shape: Any = subject.model.config
    # Turns are whole blocks, so long that the whole text and a question fit the model's window.
    turn = min(arguments.turn_tokens, shape.max_position_embeddings // (TURNS + 2)) // BLOCK_TOKENS * BLOCK_TOKENS
    most = (TURNS + 2) * max(turn, 128)
    raw, through = (GrowingHistory(subject, codec, most_tokens=most) for codec in (None, made.codec))
    encode = encoder(arguments.model)
    asked: dict[str, list[tuple[bool, float]]] = {"raw": [], "coded": []}
    settings = {
        "model": name_of(arguments.model), "budget": arguments.budget, "kl_calibrated": made.divergence,
        "turn_tokens": turn, "texts": arguments.texts, "candidates": CANDIDATES,
    }  # fmt: skip
    texts = texts_of(arguments.data, encode, [(TURNS + 1) * turn] * arguments.texts)
    drifts = [drift_of(raw, through, ids.split(turn)) for ids in run.track(texts, "texts")]
    run.keep({"settings": settings, **summarize(drifts, asked)})
    chosen = list(islice(conversations(arguments.data, encode, turn, seed=0), arguments.conversations))
    for conversation in run.track(chosen, "conversations"):
        for arm, history in (("raw", raw), ("coded", through)):
            asked[arm] += answers_of(history, conversation)
    return {"settings": settings, **summarize(drifts, asked)}


def summarize(drifts: list[list[float]], asked: dict[str, list[tuple[bool, float]]]) -> dict[str, Any]:
    """Return means over texts and over questions, and the claims that are `held`."""
    by_turn = [mean(values) for values in zip(*drifts, strict=True)]
    names = {
        arm: {"questions": len(given), "right": mean(right for right, _ in given), "logprob": mean(p for _, p in given)}
        for arm, given in asked.items()
        if given
    }
    held = {f"turn {TURNS} diverges at most {MOST_DRIFT:g} x turn 1": by_turn[-1] <= MOST_DRIFT * by_turn[0]}
    if names:
        held[f"at least {LEAST_QUESTIONS} questions"] = names["raw"]["questions"] >= LEAST_QUESTIONS
        fewer = round(names["raw"]["right"] - names["coded"]["right"], 9)
        held[f"at most {MOST_POINTS:.0%} fewer right answers behind coded history"] = fewer <= MOST_POINTS
    return {"kl_by_turn": by_turn, "names": names, "held": held}


def show(console: Console, result: Any) -> None:
    settings = result["settings"]
    title = f"{settings['model']}, budget {settings['budget']:g}: KL by turn, each on coded history of all before"
    show_rows(console, title, {"KL": {str(turn): kl for turn, kl in enumerate(result["kl_by_turn"], 1)}})
    show_rows(console, f"Names asked for in turn {TURNS}", result["names"])


def options(parser: ArgumentParser) -> None:
    text_options(parser)
    parser.add_argument("--budget", type=float, default=0.001, help="nats a token")
    parser.add_argument("--texts", type=int, default=12, help="whose drift is measured")
    parser.add_argument("--conversations", type=int, default=30, help="with four names each")
    parser.add_argument("--turn-tokens", type=int, default=128, help="of a turn, whole blocks")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("codec_drift", arguments.model),
    about=__doc__, measure=measure, show=show, options=options,
)  # fmt: skip
