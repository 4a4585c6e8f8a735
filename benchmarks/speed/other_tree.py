"""TTFT and TPOT of one server of this checkout beside one of another checkout, such as the commit before a feature.

    git worktree add ../before COMMIT, and `make setup` there
    python -m benchmarks.speed.other_tree --other ../before/.venv/bin/reprise

Both servers have the same settings, all else by default, and hold the 125 M-shape random model. They take turns, one
works while the other waits, and get the same conversations in a round: a first turn of some 600 tokens and two that
return, with answers of 48 tokens. What is compared are the two answers to the same request. Where a process happens to
lie in memory is worth some per cent, so the servers are started anew several times, and take turns in being first.
Nothing is measured before both are calm: trees of version 0.2 move their memory into large pages in their first
pauses, which takes 100 ms from a turn of the other.

`--agent` compares an agent's turns instead: 24 tools and a history of some 20,000 tokens in calls and results, which is
computed once a start. Each later request brings one more call with its result, and counts as a returning turn.

Held: the medians of TTFT and TPOT, this over other, are at most 1.02.
"""

import asyncio
import json
import random
import secrets
import time
from argparse import ArgumentParser
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Run
from benchmarks.harness.measures import median_interval
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Message, ask_stamped
from benchmarks.harness.tables import show_rows
from benchmarks.speed.hierarchy import WORDS
from reprise.loadgen.measure.http import Http

ARMS = ("this", "other")
TURNS, FIRST_WORDS, LATER_WORDS, ANSWER_TOKENS = 3, 560, 60, 48
MOST = 1.02
SILENCE_S = 300.0
RESAMPLES = 2000
CALM_S = 15.0  # after a start: until memory is there, in large pages; two servers need 12
SETTLE_S, QUIET_S = 20.0, 0.2
TOOLS, CALLS, RESULT_WORDS = 24, 40, 250
AGENT_CONTEXT = 32_768
# The bundled model's template shows neither tools nor calls. Trees that write them in themselves do it in other words.
AGENT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIGURES = ("ttft_ms of a first turn", "ttft_ms of a returning turn", "tpot_ms")


@dataclass(frozen=True, slots=True)
class Turn:
    """The times of one answer."""

    arm: str
    start: int  # number of the servers' start
    round: int
    turn: int
    ttft_ms: float
    tpot_ms: float


def settle(server: ServerProcess) -> None:
    """Wait until the engine has run nothing and moved no KV for QUIET_S. Raises TimeoutError."""
    end = time.monotonic() + SETTLE_S
    quiet_since = None
    while True:
        metrics = server.metrics()
        busy = metrics["reprise_in_flight_transfers"] or metrics["reprise_running_requests"]
        now = time.monotonic()
        quiet_since = None if busy else quiet_since or now
        if quiet_since is not None and now - quiet_since > QUIET_S:
            return
        if now > end:
            raise TimeoutError(f"{server.name!r} does not come to rest")
        time.sleep(0.05)


async def converse(server: ServerProcess, arm: str, start: int, round_: int) -> list[Turn]:
    rng = random.Random(f"other_tree/{start}/{round_}")
    http, messages, turns = Http(server.url, silence_s=SILENCE_S), list[Message](), list[Turn]()
    salt = secrets.token_hex(8)
    for turn in range(TURNS):
        words = LATER_WORDS if turn else FIRST_WORDS
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=words))})
        answer = await ask_stamped(
            http, server.model["id"], messages, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True,
            cache_salt=salt,
        )  # fmt: skip
        messages.append({"role": "assistant", "content": answer.text})
        turns.append(Turn(arm, start, round_, turn, round(answer.ttft_ms, 3), round(answer.tpot_ms, 4)))
        await asyncio.to_thread(settle, server)
    return turns


def agent_tools() -> list[dict[str, Any]]:
    """Return tools as a coding agent sends them. Each has a description and four arguments."""
    rng = random.Random("other_tree/tools")
    tools = []
    for number in range(TOOLS):
        arguments = {
            f"argument_{index}": {"type": "string", "description": " ".join(rng.choices(WORDS, k=12))}
            for index in range(4)
        }
        schema = {"type": "object", "properties": arguments, "required": ["argument_0"]}
        about = " ".join(rng.choices(WORDS, k=40))
        function = {"name": f"tool_{number}", "description": about, "parameters": schema}
        tools.append({"type": "function", "function": function})
    return tools


