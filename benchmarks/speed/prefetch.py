"""Measures what it saves to announce a turn (`POST /v1/sessions/ID/prefetch`), and what that costs others, where the
disk is slow.

    python -m benchmarks.speed.prefetch [--rounds 20] [--disk-gbps 0.05] [--think-s 3]

Conversations of a random 125 M-shape model in bf16, of several lengths. Every round starts the server anew, so that
all KV is on a disk throttled to `--disk-gbps`, and has one turn of each conversation, while another one decodes all
the time. Each conversation belongs to an arm:

    without   the turn comes unannounced
    with      it is announced `--think-s` before it comes
    beside    it comes unannounced, just after a conversation of the same length was announced that nobody continues

`ttft_ms` is the time to first token. `thinking_ms` and `answering_ms` are the gaps between the tokens of the one that
decodes, in the `--think-s` before the turn and from the turn to its first token. The first of `with` are what an
announcement costs it, also if no turn comes.

Held for the longest histories: announced, they come from DRAM, and their first token takes at most 0.6 x; meanwhile the
gaps are at most 1.1 x in the median and 1.5 x in the p95; beside an announcement in vain the first token comes at most
350 ms later in the median (a piece of the other's fetch may take 250 ms).
"""

import asyncio
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import msgspec
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.harness.experiment import Experiment, Figure, Quick, Run, turned
from benchmarks.harness.measures import mean_of, ratio, rounded
from benchmarks.harness.models import kv_bytes_per_token
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Message, StreamedAnswer, ask_stamped
from benchmarks.harness.tables import show_rows
from benchmarks.speed.hierarchy import Writer
from reprise.loadgen.measure.http import Http
from reprise.loadgen.percentile import percentile

ARMS = ("without", "with", "beside")
IN_VAIN = "in-vain"
NEW_TOKENS, ANSWER_TOKENS, DECODED_TOKENS = 40, 16, 1000
TURN_TOKENS = 2 * (NEW_TOKENS + ANSWER_TOKENS)  # room for a turn and its template
JSON = {"content-type": "application/json"}
MOST_TTFT, MOST_GAP, MOST_P95_GAP, MOST_LATER_MS = 0.6, 1.1, 1.5, 350.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn."""

    round: int
    history: int  # tokens with which its conversation began
    arm: str
    ttft_ms: float
    from_dram: float  # share of the prompt
    thinking_ms: list[float]
    answering_ms: list[float]


class Talks:
    """The conversations, on whichever server is there."""

    def __init__(self, tokenizer: Tokenizer, histories: Sequence[int], think_s: float) -> None:
        self._writer, self._histories, self._think_s = Writer(tokenizer, seed=0), histories, think_s
        self._messages: dict[str, list[Message]] = {}
        self._stamps: list[float] = []  # when pieces of the answer that is decoded all the time have come

    async def begin(self, server: ServerProcess) -> None:
        """Have the first turn of each conversation answered."""
        http = Http(server.url, silence_s=120)
        for history in self._histories:
            for arm in (*ARMS, IN_VAIN):
                await self._say(http, server, f"{arm}-{history}", history)
        http.close()

    async def play(self, server: ServerProcess, round_: int, run: Run) -> list[Sample]:
        """Have one turn of each conversation of the arms."""
        http, samples = Http(server.url, silence_s=120), []
        await self._say(http, server, f"warm-up-{round_}", NEW_TOKENS)
        for history in self._histories:
            for arm in turned(ARMS, round_):
                samples.append(await self._turn(http, server, round_, history, arm))
                run.advance()
        http.close()
        return samples

    async def _turn(self, http: Http, server: ServerProcess, round_: int, history: int, arm: str) -> Sample:
        decoding = asyncio.create_task(self._decode(http, server))
        await asyncio.sleep(0.5)
        begin_s = perf_counter()
        if arm == "with":
            await self._announce(http, f"{arm}-{history}")
        await asyncio.sleep(self._think_s)
        if arm == "beside":
            await self._announce(http, f"{IN_VAIN}-{history}")
        answer = await self._say(http, server, f"{arm}-{history}", NEW_TOKENS)
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
        if arm == "beside":
            await asyncio.sleep(self._think_s)  # what was announced in vain comes in none of the next turn's time
        first_s = answer.sent_s + answer.ttft_ms / 1e3
        return Sample(
            round_, history, arm, round(answer.ttft_ms, 2), answer.x_cache["dram_tokens"] / answer.prompt_tokens,
            self._gaps_ms(begin_s, answer.sent_s), self._gaps_ms(answer.sent_s, first_s),
        )  # fmt: skip

    async def _say(self, http: Http, server: ServerProcess, name: str, tokens: int) -> StreamedAnswer:
        messages = self._messages.setdefault(name, [])
        messages.append({"role": "user", "content": self._writer.message(tokens)})
        answer = await ask_stamped(
            http, server.model["id"], messages, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True,
            session_id=name,
        )  # fmt: skip
        messages.append({"role": "assistant", "content": answer.text})
        return answer

    async def _decode(self, http: Http, server: ServerProcess) -> None:
        """Stream a long answer and stamp its pieces, until it is cancelled."""
        body = {
            "model": server.model["id"], "messages": [{"role": "user", "content": self._writer.message(NEW_TOKENS)}],
            "stream": True, "max_tokens": DECODED_TOKENS, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        request = http.request("POST", "/v1/chat/completions", JSON, msgspec.json.encode(body))
        await http.send(request, lambda status, now_s, piece: self._stamps.append(now_s))

    def _gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        within = [now_s for now_s in self._stamps if begin_s <= now_s <= end_s]
        return [round(1e3 * (b - a), 2) for a, b in pairwise(within)]

    async def _announce(self, http: Http, name: str) -> None:
        _, response = await http.send(
            http.request("POST", f"/v1/sessions/{name}/prefetch", JSON, b"{}"), lambda *_: None
        )
        if response.status != 202:
            raise RuntimeError(f"{name!r} could not be announced: {response.status}")


def spread(values: Sequence[float]) -> dict[str, float | None]:
    shares = {f"p{share}": rounded(percentile(values, share / 100)) for share in (50, 95)}
    return {"mean": rounded(mean_of(values)), **shares}


def summarize(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    rows = []
    for history, arm in sorted({(s.history, s.arm) for s in samples}, key=lambda one: (one[0], ARMS.index(one[1]))):
        same = [s for s in samples if (s.history, s.arm) == (history, arm)]
        gaps = {name: [ms for s in same for ms in getattr(s, name)] for name in ("thinking_ms", "answering_ms")}
        rows.append(
            {"history": history, "arm": arm, "turns": len(same), "ttft_ms": spread([s.ttft_ms for s in same]),
             "from_dram_min": round(min(s.from_dram for s in same), 4)} | {n: spread(some) for n, some in gaps.items()}
        )  # fmt: skip
    return rows


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Judge what is held, of the longest histories."""
    longest = max(row["history"] for row in rows)
    without, told, beside = (next(r for r in rows if (r["history"], r["arm"]) == (longest, arm)) for arm in ARMS)
    later_ms = beside["ttft_ms"]["p50"] - without["ttft_ms"]["p50"]
    return {
        "announced, at least 90 % of the prompt comes from DRAM": told["from_dram_min"] >= 0.9,
        f"announced, TTFT p50 at most {MOST_TTFT} x": told["ttft_ms"]["p50"] <= MOST_TTFT * without["ttft_ms"]["p50"],
        f"meanwhile another's gaps p50 at most {MOST_GAP} x": over(rows, "thinking_ms", "p50") <= MOST_GAP,
        f"meanwhile another's gaps p95 at most {MOST_P95_GAP} x": over(rows, "thinking_ms", "p95") <= MOST_P95_GAP,
        f"beside one in vain, TTFT p50 at most {MOST_LATER_MS:.0f} ms later": later_ms <= MOST_LATER_MS,
    }


