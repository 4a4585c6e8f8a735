"""The papers' figures out of the simulator, beside the papers' numbers: benchmarks/results/paper_figures.json,
docs/paper_figures.md and its pictures.

    python -m benchmarks.paper.figures              every run that is not in the results yet, then tables and pictures
    python -m benchmarks.paper.figures --fresh      all of them again
    python -m benchmarks.paper.figures --only 13b   those whose names have this in them
"""

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from typing import Any

from benchmarks.harness.result_files import RESULTS, describe_machine
from benchmarks.paper.text import write
from reprise.loadgen.sim import Config, Machine, presets, simulate
from reprise.loadgen.sim.presets import FIGURE_MODELS

FILE = RESULTS / "paper_figures.json"
PAPER = Config(answer_share=0.0, warmup_turns=10_000)
SEEDS = (0, 1, 2)  # seeds of the workloads whose hit rates are Fig. 13; all else is of the first
TTL_S = 3600.0
CAPACITIES = (0.05, 0.1, 0.25, 0.5, 1.0)  # Fig. 23: of sessions an hour x window x KV per token
DOCUMENTS = (4_000, 8_000, 12_000, 16_000, 20_000, 24_000, 28_000)

Run = dict[str, Any]
"""The parts of a run, as plain values: load, seed, model, share, and what differs from the preset in machine and
config."""


def runs(share: float) -> dict[str, Run]:
    """Return all runs by name. share: the share of the paper's sessions and machine that is simulated."""
    found: dict[str, Run] = {}

    def add(arm: str, *models: str, load: str = "saturated", seed: int = SEEDS[0], machine: Run | None = None,
            **config: Any) -> None:  # fmt: skip
        for model in models:
            found[f"{model} {arm}"] = {
                "load": load, "seed": seed, "model": model, "share": share, "machine": machine or {}, "config": config,
            }  # fmt: skip

    big = "llama-13b"
    small, no_disk = {"disk_bytes": 2e12}, {"hbm_bytes": 10e9, "disk_bytes": 0.0}
    add("recompute", *FIGURE_MODELS, reuse=False)
    add("hbm", *FIGURE_MODELS, machine={**no_disk, "dram_bytes": 0.0})
    add("hbm+dram", *FIGURE_MODELS, machine=no_disk)
    for name, policy in (("lru", "lru"), ("fifo", "first-come")):
        for terabytes in (2, 10):
            disk = {"disk_bytes": terabytes * 1e12}
            add(f"{name} {terabytes}T", big, machine=disk, policy=policy, prefetch=False)
    add("fifo by insertion 10T", big, policy="fifo", prefetch=False)
    add("attentionstore", *FIGURE_MODELS)
    for seed in SEEDS[1:]:
        add(f"attentionstore, seed {seed}", *FIGURE_MODELS, seed=seed)
    add("attentionstore 2T", big, machine=small)
    add("eviction window 2T", big, machine=small, eviction_window=True)
    add("overflow", *FIGURE_MODELS, truncation="coupled")
    add("unsaturated recompute", *FIGURE_MODELS, load="unsaturated", reuse=False)
    add("unsaturated attentionstore", big, load="unsaturated")
    add("unsaturated lru", big, load="unsaturated", policy="lru", prefetch=False)
    window = presets.SHAPES[big].window * presets.SHAPES[big].kv_bytes_per_token
    for ratio in CAPACITIES:
        disk = {"disk_bytes": ratio * 3600 * presets.UNSATURATED_RATE * window}
        add(f"capacity {ratio}", big, load="unsaturated", machine=disk, ttl_s=TTL_S)
    return found


def long_documents() -> list[dict[str, dict[str, float]]]:
    """Return for each document length the TTFT and GPU time of a question, with recomputing and with reuse: means over
    the second to the sixth question."""
    machine = presets.machine("mistral-7b", layer_s=presets.MISTRAL_LAYER_S)
    rows = []
    for length in DOCUMENTS:
        row = {}
        for arm, reuse in (("recompute", False), ("attentionstore", True)):
            result = simulate(presets.documents([length]), machine, Config(reuse=reuse, answer_share=0.0))
            later = result.records[1:]
            row[arm] = {
                "ttft_s": sum(record.ttft_s for record in later) / len(later),
                "gpu_s": sum(record.done_s - record.started_s for record in later) / len(later),
            }
        rows.append(row)
    return rows


def execute(run: Run) -> dict[str, Any]:
    """Simulate one run. Returns its figures, and the seconds of processor time that it took."""
    began = time.process_time()
    share = run["share"]
    sessions = round(9000 * share)
    machine: Machine = presets.machine(run["model"])
    if run["load"] == "saturated":
        workload = presets.saturated(sessions=sessions, seed=run["seed"], rate_per_s=share)
    else:
        rate = share * presets.UNSATURATED_RATE
        workload = presets.unsaturated(sessions=sessions, seed=run["seed"], rate_per_s=rate)
    machine = presets.smaller(replace(machine, **run["machine"]), share)
    config = replace(PAPER, warmup_turns=round(PAPER.warmup_turns * share), **run["config"])
    result = simulate(workload, machine, config)
    return {"run": run, "figures": result.figures(), "processor_s": round(time.process_time() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="what is in the results does not count")
    parser.add_argument("--only", default="", help="runs whose names have this in them")
    parser.add_argument("--share", type=float, default=1.0, help="of the paper's sessions, tiers and batch")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    words = parser.parse_args()
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"runs": {}}
    document |= {
        "benchmark": "paper_figures",
        "command": "python -m benchmarks.paper.figures" + (f" --share {words.share:g}" if words.share != 1 else ""),
        "machine": describe_machine(),
        "assumptions": [asdict(row) for row in presets.TABLE],
    }
    wanted = runs(words.share)
    document["runs"] = {name: entry for name, entry in document["runs"].items() if name in wanted}
    todo = {
        name: run
        for name, run in wanted.items()
        if words.only in name and (words.fresh or document["runs"].get(name, {}).get("run") != run)
    }
    with ProcessPoolExecutor(max_workers=max(1, words.workers)) as pool:
        started = {pool.submit(execute, run): name for name, run in todo.items()}
        for future in as_completed(started):
            name = started[future]
            document["runs"][name] = future.result()
            figures = document["runs"][name]["figures"]
            print(
                f"{name}: {figures['hit_rate']:.1%} of turns hit, {document['runs'][name]['processor_s']} s", flush=True
            )
            FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    document["documents"] = dict(zip(map(str, DOCUMENTS), long_documents(), strict=True))
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    write(document)


if __name__ == "__main__":
    main()
