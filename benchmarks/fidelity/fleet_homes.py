"""Whether turns come home: three replicas behind two gateways that share no memory. Real processes, the bundled model.

    python -m benchmarks.fidelity.fleet_homes [--conversations 150]

What the fleet can do is measured first, with many conversations and no pauses. Then conversations begin by Poisson at
half of that rate, and every request goes to the other gateway than the one before it. Half of the conversations are
named by their clients, the others are known by their messages alone. When all have ended, both gateways are killed and
started anew, and every conversation has one more turn.

The conversations at half load come in two parts. The first calibrates the simulator (`reprise.loadgen.fleet`): what
steps cost, which replicas measure themselves, and what it does not know of a request (templates, the ways to the
replica and back): the median of TTFT less the replica's own times. It plays the conversations of the second part.

Held: no error; at least 95 % of the returning turns are at home, named or not, before and after the restart; the
simulated TTFT p50 is within 25 % of the real one.
"""

import asyncio
import itertools
import random
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.fleet.chat_stream import ChatStream, StreamFailed
from benchmarks.fleet.processes import FleetProcesses, fleet_processes
from benchmarks.harness.experiment import Experiment, Figure, Quick, Result, Run
from benchmarks.harness.measures import HEARTBEAT_S, ratio, rounded
from benchmarks.harness.servers import ServerProcess
from reprise.loadgen.fleet.simulation import FleetConfig, FleetSimulation
from reprise.loadgen.percentile import percentile
from reprise.loadgen.sim.calibrate import ServedModel, machine
from reprise.loadgen.sim.machine import Config, Machine
from reprise.loadgen.workloads import filler_text
from reprise.loadgen.workloads.workload import Conversation, ConversationShape, Turn, poisson

NAMES = ("a", "b", "c")
GATEWAYS = 2
SHAPE = ConversationShape(turns=4, prompt_tokens=60, answer_tokens=50, think_s=2.0, spread=0.2)
PARTS = ("full", "calibrating", "half", "restarted")
AT_HALF = ("calibrating", "half")
LOAD = 0.5
AT_ONCE = 12  # conversations, to find what the fleet can do
LEAST_HOME, MOST_OFF = 0.95, 0.25
# Before a replica has measured how fast its KV moves; nothing moves far here.
LINKS = {"dram_to_hbm": 1e9, "disk_to_dram": 5e8}
REDIS_BYTES_PER_S = 1e9
CHUNK_TOKENS = 256  # engine.step_tokens on CPU


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn."""

    part: str  # of `PARTS`
    conversation: str
    turn: int  # from 0
    is_named: bool
    at_home: bool | None  # None: the first turn
    route: str
    sent_s: float  # since the part began
    ttft_ms: float
    prompt_tokens: int
    answer_tokens: int
    outside_ms: float  # of `ttft_ms`: what the replica's own times do not explain


class Client:
    """Sends one conversation's turns."""

    def __init__(self, players: "Players", script: Conversation) -> None:
        self._players, self.script = players, script
        self._rng = random.Random(script.session_id)
        self._is_named = self._rng.random() < 0.5
        self._messages: list[dict[str, str]] = []
        self._home = ""
        self.samples: list[Sample] = []

    async def play(self, part: str, turns: Sequence[Turn], began_s: float) -> None:
        """Send turns, each after its think time. The conversation ends at an error."""
        for turn in turns:
            await asyncio.sleep(turn.think_s)
            self._messages.append({"role": "user", "content": filler_text.words(self._rng, turn.prompt_tokens)})
            body = {"messages": self._messages, "max_tokens": turn.answer_tokens, "temperature": 0, "ignore_eos": True}
            headers = {"x-session-id": self.script.session_id} if self._is_named else {}
            stream = ChatStream(self._players.next_url(), body, headers)
            try:
                await stream.run()
            except (StreamFailed, httpx.HTTPError) as error:
                self._players.errors.append(f"{part}, turn {len(self.samples) + 1}: {error!r}")
                return
            self._messages.append({"role": "assistant", "content": stream.text})
            self.samples.append(self._sample(part, stream, began_s))
            self._home = stream.x_cache["route"]["replica"]

    def _sample(self, part: str, stream: ChatStream, began_s: float) -> Sample:
        ttft_ms = 1e3 * stream.ttft_s
        inside_ms = sum(stream.timings[name] for name in ("queue_ms", "load_ms", "prefill_ms"))
        return Sample(
            part=part,
            conversation=self.script.session_id,
            turn=len(self.samples),
            is_named=self._is_named,
            at_home=stream.x_cache["route"]["replica"] == self._home if self._home else None,
            route=stream.route["route"],
            sent_s=round(stream.sent_s - began_s, 4),
            ttft_ms=round(ttft_ms, 2),
            prompt_tokens=stream.usage["prompt_tokens"],
            answer_tokens=stream.usage["completion_tokens"],
            outside_ms=round(ttft_ms - inside_ms, 2),
        )


