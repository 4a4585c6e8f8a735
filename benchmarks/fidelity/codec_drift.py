"""Whether a codec's errors add up over a conversation, and whether names survive in coded KV.

    python -m benchmarks.fidelity.codec_drift --data DIR [--model smollm2] [--texts 12] [--conversations 30]

drift   texts cut into a beginning and ten turns. Every turn is computed on the history of all before it as a server
        would load it: each block coded once, from the rows that were computed on coded history, and the first block
        exact. Scored: the KL of what the model says in a turn from what it says behind raw history, nats a token.
names   chats of ten turns. The first gives four names, eight are of other chats, and the tenth asks for each name. An
        answer is right where the right name is the likeliest of ten. Asked behind raw history and behind coded.

Held: the KL of the tenth turn is at most three times the first's; there are at least 100 questions, and behind coded
history at most 2 points fewer are right. Computed in fp32 with KV stored in bf16, as in `benchmarks.fidelity.codecs`.
"""

import gzip
import json
import random
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.harness.documents import documents
from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.models import model_directory, name_of, result_name
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.build.model import find_attention
from reprise.engine.codec.calibration import calibrate
from reprise.engine.codec.quality import HistoryCoder, Subject, coded, compared
from reprise.engine.codec.text import calibration_text
from reprise.engine.model.loading import load_model
from reprise.kernels.codecs.codec import Codec

TURNS, MOST_DRIFT = 10, 3.0
LEAST_QUESTIONS, MOST_POINTS = 100, 0.02
CANDIDATES = 10
NAMES = {
    "dog": ("Biscuit", "Rocky", "Daisy", "Shadow", "Ginger", "Pepper", "Cookie", "Bandit", "Maple", "Ziggy", "Hazel"),
    "sister": ("Clara", "Naomi", "Ingrid", "Felicia", "Harriet", "Joanna", "Miriam", "Paula", "Renata", "Sylvia"),
    "town": ("Bergen", "Toledo", "Galway", "Lucerne", "Verona", "Bruges", "Odense", "Tampere", "Utrecht", "Porto"),
    "teacher": (
        "Morrison",
        "Delgado",
        "Fischer",
        "Bennett",
        "Okafor",
        "Petrov",
        "Sullivan",
        "Tanaka",
        "Ramirez",
        "Lee",
    ),
}
GIVEN = {
    "dog": "My dog is called {}.",
    "sister": "My sister's name is {}.",
    "town": "I grew up in a town called {}.",
    "teacher": "My favourite teacher was called {}.",
}
ASKED = {
    "dog": ("What is my dog called?", "Your dog is called"),
    "sister": ("What is my sister's name?", "Your sister's name is"),
    "town": ("In which town did I grow up?", "You grew up in a town called"),
    "teacher": ("What was my favourite teacher called?", "Your favourite teacher was called"),
}
Rows = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """pieces: ids of each turn but the last, whole blocks each; questions: (what is asked, ids of candidates, the right
    one first)."""

    pieces: list[Tensor]
    questions: list[tuple[Tensor, list[int]]]


class CodedHistory:
    """The KV of a text that grows, as it is stored: coded turn by turn, or raw without a codec."""

    def __init__(self, coder: HistoryCoder, codec: Codec | None) -> None:
        self._coder, self._codec = coder, codec
        self._rows: Rows = []
        self.length = 0

    def go_on(self, token_ids: Tensor) -> Tensor:
        """Compute a turn of whole blocks behind the history, and keep it. Returns its log probabilities."""
        if self.length:
            self._coder.place(self._rows)
        logprobs, rows = self._coder.go_on(token_ids, self.length)
        if self._codec is not None:
            rows = self._as_coded(rows)
        both = zip(self._rows, rows, strict=True) if self._rows else None
        self._rows = rows if both is None else [(torch.cat([k, a]), torch.cat([v, b])) for (k, v), (a, b) in both]
        self.length += len(token_ids)
        return logprobs

    def score(self, token_ids: Tensor) -> Tensor:
        """Return the log probabilities of tokens behind the history, which stays as it is."""
        self._coder.place(self._rows)
        return self._coder.score(token_ids, self.length)

    def _as_coded(self, rows: Rows) -> Rows:
        """Code a turn's blocks. `coded` spares the first that it is given: that of the text, or one put in front."""
        assert self._codec is not None
        if not self.length:
            return coded(self._codec, rows)[0] if len(rows[0][0]) > BLOCK_TOKENS else rows
        last = [(k[-BLOCK_TOKENS:], v[-BLOCK_TOKENS:]) for k, v in self._rows]
        longer = [(torch.cat([k, a]), torch.cat([v, b])) for (k, v), (a, b) in zip(last, rows, strict=True)]
        return [(k[BLOCK_TOKENS:], v[BLOCK_TOKENS:]) for k, v in coded(self._codec, longer)[0]]


