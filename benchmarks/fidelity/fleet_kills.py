"""Replicas that are killed while they answer: what clients see of it. Real processes and the bundled model.

    python -m benchmarks.fidelity.fleet_kills [--kills 100]

Two replicas behind a gateway, with KV in a Redis of its own. In every round four conversations have a turn at once:
greedy and seeded ones, with one choice and with two; half of them are named by their clients. At a random point of one
of the answers its replica is killed (SIGKILL), or, in one round of six, its engine alone. A replica that was killed is
started again at once, the next round begins when both are there. An operator moves one conversation before each round,
which shows what a turn costs on a replica that has not seen its conversation.

An undisturbed server gets the same requests. Where its text differs, rounding can be the cause: a prompt that is
computed at once is rounded in another way than tokens that are generated one by one. At the first difference,

    near-tie   two greedy tokens have logprobs that are closer than 1e-4
    draw       a seeded answer differs: two tokens may have raced to within the rounding (decision 0020). An answer does
               not show that, so these are only counted and bounded

Answers that no kill has broken have them as well: how long the pieces of a prompt are depends on what runs beside it.

A kill breaks the answers that come from its victim. One that the victim had ended by then is not broken, even if its
client has not read it to its end; its KV may not have been saved yet, so the next turn may compute it once more.

The pause of a broken stream is the time between the last piece before the kill and the first one after it. Held:

- no client sees an error, and every stream comes to its end;
- texts are those of the undisturbed server but for near-ties and draws, which are in at most 2 % of the greedy and of
  the seeded answers;
- pauses: p95 at most twice the TTFT p50 of a moved turn, and 0.3 s more;
- every conversation is known again in its next turn, with as many tokens as on the undisturbed server;
- at least 90 % of the history is cached in the turns after broken answers;
- a turn after an answer that the victim had ended computes no more of its history than that answer's own turn had.
"""

import asyncio
import math
import random
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.fleet.chat_stream import ChatStream, StreamFailed
from benchmarks.fleet.processes import SMALL, FleetProcesses, fleet_processes
from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.measures import ratio
from benchmarks.harness.servers import serve
from benchmarks.harness.streams import NEAR_TIE
from benchmarks.speed.hierarchy import WORDS
from reprise.loadgen.percentile import percentile

NAMES = ("a", "b")
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, n=2": {"temperature": 0, "n": 2},
    "seeded": {"temperature": 1},
    "seeded, n=2": {"temperature": 0.9, "n": 2},
}
TURNS = 3  # of a conversation: it has to fit the window of 1,024 tokens
MESSAGE_WORDS = 60
ENGINE_SHARE = 1 / 6  # of the kills
MOST_EXCUSED = 0.02  # of the answers
LEAST_HIT, PAUSE_TTFTS, PAUSE_MORE_S = 0.9, 2.0, 0.3
READING_S = 0.5  # before a reply


@dataclass(frozen=True, slots=True)
class Struck:
    """An answer whose replica was killed before the client had all of it."""

    replica: str  # where it came from
    route: str  # why from there, as the gateway says it
    said: dict[int, int]  # choice -> tokens that had come
    is_broken: bool  # another replica ended it


@dataclass
class Talk:
    """A conversation of one kind."""

    kind: str
    name: str
    seed: int
    is_named: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    session_id: str = ""
    home: str = ""
    context_tokens: int = 0
    computed_tokens: int = 0  # of them by the last turn
    struck: Struck | None = None  # its last answer

    def body(self, answer_tokens: int) -> dict[str, Any]:
        seed = {"seed": self.seed + len(self.messages)} if self.kind.startswith("seeded") else {}
        asked = {"messages": list(self.messages), "max_tokens": answer_tokens, "ignore_eos": True, "logprobs": True}
        return {**asked, **KINDS[self.kind], **seed}

    @property
    def headers(self) -> dict[str, str]:
        return {"x-session-id": self.name} if self.is_named else {}

    def has(self, stream: ChatStream, struck: Struck | None) -> None:
        """Take a turn in."""
        self.messages.append({"role": "assistant", "content": stream.text})
        self.session_id, self.context_tokens = stream.session_id, stream.context_tokens
        self.computed_tokens = stream.context_tokens - stream.cached_tokens
        self.home, self.struck = ended_by(stream), struck


