"""Measures what packed weights change of a model's answers: benchmarks/results/packed_weights*.json.

    python -m benchmarks.texts packed_weights --data DIR [--model bundled] [--gguf FILE] [--llama-python PYTHON]

The mean Kullback-Leibler divergence, in nats a token, of next-token distributions from those of the same weights in
fp32, over at least 20,000 tokens of WikiText-2 in rows of 512; how often the most likely token is another; and the
change in perplexity.

With `--gguf` the weights are those of the file: as the engine computes with them packed, unpacked to bf16, and by
llama.cpp, whose activations are rounded to 8 bits. Without, they are the model's, and arms pack them: `q8` and `q4`
(`model.weights`), and `Q8_0`, `Q4_0` and `Q4_1`, which are llama.cpp's own formats, rounded by its own code (embedding
and head in `Q8_0`, as `q4` has them in 8 bits), all computed in fp32; `bf16` says what computing in bf16 changes.
"""

import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.models import result_name
from benchmarks.harness.result_files import ROOT
from benchmarks.harness.tables import show_rows
from benchmarks.texts.reading import encoder, text_options, wikitext
from reprise.engine.gguf.convert import convert
from reprise.engine.packed.directory import is_packed, write
from reprise.engine.packed.from_directory import packed
from reprise.engine.packed.load import load_packed

ROW = 512
_LLAMA = ROOT / "benchmarks" / "speed" / "llama_cpp_worker.py"
Logits = Callable[[int, Tensor], Tensor]
"""(number of a row, its tokens) -> logits fp32 [tokens, vocab]"""


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    directory = arguments.model
    if arguments.gguf:
        directory = run.directory / "kept"
        convert(Path(arguments.gguf), directory, write_packed=write)
    ids = encoder(directory)(wikitext(arguments.data))
    rows = torch.tensor(ids[: arguments.tokens // ROW * ROW]).view(-1, ROW)
    truth = _logits(_loaded(directory, torch.float32))
    arms = dict(_arms_of_file(run, directory, rows) if arguments.gguf else _arms_of_model(run, directory))
    sums: dict[str, list[Tensor]] = {name: [] for name in arms}
    for number, row in enumerate(run.track(list(rows), "rows")):
        want = truth(number, row).log_softmax(-1)
        for name, arm in arms.items():
            sums[name].append(_compare(want, arm(number, row).log_softmax(-1), row))
    figures = {name: _figures(torch.stack(found)) for name, found in sums.items()}
    return {"tokens": rows.numel(), "arms": figures, "held": verdicts(figures)}


def _figures(by_row: Tensor) -> dict[str, Any]:
    kl, other, ours, theirs = by_row.mean(0).tolist()
    return {
        "kl": round(kl, 6), "kl_by_row": [round(part, 6) for part in by_row[:, 0].tolist()],
        "other_token": round(other, 5), "perplexity": round(exp(ours), 4),
        "perplexity_change": round(exp(ours - theirs) - 1, 5),
    }  # fmt: skip


def verdicts(arms: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return claim -> whether it holds: each of our forms beside llama.cpp's, as far as both were measured."""
    return {
        f"{ours}: divergence no greater than {theirs}'s": arms[ours]["kl"] <= arms[theirs]["kl"]
        for ours, theirs in (("gguf", "llama.cpp"), ("q8", "Q8_0"), ("q4", "Q4_1"))
        if {ours, theirs} <= arms.keys()
    }


def _compare(want: Tensor, got: Tensor, row: Tensor) -> Tensor:
    """Return the divergence, how often another token is the most likely, and both mean losses."""
    kl = (want.exp() * (want - got)).sum(-1).mean()
    other = (want.argmax(-1) != got.argmax(-1)).float().mean()
    losses = [-part[:-1].gather(-1, row[1:, None]).mean() for part in (got, want)]
    return torch.stack((kl, other, *losses))


def _loaded(directory: Path, dtype: torch.dtype) -> nn.Module:
    if is_packed(directory):
        config = AutoConfig.from_pretrained(directory)
        return load_packed(directory, config, dtype, torch.device("cpu")).eval()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()  # type: ignore[no-any-return]


def _logits(model: nn.Module) -> Logits:
    @torch.inference_mode()
    def logits(_: int, row: Tensor) -> Tensor:
        found: Tensor = model(row[None]).logits[0].float()
        return found

    return logits


def _arms_of_file(run: Run, directory: Path, rows: Tensor) -> Iterator[tuple[str, Logits]]:
    yield "gguf", _logits(_loaded(directory, torch.bfloat16))
    unpacked = run.directory / "unpacked"
    convert(Path(run.arguments.gguf), unpacked)
    yield "gguf bf16", _logits(_loaded(unpacked, torch.bfloat16))
    tokens, out = run.directory / "tokens.npy", run.directory / "logits.npy"
    np.save(tokens, rows.numpy())
    words = [run.arguments.llama_python, "-P", str(_LLAMA), run.arguments.gguf, "--logits", str(tokens), str(out)]
    run.describe("llama.cpp")
    try:
        subprocess.run(words, check=True, capture_output=True, timeout=3600)
    except (OSError, subprocess.CalledProcessError) as error:
        run.console.print(f"left out: llama.cpp ({error})")
        return
    theirs = np.load(out, mmap_mode="r")
    yield "llama.cpp", lambda number, _: torch.from_numpy(theirs[number].astype(np.float32))


def _arms_of_model(run: Run, directory: Path) -> Iterator[tuple[str, Logits]]:
    yield "bf16", _logits(_loaded(directory, torch.bfloat16))
    for weights in ("q8", "q4"):
        yield weights, _logits(_loaded(packed(directory, run.directory / "packed", weights), torch.float32))
    for kind in ("Q8_0", "Q4_0", "Q4_1"):
        yield kind, _logits(_rounded(directory, kind))


def _rounded(directory: Path, kind: str) -> nn.Module:
    """The model in fp32 with its matrices rounded by ggml's own code."""
    model = _loaded(directory, torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            number = GGMLQuantizationType["Q8_0" if "embed" in name or "head" in name else kind]
            parameter.data = torch.from_numpy(dequantize(quantize(parameter.data.numpy(), number), number))
    return model


def show(console: Console, result: dict[str, Any]) -> None:
    show_rows(console, f"packed weights, {result['tokens']:,} tokens", result["arms"])


def options(parser: ArgumentParser) -> None:
    text_options(parser, model="bundled")
    parser.add_argument("--gguf", help="a GGUF file, instead of a model")
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=40 * ROW)


EXPERIMENT = Experiment(
    name=lambda arguments: (
        "packed_weights_gguf" if arguments.gguf else result_name("packed_weights", arguments.model)
    ),
    about=__doc__, measure=measure, show=show, options=options,
)  # fmt: skip
