"""What coding KV costs in time: bytes coded and decoded by one core, and the first token of a turn that comes back.

    python -m benchmarks.speed.codec [--model smollm2] [--rounds 5] [--arms raw transform]

core      the KV of the text that ships for calibration, bf16: MB of rows a second that one core encodes and decodes,
          and what remains of the bytes. Steps of about 0.001 nats a token on SmolLM2.
returns   a conversation of `--tokens` tokens, whose server was stopped and started anew, so its KV comes from disk: as
          rows or coded; from the disk as it is and from one of 0.15 GB/s. Time to the first
          token, how long the threads that load have worked for it, and what of the history was loaded, since computing
          it may be sooner. One engine in this process, arms in turn, without HTTP.

Held, for the model's shape and one core: encode at least 150 MB/s, decode at least 300 MB/s; a coded turn's first token
takes at most 1.35 times as long as one of rows; from the slow disk its load takes at most 0.55 times as long; and no
coded turn takes longer than 1.1 times a recompute.
"""

import random
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.in_process import InProcess, as_engine_process, config, vocabulary_of
from benchmarks.harness.models import model_directory, name_of, result_name
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.engine.build.model import find_attention
from reprise.engine.codec.calibration import FIRST_STEPS, statistics
from reprise.engine.codec.quality import HistoryCoder, Subject, raw_blocks
from reprise.engine.codec.text import calibration_text
from reprise.engine.model.loading import load_model

ARMS = {
    "raw": {},
    "transform": {"cache.codec": "transform"},
    "recompute": {"cache.mode": "recompute"},
}
DISKS = {"as it is": 0.0, "0.15 GB/s": 0.15}
SLOW = "0.15 GB/s"
NEW_TOKENS, ADDED = 16, 24  # of an answer; of the prompt that comes back
LEAST_ENCODE, LEAST_DECODE, MOST_TTFT, MOST_LOAD, MOST_OF_RECOMPUTE = 150.0, 300.0, 1.35, 0.55, 1.1


@dataclass(frozen=True, slots=True)
class Return:
    """The first turn of a new engine."""

    arm: str
    disk: str
    round: int
    ttft_ms: float
    load_ms: float  # of the threads that read and place
    prompt_tokens: int
    loaded_tokens: int
    coded_tokens: int
    disk_bytes: int  # of all tiers' extents


# --- one core ---------------------------------------------------------------------------------------------------------


def mb_per_s(work: Callable[[], object], size_bytes: int, repeats: int) -> float:
    """Return the best of some repeats, of this thread's processor time: the machine may be busy."""
    best = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        work()
        best = min(best, time.thread_time() - started)
    return size_bytes / best / 1e6


def measure_core(model: Path, *, blocks: int, repeats: int) -> dict[str, float]:
    """Encode and decode the KV of a text. Leaves torch with one thread."""
    from reprise.kernels.codecs.transform import TransformCodec, basis_of

    torch.set_num_threads(1)
    module = load_model(model, torch.bfloat16, torch.device("cpu"))
    backend, page_size, found = find_attention(module, torch.device("cpu"))
    subject = Subject(module, backend, page_size, found)
    learned, scored = calibration_text(model / "tokenizer.json")
    bases = [basis_of(layer) for layer in statistics(subject, learned[:2])]
    k_step, v_step = FIRST_STEPS
    codec = TransformCodec.fitted(bases, k_step=k_step, v_step=v_step, dtype=torch.bfloat16)
    text = torch.cat([*scored])[: blocks * BLOCK_TOKENS]
    rows = [raw_blocks(k, v) for k, v in HistoryCoder(subject, most_tokens=len(text)).compute(text)]
    segments = [
        torch.empty(len(raw), size, dtype=torch.uint8) for raw, size in zip(rows, codec.segment_bytes, strict=True)
    ]
    backs = [torch.empty_like(raw) for raw in rows]

    def encode() -> None:
        for layer, (raw, coded) in enumerate(zip(rows, segments, strict=True)):
            codec.encode(layer, raw, coded)

    def decode() -> None:
        for layer, (coded, back) in enumerate(zip(segments, backs, strict=True)):
            codec.decode(layer, coded, back)

    size = sum(_bytes(raw).numel() for raw in rows)
    for compiled in (encode, decode):
        compiled()
    return {
        "blocks": len(rows[0]),
        "encode_mb_per_s": mb_per_s(encode, size, repeats),
        "decode_mb_per_s": mb_per_s(decode, size, repeats),
        "coded_share": sum(map(torch.numel, segments)) / size,
    }


