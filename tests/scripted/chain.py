"""Writes a model whose answers are known: a small Llama with a Markov chain in its embedding and its head.

Tokenizer, template, KV, streams and caches are a server's real ones. Only what the model says is decided beforehand, so
that clients can be driven through calls of their own tools.

How the chain works:

- Each answer is cut into pieces of a few characters that occur nowhere else, neither in another answer nor in the
  vocabulary. Each piece becomes a token of the tokenizer. So a piece has one successor, whatever stands before it.
- An answer begins after its step token, a special token at the end of the prompt, which the template puts there. The
  template counts: `<|codex_2|>` begins what the model says to Codex after two answers.
- A token with a successor has a code of its own in the embedding: a vector of 256 signs, drawn by chance. All other
  tokens share one more code. The head's row of a token is the sum of the codes of the tokens that it follows; the
  row of the end of text has the shared code.
- The layers add almost nothing: their output projections are a thousandth of the usual size. So the last hidden state
  is the token's code, and RMSNorm leaves it as it is. The logit of the successor is 256 x 5/16 = 80, that of any other
  token about 5 x sqrt(codes in its row): no temperature that is in use chooses another one.

`python -m tests.scripted.chain DIRECTORY [--thinks]` writes the model that `tests/scripted/agents.py` describes.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from reprise.model.directories import BUNDLED
from tests.scripted.agents import answers, template

END = "<|im_end|>"
LEAST_PIECE, MOST_PIECE = 3, 24  # characters
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 2, 4, 2, 64, 256, 64
HEAD_SCALE = 5 / 16
WINDOW = 131_072


class CannotCut(ValueError):
    """A text that has nothing of its own."""


@dataclass
class Cutter:
    """Cuts texts into pieces that occur once. Raises CannotCut."""

    used: set[str]  # the vocabulary, and all pieces so far
    pieces: list[str] = field(default_factory=list)

    def cut(self, text: str) -> list[str]:
        found: list[str] = []
        start = 0
        while start < len(text):
            piece = self._next(text, start)
            if piece is None:  # what is left over is not new: pieces before it go along
                piece = text[start:]
                while found and (piece in self.used or len(piece) < LEAST_PIECE):
                    piece = found.pop() + piece
                if piece in self.used:
                    raise CannotCut(text)
                start = len(text) - len(piece)
            self.used.add(piece)
            found.append(piece)
            start += len(piece)
        self.pieces += found
        return found

    def _next(self, text: str, start: int) -> str | None:
        for length in range(LEAST_PIECE, MOST_PIECE):
            piece = text[start : start + length]
            if len(piece) == length and piece.strip() and piece not in self.used:
                return piece
        return None


def write_model(directory: Path, chat_template: str, said: Mapping[str, str]) -> Path:
    """Write a model that says `said`, a text for each step token. Returns the directory, which need not exist."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    cutter = Cutter(set(tokenizer.get_vocab(with_added_tokens=True)))
    chains = {step: cutter.cut(text) for step, text in said.items()}
    tokenizer.add_special_tokens([AddedToken(step, special=True, normalized=False) for step in chains])
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in cutter.pieces])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    pairs = [(ids[a], ids[b]) for step, pieces in chains.items() for a, b in pairwise([step, *pieces])]
    weights = _weights(max(ids.values()) + 1, pairs, ids[END])
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "chat_template.jinja").write_text(chat_template)
    end = ids[END]
    _write_json(directory / "config.json", _config(len(weights["lm_head.weight"]), end))
    _write_json(directory / "generation_config.json", {"eos_token_id": end, "temperature": 0.7})
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": WINDOW}
    _write_json(directory / "tokenizer_config.json", kept)
    return directory


def _weights(vocabulary: int, pairs: Sequence[tuple[int, int]], end: int) -> dict[str, Tensor]:
    """Return the weights of a model in which the second token of each pair follows the first, and the end follows all
    others."""
    chance = torch.Generator().manual_seed(3)

    def drawn(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=chance) * scale

    codes = torch.sign(drawn(len(pairs) + 1, HIDDEN, scale=1.0))
    embedding = codes[-1].repeat(vocabulary, 1)
    head = torch.zeros(vocabulary, HIDDEN)
    head[end] = codes[-1]
    for code, (token, successor) in zip(codes, pairs, strict=False):
        embedding[token] = code
        head[successor] += code
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head * HEAD_SCALE}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        part = f"model.layers.{layer}."
        weights |= {
            f"{part}self_attn.q_proj.weight": drawn(HEADS * HEAD_DIM, HIDDEN, scale=0.05),
            f"{part}self_attn.k_proj.weight": drawn(KV_HEADS * HEAD_DIM, HIDDEN, scale=0.05),
            f"{part}self_attn.v_proj.weight": drawn(KV_HEADS * HEAD_DIM, HIDDEN, scale=0.05),
            f"{part}self_attn.o_proj.weight": drawn(HIDDEN, HEADS * HEAD_DIM, scale=1e-3),
            f"{part}mlp.gate_proj.weight": drawn(INNER, HIDDEN, scale=0.02),
            f"{part}mlp.up_proj.weight": drawn(INNER, HIDDEN, scale=0.02),
            f"{part}mlp.down_proj.weight": drawn(HIDDEN, INNER, scale=1e-3),
            f"{part}input_layernorm.weight": torch.ones(HIDDEN),
            f"{part}post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}


def _config(vocabulary: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocabulary,
        "max_position_embeddings": WINDOW,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": end,
        "eos_token_id": end,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--thinks", action="store_true", help="each answer begins with a thought")
    arguments = parser.parse_args()
    write_model(arguments.directory, template(thinks=arguments.thinks), answers(thinks=arguments.thinks))


if __name__ == "__main__":
    main()
