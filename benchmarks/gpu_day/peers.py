"""Measures what others do on the same card with the same shape: nano-vllm where it was carried, and transformers."""

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu_day.carried import NotCarried, nano_vllm
from benchmarks.gpu_day.items import Asked, Item, Values
from benchmarks.gpu_day.shape import directory, random_model, sizes
from benchmarks.gpu_day.timing import spread, wait, wall_ms

_HISTORY_TOKENS, _NEW_TOKENS = 27_904, 101  # a whole number of nano-vllm's blocks, and a short turn


class Peers:
    """The other programs: nano-vllm and transformers. Each is loaded when it is first used, because both do not fit
    into memory together."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self._rng = asked, random.Random(0)
        self._nano: Any = None
        self._model: Any = None

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(5, sizes(self.asked.on_gpu)["vocab_size"]) for _ in range(tokens)]

    def nano(self) -> Any:
        if self._nano is None:
            nano_vllm(self.asked.carried)
            self._nano = _made_nano()
        return self._nano

    def without_nano(self) -> None:
        if self._nano is not None:
            self._nano.exit()
            self._nano = None
            torch.cuda.empty_cache()

    def transformers(self) -> Any:
        if self._model is None:
            path = directory(self.asked.on_gpu)
            self._model = random_model(path, torch.bfloat16, self.asked.device, attention="sdpa").eval()
        return self._model


def open_section(asked: Asked) -> Peers:
    return Peers(asked)


def items(asked: Asked) -> Sequence[Item]:
    streams, tokens = ((1, 8, 32, 64), (512, 4096, 28_000)) if asked.on_gpu else ((1,), (20,))
    return [
        *(Item(f"nano-vllm, decode {n}", 30, partial(nano_decode, n)) for n in streams),
        *(Item(f"nano-vllm, prompt {n}", 15, partial(nano_prompt, n)) for n in tokens),
        Item("nano-vllm, return", 15, nano_return),
        Item("transformers, generate", 30, generate),
        Item("transformers, generate_batch", 40, generate_batch),
    ]


def _made_nano() -> Any:
    """An engine of nano-vllm with random weights; it reads its configuration alone."""
    import nanovllm.engine.llm_engine as engine
    import nanovllm.engine.model_runner as runner

    path = Path(tempfile.mkdtemp())
    shape = {**sizes(on_gpu=True), "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16"}
    shape |= {"torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000}
    shape |= {"tie_word_embeddings": False, "attention_bias": False}
    (path / "config.json").write_text(json.dumps(shape), encoding="utf-8")

    def draw(model: Any, _: object) -> None:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.02)
            else:
                parameter.data.fill_(1)

    runner.load_model = draw
    tokenizer = SimpleNamespace(eos_token_id=1)
    engine.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer)
    return engine.LLMEngine(
        str(path), max_model_len=32_768, max_num_batched_tokens=32_768, max_num_seqs=64, gpu_memory_utilization=0.8
    )


def _served(peers: Peers, prompts: list[list[int]], new_tokens: int) -> list[tuple[bool, float]]:
    """Returns of each step whether it was a prefill, and its seconds."""
    nano, steps = peers.nano(), []
    from nanovllm.sampling_params import SamplingParams

    for prompt in prompts:
        nano.add_request(prompt, SamplingParams(temperature=0.7, max_tokens=new_tokens, ignore_eos=True))
    while not nano.is_finished():
        started = time.perf_counter()
        _, count = nano.step()
        steps.append((count > 0, time.perf_counter() - started))
    return steps


def nano_decode(streams: int, peers: Peers) -> Iterator[Values]:
    try:
        _served(peers, [peers.prompt(64)], 4)
    except NotCarried as error:
        yield {"not_run": str(error)}
        return
    steps = _served(peers, [peers.prompt(1024) for _ in range(streams)], 48)
    yield {"streams": streams, "context": 1024, **spread([s for is_prefill, s in steps[3:] if not is_prefill])}


def nano_prompt(tokens: int, peers: Peers) -> Iterator[Values]:
    try:
        taken = [_served(peers, [peers.prompt(tokens)], 1)[0][1] for _ in range(3)]
    except NotCarried as error:
        yield {"not_run": str(error)}
        return
    yield {"tokens": tokens, **spread(taken)}


def nano_return(peers: Peers) -> Iterator[Values]:
    """Measure with nano-vllm a turn after a long history that is in its prefix cache in HBM."""
    try:
        for _ in range(3):
            history = peers.prompt(_HISTORY_TOKENS)
            _served(peers, [history], 1)
            (_, first_s), *later = _served(peers, [history + peers.prompt(_NEW_TOKENS)], 9)
            yield {"first_ms": round(1e3 * first_s, 2), "later_ms": [round(1e3 * s, 2) for _, s in later]}
    except NotCarried as error:
        yield {"not_run": str(error)}


def generate(peers: Peers) -> Iterator[Values]:
    """Measure transformers' `generate`: milliseconds of a prompt with its first token, and of each later token."""
    peers.without_nano()
    device, model = peers.asked.device, peers.transformers()
    context, new_tokens = (1024, 24) if peers.asked.on_gpu else (32, 4)
    for streams in (1, 32) if peers.asked.on_gpu else (1,):
        ids = torch.tensor([peers.prompt(context) for _ in range(streams)], device=device)

        def answer(tokens: int, ids: torch.Tensor = ids) -> None:
            with torch.no_grad():
                model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

        first, whole = (wall_ms(partial(answer, count), device, 2) for count in (1, new_tokens + 1))
        yield {"streams": streams, "context": context, "first_ms": first, "ms": round((whole - first) / new_tokens, 3)}


def generate_batch(peers: Peers) -> Iterator[Values]:
    """Measure transformers' paged engine with continuous batching: the milliseconds of the whole run for each new token
    of a stream, prompts included."""
    peers.without_nano()
    if not peers.asked.on_gpu:
        yield {"not_run": "it needs CUDA"}
        return
    from transformers import GenerationConfig

    model, device, new_tokens = peers.transformers(), peers.asked.device, 64
    settings = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for streams in (1, 32):
        taken = []
        for _ in range(2):
            prompts = [peers.prompt(1024) for _ in range(streams)]
            started = time.perf_counter()
            model.generate_batch(inputs=prompts, generation_config=settings)
            wait(device)
            taken.append(time.perf_counter() - started)
        yield {"streams": streams, "context": 1024, "all_ms_by_token": round(1e3 * median(taken[1:]) / new_tokens, 3)}
