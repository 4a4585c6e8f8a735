"""What becomes of a fleet whose Redis is in trouble: texts, errors, times, and how soon all is well again.

    python -m benchmarks.fidelity.fleet_faults [--turns 3000] [--hold-s 10]

Two replicas and a gateway reach two Redis, the directory and the one with KV, through proxies. Clients hold
conversations without a pause; every third turn is moved to the other replica, so that KV out of Redis is wanted all the
time. One fault after the other comes, stays for `--hold-s` or longer, and goes:

    killed          both Redis; the directory comes back with what it has on disk, the other one empty
    stopped         both Redis, by SIGSTOP
    flushed         the directory; then, as a fault of its own, the KV
    full            likewise: no memory for another key
    slow            every reply comes 200 ms late
    narrow          1 MB/s to each process
    reset           connections break in the middle of replies
    locked out      another password
    bits flipped    in extents, header and KV alike
    cut short       a field of every extent
    evicting        KV has half the memory that it needs
    empty restart   of both Redis
    partition       one replica is cut off from both Redis

Beside it stands the same fleet without Redis (both are stopped after the gateway has seen the replicas), whose turns
change their replica when the others do. It is asked the same, turn by turn.

Held: no error and, in fp32, no text that is not that of a single server without Redis; TTFT p95 at most 1.25 times that
of the fleet without Redis; all three processes use Redis again 5 s after a fault, and after a flush the directory has
the heads of all sessions again within 10 s. Conversations of which two tokens are almost equally likely are left out.
"""

import asyncio
import random
import secrets
import shutil
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.fleet.chat_stream import ChatStream, StreamFailed
from benchmarks.fleet.cuttable_proxy import CuttableProxy, Faults, cuttable_proxy
from benchmarks.fleet.processes import READY_S, SMALL, FleetProcesses, fleet_processes
from benchmarks.harness.experiment import Experiment, Quick, Result, Run
from benchmarks.harness.measures import ratio, rounded
from benchmarks.harness.redis_server import RedisServer
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import NEAR_TIE, Message, ask, client_of
from benchmarks.speed.hierarchy import WORDS
from reprise.loadgen.percentile import percentile

ARMS = ("redis", "without")
REPLICAS = ("a", "b")
FIRST_WORDS, LATER_WORDS, ANSWER_TOKENS, TURNS_OF_A_TALK = 100, 8, 12, 4
MOVED = 1 / 3  # of the turns after the first
THINK_S = 0.3  # between two turns of a client, on average
AGAIN_S = 0.25  # between two blows of a fault that strikes again and again
FLIPS = 100  # of one blow
KV_KEYS, HEADS, BEATEN = "r1:k:*", "r1:s:*", "r1:ma"
MOST_TTFT, RECOVERED_S, HEADS_S, LEAST_FLIPS = 1.25, 5.0, 10.0, 1000
GIVE_UP_S = 60.0


