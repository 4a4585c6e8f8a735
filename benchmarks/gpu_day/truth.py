"""Whether the paths that a card takes in bf16 give what a recompute gives, before anything is timed.

Conversations of small random models whose histories come out of one tier each, with `cache.verify_rate` 1: every turn
that was loaded is computed again, and logits that differ by more than the model's tolerance are counted. Turns out of
HBM, which that check passes over, are held against an engine that keeps nothing.
"""

import random
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.items import Asked, Item, Values
from tests.engine.driver import Driver
from tests.engine.models import VOCAB, family_model

MIB = 1 << 20
TIERS = ("hbm", "dram", "disk")
_SESSIONS, _TURNS, _FIRST_TOKENS, _MORE_TOKENS, _ANSWER_TOKENS = 4, 5, 20, 20, 6
_HBM_TOKENS, _SMALL_HBM_TOKENS = 2048, 384  # the small one holds a conversation, and the recompute of one
_WIDE = {  # heads as Qwen3-8B's
    "head_dim": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


class Models:
    """Small random models in bf16 by kind, each with the answers that an engine without a cache gives with it."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._paths: dict[str, Path] = {}
        self._known: dict[str, list[list[int]]] = {}

    def path(self, kind: str) -> Path:
        if kind not in self._paths:
            model = family_model("qwen3", **_WIDE) if kind == "wide" else family_model(kind)
            self._paths[kind] = Path(tempfile.mkdtemp()) / kind
            model.save_pretrained(self._paths[kind])
        return self._paths[kind]

    def driver(self, kind: str, **room: Any) -> Driver:
        return Driver(self.path(kind), device=self.asked.device.type, dtype="bfloat16", **room)

    def recomputed(self, kind: str) -> list[list[int]]:
        if kind not in self._known:
            driver = self.driver(kind, cache_mode="recompute", hbm_tokens=_HBM_TOKENS)
            self._known[kind] = conversations(driver)
            driver.close()
        return self._known[kind]


def open_section(asked: Asked) -> Models:
    return Models(asked)


def items(asked: Asked) -> Sequence[Item]:
    kinds = ("wide", "llama") if asked.on_gpu else ("llama",)
    found = [Item(f"bf16 {kind}, {tier}", 30, partial(reuse, kind, tier)) for kind in kinds for tier in TIERS]
    return [*found, Item("a spoiled tier is noticed", 20, spoiled)]


def conversations(driver: Driver) -> list[list[int]]:
    """Play several conversations in turns on an engine (`driver`), always the same ones. Returns the tokens of each
    answer."""
    rng, histories, answers = random.Random(1), [list[int]() for _ in range(_SESSIONS)], []
    for turn in range(_TURNS):
        for number, history in enumerate(histories):
            prompt = history + [rng.randrange(3, VOCAB) for _ in range(_MORE_TOKENS if turn else _FIRST_TOKENS)]
            answer = driver.submit(
                f"{number}-{turn}", prompt, session=f"c{number}", max_tokens=_ANSWER_TOKENS, ignore_eos=True
            )
            driver.run()
            driver.settle()
            histories[number] = answer.text
            answers.append(answer.token_ids)
    return answers


def _room(tier: str) -> dict[str, Any]:
    if tier == "hbm":
        return {"hbm_tokens": _HBM_TOKENS, "dram_bytes": 64 * MIB}
    if tier == "dram":
        return {"hbm_tokens": _SMALL_HBM_TOKENS, "dram_bytes": 64 * MIB}
    disk = {"dram_bytes": 0, "disk_bytes": 64 * MIB, "disk_dir": tempfile.mkdtemp(), "io_deadline_s": 20.0}
    return {"hbm_tokens": _SMALL_HBM_TOKENS, **disk}


def _verified(models: Models, kind: str, tier: str) -> Driver:
    driver = models.driver(kind, cache_mode="attentionstore", verify_rate=1.0, **_room(tier))
    driver.cache.rates.compute_s = lambda tokens: float(tokens)  # type: ignore[method-assign]  # loads always pay
    return driver


def reuse(kind: str, tier: str, models: Models) -> Iterator[Values]:
    driver = _verified(models, kind, tier)
    answers = conversations(driver)
    stats, runner = driver.engine.stats(), driver.compute.runner
    wanted = models.recomputed(kind)
    found = {
        "verified": stats.verified_loads,
        "mismatches": stats.verify_mismatches,
        "answers_of_recompute": f"{sum(a == b for a, b in zip(answers, wanted, strict=True))} of {len(wanted)}",
        "prompt_tokens": {name: count for name, count in stats.prompt_tokens.items() if count},
        "load_failures": dict(stats.load_failures),
        "attention": driver.engine.model.attention_backend,
        "whole_layers": sum(type(module).__name__ == "CudaLayer" for module in runner.model.modules()),
        "why_no_graphs": getattr(runner, "why_not", "not on CUDA"),
    }
    driver.close()
    wrong = stats.verify_mismatches or not stats.prompt_tokens.get(tier) or (tier != "hbm" and not stats.verified_loads)
    yield found | ({"error": "what was reused is not what a recompute gives, or nothing was"} if wrong else {})


def spoiled(models: Models) -> Iterator[Values]:
    """Test that the check notices wrong KV: values in DRAM are made a quarter too large, with checksums that match."""
    driver = _verified(models, "llama", "dram")
    prompt = [random.Random(2).randrange(3, VOCAB) for _ in range(100)]
    text = driver.ask("first", prompt, session="s", max_tokens=2, ignore_eos=True).text
    driver.settle()
    driver.forget_hbm()
    slab = driver.engine._transfer._slab
    for layer in range(slab.num_layers):
        slab.v(layer).mul_(1.25)
    for slot in range(slab.num_slots):
        if slab.is_sealed(slot):
            slab.seal(slot)
    driver.ask("again", text + prompt[:5], session="s", max_tokens=2, ignore_eos=True)
    mismatches = driver.engine.stats().verify_mismatches
    driver.close()
    yield {"mismatches": mismatches} | ({} if mismatches else {"error": "the check saw nothing"})
