"""Trains the bundled chat model on one CPU core, with checkpoints.

    python -m tools.bundled_model.train --data DIR --run RUN_DIR --cpu-hours 1.7     # train or resume

Progress is measured in CPU seconds of the training process, not in steps: a run that is paused (SIGSTOP) or shares its
core ends after the same amount of work, and the learning-rate decay always completes. Resuming with a smaller
`--cpu-hours` therefore ends a run early without harm. SIGTERM writes a checkpoint and stops.
"""

import argparse
import json
import math
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# By default glibc returns every large temporary to the kernel, which costs a third of the throughput.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
if __name__ == "__main__" and any(os.environ.get(k) != v for k, v in _MALLOC.items()):
    os.execve(
        sys.executable, [sys.executable, "-m", "tools.bundled_model.train", *sys.argv[1:]], {**os.environ, **_MALLOC}
    )

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tools.bundled_model import corpus

CONTEXT = 1024


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a run. `cpu_s` decides when it ends; the rest is for the log."""

    step: int = 0
    tokens: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run, up to `until` of the budget; every optimizer step sees `batch * length` tokens."""

    until: float
    length: int
    batch: int
    weights: dict[str, float]


PHASES = (
    Phase(0.40, 256, 16, {"books": 0.45, "schema_guided": 0.25, "topical_chat": 0.26, "taskmaster4": 0.04}),
    Phase(0.78, 256, 16, {"books": 0.22, "schema_guided": 0.30, "topical_chat": 0.44, "taskmaster4": 0.04}),
    Phase(1.01, 1024, 4, {"books": 0.10, "schema_guided": 0.28, "topical_chat": 0.58, "taskmaster4": 0.04}),
)
WARMUP_STEPS, DECAY_FROM = 60, 0.55
MUON_LR, ADAM_LR = 4e-3, 3e-3
CHECKPOINT_EVERY_S, VALIDATION_EVERY_S = 180, 400  # seconds of CPU time


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=corpus.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )


def learning_rate_factor(step: int, progress: float) -> float:
    """Warm up over steps, hold, then decay linearly to 2 % over the last part of the budget."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    if progress < DECAY_FROM:
        return 1.0
    return max(0.02, 1 - 0.98 * (progress - DECAY_FROM) / (1 - DECAY_FROM))


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Use Muon for the weight matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def loss_on(model: torch.nn.Module, window: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


@torch.no_grad()
def validation_loss(
    model: torch.nn.Module, sources: dict[str, corpus.Source], windows: int, length: int
) -> dict[str, float]:
    """Return the mean loss per token of each held-out source, over the same `windows` windows every time."""
    model.eval()
    losses = {}
    for name in sources:
        rng = np.random.default_rng(1)
        total = 0.0
        for _ in range(windows):
            batch = corpus.sample_batch(sources, {name: 1.0}, 2, length, rng)
            total += loss_on(model, torch.from_numpy(batch)).item()
        losses[name] = total / windows
    model.train()
    return losses


def save_checkpoint(
    path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], state: TrainingProgress
) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(
        {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], **asdict(state)}, temporary
    )
    temporary.replace(path)


def load_checkpoint(path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> TrainingProgress:
    """Continue where the checkpoint was saved; from the beginning if there is none."""
    state = TrainingProgress()
    if not path.exists():
        return state
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimizer, optimizer_state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return TrainingProgress(**{key: saved[key] for key in asdict(state)})


def load_tokenizer(run: Path, data: Path) -> Tokenizer:
    """Load the tokenizer of a run, which is trained first if there is none."""
    path = run / "tokenizer.json"
    if not path.exists():
        corpus.train_tokenizer(data).save(str(path))
    return Tokenizer.from_file(str(path))


def optimize(
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    training: dict[str, corpus.Source],
    phase: Phase,
    factor: float,
    step: int,
) -> float:
    """Take one step at `factor` of the peak learning rates. Returns the loss before it."""
    for optimizer, peak in zip(optimizers, (MUON_LR, ADAM_LR), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = peak * factor
    # The step number seeds the batch, so a resumed run draws what an uninterrupted one would have drawn.
    rng = np.random.default_rng([7, step])
    batch = corpus.sample_batch(training, phase.weights, phase.batch, phase.length, rng)
    loss = loss_on(model, torch.from_numpy(batch))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set, instead of ending the process."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping


def train(data: Path, run: Path, cpu_hours: float, threads: int) -> None:
    """Train until the CPU budget is spent; resumes from `run/checkpoint.pt` if it exists."""
    torch.set_num_threads(threads)
    run.mkdir(parents=True, exist_ok=True)
    console = Console()
    tokenizer = load_tokenizer(run, data)
    training, held_out = (corpus.load_sources(data, tokenizer, held_out=h) for h in (False, True))
    console.print({name: f"{len(s.ids):,} tokens" for name, s in training.items()})

    torch.manual_seed(0)
    model = LlamaForCausalLM(model_config())
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizers = make_optimizers(model)
    checkpoint = run / "checkpoint.pt"
    state = load_checkpoint(checkpoint, model, optimizers)
    stopping = stop_on_signals()

    cpu_base, wall_base = state.cpu_s - time.process_time(), state.wall_s - time.monotonic()
    log = (run / "log.jsonl").open("a", buffering=1)
    next_checkpoint_s = state.cpu_s + CHECKPOINT_EVERY_S
    next_validation_s = state.cpu_s
    running_loss = math.nan
    while not stopping.is_set():
        state.cpu_s = cpu_base + time.process_time()
        state.wall_s = wall_base + time.monotonic()
        progress = state.cpu_s / (cpu_hours * 3600)
        if progress >= 1:
            break
        phase = next(p for p in PHASES if progress < p.until)
        factor = learning_rate_factor(state.step, progress)
        loss = optimize(model, optimizers, training, phase, factor, state.step)
        state.step += 1
        state.tokens += phase.batch * phase.length
        running_loss = loss if math.isnan(running_loss) else 0.98 * running_loss + 0.02 * loss
        if state.step % 20 == 0:
            record: dict[str, object] = {
                **asdict(state),
                "loss": round(running_loss, 4),
                "lr": round(factor, 4),
                "length": phase.length,
            }
            if state.cpu_s >= next_validation_s:
                record["validation"] = validation_loss(model, held_out, windows=12, length=256)
                next_validation_s = state.cpu_s + VALIDATION_EVERY_S
            log.write(json.dumps(record) + "\n")
            console.print(f"{progress:6.1%}  {record}")
        if state.cpu_s >= next_checkpoint_s:
            save_checkpoint(checkpoint, model, optimizers, state)
            next_checkpoint_s = state.cpu_s + CHECKPOINT_EVERY_S
    state.cpu_s = cpu_base + time.process_time()
    save_checkpoint(checkpoint, model, optimizers, state)
    console.print("stopped" if stopping.is_set() else "finished")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with dialogues/ and long_docs/")
    parser.add_argument("--run", type=Path, required=True, help="checkpoints, tokenizer and log of this run")
    parser.add_argument("--cpu-hours", type=float, default=1.7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    train(arguments.data, arguments.run, arguments.cpu_hours, arguments.threads)