class Stores:
    """The two Redis of a fleet, and the proxies through which its processes reach them."""

    def __init__(self) -> None:
        self.proxies: dict[str, tuple[CuttableProxy, CuttableProxy]] = {}  # process -> to the directory, to the KV
        self.directory: Any = None  # clients; those of redis do not say whether they are asynchronous
        self.kv: Any = None
        self.flipped = self.cut_short = 0
        self._servers: tuple[RedisServer, ...] = ()
        self._keepers: list[Any] = []
        self._not_ready: tuple[type[Exception], ...] = ()
        self._rng = random.Random(0)

    def ways(self, stack: ExitStack) -> Callable[[str, RedisServer, RedisServer], dict[str, Any]]:
        """Return what gives a process its own way to both."""

        def through_proxies(name: str, directory: RedisServer, kv: RedisServer) -> dict[str, Any]:
            made = [stack.enter_context(cuttable_proxy(store.socket)) for store in (directory, kv)]
            self.proxies[name] = made[0], made[1]
            return {"fleet.redis_url": made[0].url, "cache.redis_url": made[1].url}

        return through_proxies

    def take(self, fleet: FleetProcesses) -> None:
        """Begin with the Redis of a fleet that was started."""
        import redis

        self._servers = fleet.redis, fleet.kv
        paths = [str(server.socket) for server in self._servers]
        self.directory, self.kv = (redis.Redis(unix_socket_path=path) for path in paths)
        # One connection each that was there before the password.
        self._keepers = [redis.Redis(unix_socket_path=path, single_connection_client=True) for path in paths]
        self._not_ready = (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError)

    def close(self) -> None:
        for client in (self.directory, self.kv, *self._keepers):
            client.close()

    # --- what befalls them --------------------------------------------------------------------------------------------

    def kill(self) -> None:
        for server in self._servers:
            server.stop()

    def start(self) -> None:
        """Return when both answer."""
        for server, client in zip(self._servers, (self.directory, self.kv), strict=True):
            server.start()
            while not self._answers(client):
                time.sleep(0.02)

    def _answers(self, client: Any) -> bool:
        try:
            return bool(client.ping())
        except self._not_ready:
            return False

    def restart_empty(self) -> None:
        self.kill()
        for server in self._servers:
            shutil.rmtree(server.socket.parent / "appendonlydir", ignore_errors=True)
        self.start()

    def stop(self) -> None:
        for server in self._servers:
            server.pause()

    def go_on(self) -> None:
        for server in self._servers:
            server.resume()

    def lock(self) -> None:
        for client in self._keepers:
            client.config_set("requirepass", "another")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")  # not this connection

    def unlock(self) -> None:
        for client in self._keepers:
            client.config_set("requirepass", "")

    def link(self, faults: Faults, *names: str) -> None:
        """Let the ways of these processes, or all, have these faults."""
        for name in names or self.proxies:
            for proxy in self.proxies[name]:
                proxy.set(faults)

    def evict(self) -> None:
        self.kv.config_set("maxmemory-policy", "allkeys-lru")
        self.kv.config_set("maxmemory", max(2 << 20, self.kv.info("memory")["used_memory"] // 2))

    def keep_all(self) -> None:
        self.kv.config_set("maxmemory", 0)
        self.kv.config_set("maxmemory-policy", "noeviction")

    def flip_bits(self) -> None:
        """Flip bits of extents, drawn from all their fields."""
        fields = [(key, name) for key in self.kv.scan_iter(KV_KEYS, count=1000) for name in self.kv.hkeys(key)]
        if not fields:
            return
        for (key, name), bits in Counter(self._rng.choices(fields, k=FLIPS)).items():
            value = bytearray(self.kv.hget(key, name) or b"")
            for _ in range(bits if value else 0):
                value[self._rng.randrange(len(value))] ^= 1 << self._rng.randrange(8)
                self.flipped += 1
            self.kv.hset(key, name, bytes(value))

    def cut_fields_short(self) -> None:
        for key in self.kv.scan_iter(KV_KEYS, count=1000):
            if names := self.kv.hkeys(key):
                name = self._rng.choice(names)
                value = self.kv.hget(key, name) or b""
                self.kv.hset(key, name, value[: len(value) // 2])
                self.cut_short += 1

    # --- what is there ------------------------------------------------------------------------------------------------

    def heads(self) -> set[bytes]:
        """Return the records of all sessions that have a home and a head."""
        keys = list(self.directory.scan_iter(HEADS, count=1000))
        with self.directory.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hmget(key, "home", "head")
            return {key for key, found in zip(keys, pipe.execute(), strict=True) if all(found)}

    def beats_ms(self) -> list[float]:
        """Return when each replica has beaten last, by Redis' clock."""
        return [self.directory.zscore(BEATEN, name) or 0.0 for name in REPLICAS]

    def clock_ms(self) -> float:
        seconds, micros = self.directory.time()
        return float(seconds * 1e3 + micros / 1e3)

    def fields_written(self) -> int:
        """Return how many fields of extents Redis has taken since it was started."""
        stats = self.kv.info("commandstats").get("cmdstat_hset", {"calls": 0})
        return int(stats["calls"]) - int(stats.get("failed_calls", 0))


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Fault:
    """begin, end and again block; they are called on a thread. `again` strikes until the end."""

    name: str
    begin: Callable[[], Any] = nothing
    end: Callable[[], Any] = nothing
    again: Callable[[], Any] | None = None
    is_brief: bool = False  # it is over when it has begun
    loses_heads: bool = False


def faults(stores: Stores) -> list[Fault]:
    """Return all faults. The two Redis are those of `stores` at the time they strike."""

    def linked(name: str, wrong: Faults, *names: str) -> Fault:
        return Fault(name, lambda: stores.link(wrong, *names), lambda: stores.link(Faults(), *names))

    return [
        Fault("killed", stores.kill, stores.start),
        Fault("stopped", stores.stop, stores.go_on),
        Fault("directory flushed", lambda: stores.directory.flushall(), is_brief=True, loses_heads=True),
        Fault("KV flushed", lambda: stores.kv.flushall(), is_brief=True),
        Fault(
            "directory full",
            lambda: stores.directory.config_set("maxmemory", 1),
            lambda: stores.directory.config_set("maxmemory", 0),
        ),
        Fault("KV full", lambda: stores.kv.config_set("maxmemory", 1), lambda: stores.kv.config_set("maxmemory", 0)),
        linked("slow", Faults(delay_s=0.2)),
        linked("narrow", Faults(bytes_per_s=1e6)),
        linked("reset", Faults(reset_after=2000)),
        Fault("locked out", stores.lock, stores.unlock),
        Fault("bits flipped", again=stores.flip_bits),
        Fault("cut short", again=stores.cut_fields_short),
        Fault("evicting", stores.evict, stores.keep_all),
        Fault("empty restart", stores.restart_empty, is_brief=True, loses_heads=True),
        linked("partition", Faults(is_hole=True), REPLICAS[0]),
    ]


# --- the load ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Script:
    """A conversation, with what a single server answers."""

    questions: tuple[str, ...]
    answers: tuple[str, ...]


async def reference(server: ServerProcess, count: int, run: Run) -> list[Script]:
    """Return so many conversations of which every token is clearly the likeliest."""
    scripts: list[Script] = []
    client = client_of(server.url)
    run.expect(count, "a single server")
    number = 0
    while len(scripts) < count:
        rng = random.Random(f"faults/{number}")
        number += 1
        messages: list[Message] = []
        gap = 1.0
        for words in [FIRST_WORDS, *[LATER_WORDS] * (TURNS_OF_A_TALK - 1)]:
            messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=words))})
            answer = await ask(
                client, server.model["id"], messages, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True,
                logprobs=True, top_logprobs=2,
            )  # fmt: skip
            gap = min(gap, *(token.top[0] - token.top[1] for token in answer.tokens))
            messages.append({"role": "assistant", "content": answer.text})
        if gap >= NEAR_TIE:
            said = [message["content"] for message in messages]
            scripts.append(Script(tuple(said[::2]), tuple(said[1::2])))
            run.advance()
    await client.close()
    return scripts


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn on one arm."""

    arm: str
    fault: str  # that was there, or had been there last
    turn: int  # from 0
    replica: str
    has_moved: bool
    error: str
    same_text: bool
    ttft_ms: float
    redis_tokens: int


@dataclass(slots=True)
class Conversation:
    """A conversation as one client holds it."""

    script: Script
    salt: str
    headers: dict[str, str]
    replica: dict[str, str] = field(default_factory=dict)  # arm -> of the last turn
    direct: str = ""  # the replica that is asked without the gateway, on the arm without Redis


class Load:
    """Clients that talk without a pause until `is_over`."""

    def __init__(self, fleets: Mapping[str, FleetProcesses], scripts: list[Script], run: Run) -> None:
        self._fleets, self._scripts, self._run = fleets, scripts, run
        self._next = 0
        self.samples: list[Sample] = []
        self.turns = 0  # that the fleet with Redis has answered, or not
        self.fault = "none"
        self.is_over = False
        self._answered = asyncio.Event()

    async def next_turn(self) -> None:
        """Return when another one is over."""
        await self._answered.wait()

    async def client(self, number: int) -> None:
        rng = random.Random(f"client/{number}")
        while not self.is_over:
            self._next += 1
            script = self._scripts[self._next % len(self._scripts)]
            headers = {} if rng.random() < 0.5 else {"x-session-id": f"faults-{self._next}"}
            await self._hold(Conversation(script, secrets.token_hex(8), headers), rng)

    async def _hold(self, talk: Conversation, rng: random.Random) -> None:
        messages: list[Message] = []
        session_id = ""
        for turn, (question, answer) in enumerate(zip(talk.script.questions, talk.script.answers, strict=True)):
            if self.is_over:
                return
            messages = [*messages, {"role": "user", "content": question}]
            if turn and rng.random() < MOVED:
                await self._move(session_id, talk)
            stream = await self._ask("redis", talk, messages, turn, answer)
            if "without" in self._fleets:
                await self._ask("without", talk, messages, turn, answer)
            if stream is None:
                return
            session_id = stream.session_id
            messages = [*messages, {"role": "assistant", "content": answer}]
            await asyncio.sleep(rng.uniform(0, 2 * THINK_S))

    async def _move(self, session_id: str, talk: Conversation) -> None:
        """Move a session, if the directory can be told."""
        to = REPLICAS[1 - REPLICAS.index(talk.replica["redis"])]
        body = {"session_id": session_id, "replica": to, "cache_salt": talk.salt}
        async with httpx.AsyncClient(timeout=GIVE_UP_S, trust_env=False) as client:
            with suppress(httpx.HTTPError):
                await client.post(f"{self._fleets['redis'].gateway_url}/v1/fleet/move", json=body)

    async def _ask(
        self, arm: str, talk: Conversation, messages: list[Message], turn: int, expected: str
    ) -> ChatStream | None:
        """Ask one arm and note what came of it. Returns None if the conversation cannot go on."""
        fleet, fault, before = self._fleets[arm], self.fault, talk.replica.get(arm, "")
        url = fleet.gateway_url if not talk.direct or arm == "redis" else fleet.replicas[talk.direct].url
        body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        stream, error = ChatStream(url, {**body, "cache_salt": talk.salt}, talk.headers), ""
        try:
            await stream.run()
        except (StreamFailed, httpx.HTTPError) as problem:
            error = repr(problem)[:300]
        else:
            talk.replica[arm] = talk.direct if arm == "without" and talk.direct else stream.route["replica"]
        has_moved = bool(turn) and not error and talk.replica[arm] != before
        if arm == "redis" and has_moved and "without" in talk.replica:
            talk.direct = REPLICAS[1 - REPLICAS.index(talk.replica["without"])]
        self.samples.append(
            Sample(
                arm=arm,
                fault=fault,
                turn=turn,
                replica="" if error else talk.replica[arm],
                has_moved=has_moved,
                error=error,
                same_text=not error and stream.text == expected,
                ttft_ms=float("nan") if error else round(1e3 * stream.ttft_s, 2),
                redis_tokens=int(stream.x_cache.get("redis_tokens", 0)),
            )
        )
        if arm == "redis":
            self.turns += 1
            self._answered.set()
            self._answered = asyncio.Event()
            self._run.advance()
        return stream if not error and stream.text == expected else None


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Course:
    """What one fault did to the fleet as a whole."""

    fault: str
    lasted_s: float = 0.0
    recovered_s: float | None = None  # after its end; None: never
    heads: int = 0  # that were lost
    heads_missing: int = 0  # of them, in the end
    heads_s: float | None = None  # until all were there again


async def befall(fault: Fault, stores: Stores, fleet: FleetProcesses, load: Load, turns: int, hold_s: float) -> Course:
    """Let one fault come and go while clients ask for so many turns."""
    course, load.fault, goal = Course(fault.name), fault.name, load.turns + turns
    heads = await asyncio.to_thread(stores.heads) if fault.loses_heads else set()
    began_s = time.monotonic()
    await asyncio.to_thread(fault.begin)
    if not fault.is_brief:
        while time.monotonic() - began_s < hold_s or load.turns < goal - turns // 3:
            if fault.again is not None:
                await asyncio.to_thread(fault.again)
            await asyncio.sleep(AGAIN_S)
    await asyncio.to_thread(fault.end)
    course.lasted_s = round(time.monotonic() - began_s, 2)
    waits = [asyncio.create_task(until_recovered(stores, fleet))]
    if fault.loses_heads:
        course.heads = len(heads)
        waits.append(asyncio.create_task(until(lambda: heads <= stores.heads())))
    course.recovered_s, *rest = await asyncio.gather(*waits)
    if rest:
        course.heads_s = rest[0]
        course.heads_missing = len(heads - await asyncio.to_thread(stores.heads))
    while load.turns < goal:
        await load.next_turn()
    return course


async def until_recovered(stores: Stores, fleet: FleetProcesses) -> float | None:
    """Return the seconds until the gateway has Redis and both replicas, both have beaten, and KV is uploaded again."""
    ended_ms, written = await asyncio.to_thread(lambda: (stores.clock_ms(), stores.fields_written()))

    def is_well() -> bool:
        seen = httpx.get(f"{fleet.gateway_url}/v1/fleet", timeout=GIVE_UP_S, trust_env=False).json()
        return (
            seen["redis"]["state"] == "ok"
            and [one["open"] for one in seen["replicas"]] == [True] * len(REPLICAS)
            and min(stores.beats_ms()) > ended_ms
            and stores.fields_written() > written
        )

    return await until(is_well)


async def until(is_so: Callable[[], bool]) -> float | None:
    """Return the seconds until it is so; None if it takes too long. It is called on a thread."""
    began_s = time.monotonic()
    while not await asyncio.to_thread(is_so):
        if time.monotonic() - began_s > GIVE_UP_S:
            return None
        await asyncio.sleep(0.05)
    return round(time.monotonic() - began_s, 2)


async def play(run: Run, stores: Stores, fleets: Mapping[str, FleetProcesses], scripts: list[Script]) -> dict[str, Any]:
    arguments, load = run.arguments, Load(fleets, scripts, run)
    all_faults = faults(stores)
    run.expect(arguments.turns, "starting")
    courses: list[Course] = []
    async with asyncio.TaskGroup() as clients:
        for number in range(arguments.clients):
            clients.create_task(load.client(number))
        for fault in all_faults:
            run.describe(fault.name)
            turns = arguments.turns // len(all_faults)
            courses.append(await befall(fault, stores, fleets["redis"], load, turns, arguments.hold_s))
            run.keep(result_of(load.samples, courses, stores))
        load.is_over = True
    return result_of(load.samples, courses, stores)


def result_of(samples: list[Sample], courses: list[Course], stores: Stores) -> dict[str, Any]:
    by_fault = {course.fault: {**asdict(course), **figures(samples, course.fault)} for course in courses}
    every = figures(samples, None)
    bad = [asdict(one) for one in samples if one.error or not one.same_text]
    return {
        "held": verdicts(every, courses, bad, stores.flipped),
        "all": every,
        "faults": by_fault,
        "flipped_bits": stores.flipped,
        "fields_cut_short": stores.cut_short,
        "bad": bad,
    }


def figures(samples: list[Sample], fault: str | None) -> dict[str, Any]:
    """Return what the turns of a fault have in common, of all faults if it is None."""
    found: dict[str, Any] = {}
    for arm in ARMS:
        mine = [one for one in samples if one.arm == arm and fault in (None, one.fault)]
        good = [one.ttft_ms for one in mine if not one.error]
        if good:
            found[arm] = {
                "turns": len(mine),
                "moved": sum(one.has_moved for one in mine),
                "errors": sum(bool(one.error) for one in mine),
                "wrong_texts": sum(not one.error and not one.same_text for one in mine),
                "redis_tokens": sum(one.redis_tokens for one in mine),
                "ttft_ms": {"p50": rounded(percentile(good, 0.5)), "p95": rounded(percentile(good, 0.95))},
            }
    if len(found) == len(ARMS):
        found["ttft_p95_ratio"] = ratio(*(found[arm]["ttft_ms"]["p95"] for arm in ARMS))
    return found


def verdicts(every: dict[str, Any], courses: list[Course], bad: list[dict[str, Any]], flipped: int) -> dict[str, bool]:
    """What is held -> whether it holds."""
    held = {
        "no error": not any(one["error"] for one in bad),
        "no wrong text": all(one["error"] for one in bad),
        f"recovered within {RECOVERED_S:g} s": all(
            one.recovered_s is not None and one.recovered_s <= RECOVERED_S for one in courses
        ),
        f"heads back within {HEADS_S:g} s of a flush": all(
            one.heads_s is not None and one.heads_s <= HEADS_S for one in courses if one.heads
        ),
        f"at least {LEAST_FLIPS} bits flipped": flipped >= LEAST_FLIPS,
    }
    if "ttft_p95_ratio" in every:
        held[f"TTFT p95 at most {MOST_TTFT} x without Redis"] = every["ttft_p95_ratio"] <= MOST_TTFT
    return held


def measure(run: Run) -> dict[str, Any]:
    arguments = run.arguments
    settings = {"cache.redis_gib": 0.5}
    with serve("alone", SMALL, ready_timeout_s=READY_S) as alone:
        scripts = asyncio.run(reference(alone, arguments.scripts, run))
    with ExitStack() as stack:
        fleets: dict[str, FleetProcesses] = {}
        stores = Stores()
        for arm in arguments.arms:
            directory = run.directory / arm
            directory.mkdir()
            fleets[arm] = stack.enter_context(
                fleet_processes(
                    directory,
                    *REPLICAS,
                    settings=settings,
                    settings_of=stores.ways(stack) if arm == "redis" else lambda name, directory, kv: {},
                    directory_options=("--appendonly", "yes"),
                )
            )
        if "without" in fleets:
            fleets["without"].redis.stop()
            fleets["without"].kv.stop()
        stores.take(fleets["redis"])
        stack.callback(stores.close)
        result = asyncio.run(play(run, stores, fleets, scripts))
    return {"settings": {**SMALL, **settings}, "clients": arguments.clients, "hold_s": arguments.hold_s, **result}


def show(console: Console, result: Result) -> None:
    table = Table(title="A fleet whose Redis is in trouble", title_justify="left")
    for heading in (
        "fault", "lasted s", "turns", "moved", "errors", "wrong", "Redis tokens", "TTFT p95 ms", "without Redis", "x",
        "recovered s", "heads", "back s",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for name, found in {**result["faults"], "all": result["all"]}.items():
        mine, other = found.get("redis", {}), found.get("without", {})
        cells = (
            found.get("lasted_s"), mine.get("turns"), mine.get("moved"), mine.get("errors"), mine.get("wrong_texts"),
            mine.get("redis_tokens"), mine.get("ttft_ms", {}).get("p95"), other.get("ttft_ms", {}).get("p95"),
            found.get("ttft_p95_ratio"), found.get("recovered_s"), found.get("heads") or None, found.get("heads_s"),
        )  # fmt: skip
        table.add_row(name, *("" if cell is None else str(cell) for cell in cells))
    console.print(table)
    for entry in result["bad"][:20]:
        console.print(entry)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=3000, help="of the fleet with Redis")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--scripts", type=int, default=40, help="different conversations")
    parser.add_argument("--hold-s", type=float, default=10.0, help="how long a fault stays, at least")


EXPERIMENT = Experiment(
    name="fleet_faults", about=__doc__, measure=measure, show=show, options=options, arms=ARMS,
    quick=Quick(
        options={"turns": 105, "scripts": 6, "hold_s": 2.0, "arms": ["redis"]},
        holds=False,  # times of a busy machine
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.main())