def drift_of(coder: HistoryCoder, codec: Codec, pieces: Sequence[Tensor]) -> list[float]:
    """Return the mean KL of each turn but the first, which has no history. pieces: whole blocks each."""
    raw, through = CodedHistory(coder, None), CodedHistory(coder, codec)
    return [float(compared(raw.go_on(piece), through.go_on(piece), piece, 0.0).divergence.mean()) for piece in pieces][
        1:
    ]


def conversations(
    data: Path, encode: Callable[[str], list[int]], turn_tokens: int, seed: int
) -> Iterator[Conversation]:
    """Make chats out of recorded ones, with names in the first turn that others do not have."""
    rng = random.Random(seed)
    with gzip.open(data / "dialogues/topical_chat.jsonl.gz", "rt", encoding="utf-8") as lines:
        chats = [_as_chat(json.loads(line)["turns"]) for line in lines]
    rng.shuffle(chats)
    for start in range(0, len(chats) - TURNS, TURNS - 2):
        given = {kind: rng.choice(names) for kind, names in NAMES.items()}
        said = " ".join(GIVEN[kind].format(name) for kind, name in given.items())
        first = encode(_as_chat([{"role": "user", "content": said}, {"role": "assistant", "content": "Good to know!"}]))
        filling = [encode(chat) for chat in chats[start : start + TURNS - 2]]
        # Whole blocks: what a turn lacks is taken from the chat after it.
        ids = [*first, *(token for chat in filling for token in chat[:turn_tokens])]
        whole = (len(ids) - len(ids) % BLOCK_TOKENS) // BLOCK_TOKENS
        ends = [BLOCK_TOKENS * (whole * number // (TURNS - 1)) for number in range(TURNS)]
        pieces = [torch.tensor(ids[a:b]) for a, b in pairwise(ends) if a < b]
        questions = []
        for kind, name in given.items():
            asked, answer = ASKED[kind]
            others = rng.sample([other for other in NAMES[kind] if other != name], CANDIDATES - 1)
            prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}"
            candidates = [encode(f" {each}")[0] for each in (name, *others)]
            if len(set(candidates)) == CANDIDATES:
                questions.append((torch.tensor([*ids[ends[-1] :], *encode(prompt)]), candidates))
        yield Conversation(pieces, questions)


def _as_chat(turns: Sequence[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)


def answers_of(coder: HistoryCoder, codec: Codec | None, conversation: Conversation) -> list[tuple[bool, float]]:
    """Return for each question whether the right name is the likeliest, and its log probability."""
    history = CodedHistory(coder, codec)
    for piece in conversation.pieces:
        history.go_on(piece)
    answers = []
    for asked, candidates in conversation.questions:
        among = history.score(asked)[-1][torch.tensor(candidates)]
        answers.append((int(among.argmax()) == 0, float(among[0])))
    return answers


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model, torch.bfloat16, torch.device("cpu"))
    backend, page_size, found = find_attention(model, torch.device("cpu"))
    subject = Subject(model, backend, page_size, found)
    tokenizer = arguments.model / "tokenizer.json"
    learned, scored = calibration_text(tokenizer)
    made = calibrate(subject, budget=arguments.budget, learned=learned, scored=scored)
    if made is None:
        raise SystemExit(f"no steps keep to {arguments.budget} nats a token on this model")
    shape: Any = model.config
    turn = _turn_tokens(arguments.turn_tokens, window=int(shape.max_position_embeddings))
    coder = HistoryCoder(subject, most_tokens=(TURNS + 2) * max(turn, 128))

    def encode(text: str) -> list[int]:
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids

    encoder = Tokenizer.from_file(str(tokenizer))
    drifts: list[list[float]] = []
    asked: dict[str, list[tuple[bool, float]]] = {"raw": [], "coded": []}

    def result() -> dict[str, Any]:
        return _result(arguments, turn, made.divergence, drifts, asked)

    length = (TURNS + 1) * turn
    texts = (ids for text in documents(arguments.data) if len(ids := encode(text)) >= length)
    for ids in run.track(list(islice(texts, arguments.texts)), "texts"):
        drifts.append(drift_of(coder, made.codec, torch.tensor(ids[:length]).split(turn)))
        run.keep(result())
    chats = islice(conversations(arguments.data, encode, turn, seed=0), arguments.conversations)
    for conversation in run.track(list(chats), "conversations"):
        for arm, codec in (("raw", None), ("coded", made.codec)):
            asked[arm] += answers_of(coder, codec, conversation)
        run.keep(result())
    return result()


def _turn_tokens(wanted: int, *, window: int) -> int:
    """Return the tokens of a turn, whole blocks, so that the whole text and a question fit the model's window."""
    return min(wanted, window // (TURNS + 2)) // BLOCK_TOKENS * BLOCK_TOKENS


def _result(
    arguments: Any,
    turn: int,
    measured: float,
    drifts: list[list[float]],
    asked: dict[str, list[tuple[bool, float]]],
) -> dict[str, Any]:
    by_turn = [mean(values) for values in zip(*drifts, strict=True)]
    names = {
        arm: {"questions": len(given), "right": mean(right for right, _ in given), "logprob": mean(p for _, p in given)}
        for arm, given in asked.items()
        if given
    }
    held = {}
    if by_turn:
        held[f"turn {TURNS} diverges at most {MOST_DRIFT:g} x turn 1"] = by_turn[-1] <= MOST_DRIFT * by_turn[0]
    if names:
        held[f"at least {LEAST_QUESTIONS} questions"] = names["raw"]["questions"] >= LEAST_QUESTIONS
        fewer = round(names["raw"]["right"] - names["coded"]["right"], 9)
        held[f"at most {MOST_POINTS:.0%} fewer right answers behind coded history"] = fewer <= MOST_POINTS
    settings = {
        "model": name_of(arguments.model), "budget": arguments.budget, "kl_calibrated": measured,
        "turn_tokens": turn, "texts": len(drifts), "candidates": CANDIDATES,
    }  # fmt: skip
    return {"settings": settings, "kl_by_turn": by_turn, "names": names, "held": held}


def show(console: Console, result: Any) -> None:
    settings = result["settings"]
    title = f"{settings['model']}, budget {settings['budget']:g}: KL by turn, each on coded history of all before"
    table = Table(title=title, title_justify="left")
    for number in range(1, len(result["kl_by_turn"]) + 1):
        table.add_column(str(number), justify="right")
    table.add_row(*(f"{divergence:.5f}" for divergence in result["kl_by_turn"]))
    console.print(table)
    for arm, row in result["names"].items():
        line = f"names asked for in turn {TURNS}, {arm}: {row['right']:.1%} of {row['questions']} right"
        console.print(f"{line}, log probability {row['logprob']:.3f}", highlight=False)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="directory of the texts")
    parser.add_argument("--model", type=model_directory, default="smollm2", help="bundled, smollm2 or a directory")
    parser.add_argument("--budget", type=float, default=0.001, help="nats a token")
    parser.add_argument("--texts", type=int, default=12, help="whose drift is measured")
    parser.add_argument("--conversations", type=int, default=30, help="with four names each")
    parser.add_argument("--turn-tokens", type=int, default=128, help="of a turn, whole blocks")
    parser.add_argument("--threads", type=int, help="of torch")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("codec_drift", arguments.model),
    about=__doc__,
    measure=measure,
    show=show,
    options=options,
    quick=Quick(
        {"texts": 2, "conversations": 3},
        (Figure("KL of turn 10 over turn 1", lambda r: r["kl_by_turn"][-1] / r["kl_by_turn"][0], 2.0),),
        holds=False,
    ),
)

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
