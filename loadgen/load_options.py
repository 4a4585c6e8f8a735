"""Defines the options of `reprise load`, in the groups that its help shows."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast, get_args

from typer import Option

from reprise.loadgen.measure import load_run
from reprise.loadgen.measure.sender import Loop
from reprise.loadgen.measure.summary import Prices, Slo
from reprise.loadgen.workloads.synthetic import Distribution


@dataclass(frozen=True, slots=True)
class ServerOptions:
    panel: ClassVar = "The server"

    url: Annotated[str, Option(help="Address of the server, with or without /v1.")] = "http://127.0.0.1:8000"
    model: Annotated[str, Option(help="Default: the first model that the server lists.")] = ""
    api_key: Annotated[str, Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Bearer key.")] = ""
    temperature: Annotated[float, Option(min=0)] = 0.0
    ignore_eos: Annotated[bool, Option(help="Ask for answers of exactly their length (Reprise, vLLM, SGLang).")] = False
    body: Annotated[str, Option(help="Further fields of every request, as JSON.")] = ""
    max_tokens_field: Annotated[str, Option(help="The server's name for the token limit.")] = "max_tokens"
    timeout: Annotated[float, Option(min=0.1, help="Seconds a server may be silent.")] = 300.0
    retries: Annotated[
        int, Option(min=0, help="Retries of a request that was refused with 429 or 503, or found no connection.")
    ] = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields that every request has besides its messages. Raises ValueError if --body is no JSON
        object."""
        fields = {"temperature": self.temperature, **({"ignore_eos": True} if self.ignore_eos else {})}
        if not self.body:
            return fields
        try:
            further = json.loads(self.body)
        except json.JSONDecodeError as error:
            raise ValueError(f"--body is not JSON: {error}") from None
        if not isinstance(further, dict):
            raise ValueError("--body is not a JSON object")
        return fields | further


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    panel: ClassVar = "What is sent, and when"

    dialogues: Annotated[Path | None, Option(help="Conversations: ShareGPT JSON or dialogue JSONL.")] = None
    trace: Annotated[Path | None, Option(help="Requests as recorded: Mooncake, Azure, BurstGPT.")] = None
    conversations: Annotated[
        int | None,
        Option(
            min=1,
            help="How many; of a trace, rows. Default: 100, or all of a smaller file of dialogues; all of a trace.",
        ),
    ] = None
    loop: Annotated[
        str,
        Option(
            help="open: conversations begin when they are due. closed: --concurrency at once. sequential: one request "
            "at a time, --concurrency conversations taking turns.",
        ),
    ] = "open"
    rate: Annotated[float, Option(min=1e-6, help="Conversations a second, Poisson (open).")] = 1.0
    concurrency: Annotated[int, Option(min=0, help="0: all (closed, sequential).")] = 0
    think: Annotated[
        str,
        Option(
            help="From an answer to the next message: lognormal:MEDIAN,SIGMA, fixed:SECONDS or file:PATH#COLUMN of "
            "percentiles. The default is that of people who chat in writing (CMU DoG).",
        ),
    ] = "lognormal:24,1.05"
    speed: Annotated[float, Option(min=1e-6, help="Factor on the recorded speed (trace).")] = 1.0
    scale: Annotated[float, Option(min=1e-6, max=1e6, help="Factor on all lengths.")] = 1.0
    max_context: Annotated[
        int, Option(min=0, help="End conversations before they exceed this many tokens. 0: never.")
    ] = 0
    answer_tokens: Annotated[int, Option(min=0, help="Length of every answer. 0: as the workload says.")] = 0
    system_tokens: Annotated[int, Option(min=0, help="Length of a system prompt that all share.")] = 0
    duration: Annotated[float, Option(min=0, help="Seconds after which nothing new is sent. 0: all.")] = 0.0
    seed: Annotated[int, Option(help="Seed of everything that is random.")] = 0

    def source(self) -> tuple[str, str]:
        """Return the kind of the conversations' source ("trace", "dialogues" or "synthetic") and its file. Raises
        ValueError for options that do not go together."""
        if self.loop not in get_args(Loop):
            raise ValueError(f"--loop is one of {', '.join(get_args(Loop))}")
        if self.dialogues is not None and self.trace is not None:
            raise ValueError("--dialogues or --trace, not both")
        if self.trace is not None and self.loop != "open":
            raise ValueError("a trace says itself when its requests are sent: leave --loop open")
        if self.trace:
            return "trace", str(self.trace)
        return ("dialogues", str(self.dialogues)) if self.dialogues else ("synthetic", "")


