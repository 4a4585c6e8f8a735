"""Measures what the first returning turn finds after a restart, after a crash, and after the index is lost: real
servers, the bundled model in fp32.

    python -m benchmarks.speed.restart [--conversations 10] [--rounds 3]

Every round holds conversations of at least 640 tokens, lets them be idle for a second, brings the server down, starts
it on the same directory and asks every conversation once more. It is brought down in three ways: `stop` (SIGTERM),
`kill` (SIGKILL to server and engine), `index` (SIGKILL, and the disk tier's SQLite index is deleted).

History is what the turn before had run through the model: its prompt and its answer but for the last sampled token.
Held: no error; at least 99 % of it comes from the cache after `stop`, at least 95 % after `kill` and `index`, in every
conversation; and the answers are those of a server that recomputes everything, near-ties excused.
"""

import asyncio
import random
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Message, StreamedAnswer, ask, client_of, first_difference
from benchmarks.harness.tables import show_rows
from benchmarks.speed.hierarchy import WORDS

LEAST = {"stop": 0.99, "kill": 0.95, "index": 0.95}
IDLE_S = 1.0
SETTINGS: dict[str, str | int | float] = {"model.dtype": "float32", "engine.threads": 1}


@dataclass(frozen=True, slots=True)
class Return:
    """The first turn of one conversation on the new server."""

    how: str  # a key of LEAST
    round: int
    history_tokens: int
    cached_tokens: int
    disk_tokens: int
    ttft_ms: float
    ready_s: float  # time until the new server is ready
    miss_reasons: dict[str, int]
    differs: bool  # from a recompute, and it is no near-tie

    @property
    def share(self) -> float:
        return min(1.0, self.cached_tokens / self.history_tokens)


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def lose_index(directory: Path) -> None:
    """Delete the disk tier's index with its log files. Raises ValueError if there is not exactly one index."""
    (index,) = directory.glob("kv/*/index.sqlite")
    for path in index.parent.glob("index.sqlite*"):
        path.unlink()


class Talk:
    """One conversation with greedy answers, which any server can continue."""

    def __init__(self, *, session_id: str, first_words: int, max_tokens: int, seed: str) -> None:
        self._rng = random.Random(seed)
        self._session_id, self._first_words, self._max_tokens = session_id, first_words, max_tokens
        self._messages: list[Message] = []
        self.history_tokens = 0  # what the last turn ran through the model

    async def turn(self, server: ServerProcess) -> StreamedAnswer:
        words = 12 if self._messages else self._first_words
        self._messages.append({"role": "user", "content": text(self._rng, words)})
        answer = await self.again(server)
        self._messages.append({"role": "assistant", "content": answer.text})
        self.history_tokens = answer.prompt_tokens + answer.completion_tokens - 1
        return answer

    async def again(self, server: ServerProcess) -> StreamedAnswer:
        """Send the present messages to a server, without a new turn."""
        async with client_of(server.url) as client:
            return await ask(
                client, server.model["id"], self._messages, max_tokens=self._max_tokens, temperature=0,
                session_id=self._session_id, logprobs=True, top_logprobs=2, ignore_eos=True,
            )  # fmt: skip

    async def return_(self, server: ServerProcess, reference: ServerProcess, how: str, round_: int) -> Return:
        """Play the next turn on a new server, and compare its answer with that of `reference`, a server without a
        cache."""
        before = self.history_tokens
        answer = await self.turn(server)
        said = self._messages.pop()
        difference = first_difference(expected=await self.again(reference), got=answer)
        self._messages.append(said)
        return Return(
            how=how, round=round_, history_tokens=before, cached_tokens=answer.cached_tokens,
            disk_tokens=int(answer.x_cache["disk_tokens"]), ttft_ms=round(answer.ttft_ms, 2),
            ready_s=round(server.ready_s, 2), miss_reasons=dict(answer.x_cache["miss_reasons"]),
            differs=difference is not None and not difference.is_near_tie,
        )  # fmt: skip


async def one_round(
    *, how: str, round_: int, reference: ServerProcess, conversations: int
) -> list[Return]:  # fmt: skip
    """Play conversations of two turns, end the server in the way of `how`, and play the turn after that on a new one.
    Raises ServerFailed and what the client raises."""
    with tempfile.TemporaryDirectory(prefix="reprise-restart-") as directory:
        own = {**SETTINGS, "cache.disk_dir": directory}
        talks = [
            Talk(session_id=f"{how}.{n}", first_words=560, max_tokens=48, seed=f"{how}/{round_}/{n}")
            for n in range(conversations)
        ]
        with serve(f"restart-{how}", own) as server:
            for talk in talks:
                await talk.turn(server)
            for talk in talks:
                await talk.turn(server)
            await asyncio.sleep(IDLE_S)
            if how != "stop":
                server.kill()
        if how == "index":
            lose_index(Path(directory))
        with serve(f"restart-{how}-again", own) as server:
            return [await talk.return_(server, reference, how, round_) for talk in talks]


def summarize(returns: list[Return]) -> list[dict[str, Any]]:
    rows = []
    for how in LEAST:
        same = [r for r in returns if r.how == how]
        if not same:
            continue
        shares = [r.share for r in same]
        rows.append(
            {
                "how": how,
                "conversations": len(same),
                "history_tokens_min": min(r.history_tokens for r in same),
                "reused_min": round(min(shares), 5),
                "reused_p50": round(median(shares), 5),
                "reused": round(sum(r.share * r.history_tokens for r in same) / sum(r.history_tokens for r in same), 5),
                "ttft_ms_p50": median(r.ttft_ms for r in same),
                "ready_s_p50": median(r.ready_s for r in same),
                "differences": sum(r.differs for r in same),
            }
        )
    return rows


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return claim -> whether it holds."""
    held = {f"{row['how']}: at least {LEAST[row['how']]:.0%} reused": row["reused_min"] >= LEAST[row["how"]]
            for row in rows}  # fmt: skip
    held["conversations of at least 640 tokens"] = all(row["history_tokens_min"] >= 640 for row in rows)
    held["the answers of a recompute"] = not any(row["differences"] for row in rows)
    return held


def show(console: Console, result: dict[str, Any]) -> None:
    show_rows(console, "The first returning turn on a new server", result["summary"])


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    returns: list[Return] = []

    def result() -> dict[str, Any]:
        rows = summarize(returns)
        return {
            "settings": SETTINGS, "held": verdicts(rows), "summary": rows, "turns": [asdict(one) for one in returns],
        }  # fmt: skip

    with serve("restart-reference", {**SETTINGS, "cache.mode": "recompute"}) as reference:
        for round_, order in run.rounds(arguments.arms, arguments.rounds):
            for how in order:
                returns += asyncio.run(
                    one_round(how=how, round_=round_, reference=reference, conversations=arguments.conversations)
                )
            run.keep(result())
    return result()


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=10)


def least_reused(how: str) -> Callable[[Result], float | None]:
    return lambda result: next((row["reused_min"] for row in result["summary"] if row["how"] == how), None)


EXPERIMENT = Experiment(
    name="restart", about=__doc__, measure=measure, show=show, options=options, rounds=3, arms=tuple(LEAST),
    quick=Quick(
        options={"rounds": 1, "conversations": 2, "arms": ["kill"]},
        figures=[Figure("reused after a kill", least_reused("kill"), 1.05, more_is_better=True)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
