"""Measures how far a model is off when it is written in a format of quantised checkpoints, and when that is packed.

    python -m tests.engine.packed.format_costs MODEL_DIR [TOKENS]

Prints, by format, the mean Kullback-Leibler divergence in nats a token of next-token distributions from those of the
model itself: of the numbers that the format's library makes of the checkpoint, and of the checkpoint as `model.weights
auto` packs it, computed in fp32. The text is the codecs' calibration text. Checkpoints are written without calibration,
as the tests write them, so published ones are better.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from reprise.engine.build.weights import load_weights, pack_weights
from reprise.engine.model.hf_model import attention_implementation
from reprise.engine.packed.load import size_of
from tests.engine.packed.sources import quantised_weights as written
from tests.engine.packed.sources.quantised_weights import Format

CPU = torch.device("cpu")
_ROW = 512  # tokens that are read together
_TEXT = Path(__file__).parents[3] / "engine" / "codec" / "calibration.txt"
FORMATS = {
    "FP8, a scale for each output": written.float_integers("channel"),
    "FP8, blocks of 128 x 128": written.block_floats((128, 128)),
    "MXFP8": written.mx_floats(),
    "int8, a scale for each output": written.plain_integers(),
    "int4, groups of 32": written.packed_integers(4, 32),
    "int4, groups of 64, zero points (AWQ)": written.awq(64),
    "int4, groups of 64 (GPTQ)": written.gptq(4, 64),
    "int4, groups of 64 out of order (GPTQ)": written.gptq(4, 64, scattered=True),
    "NVFP4": written.nv_four(),
    "MXFP4": written.mx_four(),
}


@torch.inference_mode()
def _distributions(model: Any, rows: Tensor) -> Tensor:
    """Return log probabilities of next tokens, fp32 [rows, tokens, vocabulary]."""
    with attention_implementation(model, "eager"):
        found: Tensor = model(rows, use_cache=False).logits.float().log_softmax(-1)
    return found


def _divergence(wanted: Tensor, got: Tensor) -> float:
    """Return nats a token."""
    return float((wanted.exp() * (wanted - got)).sum(-1).mean())


def _write(source: Path, out: Path, form: Format) -> dict[str, Tensor]:
    """Write a checkpoint in a format. Returns the numbers of what is quantised in it."""
    out.mkdir()
    numbers, parts = {}, {}
    for file in source.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            if not name.endswith("_proj.weight"):
                parts[name] = weight
                continue
            made = form.write(weight.float())
            numbers[name] = made.numbers.float()
            parts |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in made.parts.items()}
    save_file(parts, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return numbers


def main(source: Path, tokens: int) -> None:
    text = _TEXT.read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(source / "tokenizer.json")).encode(text).ids[: tokens // _ROW * _ROW]
    rows = torch.tensor(ids).view(-1, _ROW)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    wanted = _distributions(model, rows)
    print(f"{rows.numel()} tokens, {size_of(model)[0]} weights", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, form in FORMATS.items():
            place = Path(directory) / "one"
            numbers = _write(source, place, form)
            changed = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
            changed.load_state_dict(numbers, strict=False)
            own = _divergence(wanted, _distributions(changed, rows))
            made = load_weights(pack_weights(place, Path(directory) / "made", "auto", CPU), torch.float32, CPU)
            packed = _divergence(wanted, _distributions(made, rows))
            print(f"{name:40} own {own:.5f} packed {packed:.5f}", flush=True)
            del changed, made
            for each in ("one", "made"):
                shutil.rmtree(Path(directory) / each)
        for weights in ("q8", "q4"):
            made = load_weights(pack_weights(source, Path(directory) / "made", weights, CPU), torch.float32, CPU)
            print(f"{weights:40} packed {_divergence(wanted, _distributions(made, rows)):.5f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4096)