@dataclass(frozen=True, slots=True)
class Shot:
    """A kill, as it was made."""

    what: str  # "replica" or "engine"
    victim: str
    after_pieces: int  # of one of the streams
    killed_s: float
    said: dict[ChatStream, dict[int, int]]  # stream of the victim that had not come whole -> choice -> its tokens

    def met(self, stream: ChatStream) -> Struck | None:
        """Return how it met a stream, which has ended since."""
        said = self.said.get(stream)
        if said is None:
            return None
        return Struck(self.victim, stream.route["route"], said, is_broken=ended_by(stream) != self.victim)


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill, and the streams that it broke."""

    what: str  # "replica" or "engine"
    victim: str
    after_pieces: int  # of one of the streams
    pauses_s: list[float]  # of the streams that it broke


@dataclass(frozen=True, slots=True)
class Difference:
    kind: str
    choice: int
    position: int  # in tokens
    expected: str
    found: str
    gap: float  # between the logprobs of the two tokens
    logprob: float  # of the expected one
    was_broken: bool

    @property
    def cause(self) -> str:
        """Return near-tie, draw or other."""
        if self.kind.startswith("seeded") and math.isfinite(self.gap):
            return "draw"
        return "near-tie" if self.gap < NEAR_TIE else "other"


@dataclass(frozen=True, slots=True)
class Returning:
    """A turn of which a kill met the last answer."""

    kind: str
    history: int  # tokens
    computed: int  # of them by the last turn
    cached: int  # of the history
    before: Struck  # the last answer
    home: str  # the replica that ended the last answer
    now: Struck | None  # this answer too
    x_cache: dict[str, Any]  # the replica that ended it, and what the one that began it had and computed


@dataclass
class Books:
    """What is counted over all rounds."""

    kills: list[Kill] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)  # kind -> answers
    lost: list[str] = field(default_factory=list)  # turns that do not go on with all of their conversation
    returning: list[Returning] = field(default_factory=list)
    moved_ttft_s: list[float] = field(default_factory=list)

    def share_different(self, sampling: str) -> float:
        """Return the share of the greedy or seeded answers that differ."""
        answers = sum(count for kind, count in self.compared.items() if kind.startswith(sampling))
        return sum(one.kind.startswith(sampling) for one in self.differences) / max(1, answers)


def ended_by(stream: ChatStream) -> str:
    """Return the replica that sent an answer's end."""
    return str(stream.x_cache["route"]["replica"])


def difference(kind: str, expected: ChatStream, found: ChatStream, was_broken: bool) -> Difference | None:
    """Return where two answers differ first."""
    for choice, tokens in sorted(expected.tokens.items()):
        others = found.tokens[choice]
        for position, (ours, theirs) in enumerate(zip(tokens, others, strict=False)):
            if ours[0] != theirs[0]:
                gap = abs(ours[1] - theirs[1])
                return Difference(kind, choice, position, ours[0], theirs[0], gap, ours[1], was_broken)
        if len(tokens) != len(others) or expected.texts[choice] != found.texts[choice]:
            return Difference(kind, choice, min(len(tokens), len(others)), "", "", math.inf, 0.0, was_broken)
    return None