def agent_history(start: int, calls: int) -> list[dict[str, Any]]:
    """Return the messages of an agent: a task, and `calls` tool calls with their results. start: how many times the
    servers were started before, which seeds the words. A longer history begins with the same messages as a shorter one
    of the same start."""
    rng = random.Random(f"other_tree/agent/{start}")
    messages: list[dict[str, Any]] = [{"role": "user", "content": " ".join(rng.choices(WORDS, k=FIRST_WORDS))}]
    for number in range(calls):
        function = {"name": f"tool_{number % TOOLS}", "arguments": json.dumps({"argument_0": rng.choice(WORDS)})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        result = " ".join(rng.choices(WORDS, k=RESULT_WORDS))
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return messages


async def work_on(server: ServerProcess, arm: str, start: int, round_: int) -> list[Turn]:
    """Send the agent's request of a round, whose history has one tool call more than that of the round before. The
    model's answers do not become part of the history, because they are gibberish."""
    http = Http(server.url, silence_s=SILENCE_S)
    answer = await ask_stamped(
        http, server.model["id"], agent_history(start, CALLS + round_), tools=agent_tools(),
        max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True,
    )  # fmt: skip
    await asyncio.to_thread(settle, server)
    return [Turn(arm, start, round_, 1, round(answer.ttft_ms, 3), round(answer.tpot_ms, 4))]


def ratios(turns: list[Turn]) -> dict[str, list[float]]:
    """Return for each figure the ratios of this checkout to the other one, pair by pair of answers. The first round of
    a start only warms up."""
    pairs: dict[tuple[int, int, int], dict[str, Turn]] = {}
    for one in turns:
        if one.round:
            pairs.setdefault((one.start, one.round, one.turn), {})[one.arm] = one
    found: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    for pair in pairs.values():
        if len(pair) == len(ARMS):
            this, other = (pair[arm] for arm in ARMS)
            found[FIGURES[1 if this.turn else 0]].append(this.ttft_ms / other.ttft_ms)
            found[FIGURES[2]].append(this.tpot_ms / other.tpot_ms)
    return found


def result_of(turns: list[Turn], arguments: Any) -> dict[str, Any]:
    summary = {}
    for figure, values in ratios(turns).items():
        if values:
            low, high = median_interval(values, RESAMPLES)
            summary[figure] = {
                "pairs": len(values), "p50": round(median(values), 4), "low": round(low, 4), "high": round(high, 4),
            }  # fmt: skip
    held = {f"{figure}: at most {MOST} x the other": row["p50"] <= MOST for figure, row in summary.items()}
    return {"held": held, "starts": arguments.starts, "summary": summary, "turns": [asdict(one) for one in turns]}


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    programs = {"this": None, "other": arguments.other.absolute()}
    model = run.random_model(context=AGENT_CONTEXT) if arguments.agent else run.random_model()
    if arguments.agent:
        (model / "chat_template.jinja").write_text(AGENT_TEMPLATE, encoding="utf-8")
    settings = {"model.source": str(model)}
    ask = work_on if arguments.agent else converse
    turns: list[Turn] = []
    for start in range(arguments.starts):
        with ExitStack() as running:
            servers = {
                arm: running.enter_context(serve(arm, settings, program=program)) for arm, program in programs.items()
            }
            time.sleep(CALM_S)
            label = f"start {start + 1} of {arguments.starts}, round"
            for round_, arms in run.rounds(ARMS, range(arguments.rounds + 1), label):
                for arm in arms:
                    turns += asyncio.run(ask(servers[arm], arm, start, round_))
        run.keep(result_of(turns, arguments))
    return {"model": str(arguments.model or "125 M"), **result_of(turns, arguments)}


def show(console: Console, result: Any) -> None:
    show_rows(console, "This checkout over the other, 95 % interval of the median", result["summary"])


def options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--other", type=Path, required=True, help="the `reprise` program in another checkout's .venv/bin"
    )
    parser.add_argument("--agent", action="store_true", help="compare an agent's turns of 20,000 tokens")
    parser.add_argument("--starts", type=int, default=3, help="of both servers")


EXPERIMENT = Experiment(
    name="other_tree", about=__doc__, measure=measure, show=show, options=options, rounds=12,
    rounds_help="of a start, that count; one more warms up", takes_model=True,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
