"""Greedy text over the whole hierarchy, held against the same text without it: real servers, a model in fp32.

    python -m benchmarks.fidelity.equality --data DIR [--model smollm2] [--dtype bfloat16 --exact on]
    python -m benchmarks.fidelity.equality --data DIR --model smollm2 --dtype bfloat16 --exact on --weights q4
    python -m benchmarks.fidelity.equality --data DIR --model smollm2 --dtype bfloat16 --exact on --hbm-dtype int8

Both servers of a mode get the same user turns and their own answers back as history, so they see the same conversation
for as long as they say the same; a conversation ends at its first difference. Conversations go round, one turn each, so
that every history has left HBM by the time it is needed again. Where histories come back from:

    dram       HBM for one conversation and a bit, DRAM for all, no disk
    disk       the same HBM, no DRAM, the rest on disk
    mixed      two conversations in turns, HBM for one and a half, no DRAM: a part is still there, a part on disk
    restart    every conversation's turn, then the server is stopped and started on its directory, then the next turn
    kill       the same with SIGKILL to server and engine, a second after the last answer
    crowd      8 conversations at once, HBM for one, DRAM for ten blocks, the rest on disk
    rotation   8 conversations in turns, HBM for one, DRAM for two: most are on disk when the turn before theirs
               begins, and are fetched while it decodes, to DRAM and on to HBM
    cut-dram   `dram` with a small window: conversations outgrow it again and again, in an answer too
    cut-disk   the same with `disk`

The reference of contexts never cut is a server with `cache.mode` recompute. Cutting changes what a context is, so the
reference of the others is a server that keeps everything in HBM and cuts the same way (`cache.mode` prefix).

Held: no error; at least --turns returning turns (--cut-turns after a cut); every difference is a near-tie of the
reference, in at most 0.5 % of the turns; the same cuts; and the history did come from where the mode says. With
--exact on (`model.exact`): no difference at all, and the server says that it has proven it; of contexts never cut, for
what HBM keeps after a cut was rotated twice in the reference. The exit status says so.
"""

import asyncio
import gzip
import json
import random
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.harness.experiment import Experiment, Quick, Run, some_of
from benchmarks.harness.models import kv_bytes_per_token, model_directory, result_name
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import Message, StreamedAnswer, ask, client_of, first_difference
from benchmarks.harness.tables import show_rows
from reprise.cache.blocks.keys import BLOCK_TOKENS

MAX_NEAR_TIES = 0.005
MARKUP_TOKENS = 16  # bound of the chat markup between two messages
TIERS = ("hbm", "dram", "disk")
IDLE_S = 1.2  # before a server is killed
WINDOW, CUT_WINDOW = 640, 256


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to make a server lose KV from HBM between two turns, and the tiers that must then serve most of the
    history."""

    name: str
    settings: Mapping[str, str | int | float]
    round_of: int  # conversations that go round together
    from_tiers: tuple[str, ...]  # together they must serve most of the history
    from_each: bool = False  # whether each of them must serve some of it
    at_once: int = 1
    window: int = WINDOW
    max_tokens: int = 16
    between: str = ""  # restart | kill, between two rounds
    dram_blocks: int = 0  # what DRAM holds; 0: as the settings say

    @property
    def cuts(self) -> bool:
        return self.window == CUT_WINDOW

    def settings_for(self, bytes_per_token: int) -> dict[str, str | int | float]:
        # The least that a window may have: itself and one page.
        own = {**self.settings, "model.max_context": self.window, "cache.hbm_tokens": self.window + BLOCK_TOKENS}
        if self.dram_blocks:
            size = self.dram_blocks * BLOCK_TOKENS * bytes_per_token
            own["cache.dram_gib"] = 1.01 * size / (1 << 30)  # rounding must not cost a block
        return own


_DRAM = {"cache.dram_gib": 1, "cache.disk_gib": 0}
_DISK = {"cache.dram_gib": 0, "cache.disk_gib": 2}
_BOTH = {"cache.dram_gib": 0.25, "cache.disk_gib": 2}
_LITTLE = {"cache.disk_gib": 2}  # with DRAM for some blocks
MODES = (
    Mode("dram", _DRAM, round_of=24, from_tiers=("dram",)),
    Mode("disk", _DISK, round_of=24, from_tiers=("disk",)),
    Mode("mixed", _DISK, round_of=2, from_tiers=("hbm", "disk"), from_each=True, window=384),
    Mode("restart", _BOTH, round_of=60, from_tiers=("disk", "dram"), between="restart"),
    Mode("kill", _BOTH, round_of=60, from_tiers=("disk", "dram"), between="kill"),
    Mode("crowd", _LITTLE, round_of=24, from_tiers=("disk", "dram"), at_once=8, dram_blocks=10),
    Mode("rotation", _LITTLE, round_of=8, from_tiers=("dram", "hbm"), from_each=True, dram_blocks=27),
    Mode("cut-dram", _DRAM, round_of=12, from_tiers=("dram",), window=CUT_WINDOW, max_tokens=48),
    Mode("cut-disk", _DISK, round_of=12, from_tiers=("disk",), window=CUT_WINDOW, max_tokens=48),
)


@dataclass(slots=True)
class Conversation:
    dialogue: str
    user_turns: list[str]
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    tokens: int = 0  # length of the last turn's prompt and answer
    is_over: bool = False

    def next_messages(self) -> list[Message]:
        return [*self.messages, {"role": "user", "content": self.user_turns[self.turns]}]


@dataclass(slots=True)
class Tally:
    """The counts and differences of one mode."""

    turns: int = 0
    returning: int = 0  # turns with a history that count: after a cut where the mode is about cuts
    history_tokens: Counter[str] = field(default_factory=Counter)  # tier, or "computed" -> tokens
    miss_reasons: Counter[str] = field(default_factory=Counter)
    differences: list[dict[str, Any]] = field(default_factory=list)
    other_cuts: int = 0  # turns that the two servers cut differently
    truncated_tokens: int = 0
    restarts: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def share(self, *tiers: str) -> float:
        """Return the share of returning turns' history tokens that came from these tiers."""
        return sum(self.history_tokens[tier] for tier in tiers) / max(1, self.history_tokens.total())


