"""`reprise simulate`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console(stderr=True, highlight=False, soft_wrap=True)


def simulate(
    context: typer.Context,
    trace: Annotated[
        Path | None, typer.Option(help="Requests with the names of their blocks (Mooncake's JSON lines): block mode.")
    ] = None,
    capacity_tokens: Annotated[
        str, typer.Option(help="Block mode: room for so many tokens; several with commas.")
    ] = "",
    policies: Annotated[
        str, typer.Option(help="Keys of the setting cache.policy, default, belady, unbounded; with commas.")
    ] = "lru,fifo,belady,default",
    score_from: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Block mode: share of the requests that warm up.")
    ] = 0.0,
    model: Annotated[str, typer.Option(help="Full mode: a model of the papers.")] = "llama-13b",
    server: Annotated[
        str, typer.Option(help="Full mode: instead of a model, a running Reprise, as it has measured itself (URL).")
    ] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Of --server.")] = "",
    machine: Annotated[
        Path | None, typer.Option(help="Full mode: instead of a model, the machine of an earlier result (--out).")
    ] = None,
    load: Annotated[str, typer.Option(help="Full mode: saturated or unsaturated.")] = "saturated",
    sessions_per_s: Annotated[
        float | None, typer.Option(min=1e-6, help="Full mode: conversations that begin. Default: the load's own.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Full mode: so many conversations.")] = 9000,
    dram_gb: Annotated[float, typer.Option(min=0, help="Full mode, with --model.")] = 128.0,
    disk_gb: Annotated[float, typer.Option(min=0, help="Full mode, with --model.")] = 10_000.0,
    truncation: Annotated[str, typer.Option(help="Full mode: decoupled, or coupled (a cut loses what is saved).")] = (
        "decoupled"
    ),
    warmup_turns: Annotated[int, typer.Option(min=0, help="Full mode: the first turns do not count.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Full mode: of the workload.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Block mode: PNG file; needs matplotlib.")] = None,
) -> None:
    """Estimate what caching would save. With --trace, replays eviction policies on a recorded trace; otherwise
    simulates a whole server like those of the papers, comparing every policy with recomputation."""
    from loadgen.measure.load_run import check_writable, save
    from loadgen.options import refuse_given

    names = list(dict.fromkeys(policy.strip() for policy in policies.split(",")))
    of_model = {"model", "dram_gb", "disk_gb"}
    try:
        check_writable(out, figure, read=(trace, machine))
        if trace is not None:
            from loadgen.blocks import hit_tables as trace_report

            shape = {"load", "sessions_per_s", "sessions", "truncation", "warmup_turns", "seed"}
            refuse_given(context, {*of_model, *shape, "server", "api_key", "machine"}, "with --trace")
            result = trace_report.simulate(
                trace,
                capacities=_counts("--capacity-tokens", capacity_tokens),
                policies=names,
                score_from=score_from,
                progress=lambda policy, capacity: console.print(f"{policy}, {capacity:,} tokens"),
            )
            tables_ = [trace_report.table(result)]
        else:
            from loadgen.sim import arm_tables as report
            from loadgen.sim import calibrate

            refuse_given(context, {"capacity_tokens", "score_from", "figure"}, "without --trace")
            if server:
                refuse_given(context, {*of_model, "machine"}, "with --server")
                simulated = calibrate.from_server(server, api_key=api_key)
            elif machine is not None:
                refuse_given(context, {*of_model, "api_key"}, "with --machine")
                simulated = report.read_machine(machine)
            else:
                refuse_given(context, {"api_key"}, "without --server")
                simulated = report.preset(model, load, dram_bytes=dram_gb * 1e9, disk_bytes=disk_gb * 1e9)
            result = report.simulate(
                machine=simulated,
                load=load,
                sessions=sessions,
                sessions_per_s=sessions_per_s,
                policies=names,
                truncation=truncation,
                warmup_turns=warmup_turns,
                seed=seed,
                progress=lambda arm: console.print(arm),
            )
            tables_ = report.shown(result)
        text = json.dumps(result, indent=1) + "\n"
        if out is not None:
            save(text, out)
        if figure is not None:
            trace_report.draw(result, figure)
    except (OSError, ValueError, ImportError) as error:
        console.print(f"reprise simulate: {error}", markup=False)
        raise typer.Exit(2) from None
    for shown in tables_:
        Console().print(shown)


def _counts(option: str, text: str) -> list[int]:
    """Parse whole numbers separated by commas. Raises ValueError."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ValueError(f"{option} takes whole numbers with commas between them, not {text!r}")
    return list(dict.fromkeys(int(part) for part in text.split(",")))