class Players:
    """All clients of a fleet; each request goes to the next gateway."""

    def __init__(self, fleet: FleetProcesses) -> None:
        self._urls = itertools.cycle(gateway.url for gateway in fleet.gateways)
        self.errors: list[str] = []

    def next_url(self) -> str:
        return next(self._urls)

    async def flat_out(self, count: int) -> tuple[list[Sample], float]:
        """Play conversations without pauses, some at once. Returns their turns, and turns per second."""
        scripts = iter(poisson(rng=random.Random("full"), count=count, rate_per_s=1.0, shape=SHAPE))
        began_s = time.perf_counter()
        samples: list[Sample] = []

        async def one_after_the_other() -> None:
            for script in scripts:
                client = Client(self, script)
                await client.play("full", [Turn(t.prompt_tokens, t.answer_tokens, 0.0) for t in script.turns], began_s)
                samples.extend(client.samples)

        await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
        return samples, len(samples) / (time.perf_counter() - began_s)

    async def half(self, part: str, clients: Sequence[Client]) -> None:
        """Play conversations when they are due."""
        began_s = time.perf_counter()

        async def due(client: Client) -> None:
            await asyncio.sleep(client.script.start_s)
            await client.play(part, client.script.turns, began_s)

        await asyncio.gather(*map(due, clients))

    async def once_more(self, clients: Sequence[Client], rate_per_s: float) -> None:
        """Play one more turn of each conversation, by Poisson."""
        rng = random.Random("restarted")
        began_s = time.perf_counter()
        start_s = 0.0
        playing = []
        for client in clients:
            if client.samples:
                start_s += rng.expovariate(rate_per_s)
                turn = Turn(SHAPE.prompt_tokens, SHAPE.answer_tokens, start_s)
                playing.append(client.play("restarted", [turn], began_s))
        await asyncio.gather(*playing)


def machine_of(replica: ServerProcess) -> Machine:
    """Derive a simulated replica from what a real one has measured. Raises ValueError."""
    served = replica.model
    model = ServedModel(
        name=served["id"], kv_bytes_per_token=served["cache"]["kv_bytes_per_token"], window=served["max_model_len"],
        hbm_tokens=served["cache"]["hbm_tokens"], num_layers=served["num_layers"], max_seqs=served["max_seqs"],
    )  # fmt: skip
    text = httpx.get(f"{replica.url}/metrics", timeout=10).raise_for_status().text
    return machine(text, model, links=LINKS)


def simulated_ttfts_ms(clients: Sequence[Client], of: Machine) -> list[float]:
    """Play the conversations as they were on simulated replicas. Returns the TTFTs of their turns."""
    scripts = []
    for client in clients:
        samples = [sample for sample in client.samples if sample.part == "half"]
        turns, context = [], 0
        for sample, turn in zip(samples, client.script.turns, strict=False):
            turns.append(Turn(max(1, sample.prompt_tokens - context), sample.answer_tokens, turn.think_s))
            context = sample.prompt_tokens + sample.answer_tokens
        if turns:
            scripts.append(Conversation(client.script.session_id, "", client.script.start_s, tuple(turns)))
    fleet = FleetSimulation(
        scripts,
        FleetConfig(
            replicas=len(NAMES), policy="guarded", machine=of, gateways=GATEWAYS, redis_bytes_per_s=REDIS_BYTES_PER_S,
            server=Config(granule_tokens=32, recompute_if_faster=True, chunk_tokens=CHUNK_TOKENS),
        ),
    )  # fmt: skip
    fleet.run()
    return [1e3 * fleet.ttft_s(record) for record in fleet.records]


