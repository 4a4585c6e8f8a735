"""Measures what the engine does on the card, in figures that people quote: tokens a second by streams, prompts,
returning turns by tier with first and later tokens, and streams beside a load or a prompt."""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import psutil
import torch
from msgspec.structs import replace

from benchmarks.gpu_day.items import Asked, Item, Values
from benchmarks.gpu_day.shape import directory, drawn_where_needed, step_bytes
from benchmarks.gpu_day.timing import spread
from benchmarks.harness.in_process import InProcess, Turn, config, greedy, vocabulary_of
from benchmarks.harness.models import kv_bytes_per_token
from reprise.engine.messages import SessionRequest

GIB = 1 << 30
_STEADY_AFTER_STEPS = 3  # steps in which all streams draw
_FAR = 1 << 30  # tokens: more than any conversation has


class Day:
    """One engine, with the conversations that measurements hold with it. mode: the setting cache.mode."""

    mode = "attentionstore"

    def __init__(self, asked: Asked) -> None:
        self.on_gpu = on_gpu = asked.on_gpu
        self._rng = random.Random(0)
        self.history, self.context, self.new = (28_000, 1024, 100) if on_gpu else (256, 32, 8)
        path = str(directory(on_gpu))
        self._vocabulary, self.kv_bytes = vocabulary_of(path), kv_bytes_per_token(path)
        started = time.monotonic()
        with drawn_where_needed():
            self.inner = InProcess(config(path, self._settings(asked)))
        self.built_s = round(time.monotonic() - started, 1)
        self.engine = self.inner.engine
        self.passes: list[tuple[Any, Any]] = []  # fences before and after
        self._captures = self._num_captures()
        run = self.inner.compute.run

        def noted(*given: Any) -> Any:
            computed = run(*given)
            self.passes.append((computed.begun, computed.done))
            return computed

        self.inner.compute.run = noted  # type: ignore[method-assign,assignment]
        self._numbers = 0
        self.long: Turn | None = None  # the newest turn of the long conversation

    def _settings(self, asked: Asked) -> dict[str, str | int | float]:
        saves, hbm, dram = self.mode == "attentionstore", 2048, 0.02
        if self.on_gpu:
            total = torch.cuda.get_device_properties(asked.device).total_memory
            hbm = min(150_000, int((total - 34 * GIB) / self.kv_bytes)) // 1024 * 1024
            dram = min(40.0, round(0.4 * psutil.virtual_memory().available / GIB, 1))
        return {
            "engine.device": asked.device.type,
            "cache.mode": self.mode,
            "cache.dram_gib": dram if saves else 0,
            "experiment.staging_mib": (2048 if self.on_gpu else 8) if saves else 0,
            "cache.hbm_tokens": hbm,
            "cache.disk_dir": tempfile.mkdtemp(),
            "model.max_context": 32_768 if self.on_gpu else 512,
            "scheduler.max_seqs": 64 if self.on_gpu else 4,
        }

    # --- driving

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(3, self._vocabulary) for _ in range(tokens)]

    def submit(self, prompt: list[int], new_tokens: int, session: str = "", **sampling: Any) -> Turn:
        self._numbers += 1
        params = replace(greedy(new_tokens), **sampling)
        return self.inner.submit(session or f"s{self._numbers}", prompt, new_tokens, sampling=params)

    def ask(self, prompt: list[int], new_tokens: int, session: str = "") -> Turn:
        turn = self.submit(prompt, new_tokens, session)
        self.inner.run()
        return turn

    def step(self) -> int:
        """Run one round of the engine's loop. Returns how many tokens were drawn."""
        before = self.inner.drawn_tokens
        self.inner.step()
        return self.inner.drawn_tokens - before

    def forget(self, *but: str) -> None:
        """Delete all conversations except those whose sessions are named in `but`."""
        self.inner.settle()
        owners = {name[2] for row in self.engine._cache.tiers.table for name in row.owners}
        for number, name in enumerate(sorted(owners - set(but))):
            request = SessionRequest(request_id=f"delete-{number}", tenant="", action="delete", session_id=name)
            self.engine.sessions(request, time.monotonic())
        self.inner.settle()

    def push_out(self, session: str, tokens: int) -> None:
        """Evict blocks of a conversation from HBM, the last ones first, until at least `tokens` tokens are out. Only
        blocks of which DRAM has a copy are evicted."""
        tiers, gone = self.engine._cache.tiers, 0
        rows = [row for row in tiers.table if row.page is not None and any(name[2] == session for name in row.owners)]
        for row in sorted(rows, key=lambda row: row.place or 0, reverse=True):
            if gone >= tokens:
                break
            if row.in_dram and row.page is not None and not tiers.pages.pins(row.page):
                gone += len(row.token_ids)
                tiers.hbm.evict(row.key)

    def captured(self) -> int:
        """Return the number of CUDA graphs that were captured after the engine was built."""
        return self._num_captures() - self._captures

    def _num_captures(self) -> int:
        return len(getattr(self.inner.compute.runner, "_graphs", ()))


