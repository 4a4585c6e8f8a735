"""`reprise plan`: DRAM and disk for a target hit rate, with TTFT and cost."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadgen.measure.load_run import check_writable, save
from loadgen.measure.summary import Prices
from loadgen.options import refuse_given
from loadgen.plan import plan
from loadgen.workloads.synthetic import Distribution

console = Console(stderr=True, highlight=False)
cli = typer.Typer(add_completion=False)
WORKLOAD, LENGTHS, COST, OUTPUT = "The workload", "Conversations that are not of a trace", "Cost", "Output"


def main(words: list[str]) -> None:
    """Run `reprise plan` with these arguments, then end the program."""
    cli(args=words, prog_name="reprise plan")


@cli.command()
def plan_command(
    context: typer.Context,
    trace: Annotated[
        Path | None, typer.Option(help="Requests with the names of their blocks.", rich_help_panel=WORKLOAD)
    ] = None,
    sessions_per_s: Annotated[
        float,
        typer.Option(min=1e-6, max=1e6, help="Conversations that begin a second (no trace).", rich_help_panel=WORKLOAD),
    ] = 1.0,
    model: Annotated[
        str, typer.Option(help="A preset, or a directory with a config.json.", rich_help_panel=WORKLOAD)
    ] = "llama-13b",
    ttl: Annotated[
        float, typer.Option(min=1e-3, help="Seconds that KV is kept after its last use.", rich_help_panel=LENGTHS)
    ] = 3600.0,
    sessions: Annotated[
        int,
        typer.Option(
            min=0, help="How many are simulated. 0: for twice the TTL, 1,500 at most.", rich_help_panel=LENGTHS
        ),
    ] = 0,
    think: Annotated[str, typer.Option(help="As in reprise load.", rich_help_panel=LENGTHS)] = "lognormal:24,1.05",
    mean_turns: Annotated[float, typer.Option(rich_help_panel=LENGTHS)] = 5.75,
    over_2k: Annotated[float, typer.Option("--over-2k", rich_help_panel=LENGTHS)] = 0.47,
    over_4k: Annotated[float, typer.Option("--over-4k", rich_help_panel=LENGTHS)] = 0.30,
    seed: Annotated[int, typer.Option(rich_help_panel=LENGTHS)] = 0,
    target: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Target hit rate, as a share of the best one.", rich_help_panel=WORKLOAD),
    ] = 0.9,
    dram_gb: Annotated[
        float,
        typer.Option(
            min=0, help="Most DRAM per machine; whatever exceeds it is kept on disk.", rich_help_panel=WORKLOAD
        ),
    ] = 128.0,
    gpu_price: Annotated[float, typer.Option(min=0, help="$ an hour.", rich_help_panel=COST)] = 5.0,
    dram_price: Annotated[float, typer.Option(min=0, help="$ an hour and GB.", rich_help_panel=COST)] = 0.0088,
    ssd_price: Annotated[float, typer.Option(min=0, help="$ an hour and GB.", rich_help_panel=COST)] = 0.000082,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result.", rich_help_panel=OUTPUT)] = None,
    figure: Annotated[Path | None, typer.Option(help="PNG file; needs matplotlib.", rich_help_panel=OUTPUT)] = None,
) -> None:
    """Show how much DRAM and disk a workload needs, and what it gains by them."""
    prices = Prices(gpu=gpu_price, dram=dram_price, ssd=ssd_price)

    def progress(stored_gb: float) -> None:
        console.print(f"{plan.amount(stored_gb)} GB")

    try:
        check_writable(out, figure, read=(trace,))
        machine = plan.machine_of(model)
        if trace is not None:
            drawn = {"ttl", "sessions_per_s", "sessions", "think", "mean_turns", "over_2k", "over_4k", "seed"}
            refuse_given(context, drawn, "with --trace")
            found = plan.of_trace(
                trace, machine, dram_gb=dram_gb, target=target, prices=prices, progress=progress
            )  # fmt: skip
        else:
            found = plan.of_distribution(
                machine, sessions=sessions, sessions_per_s=sessions_per_s, ttl_s=ttl, think_time=think,
                distribution=Distribution(mean_turns=mean_turns, over_2k=over_2k, over_4k=over_4k), seed=seed,
                dram_gb=dram_gb, target=target, prices=prices, progress=progress,
            )  # fmt: skip
        if out is not None:
            save(json.dumps(found.figures(), indent=1) + "\n", out)
        if figure is not None:
            plan.draw(found, figure)
    except (ImportError, OSError, ValueError) as error:
        console.print(f"reprise plan: {error}", markup=False)
        raise typer.Exit(2) from None
    Console().print(plan.table(found))
    for note in found.notes:
        console.print(f"{note}.", markup=False)
