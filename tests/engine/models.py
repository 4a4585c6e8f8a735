"""Tiny models of many families, and the engine's own path to run them: pages, flat ragged batches, chunks.

No parameter keeps a value that would hide a mistake: with norm weights of 1 and biases of 0 many of them print zeros.
"""

import copy
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_HUB_KERNELS", "NO")  # before transformers is imported, see engine.hf_model

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.batch import BatchItem, BlockTables, build_batch
from engine.cpu_optimise import Optimised, optimise_for_cpu
from engine.hf_model import KvSink, attention_implementation
from engine.probe import KvShape, ProbeResult
from engine.runner import ModelRunner, make_pages
from kernels.attention import BACKENDS
from kernels.attention.base import AttentionBackend
from kernels.kv_copy import gather_rows

PAGE = 32
WINDOW = 24  # of every sliding window here: smaller than a page, and than most texts
VOCAB = 199
CPU = torch.device("cpu")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A model type, what its config adds to the common one, and what the probe should say of it."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    decouplable: bool = True
    plain_layers: tuple[int, ...] = ()  # layers that do not rotate
    windows: tuple[int, ...] = ()  # layers that slide a window


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


_EVERY_LAYER = (0, 1, 2, 3)
_ALTERNATE = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3": Family(
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama_yarn": Family("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama_linear": Family("llama", _rope("linear", factor=4.0)),
    "qwen2": Family("qwen2"),
    "qwen2_sliding": Family(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}, windows=(2, 3)
    ),
    "qwen3": Family("qwen3", {"head_dim": 32}),
    "mistral": Family("mistral", {"sliding_window": WINDOW}, windows=_EVERY_LAYER),
    "gemma2": Family(
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATE,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
        windows=(0, 2),
    ),
    "gemma3_text": Family(
        "gemma3_text",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATE, "query_pre_attn_scalar": 24},
        windows=(0, 2),
    ),
    "phi3": Family("phi3", {**_rope("default", partial_rotary_factor=0.5), "head_dim": 16}),
    "gpt_neox": Family("gpt_neox"),
    "olmo2": Family("olmo2"),
    "cohere2": Family("cohere2", {"sliding_window": WINDOW, "logit_scale": 0.5}, plain_layers=(3,), windows=(0, 1, 2)),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, plain_layers=(1, 3)),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
        },
        windows=(0, 2),
    ),
    "starcoder2": Family("starcoder2", {"sliding_window": WINDOW}, windows=_EVERY_LAYER),
    "granite": Family(
        "granite",
        {
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 2.0,
            "logits_scaling": 1.5,
            "attention_bias": True,
        },
    ),
    "stablelm": Family("stablelm", {**_rope("default", partial_rotary_factor=0.25), "use_qkv_bias": True}),
    "phi": Family("phi", _rope("default", partial_rotary_factor=0.5)),
    "opt": Family(
        "opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, decouplable=False, plain_layers=_EVERY_LAYER
    ),
    "gpt2": Family("gpt2", decouplable=False, plain_layers=_EVERY_LAYER),
}  # fmt: skip

IGNORE_OUR_ATTENTION = ("falcon", "gptj", "bloom")  # they attend by themselves and never ask


def tiny_model(model_type: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model in eval mode, as transformers makes it: attention not taken over."""
    config = AutoConfig.for_model(model_type, **{**_COMMON, **changes})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    return model.to(dtype).requires_grad_(False)


def family_model(name: str, **changes: Any) -> Any:
    family = FAMILIES[name]
    return tiny_model(family.model_type, **{**family.config, **changes})


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Weights large enough for attention to be far from uniform; biases, norm weights and sinks away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.add_(noise, alpha=1.0 if name.endswith("sinks") else 0.3)
        elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
            parameter.copy_(noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids of no special meaning."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


@torch.inference_mode()
def vanilla_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[tokens, vocab] of transformers' own eager attention, the text in one piece."""
    with attention_implementation(model, "eager"):
        logits: Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@dataclass(slots=True)
class Text:
    """A sequence on its way through the engine's path."""

    token_ids: list[int]
    pages: list[int]  # all that it will need, in order
    logits: Tensor  # [tokens, vocab], filled as it goes
    done: int = 0


class Pool:
    """Pages of a model, and steps over them built by the engine's own classes."""

    def __init__(
        self,
        model: Any,
        shapes: list[KvShape],
        *,
        num_pages: int = 24,
        sink: KvSink | None = None,
        backend: AttentionBackend | None = None,
    ) -> None:
        dtype = next(model.parameters()).dtype
        self.pages = make_pages(shapes, num_pages, PAGE, dtype, CPU)
        for layer in self.pages:
            layer.k.fill_(float("nan"))  # a row that is read before it is written shows
            layer.v.fill_(float("nan"))
        self.runner = ModelRunner(
            model=model, pages=self.pages, backend=backend or BACKENDS["torch_cpu"](), sink=sink
        )  # fmt: skip
        self.shares: list[tuple[Text, int]] = []  # of the step that runs: texts stand where it began
        self._tables = BlockTables(max_seqs=8, max_pages=8)
        self._vocab = model.config.get_text_config().vocab_size

    def text(self, token_ids: list[int], pages: list[int]) -> Text:
        return Text(token_ids, pages, torch.full((len(token_ids), self._vocab), float("nan")))

    def step(self, shares: Sequence[tuple[Text, int]]) -> None:
        """The next so many tokens of each text in one flat batch; keeps the logits of every row."""
        self.shares = list(shares)
        items = []
        for text, count in shares:
            pages = text.pages[: -(-(text.done + count) // PAGE)]
            items.append(BatchItem(str(id(text)), text.token_ids[text.done :][:count], text.done, pages, False))
        batch = build_batch(items, self._tables, PAGE, CPU)
        batch = replace(batch, logit_rows=torch.arange(len(batch.token_ids)))
        logits = self.runner.forward(batch).float()
        for (text, count), part in zip(shares, logits.split([count for _, count in shares]), strict=True):
            text.logits[text.done : text.done + count] = part
            text.done += count

    def run(self, texts: Sequence[Text], seed: int) -> None:
        """Every text to its end, in random steps that mix chunks of a prefill with single rows."""
        rng = random.Random(seed)
        while unfinished := [text for text in texts if text.done < len(text.token_ids)]:
            chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
            sizes = [rng.choice((1, 1, 2, rng.randint(5, 40))) for _ in chosen]
            shares = [
                (text, min(size, len(text.token_ids) - text.done)) for text, size in zip(chosen, sizes, strict=True)
            ]
            self.step(shares)

    def rows(self, layer: int, text: Text) -> tuple[Tensor, Tensor]:
        """K and V [tokens, kv_heads, dim] of a text as they lie in the pages."""
        slots = slots_of(text)
        return gather_rows(self.pages[layer].k, slots), gather_rows(self.pages[layer].v, slots)


def slots_of(text: Text) -> Tensor:
    """[tokens] int64: where the rows of a text are in the pool."""
    return torch.tensor([text.pages[row // PAGE] * PAGE + row % PAGE for row in range(len(text.token_ids))])


def optimise(model: Any, probed: ProbeResult) -> Optimised:
    """Put the engine's faster modules into a model, in place."""
    return optimise_for_cpu(model, probed, BACKENDS["torch_cpu"]())


def copied(model: Any) -> Any:
    """An independent model of the same weights."""
    return copy.deepcopy(model)


def save_tiny(path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A model directory as a user would have it. Returns `path`."""
    tiny_model(seed=seed, **changes).save_pretrained(path)
    return path
