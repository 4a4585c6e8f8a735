"""`reprise load`: measures a server, and compares results."""

import json
import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast, get_args
from urllib.parse import urlsplit, urlunsplit

import httpx
import typer
from rich.console import Console

from loadgen.measure import load_run
from loadgen.measure.progress_line import ProgressLine, progress
from loadgen.measure.sender import Loop, Target, TurnResult
from loadgen.measure.summary import Prices, Slo
from loadgen.report import html_page, tables
from loadgen.workloads.synthetic import Distribution
from loadgen.workloads.workload import Conversation

KEY_VARIABLE = "OPENAI_API_KEY"
TARGET, WORKLOAD, LENGTHS, MEASURE, COST, OUTPUT = (
    "The server", "What is sent, and when", "The synthetic workload (defaults: ShareGPT as AttentionStore states it)",
    "What is measured", "Cost", "Output",
)  # fmt: skip

console = Console(stderr=True, highlight=False)
cli = typer.Typer(add_completion=False)


def _refuse(message: str) -> typer.Exit:
    console.print(f"reprise load: {message}", markup=False)
    return typer.Exit(2)


def main(words: list[str]) -> None:
    """Run `reprise load` with these arguments, then end the program."""
    cli(args=words, prog_name="reprise load", obj=words)


@cli.callback(invoke_without_command=True)
def load_command(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="With or without /v1.", rich_help_panel=TARGET)] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Default: the first it lists.", rich_help_panel=TARGET)] = "",
    api_key: Annotated[
        str, typer.Option(envvar=KEY_VARIABLE, show_envvar=True, help="Bearer key.", rich_help_panel=TARGET)
    ] = "",
    temperature: Annotated[float, typer.Option(min=0, rich_help_panel=TARGET)] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(help="Ask for answers of exactly their length (Reprise, vLLM, SGLang).", rich_help_panel=TARGET),
    ] = False,
    body: Annotated[str, typer.Option(help="Further fields of every request, as JSON.", rich_help_panel=TARGET)] = "",
    max_tokens_field: Annotated[
        str, typer.Option(help="The server's name for the token limit.", rich_help_panel=TARGET)
    ] = "max_tokens",
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds a server may be silent.", rich_help_panel=TARGET)
    ] = 300.0,
    retries: Annotated[
        int,
        typer.Option(
            min=0,
            help="Retries of a request that was refused with 429 or 503, or found no connection.",
            rich_help_panel=TARGET,
        ),
    ] = 0,
    dialogues: Annotated[
        Path | None, typer.Option(help="Conversations: ShareGPT JSON or dialogue JSONL.", rich_help_panel=WORKLOAD)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Requests as recorded: Mooncake, Azure, BurstGPT.", rich_help_panel=WORKLOAD)
    ] = None,
    conversations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many; of a trace, rows. Default: 100, or all of a smaller file of dialogues; all of a trace.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    loop: Annotated[
        str,
        typer.Option(
            help="open: conversations begin when they are due. closed: --concurrency at once. sequential: one request "
            "at a time, --concurrency conversations taking turns.",
            rich_help_panel=WORKLOAD,
        ),
    ] = "open",
    rate: Annotated[
        float, typer.Option(min=1e-6, help="Conversations a second, Poisson (open).", rich_help_panel=WORKLOAD)
    ] = 1.0,
    concurrency: Annotated[int, typer.Option(min=0, help="0: all (closed, sequential).", rich_help_panel=WORKLOAD)] = 0,
    think: Annotated[
        str,
        typer.Option(
            help="From an answer to the next message: lognormal:MEDIAN,SIGMA, fixed:SECONDS or file:PATH#COLUMN of "
            "percentiles. The default is that of people who chat in writing (CMU DoG).",
            rich_help_panel=WORKLOAD,
        ),
    ] = "lognormal:24,1.05",
    speed: Annotated[
        float, typer.Option(min=1e-6, help="Factor on the recorded speed (trace).", rich_help_panel=WORKLOAD)
    ] = 1.0,
    scale: Annotated[
        float, typer.Option(min=1e-6, max=1e6, help="Factor on all lengths.", rich_help_panel=WORKLOAD)
    ] = 1.0,
    max_context: Annotated[
        int,
        typer.Option(
            min=0, help="End conversations before they exceed this many tokens. 0: never.", rich_help_panel=WORKLOAD
        ),
    ] = 0,
    answer_tokens: Annotated[
        int, typer.Option(min=0, help="Length of every answer. 0: as the workload says.", rich_help_panel=WORKLOAD)
    ] = 0,
    system_tokens: Annotated[
        int, typer.Option(min=0, help="Length of a system prompt that all share.", rich_help_panel=WORKLOAD)
    ] = 0,
    duration: Annotated[
        float, typer.Option(min=0, help="Seconds after which nothing new is sent. 0: all.", rich_help_panel=WORKLOAD)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of everything that is random.", rich_help_panel=WORKLOAD)] = 0,
    multi_turn: Annotated[
        float, typer.Option(help="Share of conversations with several turns.", rich_help_panel=LENGTHS)
    ] = 0.73,
    mean_turns: Annotated[float, typer.Option(help="Mean number of turns.", rich_help_panel=LENGTHS)] = 5.75,
    over_2k: Annotated[
        float, typer.Option("--over-2k", help="Share over 2,048 tokens.", rich_help_panel=LENGTHS)
    ] = 0.47,
    over_4k: Annotated[
        float, typer.Option("--over-4k", help="Share over 4,096 tokens.", rich_help_panel=LENGTHS)
    ] = 0.30,
    warmup_turns: Annotated[
        int, typer.Option(min=0, help="Number of first requests that do not count.", rich_help_panel=MEASURE)
    ] = 0,
    warmup_s: Annotated[
        float, typer.Option(min=0, help="Requests due in the first seconds do not count.", rich_help_panel=MEASURE)
    ] = 0.0,
    slo_ttft_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="Goodput: highest TTFT.", rich_help_panel=MEASURE)
    ] = 1000.0,
    slo_tpot_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="Goodput: highest TPOT.", rich_help_panel=MEASURE)
    ] = 100.0,
    gpus: Annotated[float, typer.Option(min=0, max=1e9, rich_help_panel=COST)] = 1.0,
    gpu_price: Annotated[float, typer.Option(min=0, max=1e9, help="$ an hour.", rich_help_panel=COST)] = 5.0,
    dram_gb: Annotated[float, typer.Option(min=0, max=1e9, rich_help_panel=COST)] = 0.0,
    dram_price: Annotated[float, typer.Option(min=0, max=1e9, help="$ an hour and GB.", rich_help_panel=COST)] = 0.0088,
    ssd_gb: Annotated[float, typer.Option(min=0, max=1e9, rich_help_panel=COST)] = 0.0,
    ssd_price: Annotated[
        float, typer.Option(min=0, max=1e9, help="$ an hour and GB.", rich_help_panel=COST)
    ] = 0.000082,
    out: Annotated[Path | None, typer.Option(help="Result file, JSON.", rich_help_panel=OUTPUT)] = None,
    html: Annotated[Path | None, typer.Option(help="Report with plots, one file.", rich_help_panel=OUTPUT)] = None,
    token_times: Annotated[
        bool, typer.Option(help="Write every token's time to the result file.", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Annotated[bool, typer.Option(help="No progress.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Measure any OpenAI-compatible server with conversations: turns in order, full history with the real answers.

    The exit status is 0 if every request was answered, 1 if not, 2 if nothing could be sent.
    """
    if context.invoked_subcommand is not None:
        return
    source, path = _source(dialogues, trace, loop)
    try:
        options = load_run.Options(
            source=source, path=path, conversations=conversations or (100 if source == "synthetic" else 0),
            rate=rate, think=think, loop=cast(Loop, loop), concurrency=concurrency, speed=speed, scale=scale,
            max_context=max_context, answer_tokens=answer_tokens, system_tokens=system_tokens, seed=seed,
            duration_s=duration, warmup_turns=warmup_turns, warmup_s=warmup_s, timeout_s=timeout, retries=retries,
            distribution=Distribution(multi_turn, mean_turns, over_2k, over_4k),
            slo=Slo(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3),
            prices=Prices(gpus, gpu_price, dram_gb, dram_price, ssd_gb, ssd_price),
        )  # fmt: skip
        fields = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {}), **_fields(body)}
        workload = load_run.workload(options)
        target, server = _target(url, model, api_key, fields, max_tokens_field)
        load_run.check_writable(out, html, read=(dialogues, trace))
    except (ValueError, OSError) as error:
        raise _refuse(str(error)) from None
    _announce(workload, server)
    started = datetime.now(UTC)
    results, finished = _execute(options, workload.conversations, target, quiet)
    if finished and not results:
        raise _refuse("nothing was due within --duration")
    document = load_run.document(
        options, workload, results, command=["reprise", "load", *_shown(context.obj or [])], server=server,
        finished=finished, started=started, token_times=token_times,
    )  # fmt: skip
    tables.show(Console(), document)
    written = _write(document, out, html, title=out.stem if out else server["model"])
    requests = document["summary"]["requests"]
    if "context_length" in requests["errors"]:
        console.print("Some conversations outgrew the model's window: --max-context N or --scale makes them shorter.")
    raise typer.Exit(0 if finished and written and not requests["failed"] else 1)


@cli.command()
def compare(
    files: Annotated[list[Path], typer.Argument(help="Result files of `reprise load --out`.")],
    html: Annotated[Path | None, typer.Option(help="The same as a page with plots.")] = None,
    names: Annotated[str, typer.Option(help="Names of the runs, comma-separated. Default: the files' names.")] = "",
) -> None:
    """Compare runs side by side; for a single one, show its report again."""
    called = [name.strip() for name in names.split(",")] if names else [file.stem for file in files]
    if len(called) != len(files):
        raise _refuse(f"{len(files)} files, {len(called)} names")
    try:
        load_run.check_writable(html, read=files)
        documents = [load_run.read(file) for file in files]
        if html is not None:
            load_run.save(html_page.render(called, documents), html)
        if len(documents) == 1:
            tables.show(Console(), documents[0])
        else:
            tables.compare(Console(), called, documents)
    except (ValueError, OSError) as error:
        raise _refuse(str(error)) from None
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise _refuse(f"not a whole result of `reprise load`: {error!r}") from None


def _source(dialogues: Path | None, trace: Path | None, loop: str) -> tuple[str, str]:
    """What the conversations are made of: trace, dialogues or synthetic, and the file. Ends the program for options
    that do not go together."""
    if loop not in get_args(Loop):
        raise _refuse(f"--loop is one of {', '.join(get_args(Loop))}")
    if dialogues is not None and trace is not None:
        raise _refuse("--dialogues or --trace, not both")
    if trace is not None and loop != "open":
        raise _refuse("a trace says itself when its requests are sent: leave --loop open")
    return ("trace", str(trace)) if trace else ("dialogues", str(dialogues)) if dialogues else ("synthetic", "")


def _announce(workload: load_run.Workload, server: dict[str, Any]) -> None:
    """Say what will be sent, and what of the file will not."""
    conversations = workload.conversations
    console.print(
        f"{len(conversations):,} conversations, {sum(len(c.turns) for c in conversations):,} turns -> "
        f"{server['model']} at {server['url']}", markup=False,
    )  # fmt: skip
    if unusable := workload.unusable:
        console.print(f"{unusable:,} in the file are unusable: they contain no answered question")
    if left_out := workload.left_out:
        total = left_out + len(conversations)
        console.print(f"{left_out:,} of {total:,} left out: their first turn already exceeds --max-context")
    if repeats := load_run.repeated(conversations):
        console.print(
            f"{repeats:,} of them repeat others word for word: cache hits on those are not reuse of a history"
        )


def _write(document: dict[str, Any], out: Path | None, html: Path | None, *, title: str) -> bool:
    """Write the result file and the report, as far as they are wanted. Whether all went well."""
    succeeded = True
    for file, write in ((out, load_run.write), (html, partial(_write_page, title))):
        if file is not None:
            try:
                write(document, file)
            except OSError as error:
                succeeded = False
                console.print(f"reprise load: {error}", markup=False)
    return succeeded


def _write_page(title: str, document: dict[str, Any], path: Path) -> None:
    load_run.save(html_page.render([title], [document]), path)


def _execute(
    options: load_run.Options, workload: list[Conversation], target: Target, quiet: bool
) -> tuple[list[TurnResult], bool]:
    progress_line = ProgressLine(options.slo)
    with progress(console, progress_line) as bars:
        bars.disable = quiet
        bar = bars.add_task("", total=sum(len(conversation.turns) for conversation in workload), visible=not quiet)

        def on_result(result: TurnResult) -> None:
            progress_line.on_result(result)
            bars.advance(bar)

        return load_run.execute(options, workload, target, on_sent=progress_line.on_sent, on_result=on_result)


def _target(
    url: str, model: str, api_key: str, fields: dict[str, Any], max_tokens_field: str
) -> tuple[Target, dict[str, Any]]:
    """Ask the server for its model and version. Returns where to send, and what the server says. Raises ValueError if
    it cannot be asked."""
    parts = urlsplit(url)
    base = url.rstrip("/").removesuffix("/v1")
    shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/").removesuffix("/v1")
    server: dict[str, Any] = {"url": shown, "model": model, "max_context": None, "version": None}
    if not api_key.isascii() or not api_key.isprintable():
        raise ValueError("a key consists of printable ASCII characters")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=10, trust_env=False) as http:
            answer = http.get("/v1/models")
            models = _listed(answer) if answer.status_code == 200 else []
            server["version"] = _version(http.get("/version"))
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise ValueError(f"{url!r} is not an http or https address") from None
    except httpx.HTTPError as error:
        raise ValueError(f"no server at {shown}: {error}") from None
    found = next((m for m in models if not model or m["id"] == model), None)
    if found is not None:
        server |= {"model": found["id"], "max_context": found.get("max_model_len")}
    elif not model:
        raise ValueError(f"{shown} lists no models (status {answer.status_code}): give --model, or --api-key")
    return Target(base, server["model"], {"": api_key} if api_key else {}, fields, max_tokens_field), server


def _listed(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the models of a list; none if the answer has another form, because a model's name may have been given."""
    try:
        listed = answer.json()["data"]
        return [model for model in listed if isinstance(model["id"], str)]
    except (ValueError, LookupError, TypeError):
        return []


def _version(answer: httpx.Response) -> str | None:
    """Return the server's version; None if it has no such page."""
    try:
        said = answer.json()["version"] if answer.status_code == 200 else None
    except (ValueError, LookupError, TypeError):
        return None
    return said if isinstance(said, str) else None


def _fields(body: str) -> dict[str, Any]:
    if not body:
        return {}
    try:
        fields = json.loads(body)
    except json.JSONDecodeError as error:
        raise ValueError(f"--body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("--body is not a JSON object")
    return fields


def _shown(words: list[str]) -> list[str]:
    """Remove secrets from a command line: keys, which are taken from the environment again, and passwords in
    addresses."""
    words = [re.sub(r"(://)[^/@\s]*@", r"\1", word) for word in words]
    shown: list[str] = []
    skip = False
    for word in words:
        if skip or word.startswith("--api-key="):
            skip = False
        elif word == "--api-key":
            skip = True
        else:
            shown.append(word)
    return shown
