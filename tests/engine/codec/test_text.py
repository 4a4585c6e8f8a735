"""Tests the text on which codecs are calibrated."""

from reprise.engine.codec.text import calibration_text
from reprise.model.directories import BUNDLED


def test_pieces_to_learn_from_and_others_to_score():
    learned, scored = calibration_text(BUNDLED / "tokenizer.json")
    assert sum(map(len, learned)) >= 4000
    assert sum(map(len, scored)) >= 2500
    assert not {tuple(piece[:64].tolist()) for piece in learned} & {tuple(piece[:64].tolist()) for piece in scored}