@dataclass(frozen=True, slots=True)
class LengthOptions:
    panel: ClassVar = "The synthetic workload (defaults: ShareGPT as AttentionStore states it)"

    multi_turn: Annotated[float, Option(help="Share of conversations with several turns.")] = 0.73
    mean_turns: Annotated[float, Option(help="Mean number of turns.")] = 5.75
    over_2k: Annotated[float, Option("--over-2k", help="Share over 2,048 tokens.")] = 0.47
    over_4k: Annotated[float, Option("--over-4k", help="Share over 4,096 tokens.")] = 0.30


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    panel: ClassVar = "What is measured"

    warmup_turns: Annotated[int, Option(min=0, help="Number of first requests that do not count.")] = 0
    warmup_s: Annotated[float, Option(min=0, help="Requests due in the first seconds do not count.")] = 0.0
    slo_ttft_ms: Annotated[float, Option(min=0, max=1e9, help="Goodput: highest TTFT.")] = 1000.0
    slo_tpot_ms: Annotated[float, Option(min=0, max=1e9, help="Goodput: highest TPOT.")] = 100.0


@dataclass(frozen=True, slots=True)
class CostOptions:
    panel: ClassVar = "Cost"

    gpus: Annotated[float, Option(min=0, max=1e9)] = 1.0
    gpu_price: Annotated[float, Option(min=0, max=1e9, help="$ an hour.")] = 5.0
    dram_gb: Annotated[float, Option(min=0, max=1e9)] = 0.0
    dram_price: Annotated[float, Option(min=0, max=1e9, help="$ an hour and GB.")] = 0.0088
    ssd_gb: Annotated[float, Option(min=0, max=1e9)] = 0.0
    ssd_price: Annotated[float, Option(min=0, max=1e9, help="$ an hour and GB.")] = 0.000082


@dataclass(frozen=True, slots=True)
class OutputOptions:
    panel: ClassVar = "Output"

    out: Annotated[Path | None, Option(help="Result file, JSON.")] = None
    html: Annotated[Path | None, Option(help="Report with plots, one file.")] = None
    token_times: Annotated[bool, Option(help="Write every token's time to the result file.")] = False
    quiet: Annotated[bool, Option(help="No progress.")] = False


def run_options(
    server: ServerOptions, sent: WorkloadOptions, lengths: LengthOptions, measured: MeasureOptions, cost: CostOptions
) -> load_run.Options:
    """Return the options of a run, made of the groups of options of the command line. Raises ValueError for options
    that do not go together."""
    source, path = sent.source()
    return load_run.Options(
        source=source,
        path=path,
        conversations=sent.conversations or (100 if source == "synthetic" else 0),
        rate=sent.rate,
        think=sent.think,
        loop=cast(Loop, sent.loop),
        concurrency=sent.concurrency,
        speed=sent.speed,
        scale=sent.scale,
        max_context=sent.max_context,
        answer_tokens=sent.answer_tokens,
        system_tokens=sent.system_tokens,
        seed=sent.seed,
        duration_s=sent.duration,
        warmup_turns=measured.warmup_turns,
        warmup_s=measured.warmup_s,
        timeout_s=server.timeout,
        retries=server.retries,
        distribution=Distribution(lengths.multi_turn, lengths.mean_turns, lengths.over_2k, lengths.over_4k),
        slo=Slo(measured.slo_ttft_ms / 1e3, measured.slo_tpot_ms / 1e3),
        prices=Prices(cost.gpus, cost.gpu_price, cost.dram_gb, cost.dram_price, cost.ssd_gb, cost.ssd_price),
    )
