"""Write a random Llama with which speed can be measured anywhere, with nothing downloaded.

    python -m benchmarks.harness.make_model --out DIR [--tiny] [--kv-heads N]

The same seed gives the same bytes. Norm weights are drawn around 1 instead of being exactly 1, for with ones a
normalisation in the wrong order goes unnoticed. The tokenizer is the bundled one with filler tokens after its own, so
the model takes text and a chat template like any other; it answers gibberish. Both end tokens are real, but an answer
of random weights rarely meets them: measure with `ignore_eos` where lengths must agree.

The shape is the usual "125 M" one, which has that many parameters with 32 k tokens; with 16 k it has 100.7 million.
"""

import argparse
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

BUNDLED = Path(__file__).parent.parent.parent / "model" / "bundled"


@dataclass(frozen=True, slots=True)
class ModelShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int


SHAPES = {
    "125m": ModelShape(768, 12, 12, 4, 64, 2048, 16_384, 4096),
    "tiny": ModelShape(64, 2, 4, 2, 16, 128, 4608, 1024),
    "1b": ModelShape(2048, 16, 32, 8, 64, 8192, 128_256, 32_768),  # Llama-3.2-1B's, with a head of its own
    "8b": ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256, 32_768),  # Llama-3.1-8B's
}


def random_llama(shape: ModelShape, seed: int, device: torch.device | None = None) -> LlamaForCausalLM:
    """Return a random model in bfloat16. It is initialised as in transformers, except that norms are not exactly 1.
    device: where the weights are drawn; other devices draw other weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.device(device or "cpu"):
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    return model.to(torch.bfloat16)


def write_tokenizer(source: Path, out: Path, vocab: int, context: int) -> None:
    """Copy the tokenizer in `source` to `out`. Its vocabulary is filled up to `vocab` tokens with some that no text
    contains."""
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    # A BPE reaches a token through merges alone, so a token without a merge is never produced by text. Spaces in
    # front, as byte-level BPE writes them, make a generated answer readable as words.
    known.update({f"Ġ<{index}>": index for index in range(len(known), vocab)})
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = context
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def make_model(out: Path, shape: ModelShape, seed: int, device: torch.device | None = None) -> int:
    """Write a random model into the directory `out`, in place of its old contents. Returns the number of parameters.
    device: see `random_llama`."""
    fresh = out.with_name(out.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    model = random_llama(shape, seed, device)
    model.save_pretrained(fresh)
    write_tokenizer(BUNDLED, fresh, shape.vocab, shape.context)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="0.7 million parameters instead of 100.7, for tests")
    parser.add_argument("--kv-heads", type=int, help="heads of K and V; as many as heads: none are shared")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shape = SHAPES["tiny" if arguments.tiny else "125m"]
    shape = replace(shape, kv_heads=arguments.kv_heads or shape.kv_heads)
    parameters = make_model(arguments.out, shape, arguments.seed)
    print(f"{arguments.out}: {parameters:,} parameters")
