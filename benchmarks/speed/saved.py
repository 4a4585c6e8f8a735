"""Measures how right `x_cache.saved_ms` is: the server's estimate of how much sooner a turn's first token came because
KV was reused.

    python -m benchmarks.speed.saved [--rounds 4] [--histories 200 700 1500 3000]

Conversations of a random 125 M-shape model in fp32, with histories of several lengths. Each goes on with one turn,
whose history is found in HBM, and the same messages are sent once more under a new `cache_salt`, so that all of them
are computed. Which of the two comes first changes from round to round. What was truly saved is the difference of their
times to first token, as the client sees them. Then the server is started anew, so that its rates are those of its first
steps, and the conversations go on with another turn from disk.

`error` is |saved_ms - truly saved| / truly saved. Held: its median is at most 0.25, over all turns.
"""

import asyncio
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run
from benchmarks.harness.measures import rounded
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Message, StreamedAnswer, ask_stamped
from benchmarks.harness.tables import show_rows
from benchmarks.speed.hierarchy import Writer
from reprise.loadgen.measure.http import Http

NEW_TOKENS, ANSWER_TOKENS = 30, 4
TURN_TOKENS = 2 * (NEW_TOKENS + ANSWER_TOKENS)  # room for a turn and its template
MOST_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one turn, with reuse and without, and the server's estimate of the difference."""

    source: str  # hbm, or disk: found after a restart
    history: int  # tokens
    cached_tokens: int
    saved_ms: float  # the server's estimate
    reused_ttft_ms: float
    computed_ttft_ms: float

    @property
    def truly_ms(self) -> float:
        return self.computed_ttft_ms - self.reused_ttft_ms

    @property
    def error(self) -> float:
        """The difference between the estimate and the time that was truly saved, as a share of the latter."""
        return abs(self.saved_ms - self.truly_ms) / max(1e-3, abs(self.truly_ms))


class Talks:
    """All conversations, which any server can continue."""

    def __init__(self, tokenizer: Tokenizer, histories: Sequence[int], rounds: int) -> None:
        self._writer, self._histories, self._rounds = Writer(tokenizer, seed=0), histories, rounds
        self._messages: dict[str, list[Message]] = {}
        self._salts = 0

    async def begin(self, server: ServerProcess) -> None:
        """Play the first turn of each conversation."""
        http = Http(server.url, silence_s=120)
        for round_ in range(self._rounds):
            for history in self._histories:
                await self._say(http, server, f"{history}-{round_}", history)
        http.close()

    async def play(self, server: ServerProcess, source: str, run: Run) -> list[Sample]:
        """Play one more turn of each conversation twice: once with its history reused, and once under a new cache salt,
        so that nothing is reused and the history is computed. source: the tier that holds the histories."""
        http, samples = Http(server.url, silence_s=120), []
        for round_ in range(self._rounds):
            for history in self._histories:
                samples.append(await self._turn(http, server, source, history, round_))
                run.advance()
        http.close()
        return samples

    async def _turn(self, http: Http, server: ServerProcess, source: str, history: int, round_: int) -> Sample:
        name = f"{history}-{round_}"
        asked = [*self._messages[name], {"role": "user", "content": self._writer.message(NEW_TOKENS)}]
        self._salts += 1
        salt = f"computed-{self._salts}"
        if round_ % 2:
            computed = await _ask(http, server, asked, session_id=salt, cache_salt=salt)
            reused = await _ask(http, server, asked, session_id=name)
        else:
            reused = await _ask(http, server, asked, session_id=name)
            computed = await _ask(http, server, asked, session_id=salt, cache_salt=salt)
        self._messages[name] = [*asked, {"role": "assistant", "content": reused.text}]
        if computed.cached_tokens:
            raise RuntimeError(f"{computed.cached_tokens} tokens were found under a new salt")
        return Sample(
            source, history, reused.cached_tokens, reused.x_cache["saved_ms"],
            round(reused.ttft_ms, 2), round(computed.ttft_ms, 2),
        )  # fmt: skip

    async def _say(self, http: Http, server: ServerProcess, name: str, tokens: int) -> None:
        messages: list[Message] = [{"role": "user", "content": self._writer.message(tokens)}]
        answer = await _ask(http, server, messages, session_id=name)
        self._messages[name] = [*messages, {"role": "assistant", "content": answer.text}]


async def _ask(http: Http, server: ServerProcess, messages: list[Message], **fields: str) -> StreamedAnswer:
    return await ask_stamped(
        http, server.model["id"], messages, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True, **fields
    )


def summarize(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    rows = []
    for source, history in sorted({(one.source, one.history) for one in samples}, reverse=True):
        same = [one for one in samples if (one.source, one.history) == (source, history)]
        rows.append(
            {"source": source, "history": history, "turns": len(same),
             "saved_ms": rounded(median(one.saved_ms for one in same)),
             "truly_ms": rounded(median(one.truly_ms for one in same)),
             "error": rounded(median(one.error for one in same))}
        )  # fmt: skip
    return rows


def show(console: Console, result: dict[str, Any]) -> None:
    show_rows(console, "What reuse saved, in ms: the server's estimate, and measured (medians)", result["summary"])
    console.print(f"median error of all turns: {result['median_error']:.0%}")


def measure(run: Run) -> dict[str, Any]:
    """Play all conversations before and after a restart, and return the result. Raises ServerFailed, RuntimeError, and
    what the client raises."""
    arguments, model = run.arguments, str(run.random_model())
    histories = sorted(arguments.histories)
    talks = Talks(Tokenizer.from_file(f"{model}/tokenizer.json"), histories, arguments.rounds)
    window = histories[-1] + 4 * TURN_TOKENS
    room = 4 * arguments.rounds * (sum(histories) + 4 * TURN_TOKENS * len(histories))
    settings = {
        "model.source": model, "model.dtype": "float32", "model.max_context": window, "cache.hbm_tokens": room,
        "cache.dram_gib": 0, "cache.disk_dir": run.directory / "state",
    }  # fmt: skip
    samples: list[Sample] = []

    def result() -> dict[str, Any]:
        error = median(one.error for one in samples)
        return {
            "workload": {"histories": histories}, "median_error": round(error, 4),
            "held": {f"the median error is at most {MOST_ERROR}": error <= MOST_ERROR},
            "summary": summarize(samples), "turns": [asdict(one) for one in samples],
        }  # fmt: skip

    run.expect(2 * arguments.rounds * len(histories), "turns")
    with serve("saved", settings) as server:
        asyncio.run(talks.begin(server))
        samples += asyncio.run(talks.play(server, "hbm", run))
    run.keep(result())
    with serve("saved-again", settings) as server:
        samples += asyncio.run(talks.play(server, "disk", run))
    return result()


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--histories", type=int, nargs="+", default=[200, 700, 1500, 3000], help="tokens")


EXPERIMENT = Experiment(
    name="saved", about=__doc__, measure=measure, show=show, options=options, rounds=4, takes_model=True,
    quick=Quick(
        options={"rounds": 1, "histories": [200, 600, 1500]},
        figures=[Figure("median error of saved_ms", lambda result: result["median_error"], 3.0)],
        holds=False,  # six turns
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