def _bytes(raw: Tensor) -> Tensor:
    return raw.view(torch.uint8)


# --- a turn that comes back -------------------------------------------------------------------------------------------


def settings_of(arm: str, disk: str, directory: Path) -> dict[str, str | int | float]:
    """Every arm keeps a directory of its own over the rounds, and so its calibration."""
    return {
        "cache.dram_gib": 0.25, "cache.disk_gib": 8, "cache.disk_dir": str(directory / arm),
        "experiment.disk_gbps": DISKS[disk], "cache.hbm_tokens": 4096, "scheduler.policy": "fcfs", **ARMS[arm],
    }  # fmt: skip


def one_return(model: Path, arm: str, disk: str, round_: int, tokens: int, directory: Path) -> Return:
    """Have a conversation, stop the engine, start another one on its directory and go on."""
    rng, vocabulary = random.Random(f"{arm}/{disk}/{round_}"), vocabulary_of(str(model))
    session = f"{arm}-{disk}-{round_}"
    options = config(str(model), settings_of(arm, disk, directory))
    first = InProcess(options)
    before = first.submit(session, [rng.randrange(100, vocabulary) for _ in range(tokens)], NEW_TOKENS)
    first.run()
    first.settle()
    first.close()
    second = InProcess(options)
    stored = second.stats().tier_bytes.get("disk", 0)
    warm = second.submit("warm", [rng.randrange(100, vocabulary) for _ in range(64)], 2)
    second.run()
    assert warm.done_s is not None
    turn = second.submit(session, [*before.text, *(rng.randrange(100, vocabulary) for _ in range(ADDED))], 2)
    second.run()
    loaded_s = second.stats().moved_seconds.get("disk_to_hbm", 0.0)
    second.close()
    assert turn.first_s is not None
    assert turn.report is not None
    return Return(
        arm=arm, disk=disk, round=round_, ttft_ms=(turn.first_s - turn.submitted_s) * 1e3,
        load_ms=loaded_s * 1e3, prompt_tokens=len(turn.prompt), loaded_tokens=turn.report.disk_tokens,
        coded_tokens=turn.report.coded_tokens, disk_bytes=stored,
    )  # fmt: skip


def summarize(returns: list[Return]) -> list[dict[str, Any]]:
    """Medians by arm and disk."""
    rows = []
    for arm, disk in dict.fromkeys((r.arm, r.disk) for r in returns):
        same = [r for r in returns if (r.arm, r.disk) == (arm, disk)]
        rows.append(
            {
                "arm": arm, "disk": disk, "rounds": len(same), "ttft_ms_p50": median(r.ttft_ms for r in same),
                "ttft_ms_least": min(r.ttft_ms for r in same), "ttft_ms_most": max(r.ttft_ms for r in same),
                "load_ms_p50": median(r.load_ms for r in same),
                "loaded_share": sum(r.loaded_tokens for r in same) / sum(r.prompt_tokens for r in same),
            }
        )  # fmt: skip
    return rows


def figure_of(rows: list[dict[str, Any]], arm: str, disk: str, name: str) -> float | None:
    return next((row[name] for row in rows if (row["arm"], row["disk"]) == (arm, disk)), None)


