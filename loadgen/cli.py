"""`reprise load`: measures a server, and compares results."""

import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import typer
from rich.console import Console

from reprise.loadgen.load_options import (
    CostOptions,
    LengthOptions,
    MeasureOptions,
    OutputOptions,
    ServerOptions,
    WorkloadOptions,
    run_options,
)
from reprise.loadgen.measure import load_run
from reprise.loadgen.measure.progress_line import ProgressLine, progress
from reprise.loadgen.measure.sender import Target, TurnResult
from reprise.loadgen.options import grouped
from reprise.loadgen.report import html_page, tables
from reprise.loadgen.workloads.workload import Conversation

console = Console(stderr=True, highlight=False)
_WIDE_COLUMNS = 400  # width of tables that no terminal shows
cli = typer.Typer(add_completion=False)


def _refuse(message: str) -> typer.Exit:
    console.print(f"reprise load: {message}", markup=False)
    return typer.Exit(2)


def main(words: list[str]) -> None:
    """Run `reprise load` with these arguments, then end the program."""
    cli(args=words, prog_name="reprise load", obj=words)


@cli.callback(invoke_without_command=True)
@grouped
def load_command(
    context: typer.Context,
    server: ServerOptions,
    sent: WorkloadOptions,
    lengths: LengthOptions,
    measured: MeasureOptions,
    cost: CostOptions,
    output: OutputOptions,
) -> None:
    """Measure any OpenAI-compatible server with conversations: turns in order, full history with the real answers.

    The exit status is 0 if every request was answered, 1 if not, 2 if nothing could be sent.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        options = run_options(server, sent, lengths, measured, cost)
        fields = server.fields()
        workload = load_run.workload(options)
        target, said = find_target(server, fields)
        load_run.check_writable(output.out, output.html, read=(sent.dialogues, sent.trace))
    except (ValueError, OSError) as error:
        raise _refuse(str(error)) from None
    _announce(workload, said)
    started = datetime.now(UTC)
    results, finished = _execute(options, workload.conversations, target, output.quiet)
    if finished and not results:
        raise _refuse("nothing was due within --duration")
    document = load_run.document(
        options,
        workload,
        results,
        command=["reprise", "load", *_shown(context.obj or [])],
        server=said,
        finished=finished,
        started=started,
        token_times=output.token_times,
    )
    tables.show(_on_stdout(), document)
    written = _write(document, output, title=output.out.stem if output.out else said["model"])
    requests = document["summary"]["requests"]
    if "context_length" in requests["errors"]:
        console.print("Some conversations outgrew the model's window: --max-context N or --scale makes them shorter.")
    raise typer.Exit(0 if finished and written and not requests["failed"] else 1)


def _on_stdout() -> Console:
    """Return the console for tables: outside of a terminal so wide that none is cut."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE_COLUMNS
    return console


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
            tables.show(_on_stdout(), documents[0])
        else:
            tables.compare(_on_stdout(), called, documents)
    except (ValueError, OSError) as error:
        raise _refuse(str(error)) from None
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise _refuse(f"not a whole result of `reprise load`: {error!r}") from None


def _announce(workload: load_run.Workload, server: dict[str, Any]) -> None:
    """Print what will be sent, and which conversations of the file will not."""
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


def _write(document: dict[str, Any], output: OutputOptions, *, title: str) -> bool:
    """Write the result file and the report, if they are wanted. Return whether that succeeded."""
    succeeded = True
    for file, write in ((output.out, load_run.write), (output.html, partial(_write_page, title))):
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


def find_target(server: ServerOptions, fields: dict[str, Any]) -> tuple[Target, dict[str, Any]]:
    """Ask the server for its model and version. Returns the target of requests, and the server's answers. Raises
    ValueError if it cannot be asked. fields: of every request."""
    base = server.url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(server.url)
    shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/").removesuffix("/v1")
    said: dict[str, Any] = {"url": shown, "model": server.model, "max_context": None, "version": None}
    key = server.api_key
    if not key.isascii() or not key.isprintable():
        raise ValueError("a key consists of printable ASCII characters")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=10, trust_env=False) as http:
            answer = http.get("/v1/models")
            models = _listed(answer) if answer.status_code == 200 else []
            said["version"] = _version(http.get("/version"))
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise ValueError(f"{server.url!r} is not an http or https address") from None
    except httpx.HTTPError as error:
        raise ValueError(f"no server at {shown}: {error}") from None
    found = next((m for m in models if not server.model or m["id"] == server.model), None)
    if found is not None:
        said |= {"model": found["id"], "max_context": found.get("max_model_len")}
    elif not server.model:
        raise ValueError(f"{shown} lists no models (status {answer.status_code}): give --model, or --api-key")
    return Target(base, said["model"], {"": key} if key else {}, fields, server.max_tokens_field), said


def _listed(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the models of a server's list. Empty if the answer is no such list, which is no error, because an option
    may name the model."""
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


def _shown(words: list[str]) -> list[str]:
    """Remove secrets from a command line: passwords in addresses, and keys, which a repeated run reads from the
    environment."""
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
