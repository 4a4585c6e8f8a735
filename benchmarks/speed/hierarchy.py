"""Time to first token of returning turns when conversations overflow HBM: the hierarchy against its alternatives.

    python -m benchmarks.speed.hierarchy

Eight conversations of a random 125 M-shape model in bf16 go round: a first prompt of 1,000 tokens, then user messages
that bring about 140 new tokens a turn, answers of 100. The servers, side by side in one run:

    attentionstore   HBM for 2 conversations, DRAM for 3, the rest on disk
    disk             the same without DRAM
    ample            attentionstore with HBM for all of them
    prefix           HBM for 2 conversations and nothing below
    recompute        no cache
    coded            with --codec: attentionstore whose KV is coded (docs/codec.md), in the same bytes of DRAM

A leg is one turn of all eight conversations on one server, back to back, so that saving and evicting one conversation
falls into the time of the next. The servers take turns leg by leg, in an order that moves on with every turn; only one
works at a time. A pair is the same turn of the same conversation on two servers; a pass is four turns, and what a pass
has left is deleted before the next. After the last pass the attentionstore server is stopped and started again on its
directory, and every conversation returns once more, on `ample` and `recompute` as well. A TTFT runs from the request
handed to the socket to the bytes that bring the first token; what a client makes of them is not in it.

By the third turn conversations may come like clockwork for a server, and while it is idle it fetches from disk who is
due (`cache/returns/regulars.py`): into DRAM, as far as that has room.

Expected: at turn 4 attentionstore takes at most 0.15 x recompute, and at most 1.25 x ample: its loads are hidden. With
a codec the DRAM that holds 3 conversations of 8 holds all of them, so that nothing comes off the disk, and later turns
take at most 1.15 x ample.
"""

import asyncio
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run, turned
from benchmarks.harness.models import kv_bytes_per_token
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Message, StreamedAnswer, ask_stamped
from benchmarks.harness.tables import show_rows
from reprise.loadgen.measure.http import Http
from reprise.loadgen.percentile import percentile