class Rounds:
    """Plays rounds against a fleet and the undisturbed server."""

    def __init__(self, run: Run, fleet: FleetProcesses, alone_url: str) -> None:
        self._answer_tokens = run.arguments.answer_tokens
        self._fleet, self._alone_url = fleet, alone_url
        self._rng = random.Random(run.arguments.seed)
        self._made = 0
        self._talks = [self._talk(kind) for kind in KINDS]
        self.books = Books()

    def _talk(self, kind: str) -> Talk:
        self._made += 1
        return Talk(kind, f"kills-{self._made}", self._rng.getrandbits(32), is_named=self._rng.random() < 0.5)

    async def play(self) -> None:
        """Play one round: four turns with a kill, and the same four undisturbed."""
        self._talks = [talk if len(talk.messages) < 2 * TURNS else self._talk(talk.kind) for talk in self._talks]
        moved = self._move_one()
        for talk in self._talks:
            words = " ".join(self._rng.choice(WORDS) for _ in range(MESSAGE_WORDS))
            talk.messages.append({"role": "user", "content": words})
        streams = [self._stream(talk, self._fleet.gateway_url) for talk in self._talks]
        running = [asyncio.create_task(stream.run()) for stream in streams]
        shot = await self._kill(streams, running)
        start = asyncio.create_task(self._start_again(shot))
        ended = await asyncio.gather(*running, return_exceptions=True)
        await start
        await asyncio.to_thread(self._fleet.wait_ready, shot.victim)
        await asyncio.to_thread(self._fleet.wait_for, len(NAMES))
        expected = [self._stream(talk, self._alone_url) for talk in self._talks]
        await asyncio.gather(*(stream.run() for stream in expected))
        broken: list[ChatStream] = []
        for place, (talk, stream, how) in enumerate(zip(self._talks, streams, ended, strict=True)):
            if isinstance(how, BaseException):
                if not isinstance(how, StreamFailed | httpx.HTTPError):
                    raise how
                self.books.errors.append(f"{talk.kind}: {how!r}")
                self._talks[place] = self._talk(talk.kind)
                continue
            if talk is moved and stream.route["route"] == "moved" and stream.came_s[0] < shot.killed_s:
                self.books.moved_ttft_s.append(stream.ttft_s)
            struck = shot.met(stream)
            if struck is not None and struck.is_broken:
                broken.append(stream)
            if not self._is_as(expected[place], talk, stream, struck):
                self._talks[place] = self._talk(talk.kind)
        pauses_s = [round(gap, 4) for gap in pauses(broken, shot.killed_s)]
        self.books.kills.append(Kill(shot.what, shot.victim, shot.after_pieces, pauses_s))
        await asyncio.sleep(READING_S)

    def _stream(self, talk: Talk, url: str) -> ChatStream:
        return ChatStream(url, talk.body(self._answer_tokens), talk.headers)

    def _move_one(self) -> Talk | None:
        """Have an operator move a conversation. Returns it; None: none has begun."""
        begun = [talk for talk in self._talks if talk.session_id]
        if not begun:
            return None
        talk = self._rng.choice(begun)
        self._fleet.move(talk.session_id, NAMES[talk.home == NAMES[0]])
        return talk

    async def _kill(self, streams: list[ChatStream], running: list[asyncio.Task[ChatStream]]) -> Shot:
        """Kill at a random point of one of the answers."""
        rng, fleet = self._rng, self._fleet
        aim = rng.randrange(len(streams))
        pieces = rng.randrange(int(0.9 * self._answer_tokens * streams[aim].body.get("n", 1)))
        await streams[aim].has(pieces)
        at = [
            stream.route["replica"] if stream.pieces and not task.done() else ""
            for stream, task in zip(streams, running, strict=True)
        ]
        victim = at[aim] or rng.choice(NAMES)
        what = "engine" if rng.random() < ENGINE_SHARE else "replica"
        said = {
            stream: {choice: len(tokens) for choice, tokens in stream.tokens.items()}
            for stream, replica in zip(streams, at, strict=True)
            if replica == victim
        }
        shot = Shot(what, victim, pieces, time.perf_counter(), said)
        await asyncio.to_thread(fleet.kill_engine if what == "engine" else fleet.kill, victim)
        return shot

    async def _start_again(self, shot: Shot) -> None:
        """Start a replica that was killed; one whose engine was does so itself."""
        if shot.what == "replica":
            await asyncio.to_thread(self._fleet.start, shot.victim)

    def _is_as(self, expected: ChatStream, talk: Talk, stream: ChatStream, struck: Struck | None) -> bool:
        """Compare a turn with the undisturbed one, and enter it. Returns whether the conversation can go on."""
        books = self.books
        books.compared[talk.kind] += 1
        if talk.session_id:
            if stream.session_id != talk.session_id:
                books.lost.append(f"{talk.kind}: not known")
            elif stream.usage["prompt_tokens"] != expected.usage["prompt_tokens"]:
                books.lost.append(f"{talk.kind}: a prompt of {stream.usage['prompt_tokens']} tokens")
            if talk.struck is not None:
                books.returning.append(
                    Returning(
                        talk.kind,
                        talk.context_tokens,
                        talk.computed_tokens,
                        stream.cached_tokens,
                        talk.struck,
                        talk.home,
                        struck,
                        stream.x_cache,
                    )
                )
        found = difference(talk.kind, expected, stream, struck is not None and struck.is_broken)
        if found is not None:
            books.differences.append(found)
            return False
        talk.has(stream, struck)
        return True


def pauses(broken: list[ChatStream], killed_s: float) -> list[float]:
    """Return the longest gap of each stream after a kill; one that an error ended has none."""
    found = []
    for stream in broken:
        gaps = [later - earlier for earlier, later in pairwise(stream.came_s) if later > killed_s]
        found += [max(gaps)] if gaps else []
    return found


