"""`reprise simulate`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

_OF_MODEL = {"model", "dram_gb", "disk_gb"}  # options of the full mode, by what they describe
_OF_WORKLOAD = {"load", "sessions_per_s", "sessions", "truncation", "warmup_turns", "seed"}

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
    try:
        check_writable(out, figure, read=(trace, machine))
        if trace is not None:
            refuse_given(context, {*_OF_MODEL, *_OF_WORKLOAD, "server", "api_key", "machine"}, "with --trace")
            capacities = _counts("--capacity-tokens", capacity_tokens)
            result, shown = _replay_blocks(trace, capacities, names, score_from)
        else:
            refuse_given(context, {"capacity_tokens", "score_from", "figure"}, "without --trace")
            if server:
                refuse_given(context, {*_OF_MODEL, "machine"}, "with --server")
            elif machine is not None:
                refuse_given(context, {*_OF_MODEL, "api_key"}, "with --machine")
            else:
                refuse_given(context, {"api_key"}, "without --server")
            result, shown = _run_servers(
                _machine(server, api_key, machine, model, load, dram_bytes=dram_gb * 1e9, disk_bytes=disk_gb * 1e9),
                names,
                load=load,
                sessions=sessions,
                sessions_per_s=sessions_per_s,
                truncation=truncation,
                warmup_turns=warmup_turns,
                seed=seed,
            )
        if out is not None:
            save(json.dumps(result, indent=1) + "\n", out)
        if figure is not None:
            from loadgen.blocks.hit_tables import draw

            draw(result, figure)
    except (OSError, ValueError, ImportError) as error:
        console.print(f"reprise simulate: {error}", markup=False)
        raise typer.Exit(2) from None
    for table in shown:
        Console().print(table)


def _replay_blocks(
    trace: Path, capacities: list[int], policies: list[str], score_from: float
) -> tuple[dict[str, Any], list[Table]]:
    """Block mode: the hit rate of every policy at every capacity, and its table."""
    from loadgen.blocks import hit_tables

    result = hit_tables.simulate(
        trace,
        capacities=capacities,
        policies=policies,
        score_from=score_from,
        progress=lambda policy, capacity: console.print(f"{policy}, {capacity:,} tokens"),
    )
    return result, [hit_tables.table(result)]


def _machine(
    server: str, api_key: str, file: Path | None, model: str, load: str, *, dram_bytes: float, disk_bytes: float
) -> Any:
    """Full mode: the machine that a running server has measured itself to be, that of an earlier result, or that of a
    model of the papers. (A `loadgen.sim.machine.Machine`: loadgen is loaded only where it is used.)"""
    from loadgen.sim import arm_tables, calibrate

    if server:
        return calibrate.from_server(server, api_key=api_key)
    if file is not None:
        return arm_tables.read_machine(file)
    return arm_tables.preset(model, load, dram_bytes=dram_bytes, disk_bytes=disk_bytes)


def _run_servers(machine: Any, policies: list[str], **workload: Any) -> tuple[dict[str, Any], list[Table]]:
    """Full mode: a server under every policy, and their tables. `workload` is what `arm_tables.simulate` takes."""
    from loadgen.sim import arm_tables

    result = arm_tables.simulate(machine=machine, policies=policies, progress=console.print, **workload)
    return result, arm_tables.shown(result)


def _counts(option: str, text: str) -> list[int]:
    """Parse whole numbers separated by commas. Raises ValueError."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ValueError(f"{option} takes whole numbers with commas between them, not {text!r}")
    return list(dict.fromkeys(int(part) for part in text.split(",")))