CODED = "coded"
ARMS = ("attentionstore", "disk", "ample", "prefix", "recompute", CODED)
RETURNING = ("attentionstore", "ample", "recompute")  # those that play the turn after the restart
TIERS = ("hbm", "dram", "disk", "computed")
TURNS = 4
SILENCE_S = 120.0
TARGETS = {"recompute": 0.15, "ample": 1.25}
CODED_TARGET = 1.15  # x ample, later turns
BLOCK = 32
IN_HBM, IN_DRAM = 2, 3  # conversations
WORDS = (
    "the", "a", "his", "her", "ship", "sea", "day", "night", "old", "good", "little", "came", "went", "said", "saw",
    "man", "boy", "town", "hill", "house", "door", "time",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """The workload, in tokens."""

    conversations: int
    first_tokens: int
    turn_tokens: int  # new tokens of a later prompt: the message, its template, and the last token of the answer before
    answer_tokens: int
    turns: int

    @property
    def final_tokens(self) -> int:
        """Tokens of a conversation after the last turn that is measured, in whole blocks."""
        tokens = self.first_tokens + (self.turns - 1) * self.turn_tokens + self.turns * self.answer_tokens
        return -(-tokens // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one turn on one server."""

    arm: str
    pass_: int
    conversation: int
    turn: int  # from 1; one more than a pass has: after the restart
    ttft_ms: float
    tpot_ms: float
    prompt_tokens: int
    history_tokens: int  # tokens of the prompt that earlier turns computed
    tokens: dict[str, int]  # x_cache: tier or "computed" -> prompt tokens


@dataclass(slots=True)
class Conversation:
    """A conversation with one server."""

    session_id: str
    messages: list[Message] = field(default_factory=list)
    length: int = 0  # tokens when the last answer had ended


def settings_of(arm: str, model: str, shape: Shape, directory: Path, codec: str) -> dict[str, Any]:
    """Return the settings of an arm's server. HBM holds IN_HBM conversations and one block more, which may have to be
    copied; `ample` holds all conversations in HBM. DRAM holds IN_DRAM conversations, in the arm `disk` none. codec:
    setting cache.codec of the arm CODED."""
    size = shape.final_tokens
    few = {"cache.hbm_tokens": IN_HBM * size + BLOCK}
    hierarchy = {**few, "cache.dram_gib": IN_DRAM * size * kv_bytes_per_token(model) / (1 << 30)}
    tiers: dict[str, dict[str, Any]] = {
        "attentionstore": hierarchy,
        "disk": {**few, "cache.dram_gib": 0},
        "ample": {"cache.hbm_tokens": 2 * shape.conversations * size},
        "prefix": few,
        "recompute": few,
        CODED: {**hierarchy, "cache.codec": codec},
    }
    return {
        "model.source": model, "model.dtype": "bfloat16", "model.max_context": IN_HBM * size,
        "cache.mode": arm if arm in ("prefix", "recompute") else "attentionstore", "cache.disk_dir": directory / arm,
        **tiers[arm],
    }  # fmt: skip


class Writer:
    """A writer of messages that consist of random words."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)

    def message(self, num_tokens: int) -> str:
        """Return a message of about `num_tokens` tokens, at least one word."""
        words: list[str] = []
        while True:
            words += self._rng.choices(WORDS, k=max(1, num_tokens // 8))
            encoding = self._tokenizer.encode(" ".join(words), add_special_tokens=False)
            if len(encoding.ids) >= num_tokens:
                text = " ".join(words)
                return text[: encoding.offsets[max(0, num_tokens - 1)][1]]


class Rotation:
    """A player of conversations that take turns on servers. It keeps all samples."""

    def __init__(self, tokenizer: Tokenizer, shape: Shape, seed: int) -> None:
        self._tokenizer, self._shape, self._seed = tokenizer, shape, seed
        self._conversations: dict[tuple[str, int, int], Conversation] = {}
        self._template_tokens: dict[str, int] = {}
        self.samples: list[Sample] = []

    async def warm_up(self, server: ServerProcess, arm: str) -> None:
        """Send a first request, so that later ones do not pay for what the process sets up. It also shows how many
        tokens the template adds."""
        http = Http(server.url, silence_s=SILENCE_S)
        answer = await ask_stamped(
            http, server.model["id"], [{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0,
            session_id="warm-up",
        )  # fmt: skip
        http.close()
        self._template_tokens[arm] = answer.prompt_tokens - len(self._tokenizer.encode("Hello").ids)

    async def leg(self, server: ServerProcess, arm: str, pass_: int, turn: int, tell: Callable[[], None]) -> None:
        """Play one turn of every conversation on one server. tell: called after each turn. Raises what the client
        raises."""
        http = Http(server.url, silence_s=SILENCE_S)
        try:
            for number in range(self._shape.conversations):
                await self._turn(http, server, arm, pass_, number, turn)
                tell()
        finally:
            http.close()

    async def _turn(self, http: Http, server: ServerProcess, arm: str, pass_: int, number: int, turn: int) -> None:
        shape = self._shape
        conversation = self._conversations.setdefault(
            (arm, pass_, number), Conversation(f"conversation-{pass_}-{number}")
        )
        # The same on all servers.
        writer = Writer(self._tokenizer, seed=hash((self._seed, pass_, number, turn)))
        wanted = shape.first_tokens if turn == 1 else shape.turn_tokens - 1
        text = writer.message(wanted - self._template_tokens[arm])
        messages = [*conversation.messages, {"role": "user", "content": text}]
        answer = await ask_stamped(
            http, server.model["id"], messages, max_tokens=shape.answer_tokens, temperature=0, ignore_eos=True,
            session_id=conversation.session_id,
        )  # fmt: skip
        history = max(0, conversation.length - 1)  # the token sampled last was not computed
        conversation.messages = [*messages, {"role": "assistant", "content": answer.text}]
        conversation.length = answer.prompt_tokens + answer.completion_tokens
        self.samples.append(sample_of(answer, arm, pass_, number, turn, history))

    def forget(self, server: ServerProcess, pass_: int) -> None:
        """Delete from a server the conversations of a pass."""
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for number in range(self._shape.conversations):
                http.delete(f"/v1/sessions/conversation-{pass_}-{number}")


def sample_of(answer: StreamedAnswer, arm: str, pass_: int, number: int, turn: int, history: int) -> Sample:
    tokens = {tier: int(answer.x_cache.get(f"{tier}_tokens", 0)) for tier in TIERS}
    return Sample(
        arm, pass_, number, turn, answer.ttft_ms, answer.tpot_ms, answer.prompt_tokens,
        min(history, answer.prompt_tokens), tokens,
    )  # fmt: skip


def spread(values: list[float]) -> dict[str, float]:
    found = {"p50": median(values), "p90": percentile(values, 0.9), "min": min(values), "max": max(values)}
    return {name: round(value, 2) for name, value in found.items()}


def describe(samples: list[Sample]) -> dict[str, Any]:
    """Return figures of samples that belong together, such as those of one turn on one server."""
    history = sum(s.history_tokens for s in samples)
    found = sum(min(s.history_tokens, s.prompt_tokens - s.tokens["computed"]) for s in samples)
    return {
        "samples": len(samples),
        "ttft_ms": spread([s.ttft_ms for s in samples]),
        "tpot_ms_p50": round(median(s.tpot_ms for s in samples), 2),
        "prompt_tokens_p50": median(s.prompt_tokens for s in samples),
        "tokens": {tier: sum(s.tokens[tier] for s in samples) for tier in TIERS},
        "reused_of_history": round(found / history, 4) if history else None,
    }


def paired_ratio(samples: list[Sample], over: str, under: str, turn: int) -> dict[str, float] | None:
    """Return the TTFT of the arm `over` divided by that of `under` at one turn: figures of the ratio over all pairs
    (the same conversation on both), and the ratio of the medians. None if there are no pairs."""
    mine = {(s.pass_, s.conversation): s.ttft_ms for s in samples if (s.arm, s.turn) == (over, turn)}
    theirs = {(s.pass_, s.conversation): s.ttft_ms for s in samples if (s.arm, s.turn) == (under, turn)}
    pairs = [mine[key] / theirs[key] for key in mine if key in theirs]
    if not pairs:
        return None
    medians = median(mine[key] for key in mine if key in theirs) / median(theirs[key] for key in mine if key in theirs)
    return {
        "of_medians": round(medians, 4), "median": round(median(pairs), 4), "min": round(min(pairs), 4),
        "max": round(max(pairs), 4), "pairs": len(pairs),
    }  # fmt: skip


def summarize(samples: list[Sample], turns: int) -> dict[str, Any]:
    """Return everything that is reported of the samples, as plain values."""
    arms: dict[str, Any] = {}
    for arm in ARMS:
        mine = [s for s in samples if s.arm == arm]
        if arm == CODED and not mine:
            continue
        by_turn = {turn: [s for s in mine if s.turn == turn] for turn in range(1, turns + 2)}
        later = [s for s in mine if 2 <= s.turn <= turns]
        arms[arm] = {
            "by_turn": {str(turn): describe(some) for turn, some in by_turn.items() if some and turn <= turns},
            "later": describe(later) if later else None,
        }
    returning = {arm: some for arm in ARMS if (some := [s for s in samples if s.arm == arm and s.turn > turns])}
    return {
        "arms": arms,
        "ratios": {
            str(turn): {
                f"{over}/{under}": ratio
                for over in ("attentionstore", "disk", CODED)
                for under in ("recompute", "prefix", "ample")
                if (ratio := paired_ratio(samples, over, under, turn)) is not None
            }
            for turn in range(2, turns + 1)
        },
        "after_restart": {
            arm: {"first_ttft_ms": round(some[0].ttft_ms, 2), **describe(some)} for arm, some in returning.items()
        },
    }


def verdicts(summary: dict[str, Any], turns: int) -> dict[str, bool]:
    """Return claim -> whether it holds. turns: number of the last turn that is measured."""
    held = {}
    for under, most in TARGETS.items():
        ratio = summary["ratios"][str(turns)].get(f"attentionstore/{under}")
        if ratio is not None:
            held[f"turn {turns}: at most {most} x {under}"] = ratio["of_medians"] <= most
    coded, ample = (summary["arms"].get(arm, {}).get("later") for arm in (CODED, "ample"))
    if coded:
        held["coded: all of the history from DRAM"] = coded["reused_of_history"] == 1 and not coded["tokens"]["disk"]
    if coded and ample:
        ratio_of_later = coded["ttft_ms"]["p50"] / ample["ttft_ms"]["p50"]
        held[f"coded, later turns: at most {CODED_TARGET} x ample"] = ratio_of_later <= CODED_TARGET
    return held


def show(console: Console, summary: dict[str, Any]) -> None:
    turns = {arm: {turn: v["ttft_ms"]["p50"] for turn, v in values["by_turn"].items()}
             for arm, values in summary["arms"].items()}  # fmt: skip
    show_rows(console, "Time to first token by turn, p50, ms", turns)
    later = {arm: values["later"] for arm, values in summary["arms"].items() if values["later"] is not None}
    again = {f"{arm}, next turn": values for arm, values in summary["after_restart"].items()}
    show_rows(console, "Later turns, and the turn after a restart", later | again)
    for turn, ratios in summary["ratios"].items():
        console.print(f"turn {turn}:", ", ".join(f"{name} {ratio['of_medians']:.3f}" for name, ratio in ratios.items()))


def legs(passes: int, turns: int, arms: Sequence[str]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Yield (pass, turn, the arms in order). The first arm of a leg is the last one of the next leg."""
    for pass_ in range(passes):
        for turn in range(1, turns + 1):
            yield pass_, turn, turned(arms, pass_ * turns + turn)


def result_of(samples: list[Sample], shape: Shape, arguments: Namespace) -> dict[str, Any]:
    summary = summarize(samples, shape.turns)
    return {
        "workload": {
            "conversations": shape.conversations, "first_tokens": shape.first_tokens,
            "turn_tokens": shape.turn_tokens, "answer_tokens": shape.answer_tokens,
            "final_tokens": shape.final_tokens, "turns": shape.turns,
            "in_hbm": IN_HBM, "in_dram": IN_DRAM, "codec": arguments.codec,
        },
        "held": verdicts(summary, shape.turns),
        **summary,
    }  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    """Play all passes and the turn after a restart, and return the result. Raises ServerFailed, and what the client
    raises."""
    options = run.arguments
    shape = Shape(options.conversations, options.first_tokens, 140, options.answer_tokens, TURNS)
    model, passes = str(run.random_model()), options.passes
    arms = [arm for arm in options.arms if arm != CODED or options.codec != "raw"]
    rotation = Rotation(Tokenizer.from_file(f"{model}/tokenizer.json"), shape, seed=0)
    settings = {arm: settings_of(arm, model, shape, run.directory, options.codec) for arm in arms}
    run.expect(
        (passes * shape.turns * len(arms) + sum(arm in RETURNING for arm in arms)) * shape.conversations, "turns"
    )
    with ExitStack() as stack, ExitStack() as first:
        servers = {
            arm: (first if arm == "attentionstore" else stack).enter_context(serve(arm, settings[arm])) for arm in arms
        }
        for arm, server in servers.items():
            asyncio.run(rotation.warm_up(server, arm))
        for pass_, turn, order in legs(passes, shape.turns, arms):
            for arm in order:
                asyncio.run(rotation.leg(servers[arm], arm, pass_, turn, run.advance))
            if turn == shape.turns:
                run.keep(result_of(rotation.samples, shape, options))
                for arm in arms if pass_ < passes - 1 else ():
                    rotation.forget(servers[arm], pass_)
        if "attentionstore" in arms:
            first.close()
            servers["attentionstore"] = stack.enter_context(serve("attentionstore", settings["attentionstore"]))
            # Not the model's first computation, but the first turn of a known conversation.
            asyncio.run(rotation.warm_up(servers["attentionstore"], "attentionstore"))
            for arm in (arm for arm in RETURNING if arm in arms):
                asyncio.run(rotation.leg(servers[arm], arm, passes - 1, shape.turns + 1, run.advance))
    return result_of(rotation.samples, shape, options)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--passes", type=int, default=3, help="a pass is 8 pairs of every turn")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--first-tokens", type=int, default=1000)
    parser.add_argument("--answer-tokens", type=int, default=100)
    parser.add_argument("--codec", default="raw", help="of the arm `coded`, which there is with another one than raw")


def last_turn(over: str, under: str) -> Callable[[Result], float | None]:
    """Return a function that reads from a result the ratio of medians of `over` to `under`, at the last turn."""

    def read(result: Result) -> float | None:
        ratios: dict[str, dict[str, float]] = list(result["ratios"].values())[-1]
        return ratios[f"{over}/{under}"]["of_medians"] if f"{over}/{under}" in ratios else None

    return read


EXPERIMENT = Experiment(
    name="hierarchy", about=__doc__, measure=measure, show=show, options=options, arms=ARMS, takes_model=True,
    quick=Quick(
        options={"passes": 1, "answer_tokens": 24, "arms": ["attentionstore", "ample", "recompute"]},
        figures=[
            Figure("TTFT at turn 4, x recompute", last_turn("attentionstore", "recompute"), 1.6),
            Figure("TTFT at turn 4, x ample", last_turn("attentionstore", "ample"), 1.3),
        ],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