def result_of(samples: Sequence[Sample], errors: list[str]) -> dict[str, Any]:
    """Figures of the turns at half load and after the restart."""
    shares: dict[str, dict[str, Any]] = {}
    for (title, parts), is_named in itertools.product(
        {"half load": AT_HALF, "new gateways": ("restarted",)}.items(), (True, False)
    ):
        home = [one.at_home for one in samples if one.part in parts and one.is_named == is_named and one.turn]
        shares[f"{title}, {'named' if is_named else 'by messages'}"] = {
            "turns": len(home), "at_home": ratio(sum(map(bool, home)), len(home))
        }  # fmt: skip
    return {
        "homes": shares,
        "ttft_ms": {
            part: percentile([one.ttft_ms for one in samples if one.part == part], 0.5)
            for part in dict.fromkeys(one.part for one in samples)
        },
        "errors": errors,
    }


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    with fleet_processes(run.directory, *NAMES, gateways=GATEWAYS, settings={"cache.redis_gib": 0.5}) as fleet:
        players = Players(fleet)
        run.expect(4, "flat out")
        full, turns_per_s = asyncio.run(players.flat_out(arguments.full))
        run.advance()
        rate_per_s = LOAD * turns_per_s / SHAPE.turns
        clients = {
            part: [
                Client(players, replace(script, session_id=f"{part}-{script.session_id}"))
                for script in poisson(
                    rng=random.Random(f"{part}/{arguments.seed}"), count=arguments.conversations, rate_per_s=rate_per_s,
                    shape=SHAPE,
                )
            ]
            for part in AT_HALF
        }  # fmt: skip
        run.describe("at half load, calibrating")
        asyncio.run(players.half("calibrating", clients["calibrating"]))
        time.sleep(HEARTBEAT_S)
        machines = [machine_of(replica) for replica in fleet.replicas.values()]
        run.advance()
        run.describe("at half load")
        asyncio.run(players.half("half", clients["half"]))
        run.advance()
        run.describe("with new gateways")
        for gateway in fleet.gateways:
            gateway.stop()
        for gateway in fleet.gateways:
            gateway.start()
        fleet.wait_for(len(NAMES))
        everybody = [client for part in AT_HALF for client in clients[part]]
        asyncio.run(players.once_more(everybody, LOAD * turns_per_s))
        run.advance()
    samples = [*full, *(sample for client in everybody for sample in client.samples)]
    result = result_of(samples, players.errors)
    outside_ms = percentile([one.outside_ms for one in samples if one.part == "calibrating"], 0.5)
    simulated = sorted(ttft for of in machines for ttft in simulated_ttfts_ms(clients["half"], of))
    real_ms, simulated_ms = result["ttft_ms"]["half"], percentile(simulated, 0.5) + outside_ms
    held = {"no errors": not players.errors}
    held |= {
        f"{part}: at least {LEAST_HOME:.0%} at home": share["at_home"] is not None and share["at_home"] >= LEAST_HOME
        for part, share in result["homes"].items()
    }
    held[f"simulated TTFT p50 within {MOST_OFF:.0%}"] = abs(simulated_ms / real_ms - 1) <= MOST_OFF
    return {
        "held": held, "turns_per_s": rounded(turns_per_s, 3), "conversations_per_s": rounded(rate_per_s, 4), **result,
        "simulated": {
            "ttft_ms": rounded(simulated_ms), "outside_ms": rounded(outside_ms),
            "machines": [asdict(of) for of in machines],
        },
        "turns": [asdict(sample) for sample in samples],
    }  # fmt: skip


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="Returning turns", title_justify="left")
    for heading in ("which", "turns", "at home"):
        table.add_column(heading, justify="right")
    for which, share in result["homes"].items():
        table.add_row(which, str(share["turns"]), "-" if share["at_home"] is None else f"{share['at_home']:.1%}")
    console.print(table)
    console.print(
        f"flat out {result['turns_per_s']} turns a second; TTFT p50 at half load {result['ttft_ms']['half']:.1f} ms, "
        f"simulated {result['simulated']['ttft_ms']:.1f} ms",
        highlight=False,
    )
    for error in result["errors"][:20]:
        console.print(error)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=100, help="of each part at half load")
    parser.add_argument("--full", type=int, default=60, help="conversations without pauses, to find the rate")
    parser.add_argument("--seed", type=int, default=0)


def least_at_home(result: Result) -> float | None:
    return min((share["at_home"] for share in result["homes"].values() if share["turns"]), default=None)


EXPERIMENT = Experiment(
    name="fleet_homes", about=__doc__, measure=measure, show=show, options=options,
    quick=Quick(
        options={"conversations": 6, "full": 12},
        holds=False,  # the rate comes from seconds of a shared machine
        figures=[Figure("returning turns at home, least", least_at_home, 1.1, more_is_better=True)],
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
