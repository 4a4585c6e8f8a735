"""Exports a training run as the bundled model, measures it, and writes its card.

    python -m tools.bundled_model.export --run RUN_DIR --data DIR --out model/bundled

Reads `checkpoint.pt`, `tokenizer.json` and `log.jsonl` of a run of `train.py`. It may still be going on, because
checkpoints are replaced atomically. Writes a directory that plain transformers loads, and next to it MODEL_CARD.md and
loss_curve.png. Every number and every sample of the card is measured on the exported bfloat16 weights, read back from
disk.
"""

import argparse
import json
import math
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tools.bundled_model import card, corpus
from tools.bundled_model.train import CONTEXT, model_config

SAMPLES: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    (None, ("Hi! How are you today?",)),
    ("You are a friendly person who likes to chat.", ("Do you like music?",)),
    (None, ("What is your favorite movie?",)),
    (None, ("Did you watch the football game last night?", "Who do you think will win next week?")),
    (
        "You are a helpful assistant.",
        ("I want to find a restaurant for dinner tonight.", "Something Italian in San Jose."),
    ),
    ("You are a friendly barista.", ("Can I get a large latte, please?",)),
    (None, ("What is the capital of France?",)),
)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The held-out loss of one source, in nats, summed over `tokens`. Markup tokens count as tokens but have no
    bytes."""

    documents: int
    tokens: int
    text_bytes: int
    loss: float

    @property
    def per_token(self) -> float:
        return math.exp(self.loss / self.tokens)

    @property
    def per_byte(self) -> float:
        return math.exp(self.loss / self.text_bytes)


def write_model(run: Path, out: Path) -> dict[str, float]:
    """Write the model directory `out`, replacing an existing one completely. Returns the counters of the run."""
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True, map_location="cpu")
    model = LlamaForCausalLM(model_config())
    model.load_state_dict(checkpoint["model"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(run / "tokenizer.json"),
        eos_token=corpus.TURN_END,
        pad_token=corpus.END_OF_TEXT,
        additional_special_tokens=[corpus.TURN_START],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = corpus.CHAT_TEMPLATE
    end_ids = tokenizer.convert_tokens_to_ids([corpus.TURN_END, corpus.END_OF_TEXT])
    model.generation_config = GenerationConfig(
        eos_token_id=end_ids, pad_token_id=end_ids[1], do_sample=True, temperature=0.3
    )

    fresh = out.with_name(out.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(fresh)
    # keep the template inside tokenizer_config.json, so that there is no separate file to forget
    tokenizer.save_pretrained(fresh, save_jinja_files=False)
    for file in fresh.iterdir():
        file.chmod(0o644)  # safetensors gives access to the owner only
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)
    return {key: checkpoint[key] for key in ("step", "tokens", "cpu_s", "wall_s")}


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Return the bytes of text of each id, [vocabulary]. A byte-level token has one character per byte; markup has no
    text."""
    lengths = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if token in corpus.SPECIAL_TOKENS else len(token)
    return lengths


@torch.no_grad()
def perplexity(model: torch.nn.Module, source: corpus.Source, text_bytes: np.ndarray, max_tokens: int) -> Perplexity:
    """Score whole documents, in order, until `max_tokens` are done. A document longer than the context window is cut
    into windows that do not overlap, each starting without context, so the result is an upper bound."""
    documents = tokens = size = 0
    loss = 0.0
    windows: list[np.ndarray] = []
    for start, stop in zip(source.starts, [*source.starts[1:], len(source.ids)], strict=True):
        ids = source.ids[start:stop].astype(np.int64)
        windows += [ids[at : at + CONTEXT + 1] for at in range(0, len(ids) - 1, CONTEXT)]
        documents, tokens, size = documents + 1, tokens + len(ids) - 1, size + int(text_bytes[ids[1:]].sum())
        if tokens >= max_tokens:
            break
    windows.sort(key=len)
    for at in range(0, len(windows), 8):
        batch = windows[at : at + 8]
        padded = np.full((len(batch), max(map(len, batch))), -100)
        for row, window in zip(padded, batch, strict=True):
            row[: len(window)] = window
        targets = torch.from_numpy(padded)
        # padding is on the right, so causal attention never sees it
        logits = model(input_ids=targets[:, :-1].clamp(min=0), use_cache=False).logits
        loss += F.cross_entropy(logits.flatten(0, 1).float(), targets[:, 1:].flatten(), reduction="sum").item()
    return Perplexity(documents, tokens, size, loss)


