"""`reprise plan`: DRAM and disk for a target hit rate, with TTFT and cost."""

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.console import Console
from typer import Option

from reprise.loadgen.codec import CodedKV
from reprise.loadgen.measure.load_run import check_writable, save
from reprise.loadgen.measure.summary import Prices
from reprise.loadgen.options import grouped, refuse_given
from reprise.loadgen.plan import plan, replicas
from reprise.loadgen.workloads.synthetic import Distribution

console = Console(stderr=True, highlight=False)
cli = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    panel: ClassVar = "The workload"

    trace: Annotated[Path | None, Option(help="Requests with the names of their blocks.")] = None
    sessions_per_s: Annotated[
        float, Option(min=1e-6, max=1e6, help="Conversations that begin a second (no trace).")
    ] = 1.0
    model: Annotated[str, Option(help="A preset, or a directory with a config.json.")] = "llama-13b"
    target: Annotated[float, Option(min=0.0, max=1.0, help="Target hit rate, as a share of the best one.")] = 0.9
    dram_gb: Annotated[float, Option(min=0, help="Most DRAM per machine; whatever exceeds it is kept on disk.")] = 128.0
    codec_ratio: Annotated[float, Option(min=1.0, help="How many times smaller a codec makes KV on disk.")] = 1.0
    codec_gb_per_s: Annotated[float, Option(min=1e-3, help="GB of raw KV that are decoded in a second.")] = math.inf


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    panel: ClassVar = "Conversations that are not of a trace"

    ttl: Annotated[float, Option(min=1e-3, help="Seconds that KV is kept after its last use.")] = 3600.0
    sessions: Annotated[int, Option(min=0, help="How many are simulated. 0: for twice the TTL, 1,500 at most.")] = 0
    think: Annotated[str, Option(help="As in reprise load.")] = "lognormal:24,1.05"
    mean_turns: Annotated[float, Option()] = 5.75
    over_2k: Annotated[float, Option("--over-2k")] = 0.47
    over_4k: Annotated[float, Option("--over-4k")] = 0.30
    seed: Annotated[int, Option()] = 0


@dataclass(frozen=True, slots=True)
class FleetOptions:
    panel: ClassVar = "A fleet"

    replicas: Annotated[
        bool, Option("--replicas", help="Plan the number of replicas and Redis instead of DRAM and disk.")
    ] = False
    ttft_target: Annotated[float, Option(min=1e-3, help="Seconds that 95 % of the turns may wait.")] = 2.0
    disk_gb: Annotated[float, Option(min=0, help="Disk per replica.")] = 2000.0


@dataclass(frozen=True, slots=True)
class PriceOptions:
    panel: ClassVar = "Cost"

    gpu_price: Annotated[float, Option(min=0, help="$ an hour.")] = 5.0
    dram_price: Annotated[float, Option(min=0, help="$ an hour and GB.")] = 0.0088
    ssd_price: Annotated[float, Option(min=0, help="$ an hour and GB.")] = 0.000082


@dataclass(frozen=True, slots=True)
class PlanOutputOptions:
    panel: ClassVar = "Output"

    out: Annotated[Path | None, Option(help="JSON file for the result.")] = None
    figure: Annotated[Path | None, Option(help="PNG file; needs matplotlib.")] = None


def main(words: list[str]) -> None:
    """Run `reprise plan` with these arguments, then end the program."""
    cli(args=words, prog_name="reprise plan")


@cli.command()
@grouped
def plan_command(
    context: typer.Context,
    workload: PlanOptions,
    drawn: ConversationOptions,
    fleet: FleetOptions,
    prices: PriceOptions,
    output: PlanOutputOptions,
) -> None:
    """Show how much DRAM and disk a workload needs, and what it gains by them; or how many replicas and what Redis."""
    found: plan.Plan | replicas.FleetPlan
    try:
        check_writable(output.out, output.figure, read=(workload.trace,))
        if workload.trace is not None:
            without_effect = {"sessions_per_s", *(field.name for field in fields(ConversationOptions))}
            refuse_given(context, without_effect, "with --trace")
        if fleet.replicas:
            without_effect = {"trace", "target", "sessions", "figure", "codec_ratio", "codec_gb_per_s"}
            without_effect |= {*(field.name for field in fields(PriceOptions))}
            refuse_given(context, without_effect, "with --replicas")
            found = _plan_fleet(workload, drawn, fleet)
        else:
            refuse_given(context, {"ttft_target", "disk_gb"}, "without --replicas")
            found = _plan(workload, drawn, Prices(gpu=prices.gpu_price, dram=prices.dram_price, ssd=prices.ssd_price))
        if output.out is not None:
            save(json.dumps(found.figures(), indent=1) + "\n", output.out)
        if output.figure is not None and isinstance(found, plan.Plan):
            plan.draw(found, output.figure)
    except (ImportError, OSError, ValueError) as error:
        console.print(f"reprise plan: {error}", markup=False)
        raise typer.Exit(2) from None
    if isinstance(found, replicas.FleetPlan):
        Console().print(replicas.table(found))
        return
    Console().print(plan.table(found))
    for note in found.notes:
        console.print(f"{note}.", markup=False)


def _plan_fleet(workload: PlanOptions, drawn: ConversationOptions, fleet: FleetOptions) -> replicas.FleetPlan:
    """Plan a fleet for conversations that are drawn at random. Raises ValueError."""
    machine = replace(
        plan.machine_of(workload.model), dram_bytes=workload.dram_gb * 1e9, disk_bytes=fleet.disk_gb * 1e9
    )
    return replicas.plan_replicas(
        machine,
        rate=workload.sessions_per_s,
        ttft_target_s=fleet.ttft_target,
        ttl_s=drawn.ttl,
        think_time=drawn.think,
        distribution=Distribution(mean_turns=drawn.mean_turns, over_2k=drawn.over_2k, over_4k=drawn.over_4k),
        seed=drawn.seed,
        progress=lambda number: console.print(f"{number} replicas"),
    )


def _plan(workload: PlanOptions, drawn: ConversationOptions, prices: Prices) -> plan.Plan:
    """Plan for the trace, if there is one, or for conversations that are drawn at random. Raises ValueError,
    OSError."""

    def progress(stored_gb: float) -> None:
        console.print(f"{plan.amount(stored_gb)} GB")

    codec = CodedKV(workload.codec_ratio, workload.codec_gb_per_s * 1e9)
    machine = replace(plan.machine_of(workload.model), codec=codec)
    if workload.trace is not None:
        return plan.of_trace(
            workload.trace,
            machine,
            dram_gb=workload.dram_gb,
            target=workload.target,
            prices=prices,
            progress=progress,
        )
    return plan.of_distribution(
        machine,
        sessions=drawn.sessions,
        sessions_per_s=workload.sessions_per_s,
        ttl_s=drawn.ttl,
        think_time=drawn.think,
        distribution=Distribution(mean_turns=drawn.mean_turns, over_2k=drawn.over_2k, over_4k=drawn.over_4k),
        seed=drawn.seed,
        dram_gb=workload.dram_gb,
        target=workload.target,
        prices=prices,
        progress=progress,
    )
