"""`reprise bench`: says in a minute what a server's tiers give the person who asks."""

import asyncio
import contextlib
import math
import random
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer import Option

from reprise.loadgen.cli import find_target
from reprise.loadgen.load_options import ServerOptions
from reprise.loadgen.measure.bench_run import BenchRun, Bounds, Kind, Measured, own_prompts, read_prompts
from reprise.loadgen.measure.sender import Target
from reprise.loadgen.percentile import percentile

TIERS = {"hbm": "HBM", "dram": "DRAM", "disk": "disk", "redis": "Redis", "computed": "anew"}
LABELS: dict[Kind, str] = {"first": "first turn", "kept": "history kept", "anew": "history anew"}
MAX_CONVERSATIONS = 8  # unless a file has more
LEAST_TURNS = 3  # medians of fewer turns are not compared
MAX_WORDS = 700  # a prompt of our own has so many, or fewer in a small window
DELETE_S = 20.0  # longest time for deleting the run's sessions
_NOT_REPRISE = (
    "This server is not Reprise: which tier a history came from, and whether the sessions of this run are kept, cannot "
    "be known. What is cached counts where the server says it (`cached_tokens`)."
)

console = Console(stderr=True, highlight=False, soft_wrap=True)
cli = typer.Typer(add_completion=False)


def main(words: list[str]) -> None:
    """Run `reprise bench` with these arguments, then end the program."""
    cli(args=words, prog_name="reprise bench")