def over(rows: Sequence[dict[str, Any]], name: str, figure: str) -> float:
    """Return a figure of the longest histories, announced over unannounced."""
    longest = max(row["history"] for row in rows)
    found = {row["arm"]: row[name][figure] for row in rows if row["history"] == longest}
    return ratio(found["with"], found["without"]) or float("nan")


def show(console: Console, result: dict[str, Any]) -> None:
    show_rows(console, "Times in ms: first tokens, and gaps of another conversation", result["summary"])


def measure(run: Run) -> dict[str, Any]:
    """Raises ServerFailed, RuntimeError, and what the client raises."""
    arguments, model = run.arguments, str(run.random_model())
    histories = sorted(arguments.histories)
    talks = Talks(Tokenizer.from_file(f"{model}/tokenizer.json"), histories, arguments.think_s)
    window = max(histories[-1] + TURN_TOKENS * (1 + arguments.rounds), DECODED_TOKENS + TURN_TOKENS)
    settings = {
        "model.source": model, "model.dtype": "bfloat16", "model.max_context": window, "cache.hbm_tokens": 4 * window,
        "cache.dram_gib": 8 * window * kv_bytes_per_token(model) / (1 << 30),
        "cache.disk_dir": run.directory / "state",
    }  # fmt: skip
    with serve("prefetch-begin", settings) as server:
        asyncio.run(talks.begin(server))
    samples: list[Sample] = []

    def result() -> dict[str, Any]:
        rows = summarize(samples)
        return {
            "workload": {"histories": histories, "think_s": arguments.think_s, "disk_gbps": arguments.disk_gbps},
            "held": verdicts(rows), "summary": rows, "turns": [asdict(one) for one in samples],
        }  # fmt: skip

    run.expect(arguments.rounds * len(histories) * len(ARMS), "turns")
    for round_ in range(arguments.rounds):
        with serve("prefetch", {**settings, "experiment.disk_gbps": arguments.disk_gbps}) as server:
            samples += asyncio.run(talks.play(server, round_, run))
        run.keep(result())
    return result()


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--histories", type=int, nargs="+", default=[500, 1500, 3000], help="tokens")
    parser.add_argument("--disk-gbps", type=float, default=0.05)
    parser.add_argument("--think-s", type=float, default=3.0)


def read(name: str) -> Any:
    return lambda result: over(result["summary"], name, "p50")


EXPERIMENT = Experiment(
    name="prefetch", about=__doc__, measure=measure, show=show, options=options, rounds=20, takes_model=True,
    quick=Quick(
        options={"rounds": 1, "histories": [500, 2000], "think_s": 1.5},
        figures=[Figure("TTFT of announced turns, x unannounced", read("ttft_ms"), 1.5)],
        holds=False,  # one turn of each
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