def sample_dialogue(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, system: str | None, user_turns: tuple[str, ...],
    temperature: float,
) -> list[dict[str, str]]:  # fmt: skip
    """Return the dialogue with the model's answers filled in; temperature 0 is greedy. Seeded."""
    torch.manual_seed(0)
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    messages = [{"role": "system", "content": system}] if system else []
    for content in user_turns:
        messages.append({"role": "user", "content": content})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=60, **how)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer.strip()})
    return messages


def plot_losses(log: Path, image: Path, up_to_tokens: int) -> None:
    """Plot training loss and each source's held-out loss over the tokens seen."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    records = [r for r in records if r["tokens"] <= up_to_tokens]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([r["tokens"] / 1e6 for r in records], [r["loss"] for r in records], "k", lw=1, label="training (mixture)")
    measured = [r for r in records if "validation" in r]
    for name in corpus.SOURCES:
        points = [r["validation"][name] for r in measured]
        axes.plot([r["tokens"] / 1e6 for r in measured], points, "o-", ms=3, lw=1, label=f"held out: {name}")
    longer = [r for r in records if r["length"] == CONTEXT]
    if longer:
        axes.axvline(longer[0]["tokens"] / 1e6, color="gray", ls=":", lw=1, label=f"windows of {CONTEXT} from here")
    axes.set(xlabel="tokens seen, millions", ylabel="loss, nats per token", title="Training of the bundled model")
    axes.set_ylim(0, 8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(image, dpi=110)
    pyplot.close(figure)


def describe_hardware() -> str:
    """Describe this machine in general terms."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"one core of a machine with {len(names) or 'some'} cores ({names[0] if names else platform.machine()})"


def export(run: Path, data: Path, out: Path, max_tokens: int) -> None:
    console = Console()
    counters = write_model(run, out)
    console.print(f"{out}: step {counters['step']:,}, {counters['tokens']:,} tokens seen")
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)

    plain = Tokenizer.from_file(str(out / "tokenizer.json"))
    held_out = corpus.load_sources(data, plain, held_out=True)
    results = {}
    for name, source in held_out.items():
        results[name] = perplexity(model, source, token_bytes(plain), max_tokens)
        console.print(
            f"{name:16} perplexity {results[name].per_token:8.2f} a token, {results[name].per_byte:.3f} a byte"
        )
    plot_losses(run / "log.jsonl", out.parent / "loss_curve.png", int(counters["tokens"]))
    samples = [
        [sample_dialogue(model, tokenizer, system, turns, temperature) for temperature in (0.0, 0.7)]
        for system, turns in SAMPLES
    ]
    text = card.render(
        config=model.config,
        parameters=sum(p.numel() for p in model.parameters()),
        size_bytes=(out / "model.safetensors").stat().st_size,
        counters=counters,
        hardware=describe_hardware(),
        perplexities={n: (r.documents, r.tokens, r.per_token, r.per_byte) for n, r in results.items()},
        samples=samples,
    )
    (out.parent / "MODEL_CARD.md").write_text(text, encoding="utf-8")
    console.print(f"wrote {out.parent / 'MODEL_CARD.md'} and loss_curve.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="directory of the training run")
    parser.add_argument("--data", type=Path, required=True, help="directory with dialogues/ and long_docs/")
    parser.add_argument("--out", type=Path, default=Path("model/bundled"))
    parser.add_argument("--eval-tokens", type=int, default=200_000, help="held-out tokens to score of each source")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    export(arguments.run, arguments.data, arguments.out, arguments.eval_tokens)
