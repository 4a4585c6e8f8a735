"""Provides the text on which codecs are calibrated: dialogues, prose and code, in `calibration.txt`."""

from hashlib import blake2b
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

LEARNED_TOKENS, SCORED_TOKENS = 1024, 640  # tokens of a piece
_MOST_PIECES = 5  # most pieces: more cost time and change the steps by less than a tenth
_TEXT = Path(__file__).with_name("calibration.txt")
_END = "\n%%\n"  # separates documents, which are learned from and scored in turn


def text_digest() -> str:
    """Return a digest of the calibration text. It is stored with results of calibration, which do not hold for the text
    of another release."""
    return blake2b(_TEXT.read_bytes(), digest_size=16).hexdigest()


def calibration_text(tokenizer: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return two lists of token ids, int64: texts to learn statistics from, and texts to be scored. tokenizer: path of
    a `tokenizer.json`."""
    encode = Tokenizer.from_file(str(tokenizer)).encode
    documents = _TEXT.read_text("utf-8").split(_END)
    halves = []
    for first, size in enumerate((LEARNED_TOKENS, SCORED_TOKENS)):
        ids = torch.tensor(encode("\n\n".join(documents[first::2]), add_special_tokens=False).ids)
        pieces = [piece for piece in ids.split(size) if len(piece) >= size // 2]
        halves.append(pieces[:_MOST_PIECES])
    return halves[0], halves[1]