@cli.command()
def bench_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of a server or a gateway, with or without /v1.")],
    prompts: Annotated[
        Path | None,
        Option(help="Your own prompts: one a line, as text or as JSON (a list of messages). Default: some of ours."),
    ] = None,
    seconds: Annotated[float, Option(min=1, max=3600, help="How long to measure.")] = 60.0,
    requests: Annotated[int, Option(min=3, max=100_000, help="Most requests.")] = 300,
    answer_tokens: Annotated[int, Option(min=1, max=4096, help="Most tokens of an answer.")] = 16,
    model: Annotated[str, Option(help="Default: the first model that the server lists.")] = "",
    api_key: Annotated[str, Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Bearer key.")] = "",
) -> None:
    """Say what the server's tiers give: first tokens of turns whose history is kept, and of the same turns without.

    Conversations take turns, one request at a time. The sessions of the run are deleted at its end. The exit status is
    0 if every request was answered, 1 if not, 2 if nothing could be measured.
    """
    try:
        given = None if prompts is None else read_prompts(prompts)
        server = ServerOptions(url=url, model=model, api_key=api_key)
        target, said = find_target(server, {"temperature": 0.0})
    except (ValueError, OSError) as error:
        raise _refuse(str(error)) from None
    is_reprise = _is_reprise(target)
    rng = random.Random(secrets.randbits(64))  # texts of an earlier run would be hits
    if given is None:
        given = own_prompts(MAX_CONVERSATIONS, min(MAX_WORDS, (said["max_context"] or 4096) // 4), rng)
    console.print(f"{said['model']} at {said['url']}, for {seconds:g} s", markup=False)
    run = BenchRun(
        target=target,
        bounds=Bounds(seconds=seconds, requests=requests, answer_tokens=answer_tokens, silence_s=seconds),
        prompts=given,
        session_prefix=f"bench-{secrets.token_hex(6)}" if is_reprise else "",
        rng=rng,
        on_result=lambda _: None,
    )
    was_stopped = _execute(run, seconds)
    kept_on = _delete(target, run.sessions) if is_reprise else []
    _show(Console(), run.measured, is_reprise=is_reprise)
    if kept_on:
        console.print(f"{len(kept_on)} sessions could not be deleted: {', '.join(kept_on[:3])}", markup=False)
    failed = [one.result.error for one in run.measured if one.result.error is not None]
    if failed:
        console.print(f"{len(failed)} requests failed, the first with: {failed[0]}", markup=False)
    if not any(one.ttft_s is not None for one in run.measured):
        raise _refuse("no answer began in time; give it more --seconds" if not failed else "no request was answered")
    raise typer.Exit(1 if failed or was_stopped else 0)


def _execute(run: BenchRun, seconds: float) -> bool:
    """Run, with a line of progress. Returns whether Ctrl-C has ended it early."""
    bar = Progress(
        BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}", markup=False), console=console
    )
    ended = threading.Event()

    def draw() -> None:
        began_s = time.monotonic()
        while not ended.wait(0.25):
            bar.update(task, completed=min(seconds, time.monotonic() - began_s), description=_line(run.measured))

    with bar:
        task = bar.add_task("", total=seconds)
        drawing = threading.Thread(target=draw, daemon=True)
        drawing.start()
        try:
            asyncio.run(run.run())
        except KeyboardInterrupt:
            return True
        finally:
            ended.set()
            drawing.join()
            bar.update(task, completed=seconds, description=_line(run.measured))
    return False


def _line(measured: Sequence[Measured]) -> str:
    kinds: tuple[Kind, ...] = ("kept", "anew")
    times = {LABELS[kind]: _times(measured, kind) for kind in kinds}
    medians = [f"{label} {_ms(median(some))}" for label, some in times.items() if some]
    return ", ".join([f"{len(measured)} requests", *medians])


def _show(out: Console, measured: Sequence[Measured], *, is_reprise: bool) -> None:
    table = Table(
        title="First tokens, and where the KV of prompts came from",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("", no_wrap=True)
    by_kind = {kind: [one for one in measured if one.kind == kind and one.result.error is None] for kind in LABELS}
    every = _tier_shares([one for some in by_kind.values() for one in some])
    used = [tier for tier, share in zip(TIERS, every, strict=True) if share > 0]  # a terminal may be narrow
    names = ("count", "tokens", "p50", "p10 - p90", *([TIERS[tier] for tier in used] if is_reprise else ("cached",)))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for kind, label in LABELS.items():
        of_kind, times = by_kind[kind], _times(measured, kind)
        if not times:
            table.add_row(label, *(("0",) + ("-",) * (len(names) - 1)))
            continue
        tokens = [one.result.prompt_tokens for one in of_kind if one.result.prompt_tokens]
        shares = dict(zip(TIERS, _tier_shares(of_kind), strict=True))
        shown = [shares[tier] for tier in used] if is_reprise else [_cached_share(of_kind)]
        spread = f"{_ms(percentile(times, 0.1))} - {_ms(percentile(times, 0.9))}" if len(times) >= LEAST_TURNS else "-"
        prompt = f"{median(tokens):,.0f}" if tokens else "-"
        table.add_row(label, f"{len(of_kind)}", prompt, _ms(median(times)), spread, *map(_percent, shown))
    out.print(table)
    kept, anew = _times(measured, "kept"), _times(measured, "anew")
    if min(len(kept), len(anew)) >= LEAST_TURNS:
        factor = median(anew) / median(kept)
        out.print(
            f"With its history kept, a turn's first token came after {_ms(median(kept))}, computed anew after "
            f"{_ms(median(anew))}: {factor:.1f} times as fast."
        )
    else:
        out.print("Too few turns for a comparison: give it more --seconds, or shorter --prompts.")
    if not is_reprise:
        out.print(_NOT_REPRISE)


def _times(measured: Sequence[Measured], kind: Kind) -> list[float]:
    return [one.ttft_s for one in measured if one.kind == kind and one.result.error is None and one.ttft_s is not None]


def _tier_shares(measured: Sequence[Measured]) -> list[float]:
    """Return for each of TIERS the share of the prompts' tokens whose KV came from there; nan where nothing is said."""
    said = [one.result.extra.get("x_cache") or {} for one in measured]
    counts = [sum(_count(one.get(f"{tier}_tokens")) for one in said) for tier in TIERS]
    total = sum(counts)
    return [count / total if total else math.nan for count in counts]


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _cached_share(measured: Sequence[Measured]) -> float:
    said = [one.result for one in measured if one.result.cached_tokens is not None and one.result.prompt_tokens]
    if not said:
        return math.nan
    return sum(result.cached_tokens or 0 for result in said) / sum(result.prompt_tokens for result in said)


def _is_reprise(target: Target) -> bool:
    with contextlib.suppress(httpx.HTTPError, ValueError), _client(target) as http:
        said = http.get("/version").json()
        return isinstance(said, dict) and "wire_version" in said
    return False


def _delete(target: Target, sessions: Sequence[str]) -> list[str]:
    """Delete the run's sessions. Returns those that may still be there."""
    end_s = time.monotonic() + DELETE_S
    left = list(sessions)
    with contextlib.suppress(httpx.HTTPError), _client(target) as http:
        for name in sessions:
            if time.monotonic() > end_s:
                break
            if http.delete(f"/v1/sessions/{name}").status_code in (204, 404):
                left.remove(name)
    return left


def _client(target: Target) -> httpx.Client:
    key = target.api_keys.get("", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=target.url, headers=headers, timeout=10, trust_env=False)


def _ms(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


def _refuse(message: str) -> typer.Exit:
    console.print(f"reprise bench: {message}", markup=False)
    return typer.Exit(2)
