"""Tests the export of a training run to the bundled directory, on a run made here."""

import gzip
import json
import math
import shutil
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tools.bundled_model import corpus
from tools.bundled_model.export import export, perplexity, token_bytes
from tools.bundled_model.train import CONTEXT, model_config

BUNDLED = Path(__file__).parents[3] / "model" / "bundled"


def held_out_id() -> str:
    return next(f"d{n}" for n in count() if corpus.is_held_out(f"d{n}"))


@pytest.fixture
def data(tmp_path):
    """Each source with one document, which is held out."""
    turns = [{"role": "user", "content": "Are you a fan?"}, {"role": "assistant", "content": "Yes. Café, 12 €."}]
    book = next(f"b{n}" for n in count() if corpus.is_held_out(f"b{n}/0"))
    rows = {f"dialogues/{name}": {"id": held_out_id(), "turns": turns} for name in corpus.SOURCES if name != "books"}
    rows["long_docs/books"] = {"id": book, "text": "It was a dark and stormy night. " * 10}
    for name, row in rows.items():
        path = tmp_path / "data" / f"{name}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(row).encode()))
    return tmp_path / "data"


@pytest.fixture
def run(tmp_path):
    """A run that has just begun: random weights, two lines of log."""
    torch.manual_seed(0)
    directory = tmp_path / "run"
    directory.mkdir()
    shutil.copy(BUNDLED / "tokenizer.json", directory)
    state = {"step": 40, "tokens": 163_840, "cpu_s": 47.4, "wall_s": 47.5}
    torch.save(
        {"model": LlamaForCausalLM(model_config()).state_dict(), "optimizers": [], **state}, directory / "checkpoint.pt"
    )
    records = [
        {**state, "tokens": 81_920, "loss": 8.1, "length": 256, "validation": dict.fromkeys(corpus.SOURCES, 6.9)},
        {**state, "loss": 7.5, "length": CONTEXT},
    ]
    (directory / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


@pytest.mark.long
def test_export_replaces_what_was_there(tmp_path, run, data):
    out = tmp_path / "model" / "bundled"
    out.mkdir(parents=True)
    (out / "stale.bin").write_text("from an earlier export")
    export(run, data, out, max_tokens=1000)
    assert not (out / "stale.bin").exists()
    assert not out.with_name("bundled.tmp").exists()
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {f.name for f in out.iterdir()}

    exported = AutoModelForCausalLM.from_pretrained(out)
    trained = torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    for name, weight in exported.state_dict().items():
        assert torch.equal(weight, trained[name].to(torch.bfloat16)), name

    card = (out.parent / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "40 optimizer steps over 0.2 million tokens" in card
    assert (out.parent / "loss_curve.png").stat().st_size > 10_000


def test_perplexity_is_the_exponent_of_the_mean_loss():
    """Against a loop that scores every window alone: a short document, and one longer than the context window."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(model_config()).eval()
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, corpus.VOCAB_SIZE, size=size, dtype=np.uint16) for size in (7, CONTEXT + 9)]
    source = corpus.Source("made up", np.concatenate(documents), np.array([0, 7]))
    sizes = token_bytes(tokenizer)

    loss = 0.0
    for document in documents:
        for at in range(0, len(document) - 1, CONTEXT):
            window = torch.from_numpy(document[at : at + CONTEXT + 1].astype(np.int64))[None]
            with torch.no_grad():
                logits = model(input_ids=window[:, :-1]).logits[0]
            loss += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()

    result = perplexity(model, source, sizes, max_tokens=10**6)
    assert (result.documents, result.tokens) == (2, 6 + CONTEXT + 8)
    assert result.loss == pytest.approx(loss, rel=1e-4)
    assert result.per_token == pytest.approx(math.exp(loss / result.tokens), rel=1e-3)
    assert result.text_bytes == sum(int(sizes[d[1:]].sum()) for d in documents)
    assert perplexity(model, source, sizes, max_tokens=6).documents == 1


def test_token_bytes_add_up_to_the_text():
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    text = corpus.render_dialogue([{"role": "user", "content": "Café für 12 €, 你好 🙂"}], None)
    plain = text
    for special in corpus.SPECIAL_TOKENS:
        plain = plain.replace(special, "")
    assert token_bytes(tokenizer)[tokenizer.encode(text).ids].sum() == len(plain.encode())
