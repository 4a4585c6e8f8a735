"""Executes one run of `reprise load`: its options, the workload they describe, the run itself and the result file."""

import asyncio
import gc
import json
import os
import platform
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from reprise.loadgen.measure import summary
from reprise.loadgen.measure.sender import Loop, Target, TurnResult, run
from reprise.loadgen.workloads import dialogues, think, traces
from reprise.loadgen.workloads.filler_text import words
from reprise.loadgen.workloads.synthetic import Distribution
from reprise.loadgen.workloads.workload import Conversation, Script, arrive, digest, fitted, scaled

FORMAT = "reprise-load/1"
_PARTS = {
    "command": list, "finished": bool, "options": dict, "server": dict, "workload": dict, "summary": dict,
    "by_turn": list, "timeline": list, "itl_histogram": dict, "requests": list,
}  # fmt: skip
_DIALOGUES = 100  # from a file, if no number is given
# Upper bound on the template's tokens per message, which `--max-context` leaves room for.
_TEMPLATE_TOKENS = 8
# The thread that draws the progress must not hold up a request for Python's default of 5 ms.
_SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that determines a run, except the server. Equal options give the same requests at the same times."""

    source: str  # synthetic, dialogues or trace
    path: str
    conversations: int
    rate: float
    think: str
    loop: Loop
    concurrency: int
    speed: float
    scale: float
    max_context: int
    answer_tokens: int  # 0: as the workload says
    system_tokens: int
    seed: int
    duration_s: float  # 0: until everything is sent
    warmup_turns: int
    warmup_s: float
    timeout_s: float
    retries: int
    distribution: Distribution
    slo: summary.Slo
    prices: summary.Prices


@dataclass(frozen=True, slots=True)
class Workload:
    """The conversations to send, and how many conversations of the source could not be used."""

    conversations: list[Conversation]
    left_out: int = 0  # whose first turn already exceeds `max_context`
    unusable: int = 0  # dialogues of a file in which no question is answered


def workload(options: Options) -> Workload:
    """Build the workload. Raises ValueError and OSError if it cannot be built."""
    rng = random.Random(options.seed)
    system = words(random.Random(f"{options.seed} system"), options.system_tokens) if options.system_tokens else ""
    think_time = think.parse(options.think)
    unusable = 0
    if options.source == "trace":
        requests = traces.read(Path(options.path))[: options.conversations or None]
        found = traces.conversations(requests, speed=options.speed)
    else:
        scripts, unusable = _scripts(options, rng)
        found = arrive(scripts, rng=rng, rate_per_s=options.rate, think=think_time, system=system)
    conversations = [shaped for conversation in found if (shaped := _shaped(conversation, options, system)).turns]
    if not conversations:
        raise ValueError(f"nothing of this workload fits {options.max_context} tokens")
    return Workload(conversations, len(found) - len(conversations), unusable)


def repeated(conversations: Sequence[Conversation]) -> int:
    """Return how many conversations repeat an earlier one word for word, so that a cache hits their prompts too.
    Conversations whose first turn has no text of its own are not counted."""
    told = [tuple(turn.text for turn in conversation.turns) for conversation in conversations]
    return sum(1 for texts in told if texts[0]) - len({texts for texts in told if texts[0]})


def execute(
    options: Options,
    conversations: Sequence[Conversation],
    target: Target,
    *,
    on_sent: Callable[[], None],
    on_result: Callable[[TurnResult], None],
) -> tuple[list[TurnResult], bool]:
    """Send the workload. Returns the finished requests in order of sending, and whether the run completed; Ctrl-C ends
    it early and keeps the results so far."""
    ended: list[TurnResult] = []

    def take(result: TurnResult) -> None:
        ended.append(result)
        on_result(result)

    finished = True
    gc.collect()
    gc.freeze()  # keeps the garbage collector from scanning the workload while the clock runs
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(
                run(
                    target, conversations, seed=options.seed, timeout_s=options.timeout_s, loop=options.loop,
                    concurrency=options.concurrency or len(conversations), retries=options.retries,
                    stop_s=options.duration_s or float("inf"), on_sent=on_sent, on_result=take,
                )
            )  # fmt: skip
    except KeyboardInterrupt:
        finished = False
    finally:
        sys.setswitchinterval(before_s)
        gc.unfreeze()
    return sorted(ended, key=lambda result: result.sent_s), finished


def warmed_up(results: Sequence[TurnResult], options: Options) -> list[bool]:
    """Return for each result, in order of sending, whether it counts because it was sent after the warm-up."""
    return [place >= options.warmup_turns and result.due_s >= options.warmup_s for place, result in enumerate(results)]


def document(
    options: Options,
    workload: Workload,
    results: Sequence[TurnResult],
    *,
    command: Sequence[str],
    server: dict[str, Any],
    finished: bool,
    started: datetime,
    token_times: bool,
) -> dict[str, Any]:
    """Return the content of the result file, described in docs/measuring.md."""
    conversations = workload.conversations
    counts = warmed_up(results, options)
    counted = [result for result, counted in zip(results, counts, strict=True) if counted]
    turns = [turn for conversation in conversations for turn in conversation.turns]
    planned = len(turns) - (len(results) - len(counted))
    return {
        "format": FORMAT,
        "command": list(command),
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        "finished": finished,
        "options": asdict(options),
        "server": server,
        "client": client(),
        "workload": {
            "digest": digest(conversations),
            "conversations": len(conversations),
            "left_out": workload.left_out,
            "unusable": workload.unusable,
            "repeated": repeated(conversations),
            "turns": len(turns),
            "new_prompt_tokens": sum(turn.prompt_tokens for turn in turns),
            "answer_tokens": sum(turn.answer_tokens for turn in turns),
        },
        "summary": summary.summarize(counted, planned_turns=planned, slo=options.slo, prices=options.prices),
        "by_turn": summary.by_turn(counted),
        "timeline": summary.timeline(results),
        "itl_histogram": summary.histogram(gap * 1e3 for r in counted if r.error is None for gap in r.gaps_s),
        "requests": [
            summary.request_row(result, counts=counted, token_times=token_times)
            for result, counted in zip(results, counts, strict=True)
        ],
    }


def write(document: dict[str, Any], path: Path) -> None:
    """Write the result file, one request per line. Raises OSError."""
    head = {name: value for name, value in document.items() if name != "requests"}
    rows = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in document["requests"])
    text = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}") + f',\n  "requests": [\n{rows}\n  ]\n}}\n'
    save(text, path)


def save(text: str, path: Path) -> None:
    """Write a file completely or not at all, following links; a pipe or a device is written to directly. Raises
    OSError."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    new = _beside(path)
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def check_writable(*paths: Path | None, read: Sequence[Path | None] = ()) -> None:
    """Check before a run that its results can be written. read: files that the run reads, and must not replace. Raises
    ValueError."""
    taken = {path.resolve() for path in read if path is not None}
    for path in (path.resolve() for path in paths if path is not None):
        if path in taken and (path.is_file() or not path.exists()):
            raise ValueError(f"{path} is read or written already: give the result another name")
        taken.add(path)
        if path.is_dir():
            raise ValueError(f"{path} is a directory")
        if not path.parent.is_dir():
            raise ValueError(f"there is no directory {path.parent}")
        if path.exists() and not path.is_file():
            continue
        new = _beside(path)
        try:
            new.touch()
            new.unlink()
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error}") from None


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def read(path: Path) -> dict[str, Any]:
    """Read a result file. Raises ValueError if it is not one, OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result of `reprise load` ({FORMAT})")
    if missing := [name for name, kind in _PARTS.items() if not isinstance(found.get(name), kind)]:
        raise ValueError(f"{path} is not a whole result: {', '.join(missing)}")
    return found


def client() -> dict[str, Any]:
    try:
        own = version("reprise-llm")
    except PackageNotFoundError:
        own = None
    return {
        "version": own,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
    }


def _scripts(options: Options, rng: random.Random) -> tuple[list[Script], int]:
    """Return (what is said in the conversations to send, number of conversations in the file that are unusable)."""
    if options.source == "dialogues":
        scripts, unusable = dialogues.read(Path(options.path))
        return dialogues.choose(scripts, rng, options.conversations or min(_DIALOGUES, len(scripts))), unusable
    return [options.distribution.script(rng) for _ in range(options.conversations)], 0


def _shaped(conversation: Conversation, options: Options, system: str) -> Conversation:
    """Return the conversation with the lengths that the options ask for. system: the text of its system prompt."""
    turns = scaled(conversation.turns, options.scale)
    if options.answer_tokens:
        turns = tuple(replace(turn, answer_tokens=options.answer_tokens) for turn in turns)
    shaped = replace(conversation, turns=turns, system=system)
    return fitted(shaped, options.max_context, _TEMPLATE_TOKENS) if options.max_context else shaped


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # uvloop does not exist on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