def open_section(asked: Asked) -> Day:
    return Day(asked)


def items(asked: Asked) -> Sequence[Item]:
    on_gpu = asked.on_gpu
    many = (32, 64) if on_gpu else (2, 4)
    few, some = (1, 8) if on_gpu else (1, 3)
    tokens = (100, 512, 4096, 28_000) if on_gpu else (10, 20, 64, 256)
    history = 28_000 if on_gpu else 256
    parts = {"4k": history // 7, "16k": history * 4 // 7, "all": _FAR}
    return [
        Item("built", 5, built),
        *(Item(f"decode {n}", 20, partial(decode, n)) for n in (few, many[0], many[1], some)),
        Item(f"decode {many[0]} sampled", 20, partial(decode, many[0], sampled=True)),
        Item("return, HBM", 20, partial(returning, "HBM", 0)),
        *(Item(f"return, DRAM {label}", 25, partial(returning, f"DRAM {label}", n)) for label, n in parts.items()),
        *(Item(f"prompt {n}", 20, partial(prompts, n)) for n in tokens),
        Item("beside a load", 30, partial(beside, "load")),
        Item("beside a prompt", 30, partial(beside, "prompt")),
        Item("prompts back to back", 20, back_to_back),
        Item("decode 4 long", 30, partial(decode, 4 if on_gpu else 2, long=True)),
        Item("at the end", 5, at_the_end),
    ]


# --- what is measured -------------------------------------------------------------------------------------------------


def built(day: Day) -> Iterator[Values]:
    info, runner = day.engine.model, day.inner.compute.runner
    day.ask(day.prompt(day.context), 4)  # what is set up at first use
    day.forget()
    yield {
        "s": day.built_s,
        "model": f"{info.architecture}, {info.parameters / 1e9:.2f} G parameters, {info.dtype}",
        "attention": info.attention_backend,
        "graphs": day._num_captures(),
        "why_no_graphs": getattr(runner, "why_not", "not on CUDA"),
        "memory_gib": {name: round(size / GIB, 2) for name, size in info.memory_plan.items()},
        "hbm_tokens": info.hbm_tokens,
        "dram_tokens": info.dram_tokens,
        "kv_bytes_per_token": day.kv_bytes,
    }


def decode(streams: int, day: Day, *, sampled: bool = False, long: bool = False) -> Iterator[Values]:
    """Measure decode steps in which each of `streams` streams draws a token: the time from one step's end to the next
    one's, and the device's part of it. sampled: with temperature and top_p, otherwise greedily. long: after the long
    history, otherwise after a shorter context."""
    context = day.history if long else day.context
    new_tokens = (40 if long else 96) if day.on_gpu else 20
    choice: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9} if sampled else {}
    captures = day.captured()
    for number in range(streams):
        day.submit(day.prompt(context), new_tokens, **({**choice, "seed": number} if sampled else {}))
    day.passes.clear()
    ends: list[tuple[float, int, int]] = []  # time, tokens drawn, passes until then
    while day.engine.has_work():
        drawn = day.step()
        ends.append((time.monotonic(), drawn, len(day.passes)))
    full = [pair for pair in pairwise(ends) if pair[0][1] == pair[1][1] == streams][_STEADY_AFTER_STEPS:]
    wall = [after[0] - before[0] for before, after in full]
    passes = [day.passes[after[2] - 1] for before, after in full if after[2] > before[2]]
    device = spread([done.seconds_since(begun) for begun, done in passes])
    took = spread(wall)
    yield {
        "streams": streams,
        "context": context,
        "sampled": sampled,
        **took,
        "device_ms": device.get("ms"),
        "host_gap_ms": round(took["ms"] - device["ms"], 3) if device.get("ms") and took.get("ms") else None,
        "gb": round(step_bytes(day.on_gpu, streams * context) / 1e9, 3),
        "captures": day.captured() - captures,
    }
    day.forget("long")