def verdicts(core: dict[str, float], rows: list[dict[str, Any]]) -> dict[str, bool]:
    """What is held -> whether it holds, as far as it was measured."""
    held = {}
    if core:
        held[f"encode at least {LEAST_ENCODE:g} MB/s"] = core["encode_mb_per_s"] >= LEAST_ENCODE
        held[f"decode at least {LEAST_DECODE:g} MB/s"] = core["decode_mb_per_s"] >= LEAST_DECODE
    for disk in DISKS:
        coded, raw, computed = (figure_of(rows, arm, disk, "ttft_ms_p50") for arm in ("transform", "raw", "recompute"))
        if coded is not None and raw is not None and disk != SLOW:
            held[f"disk {disk}: a coded turn within {MOST_TTFT} x raw's first token"] = coded <= MOST_TTFT * raw
        if coded is not None and computed is not None:
            held[f"disk {disk}: no slower than {MOST_OF_RECOMPUTE} x a recompute"] = (
                coded <= MOST_OF_RECOMPUTE * computed
            )
    loads = [figure_of(rows, arm, SLOW, "load_ms_p50") for arm in ("transform", "raw")]
    if loads[0] is not None and loads[1] is not None:
        held[f"disk {SLOW}: coded load within {MOST_LOAD} x raw's"] = loads[0] <= MOST_LOAD * loads[1]
    return held


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    all_threads = torch.get_num_threads()
    if arguments.core:
        core = measure_core(arguments.model, blocks=arguments.blocks, repeats=arguments.repeats)
    else:
        core = {}
    returns: list[Return] = []

    def result() -> dict[str, Any]:
        rows = summarize(returns)
        return {
            "settings": {"model": name_of(arguments.model), "tokens": arguments.tokens},
            "held": verdicts(core, rows), "core": core, "summary": rows, "returns": [asdict(one) for one in returns],
        }  # fmt: skip

    torch.set_num_threads(arguments.threads or all_threads)
    for round_, order in run.rounds(arguments.arms, arguments.rounds):
        for arm in order:
            for disk in arguments.disks:
                one = one_return(arguments.model, arm, disk, round_, arguments.tokens, run.directory)
                returns.append(one)
        run.keep(result())
    return result()


def show(console: Console, result: Any) -> None:
    if core := result["core"]:
        rates = {name: core[f"{name}_mb_per_s"] for name in ("encode", "decode")}
        shown = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        shares = f"coded {core['coded_share']:.3f} of the bytes"
        console.print(f"One core, MB of rows a second: {shown}; {shares}", highlight=False)
    table = Table(title=f"A turn of {result['settings']['tokens']} tokens, from disk", title_justify="left")
    for heading in ("arm", "disk", "rounds", "TTFT p50, ms", "least - most", "load p50, ms", "loaded"):
        table.add_column(heading, justify="left" if heading in ("arm", "disk") else "right")
    for row in result["summary"]:
        table.add_row(
            row["arm"], row["disk"], str(row["rounds"]), f"{row['ttft_ms_p50']:.1f}",
            f"{row['ttft_ms_least']:.1f} - {row['ttft_ms_most']:.1f}", f"{row['load_ms_p50']:.1f}",
            f"{row['loaded_share']:.1%}",
        )  # fmt: skip
    console.print(table)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", type=model_directory, default="smollm2", help="bundled, smollm2 or a directory")
    parser.add_argument("--tokens", type=int, default=1750, help="of the conversation that comes back")
    parser.add_argument("--disks", nargs="+", choices=DISKS, default=list(DISKS), help="which it comes from")
    parser.add_argument("--blocks", type=int, default=40, help="of KV, coded by one core")
    parser.add_argument("--repeats", type=int, default=5, help="of which the best counts")
    parser.add_argument("--no-core", dest="core", action="store_false", help="leave out what one core does")
    parser.add_argument("--threads", type=int, help="of torch, in the turns; by default its own choice")


EXPERIMENT = Experiment(
    name=lambda arguments: result_name("codec_speed", arguments.model),
    about=__doc__,
    measure=measure,
    show=show,
    options=options,
    rounds=5,
    arms=tuple(ARMS),
    quick=Quick(
        {"rounds": 1, "arms": ["raw", "transform"], "blocks": 12, "repeats": 2, "disks": [SLOW]},
        (
            Figure("decode, MB/s", lambda r: r["core"]["decode_mb_per_s"], 2.0, more_is_better=True),
            Figure("coded share of bytes", lambda r: r["core"]["coded_share"], 1.1),
        ),
        holds=False,
    ),
)

if __name__ == "__main__":
    as_engine_process()
    raise SystemExit(EXPERIMENT.main())