def result_of(books: Books) -> dict[str, Any]:
    gaps = [pause for kill in books.kills for pause in kill.pauses_s]
    broken = [turn for turn in books.returning if turn.before.is_broken]
    ended = [turn for turn in books.returning if not turn.before.is_broken]
    figures = {
        "kills": dict(Counter(kill.what for kill in books.kills)),
        "streams_broken": len(gaps),
        "pause_s": {"p50": percentile(gaps, 0.5), "p95": percentile(gaps, 0.95)} if gaps else None,
        "moved_ttft_s": percentile(books.moved_ttft_s, 0.5) if books.moved_ttft_s else None,
        "moved_turns": len(books.moved_ttft_s),
        "answers": dict(books.compared),
        "broken_and_different": sum(one.was_broken for one in books.differences),
        "causes": dict(Counter(one.cause for one in books.differences)),
        "turns_after_a_kill": len(broken),
        "history_cached": share_cached(broken),
        "turns_after_an_end": len(ended),
        "history_cached_after_an_end": share_cached(ended),
    }
    return {
        "held": verdicts(books, figures), **figures, "errors": books.errors, "lost": books.lost,
        "differences": [asdict(one) | {"cause": one.cause} for one in books.differences],
        "each_kill": [asdict(kill) for kill in books.kills],
        "less_cached": [asdict(turn) for turn in books.returning if turn.cached < turn.history],
    }  # fmt: skip


def share_cached(turns: list[Returning]) -> float | None:
    """Return the share of all history that was cached; None without any."""
    return ratio(sum(turn.cached for turn in turns), sum(turn.history for turn in turns))


def verdicts(books: Books, figures: dict[str, Any]) -> dict[str, bool]:
    """What is held -> whether it holds."""
    held = {
        "kills broke streams": bool(figures["streams_broken"]),
        "no client sees an error": not books.errors,
        "texts of the undisturbed server, near-ties and draws excused": all(
            one.cause != "other" for one in books.differences
        ),
        **{
            f"at most {MOST_EXCUSED:.0%} of the {one} answers excused": books.share_different(one) <= MOST_EXCUSED
            for one in ("greedy", "seeded")
        },
        "no turn is lost": not books.lost,
    }
    if figures["pause_s"] and figures["moved_ttft_s"]:
        most_s = PAUSE_TTFTS * figures["moved_ttft_s"] + PAUSE_MORE_S
        held[f"pause p95 at most {PAUSE_TTFTS:g} TTFT of a moved turn and {PAUSE_MORE_S} s"] = (
            figures["pause_s"]["p95"] <= most_s
        )
    if figures["history_cached"] is not None:
        held[f"at least {LEAST_HIT:.0%} of the history cached after a kill"] = figures["history_cached"] >= LEAST_HIT
    if figures["turns_after_an_end"]:
        held["no more than the last turn computed, after an answer that had ended, computed again"] = all(
            turn.history - turn.cached <= turn.computed for turn in books.returning if not turn.before.is_broken
        )
    return held


def measure(run: Run) -> dict[str, Any]:
    kills = run.arguments.kills
    with ExitStack() as stack:
        alone = stack.enter_context(serve("alone", SMALL))
        fleet = stack.enter_context(fleet_processes(run.directory, *NAMES, settings={"cache.redis_gib": 0.5}))
        rounds = Rounds(run, fleet, alone.url)

        async def play() -> None:
            for number in run.track(range(kills), "kills"):
                await rounds.play()
                if number % 10 == 9:
                    run.keep(result_of(rounds.books))

        asyncio.run(play())
    return {"settings": SMALL, **result_of(rounds.books)}


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="Kills in the middle of answers", title_justify="left")
    table.add_column("what")
    table.add_column("how many", justify="right")
    shown = ("kills", "streams_broken", "pause_s", "moved_ttft_s", "answers", "causes", "history_cached",
             "turns_after_an_end", "history_cached_after_an_end")  # fmt: skip
    for what in shown:
        table.add_row(what.replace("_", " "), str(result[what]))
    for what in ("errors", "lost", "differences"):
        table.add_row(what, str(len(result[what])))
    console.print(table)
    told = ("errors", "lost", "differences", "less_cached")
    for entry in (entry for what in told for entry in result[what][:20]):
        console.print(entry)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--answer-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)


def unseen(result: Result) -> float | None:
    """The share of answers without an error."""
    answers = sum(result["answers"].values())
    return ratio(answers, answers + len(result["errors"]))


EXPERIMENT = Experiment(
    name="fleet_kills", about=__doc__, measure=measure, show=show, options=options,
    quick=Quick(
        options={"kills": 4, "answer_tokens": 100},
        holds=False,  # a few pauses on a shared machine have no p95
        figures=[
            Figure("answers without an error", unseen, 1.0, more_is_better=True),
            Figure("history cached after a kill", lambda result: result["history_cached"], 1.1, more_is_better=True),
        ],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