def read_conversations(file: Path, opening_words: int) -> Iterator[Conversation]:
    """Yield conversations made of the file's dialogues, in random order and without end. Every utterance, by either
    speaker, is one turn of the user. The first turn joins as many utterances as it takes to have `opening_words`
    words."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rng = random.Random(0)
    while True:
        for row in rng.sample(rows, len(rows)):
            said = [turn["content"] for turn in row["turns"]]
            first = 1
            while first < len(said) and sum(len(text.split()) for text in said[:first]) < opening_words:
                first += 1
            yield Conversation(row["id"], [" ".join(said[:first]), *said[first:]])


class Arm:
    """A server that can be stopped or killed, and started again with the same state directory."""

    def __init__(self, name: str, settings: Mapping[str, str | int | float]) -> None:
        self._name, self._running, self._stack = name, ExitStack(), ExitStack()
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix=f"reprise-{name}-state-"))
        self._settings = {**settings, "cache.disk_dir": directory}
        self._start()

    def _start(self) -> None:
        self.server: ServerProcess = self._running.enter_context(serve(self._name, self._settings))
        self.client = client_of(self.server.url)

    async def again(self, how: str) -> None:
        """Stop the server and start it again. how: "restart", or "kill" to kill it first."""
        await self.client.close()
        if how == "kill":
            self.server.kill()
        self._running.close()
        self._start()

    async def ask(self, messages: list[Message], max_tokens: int, session_id: str) -> StreamedAnswer:
        return await ask(
            self.client, self.server.model["id"], messages, max_tokens=max_tokens, session_id=session_id,
            temperature=0, logprobs=True, top_logprobs=2,
        )  # fmt: skip

    def close(self) -> None:
        self._running.close()
        self._stack.close()


class Comparison:
    """A comparison of the texts of two servers: one in a mode, and a reference without the tiers of that mode."""

    def __init__(
        self, mode: Mode, tiered: Arm, reference: Arm, tokenizer: Tokenizer, on_returning: Callable[[], None]
    ) -> None:
        self.tally = Tally()
        self._mode, self._tiered, self._reference = mode, tiered, reference
        self._tokenizer, self._on_returning = tokenizer, on_returning

    async def run(self, conversations: Iterator[Conversation], returning: int) -> None:
        """Play conversations, some of them in turns, until `returning` turns with a history have been compared."""
        started = time.monotonic()
        group = 0
        while self.tally.returning < returning and not self.tally.errors:
            active = list(islice(conversations, self._mode.round_of))
            group += 1
            while active and self.tally.returning < returning and not self.tally.errors:
                if self._mode.between and active[0].turns:
                    if self._mode.between == "kill":
                        await asyncio.sleep(IDLE_S)
                    await self._tiered.again(self._mode.between)
                    self.tally.restarts += 1
                for start in range(0, len(active), self._mode.at_once):
                    if self.tally.errors:
                        break
                    some = active[start : start + self._mode.at_once]
                    await asyncio.gather(*(self._turn(conversation, group) for conversation in some))
                active = [c for c in active if self._goes_on(c)]
        for arm in (self._tiered, self._reference):
            await arm.client.close()
        self.tally.seconds = round(time.monotonic() - started, 1)

    def _goes_on(self, conversation: Conversation) -> bool:
        if conversation.is_over or conversation.turns >= len(conversation.user_turns):
            return False
        message = len(self._tokenizer.encode(conversation.user_turns[conversation.turns]).ids)
        needed = MARKUP_TOKENS + message + self._mode.max_tokens
        # A turn that does not even fit an empty window would be refused; one that overflows a full one is cut.
        return needed + (0 if self._mode.cuts else conversation.tokens) < self._mode.window

    async def _turn(self, conversation: Conversation, group: int) -> None:
        messages, name = conversation.next_messages(), f"{group}.{conversation.dialogue}"
        pair = await asyncio.gather(
            self._tiered.ask(messages, self._mode.max_tokens, name),
            self._reference.ask(messages, self._mode.max_tokens, name),
            return_exceptions=True,
        )
        tiered, reference = pair
        if isinstance(tiered, BaseException) or isinstance(reference, BaseException):
            self.tally.errors += [f"{name}: {one!r}" for one in pair if isinstance(one, BaseException)]
            conversation.is_over = True
            return
        conversation.turns += 1
        self._count(conversation, tiered, reference)
        conversation.messages = [*messages, {"role": "assistant", "content": tiered.text}]
        conversation.tokens = tiered.prompt_tokens + tiered.completion_tokens

    def _count(self, conversation: Conversation, tiered: StreamedAnswer, reference: StreamedAnswer) -> None:
        """Take down a turn that both have answered. A conversation ends at its first difference."""
        difference = first_difference(expected=reference, got=tiered)
        conversation.is_over = difference is not None
        tally, cache = self.tally, tiered.x_cache
        tally.turns += 1
        cut = int(cache["truncated_tokens"])
        tally.other_cuts += cut != reference.x_cache["truncated_tokens"]
        if conversation.turns > 1 and (cut or not self._mode.cuts):
            tally.returning += 1
            tally.truncated_tokens = tally.truncated_tokens + cut
            found = {tier: int(cache[f"{tier}_tokens"]) for tier in TIERS}
            tally.history_tokens.update(found)
            tally.history_tokens["computed"] += max(0, int(cache["history_tokens"]) - sum(found.values()))
            tally.miss_reasons.update(cache["miss_reasons"])
            self._on_returning()
        if difference is not None:
            where = {"dialogue": conversation.dialogue, "turn": conversation.turns}
            tally.differences.append({**where, **difference.as_row(), "x_cache": cache})


def plan(wanted: list[str], turns: int, cut_turns: int) -> dict[str, int]:
    """Return how many returning turns each mode has to compare: equal shares of `turns`, or of `cut_turns` for the
    modes in which the window overflows."""
    modes = [mode for mode in MODES if mode.name in wanted]
    totals = {False: turns, True: cut_turns}
    counts = Counter(mode.cuts for mode in modes)
    return {mode.name: -(-totals[mode.cuts] // counts[mode.cuts]) for mode in modes}


def verdicts(tallies: Mapping[str, Tally], planned: Mapping[str, int], exact: bool) -> dict[str, bool]:
    """Return claim -> whether it holds. exact: differences at near-ties count as differences too."""
    differences = [d for tally in tallies.values() for d in tally.differences]
    near_ties = sum(d["excused"] for d in differences)
    held = {
        "no errors": not any(tally.errors for tally in tallies.values()),
        "as many returning turns as asked for": all(
            mode in tallies and tallies[mode].returning >= count for mode, count in planned.items()
        ),
        "identical text": not differences if exact else near_ties == len(differences),
        f"near-ties in at most {MAX_NEAR_TIES:.1%} of the turns": near_ties
        <= MAX_NEAR_TIES * sum(tally.turns for tally in tallies.values()),
        "the same cuts": not any(tally.other_cuts for tally in tallies.values()),
    }
    for mode in MODES:
        if mode.name in tallies:
            where = " and ".join(mode.from_tiers)
            each = all(tallies[mode.name].share(tier) > 0.1 for tier in mode.from_tiers) or not mode.from_each
            held[f"{mode.name}: most history from {where}"] = each and tallies[mode.name].share(*mode.from_tiers) > 0.5
    return held


def summarize(tallies: Mapping[str, Tally]) -> list[dict[str, Any]]:
    rows = []
    for name, tally in tallies.items():
        total = max(1, tally.history_tokens.total())
        shares = {tier: round(count / total, 4) for tier, count in tally.history_tokens.items()}
        near_ties = sum(d["excused"] for d in tally.differences)
        row = {field.name: getattr(tally, field.name) for field in fields(tally)}
        rows.append({"mode": name, **row, "near_ties": near_ties, "history_shares": shares})
    return rows


def show(console: Console, result: dict[str, Any]) -> None:
    show_rows(console, "Greedy text against its reference", [*map(_shown, result["modes"])])
    for row in result["modes"]:
        for entry in (*row["differences"], *row["errors"]):
            console.print(row["mode"], entry)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    counts = {name: len(row[name]) for name in ("differences", "errors")}
    fields_ = ("mode", "returning", "near_ties", "history_shares", "truncated_tokens", "restarts", "seconds")
    return {name: row[name] for name in fields_} | counts


def measure(run: Run) -> dict[str, Any]:
    """Compare all modes and return the result. The result is written after every mode."""
    arguments, exact = run.arguments, run.arguments.exact == "on"
    wanted = arguments.modes or [mode.name for mode in MODES if not (mode.cuts and exact)]
    planned = plan(wanted, arguments.turns, arguments.cut_turns)
    # Sums depend on the number of threads; and so the two servers of a mode can work at the same time.
    settings: dict[str, str | int | float] = {
        "model.source": str(arguments.model), "model.dtype": arguments.dtype, "model.exact": arguments.exact,
        "model.weights": arguments.weights, "cache.hbm_dtype": arguments.hbm_dtype, "engine.threads": 1,
    }  # fmt: skip
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    kv_bytes = kv_bytes_per_token(arguments.model, 4 if arguments.dtype == "float32" else 2)
    modes = [mode for mode in MODES if mode.name in wanted]
    tallies: dict[str, Tally] = {}
    result: dict[str, Any] = {}
    for mode in modes:
        run.expect(planned[mode.name], mode.name)
        own = {**settings, **mode.settings_for(kv_bytes)}
        apart: dict[str, str | int | float] = {
            **settings, "model.max_context": mode.window, "cache.mode": "prefix" if mode.cuts else "recompute",
            "cache.hbm_tokens": min(65_536, (1 << 30) // kv_bytes),
        }  # fmt: skip
        with ExitStack() as stack:
            arms = []
            for name, arm_settings in ((f"equality-{mode.name}", own), ("equality-reference", apart)):
                arms.append(Arm(name, arm_settings))
                stack.callback(arms[-1].close)
            model = arms[0].server.model
            comparison = Comparison(mode, arms[0], arms[1], tokenizer, run.advance)
            tallies[mode.name] = comparison.tally
            words = 60 if mode.name == "mixed" else 0  # two short conversations would both fit
            conversations = read_conversations(arguments.data / "dialogues/topical_chat.jsonl.gz", words)
            asyncio.run(comparison.run(conversations, planned[mode.name]))
        held = verdicts(tallies, planned, exact)
        if exact:
            held["proven at start"] = bool(model["exact"]["proven"])
        result = {
            "model": model, "settings": settings,
            "modes_settings": {one.name: one.settings_for(kv_bytes) for one in modes}, "planned": planned,
            "held": held, "modes": summarize(tallies),
        }  # fmt: skip
        run.keep(result)
    return result


def options(parser: ArgumentParser) -> None:
    names = [mode.name for mode in MODES]
    parser.add_argument("--data", type=Path, required=True, help="directory with dialogues/topical_chat.jsonl.gz")
    parser.add_argument("--model", type=model_directory, default="bundled", help="bundled, smollm2, or a directory")
    parser.add_argument("--turns", type=int, default=2100, help="returning turns of contexts never cut, over all modes")
    parser.add_argument("--cut-turns", type=int, default=540, help="returning turns of cut contexts, over both modes")
    parser.add_argument(
        "--modes", type=some_of(names), help="comma-separated; default: all, with --exact those never cut"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and KV")
    parser.add_argument("--weights", choices=("auto", "bf16", "q8", "q4"), default="auto", help="model.weights")
    parser.add_argument("--hbm-dtype", choices=("auto", "int8"), default="auto", help="cache.hbm_dtype, of both arms")
    parser.add_argument("--exact", choices=("off", "on"), default="off", help="model.exact; on: nothing is excused")


def file_name(words: Namespace) -> str:
    name = "equality_exact" if words.exact == "on" else "equality"
    name += "" if words.weights == "auto" else f"_{words.weights}"
    name += "" if words.hbm_dtype == "auto" else f"_{words.hbm_dtype}"
    return result_name(name, words.model)


EXPERIMENT = Experiment(
    name=file_name,
    about=__doc__, measure=measure, show=show, options=options,
    quick=Quick(options={"turns": 40, "cut_turns": 0, "modes": ["disk", "crowd"]}),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