def prompts(tokens: int, day: Day) -> Iterator[Values]:
    for repeat in range(3):
        yield {"tokens": tokens, "repeat": repeat, **_told(day.ask(day.prompt(tokens), 9))}
        day.inner.settle()
    day.forget("long")


def _conversation(day: Day) -> Turn:
    """Return the newest turn of the long conversation, which is begun if there is none."""
    if day.long is None:
        day.long = day.ask(day.prompt(day.history), 9, "long")
        day.inner.settle()
    return day.long


def returning(label: str, lost_tokens: int, day: Day) -> Iterator[Values]:
    """Measure a turn of a few new tokens after the long history, of which `lost_tokens` tokens have been evicted from
    HBM before. label: says in the results where this history comes from."""
    for repeat in range(3):
        before = _conversation(day)
        day.push_out("long", lost_tokens)
        moved = day.inner.stats().moved_bytes.get("dram_to_hbm", 0)
        day.long = turn = day.ask(before.text[: day.history] + day.prompt(day.new), 9, "long")
        loaded = day.inner.stats().moved_bytes.get("dram_to_hbm", 0) - moved
        yield {
            "from": label,
            "repeat": repeat,
            **_told(turn),
            "gb": round(step_bytes(day.on_gpu, day.history) / 1e9, 3),
            "loaded_gb": round(loaded / 1e9, 3),
        }
        day.inner.settle()


def beside(what: str, day: Day) -> Iterator[Values]:
    """Measure the time between tokens of decoding streams while another turn comes in. what: "load" for one whose
    history is loaded, else one with a long prompt."""
    streams = 16 if day.on_gpu else 2
    before = _conversation(day)
    if what == "load":
        day.push_out("long", _FAR)
    for _ in range(streams):
        day.submit(day.prompt(day.context), 300 if day.on_gpu else 60)
    alone = _gaps(day, streams, lambda seen: seen >= (40 if day.on_gpu else 8))
    if what == "load":
        day.long = turn = day.submit(before.text[: day.history] + day.prompt(day.new), 9, "long")
    else:
        turn = day.submit(day.prompt(4096 if day.on_gpu else 64), 9)
    while_it_comes = _gaps(day, 1, lambda _: turn.first_s is not None)
    after = _gaps(day, 1, lambda _: turn.done_s is not None)
    yield {"what": what, "streams": streams, "alone": spread(alone), "until_its_first_token": spread(while_it_comes)}
    yield {"what": what, "after_it": spread(after), **_told(turn)}
    day.inner.run()
    day.forget("long")


def _gaps(day: Day, least_drawn: int, is_over: Callable[[int], bool]) -> list[float]:
    """Step until it is over, which is asked with the number of gaps seen. Returns the seconds between steps' ends that
    have drawn so many tokens."""
    gaps, last = list[float](), time.monotonic()
    while day.engine.has_work() and not is_over(len(gaps)):
        drawn, now = day.step(), time.monotonic()
        if drawn >= least_drawn:
            gaps.append(now - last)
            last = now
        elif not gaps:
            last = now
    return gaps


def back_to_back(day: Day) -> Iterator[Values]:
    """Measure prompts that follow each other at once: each is computed while the one before is saved, if the cache
    saves KV."""
    tokens = 4096 if day.on_gpu else 64
    turns = [day.ask(day.prompt(tokens), 1) for _ in range(6)]
    first = [turn.first_s - turn.submitted_s for turn in turns[1:] if turn.first_s is not None]
    yield {"mode": day.mode, "tokens": tokens, **spread(first)}
    day.forget("long")


def at_the_end(day: Day) -> Iterator[Values]:
    stats = day.inner.stats()
    found: dict[str, Any] = {
        "captures_after_ready": day.captured(),
        "eager_decode_steps": stats.eager_decode_steps,
        "load_failures": dict(stats.load_failures),
        "preemptions": stats.preemptions,
    }
    if day.on_gpu:
        found["peak_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    yield found


def _told(turn: Turn) -> dict[str, Any]:
    """First token and the gaps of the later ones, ms; where the prompt's KV came from."""
    times, report = turn.times_s, turn.report
    found: dict[str, Any] = {
        "first_ms": round(1e3 * (times[0] - turn.submitted_s), 2),
        "later_ms": [round(1e3 * (after - before), 2) for before, after in pairwise(times)],
    }
    if report is not None:
        found |= {"hbm": report.hbm_tokens, "dram": report.dram_tokens, "computed": report.computed_tokens}
    return found
