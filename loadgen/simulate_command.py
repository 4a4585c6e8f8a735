"""`reprise simulate`: compares eviction policies, on a recorded trace or on a simulated server."""

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from reprise.loadgen.blocks import hit_tables
from reprise.loadgen.codec import CodedKV
from reprise.loadgen.measure.load_run import check_writable, save
from reprise.loadgen.options import grouped, refuse_given
from reprise.loadgen.sim import Machine, arm_tables, calibrate

_OF_MODEL = {"model", "dram_gb", "disk_gb"}

console = Console(stderr=True, highlight=False, soft_wrap=True)
cli = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class FullModeOptions:
    """Options of the full mode, which simulates a whole server."""

    model: Annotated[str, Option(help="Full mode: a model of the papers.")] = "llama-13b"
    server: Annotated[
        str, Option(help="Full mode: instead of a model, a running Reprise, as it has measured itself (URL).")
    ] = ""
    api_key: Annotated[str, Option(envvar="OPENAI_API_KEY", show_envvar=True, help="API key of --server.")] = ""
    machine: Annotated[
        Path | None, Option(help="Full mode: instead of a model, the machine of an earlier result (--out).")
    ] = None
    load: Annotated[str, Option(help="Full mode: saturated or unsaturated.")] = "saturated"
    sessions_per_s: Annotated[
        float | None, Option(min=1e-6, help="Full mode: conversations that begin. Default: the load's own.")
    ] = None
    sessions: Annotated[int, Option(min=1, help="Full mode: so many conversations.")] = 9000
    dram_gb: Annotated[float, Option(min=0, help="Full mode, with --model.")] = 128.0
    disk_gb: Annotated[float, Option(min=0, help="Full mode, with --model.")] = 10_000.0
    truncation: Annotated[str, Option(help="Full mode: decoupled, or coupled (a cut loses what is saved).")] = (
        "decoupled"
    )
    warmup_turns: Annotated[int, Option(min=0, help="Full mode: the first turns do not count.")] = 10_000
    seed: Annotated[int, Option(help="Full mode: of the workload.")] = 0

    def refuse_unused(self, context: typer.Context) -> None:
        """Raise ValueError for options that have no effect: those that describe a machine, beside --server or
        --machine, which give another one; --machine beside --server; and --api-key without --server."""
        if self.server:
            refuse_given(context, {*_OF_MODEL, "machine"}, "with --server")
        elif self.machine is not None:
            refuse_given(context, {*_OF_MODEL, "api_key"}, "with --machine")
        else:
            refuse_given(context, {"api_key"}, "without --server")

    def find_machine(self) -> Machine:
        """Return the machine to simulate: as measured by a running server, of an earlier result, or with a model of the
        papers. Raises ValueError, OSError."""
        if self.server:
            return calibrate.from_server(self.server, api_key=self.api_key)
        if self.machine is not None:
            return arm_tables.read_machine(self.machine)
        return arm_tables.preset(self.model, self.load, dram_bytes=self.dram_gb * 1e9, disk_bytes=self.disk_gb * 1e9)


def main(words: list[str]) -> None:
    """Run `reprise simulate` with these arguments, then end the program."""
    cli(args=words, prog_name="reprise simulate")


@cli.command()
@grouped
def simulate(
    context: typer.Context,
    trace: Annotated[
        Path | None, Option(help="Requests with the names of their blocks (Mooncake's JSON lines): block mode.")
    ] = None,
    capacity_tokens: Annotated[str, Option(help="Block mode: room for so many tokens; several with commas.")] = "",
    policies: Annotated[
        str, Option(help="Keys of the setting cache.policy, default, belady, unbounded; with commas.")
    ] = "lru,fifo,belady,default",
    score_from: Annotated[
        float, Option(min=0.0, max=1.0, help="Block mode: share of the requests that warm up.")
    ] = 0.0,
    codec_ratio: Annotated[
        float, Option(min=1.0, help="How many times smaller a codec makes blocks: on disk, or in a trace's only tier.")
    ] = 1.0,
    codec_gb_per_s: Annotated[
        float, Option(min=1e-3, help="Full mode: GB of raw KV that are decoded in a second.")
    ] = math.inf,
    *,
    full: FullModeOptions,
    out: Annotated[Path | None, Option(help="JSON file for the result.")] = None,
    figure: Annotated[Path | None, Option(help="Block mode: PNG file; needs matplotlib.")] = None,
) -> None:
    """Estimate what caching would save. With --trace, replays eviction policies on a recorded trace; otherwise
    simulates a whole server like those of the papers, comparing every policy with recomputation."""
    names = list(dict.fromkeys(policy.strip() for policy in policies.split(",")))
    try:
        codec = CodedKV(codec_ratio, codec_gb_per_s * 1e9).check()
        check_writable(out, figure, read=(trace, full.machine))
        if trace is not None:
            full_mode = ["codec_gb_per_s", *(field.name for field in fields(FullModeOptions))]
            refuse_given(context, full_mode, "with --trace")
            result, shown = _replay_blocks(
                trace, _counts("--capacity-tokens", capacity_tokens), names, score_from, codec
            )
        else:
            refuse_given(context, {"capacity_tokens", "score_from", "figure"}, "without --trace")
            full.refuse_unused(context)
            result, shown = _run_servers(full, names, codec)
        if out is not None:
            save(json.dumps(result, indent=1) + "\n", out)
        if figure is not None:
            hit_tables.draw(result, figure)
    except (OSError, ValueError, ImportError) as error:
        console.print(f"reprise simulate: {error}", markup=False)
        raise typer.Exit(2) from None
    for table in shown:
        Console().print(table)


def _replay_blocks(
    trace: Path, capacities: list[int], policies: list[str], score_from: float, codec: CodedKV
) -> tuple[dict[str, Any], list[Table]]:
    """Run block mode. Returns the hit rate of every policy at every capacity, and its table."""
    result = hit_tables.simulate(
        trace,
        capacities=capacities,
        policies=policies,
        score_from=score_from,
        codec=codec,
        progress=lambda policy, capacity: console.print(f"{policy}, {capacity:,} tokens"),
    )
    return result, [hit_tables.table(result)]


def _run_servers(full: FullModeOptions, policies: list[str], codec: CodedKV) -> tuple[dict[str, Any], list[Table]]:
    """Run full mode: simulate a server under every policy. Returns the result and its tables."""
    result = arm_tables.simulate(
        machine=replace(full.find_machine(), codec=codec),
        policies=policies,
        load=full.load,
        sessions=full.sessions,
        sessions_per_s=full.sessions_per_s,
        truncation=full.truncation,
        warmup_turns=full.warmup_turns,
        seed=full.seed,
        progress=console.print,
    )
    return result, arm_tables.shown(result)


def _counts(option: str, text: str) -> list[int]:
    """Parse whole numbers separated by commas. Raises ValueError."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ValueError(f"{option} takes whole numbers with commas between them, not {text!r}")
    return list(dict.fromkeys(int(part) for part in text.split(",")))
