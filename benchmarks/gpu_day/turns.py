"""What the engine does on the card: tokens a second by streams, prompts, and returning turns by tier."""

import random
import time
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_day.section import Asked, asked
from benchmarks.harness.in_process import InProcess, Turn, config, kv_bytes_per_token, vocabulary_of


class Day:
    """One engine and all that is measured of it."""

    def __init__(self, wanted: Asked) -> None:
        self._wanted, self._rng = wanted, random.Random(0)
        on_gpu = wanted.on_gpu
        self._history = 28_000 if on_gpu else 256
        self._context, self._new = (1024, 64) if on_gpu else (48, 8)
        self._streams = (1, 8, 32) if on_gpu else (1, 2)
        model = wanted.made_model()
        self._vocabulary, self._bytes_per_token = vocabulary_of(model), kv_bytes_per_token(model)
        started = time.monotonic()
        self._engine = InProcess(
            config(
                model,
                {
                    "engine.device": wanted.device.type,
                    "cache.mode": "attentionstore",
                    "cache.dram_gib": 40 if on_gpu else 0.05,
                    "cache.staging_mib": 2048 if on_gpu else 8,
                    "cache.hbm_tokens": 52_000 if on_gpu else 1024,
                    "model.max_context": 32_768 if on_gpu else 512,
                    "scheduler.max_seqs": 32,
                },
            )
        )
        self._numbers = 0
        info = self._engine.engine.model
        self.result: dict[str, Any] = {
            "model": f"{info.architecture}, {info.parameters / 1e9:.2f} G parameters, {info.dtype}",
            "attention": info.attention_backend,
            "KV bytes a token": self._bytes_per_token,
            "engine built in s": round(time.monotonic() - started, 1),
            "memory plan GiB": {name: round(size / (1 << 30), 2) for name, size in info.memory_plan.items()},
        }

    def measure(self) -> None:
        self._ask([self._prompt(self._context)], 4)  # whatever is compiled or chosen at first use
        for streams in self._streams:
            self.result[f"decode {streams} x {self._context}"] = self._decode(streams)
            self._wanted.write(self.result)
        runner: Any = self._engine.engine._compute.runner
        self.result["graphs"] = getattr(runner, "why_not", "no: not on CUDA") or "yes"
        if self.result["graphs"] == "yes":
            runner.why_not = "measured without"
            for streams in self._streams:
                self.result[f"decode {streams} x {self._context}, eager"] = self._decode(streams)
            runner.why_not = ""
        self._wanted.write(self.result)
        for tokens in (512, 4096) if self._wanted.on_gpu else (32, 64):
            taken = [self._ask([self._prompt(tokens)], 1)[0] for _ in range(3)]
            self.result[f"prompt of {tokens}, ms"] = [_ms(turn) for turn in taken]
            self._engine.settle()
        self._wanted.write(self.result)
        self._returning()
        self._wanted.write(self.result)
        if self._wanted.on_gpu:
            self.result["peak GiB"] = round(torch.cuda.max_memory_allocated() / (1 << 30), 2)
            self.result["profile of decoding 32"] = self._profile()
            self._wanted.write(self.result)
        self._engine.close()

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(3, self._vocabulary) for _ in range(tokens)]

    def _ask(self, prompts: list[list[int]], new_tokens: int, session: str = "") -> list[Turn]:
        turns = []
        for prompt in prompts:
            self._numbers += 1
            turns.append(self._engine.submit(session or f"s{self._numbers}", prompt, new_tokens))
        self._engine.run()
        return turns

    def _decode(self, streams: int) -> dict[str, float]:
        """So many conversations at once: first from prompt to end, then step by step."""
        turns = self._ask([self._prompt(self._context) for _ in range(streams)], self._new)
        whole = max(turn.done_s or 0.0 for turn in turns) - min(turn.submitted_s for turn in turns)
        self._engine.settle()
        return {
            "ms a step": self._step_ms(streams),
            "all in s": round(whole, 3),
        }

    def _step_ms(self, streams: int) -> float:
        """Median of steps that draw a token for each of so many streams: nearly all of them only decode."""
        for _ in range(streams):
            self._numbers += 1
            self._engine.submit(f"s{self._numbers}", self._prompt(self._context), self._new)
        taken: list[float] = []
        while self._engine.engine.has_work():
            before = self._engine.stats().generated_tokens
            started = time.perf_counter()
            self._engine.step()
            if self._engine.stats().generated_tokens - before == streams:
                taken.append(time.perf_counter() - started)
        return round(1e3 * median(taken), 3) if taken else float("nan")

    def _returning(self) -> None:
        """A turn behind a long history, out of HBM, then out of DRAM after another conversation has taken HBM."""
        for repeat in range(2):
            name, other = f"long{repeat}", f"other{repeat}"
            first = self._ask([self._prompt(self._history)], 4, name)[0]
            self._engine.settle()
            rows = {"computed": first}
            rows["HBM"] = self._ask([first.text + self._prompt(100 if self._wanted.on_gpu else 8)], 4, name)[0]
            self._engine.settle()
            second = self._ask([self._prompt(self._history)], 4, other)[0]
            self._engine.settle()
            third = self._ask([self._prompt(self._history // 2)], 4, f"third{repeat}")[0]
            self._engine.settle()
            assert second.done_s is not None
            assert third.done_s is not None
            rows["DRAM"] = self._ask([rows["HBM"].text + self._prompt(100 if self._wanted.on_gpu else 8)], 4, name)[0]
            self._engine.settle()
            for label, turn in rows.items():
                report = turn.report
                assert report is not None
                self.result[f"{self._history} tokens, {label}, {repeat}"] = {
                    "first token ms": _ms(turn),
                    "hbm": report.hbm_tokens,
                    "dram": report.dram_tokens,
                    "computed": report.computed_tokens,
                    "floor by bytes, GB": round(report.dram_tokens * self._bytes_per_token / 1e9, 3),
                }
                self._wanted.write(self.result)

    def _profile(self) -> list[str]:
        """The operations that take longest, of ten steps of 32 streams: on the device and on the host."""
        for _ in range(32):
            self._numbers += 1
            self._engine.submit(f"s{self._numbers}", self._prompt(256), 64)
        for _ in range(24):  # until all have begun to answer
            self._engine.step()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(10):
                self._engine.step()
        self._engine.run()
        lines = []
        for key in ("self_cuda_time_total", "self_cpu_time_total"):
            lines += profile.key_averages().table(sort_by=key, row_limit=14, max_name_column_width=48).splitlines()
        print("\n".join(lines))
        return [line for line in lines if "time total" in line.lower()]


def _ms(turn: Turn) -> float:
    assert turn.first_s is not None
    return round(1e3 * (turn.first_s - turn.submitted_s), 2)


if __name__ == "__main__":
    Day(request := asked()).measure()
