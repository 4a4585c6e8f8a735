"""A fleet whose Redis is in trouble: texts, errors, times, and how soon all is well again.

    python -m benchmarks.fleet faults [--turns 3000] [--hold-s 10]

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
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import httpx

from benchmarks.fleet.processes import READY_S, SMALL, FleetProcesses, fleet_processes
from benchmarks.fleet.redis_faults import REPLICAS, Fault, Stores, all_faults
from benchmarks.fleet.scenario import Row, Talk, asks, error_of, p50_p95, show, words
from benchmarks.harness.experiment import Experiment, Quick, Run
from benchmarks.harness.measures import ratio
from benchmarks.harness.servers import ServerProcess, serve
from benchmarks.harness.streams import NEAR_TIE, Message, ask, client_of

ARMS = ("redis", "without")
FIRST_WORDS, LATER_WORDS, ANSWER_TOKENS, TURNS_OF_A_TALK = 100, 8, 12, 4
MOVED_SHARE = 1 / 3  # share of the turns after the first
THINK_S = 0.3  # between two turns of a client, on average
AGAIN_S = 0.25  # between two blows of a fault that strikes again and again
MOST_TTFT, RECOVERED_S, HEADS_S, LEAST_FLIPS = 1.25, 5.0, 10.0, 1000
GIVE_UP_S = 60.0
Script = Sequence[tuple[str, str]]  # questions, with what a single server answers


async def reference(server: ServerProcess, count: int, run: Run) -> list[Script]:
    """Return `count` conversations, each with the answers of a single server. They are chosen so that every token of an
    answer is clearly the likeliest one."""
    scripts: list[Script] = []
    run.expect(count, "a single server")
    number = 0
    async with client_of(server.url) as client:
        while len(scripts) < count:
            rng = random.Random(f"faults/{number}")
            number += 1
            messages, script, gap = list[Message](), list[tuple[str, str]](), 1.0
            for length in [FIRST_WORDS, *[LATER_WORDS] * (TURNS_OF_A_TALK - 1)]:
                question = words(rng, length)
                messages.append({"role": "user", "content": question})
                answer = await ask(
                    client, server.model["id"], messages, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True,
                    logprobs=True, top_logprobs=2,
                )  # fmt: skip
                gap = min(gap, *(token.top[0] - token.top[1] for token in answer.tokens))
                messages.append({"role": "assistant", "content": answer.text})
                script.append((question, answer.text))
            if gap >= NEAR_TIE:
                scripts.append(script)
                run.advance()
    return scripts


class Load:
    """A number of clients that hold conversations without a pause until `is_over`, and record each turn."""

    def __init__(self, fleets: Mapping[str, FleetProcesses], scripts: list[Script], run: Run) -> None:
        self._fleets, self._scripts, self._run = fleets, scripts, run
        self._begun = 0
        self.rows: list[Row] = []
        self.turns = 0  # turns of the fleet with Redis, answered or not
        self.fault = "none"  # the present fault, or the last one
        self.is_over = False

    async def client(self, number: int) -> None:
        rng = random.Random(f"client/{number}")
        while not self.is_over:
            self._begun += 1
            name, is_named, body = f"faults-{self._begun}", rng.random() < 0.5, {"cache_salt": secrets.token_hex(8)}
            talks = {arm: Talk(name, is_named, body) for arm in self._fleets}
            await self._hold(talks, self._scripts[self._begun % len(self._scripts)], rng)

    async def _hold(self, talks: Mapping[str, Talk], script: Script, rng: random.Random) -> None:
        """Play one conversation on all arms. It ends at an error and at another text."""
        mine, other, direct = talks["redis"], talks.get("without"), ""
        for question, answer in script:
            if self.is_over:
                return
            before = mine.home
            if before and rng.random() < MOVED_SHARE:
                await self._move(mine)
            if not await self._ask("redis", mine, question, answer):
                return
            if other is not None:
                if before not in ("", mine.home):  # no directory can move it here, so the other replica is asked itself
                    direct = elsewhere(other.home)
                if not await self._ask("without", other, question, answer, direct):
                    return
            await asyncio.sleep(rng.uniform(0, 2 * THINK_S))

    async def _move(self, talk: Talk) -> None:
        """Move a session, if the directory can be told."""
        body = {"session_id": talk.session_id, "replica": elsewhere(talk.home), "cache_salt": talk.body["cache_salt"]}
        async with httpx.AsyncClient(timeout=GIVE_UP_S, trust_env=False) as client:
            with suppress(httpx.HTTPError):
                await client.post(f"{self._fleets['redis'].gateway_url}/v1/fleet/move", json=body)

    async def _ask(self, arm: str, talk: Talk, question: str, expected: str, direct: str = "") -> bool:
        """Ask an arm's gateway, or one of its replicas, and note what came of it. Returns whether the conversation can
        go on."""
        fleet = self._fleets[arm]
        row: Row = {"arm": arm, "fault": self.fault}
        talk.say(question)
        stream = talk.stream(fleet.replicas[direct].url if direct else fleet.gateway_url, max_tokens=ANSWER_TOKENS)
        if error := await error_of(stream):
            self.rows.append(row | {"error": error, "conversation": talk.name, "turn": len(talk.messages) // 2})
        else:
            row |= {"replica": direct or stream.replica, "error": "", "same_text": stream.text == expected}
            self.rows.append(talk.row(stream, **row, has_moved=row["replica"] != (talk.home or row["replica"])))
            talk.take(stream)
            talk.home = row["replica"]
        if arm == "redis":
            self.turns += 1
            self._run.advance()
        return not error and stream.text == expected


def elsewhere(replica: str) -> str:
    return REPLICAS[1 - REPLICAS.index(replica)]


async def befall(fault: Fault, stores: Stores, fleet: FleetProcesses, load: Load, turns: int, hold_s: float) -> Row:
    """Cause one fault, end it, and wait until the fleet has recovered and clients have sent at least `turns` turns
    since the fault began. Returns how long the fault lasted, how soon the fleet recovered, and how soon the heads were
    back (records by which another replica can take over a session). hold_s: least duration of the fault in seconds."""
    load.fault, goal = fault.name, load.turns + turns
    heads = await asyncio.to_thread(stores.heads) if fault.loses_heads else set()
    began_s = time.monotonic()
    await asyncio.to_thread(fault.begin)
    if fault.end is not None:
        while time.monotonic() - began_s < hold_s or load.turns < goal - turns // 3:
            await asyncio.to_thread(fault.again)
            await asyncio.sleep(AGAIN_S)
        await asyncio.to_thread(fault.end)
    lasted_s = round(time.monotonic() - began_s, 2)
    ended_ms, written = await asyncio.to_thread(lambda: (stores.now_ms(), stores.fields_written()))

    def is_well() -> bool:
        """Return whether the gateway has Redis and both replicas, both have beaten, and KV is uploaded again."""
        seen = httpx.get(f"{fleet.gateway_url}/v1/fleet", timeout=GIVE_UP_S, trust_env=False).json()
        return (
            seen["redis"]["state"] == "ok"
            and [one["open"] for one in seen["replicas"]] == [True] * len(REPLICAS)
            and stores.all_have_beaten_since(ended_ms)
            and stores.fields_written() > written
        )

    recovered_s, heads_s = await asyncio.gather(until(is_well), until(lambda: not heads or heads <= stores.heads()))
    await until(lambda: load.turns >= goal, give_up_s=math.inf)
    return {
        "lasted_s": lasted_s, "recovered_s": recovered_s, "heads": len(heads), "heads_s": heads_s if heads else None,
        "heads_missing": len(heads - await asyncio.to_thread(stores.heads)) if heads_s is None else 0,
    }  # fmt: skip


async def until(is_so: Callable[[], bool], give_up_s: float = GIVE_UP_S) -> float | None:
    """Wait until `is_so` returns True; it is called on a thread. Returns the seconds that took, or None after
    `give_up_s`."""
    began_s = time.monotonic()
    while not await asyncio.to_thread(is_so):
        if time.monotonic() - began_s > give_up_s:
            return None
        await asyncio.sleep(0.05)
    return round(time.monotonic() - began_s, 2)


async def play(run: Run, stores: Stores, fleets: Mapping[str, FleetProcesses], scripts: list[Script]) -> dict[str, Any]:
    asked, load, courses = run.arguments, Load(fleets, scripts, run), dict[str, Row]()
    faults = all_faults(stores)
    run.expect(asked.turns, "starting")
    async with asyncio.TaskGroup() as clients:
        for number in range(asked.clients):
            clients.create_task(load.client(number))
        for fault in faults:
            run.describe(fault.name)
            turns = asked.turns // len(faults)
            courses[fault.name] = await befall(fault, stores, fleets["redis"], load, turns, asked.hold_s)
            run.keep(result_of(load.rows, courses, stores.flipped))
        load.is_over = True
    return result_of(load.rows, courses, stores.flipped) | {"fields_cut_short": stores.cut_short}


def result_of(rows: list[Row], courses: dict[str, Row], flipped: int) -> dict[str, Any]:
    every = figures_by_arm(rows)
    bad = [row for row in rows if row["error"] or not row["same_text"]]
    late = [one for one in courses.values() if one["recovered_s"] is None or one["recovered_s"] > RECOVERED_S]
    lost = [one for one in courses.values() if one["heads"] and (one["heads_s"] is None or one["heads_s"] > HEADS_S)]
    held = {
        "no error": not any(row["error"] for row in bad),
        "no wrong text": all(row["error"] for row in bad),
        f"recovered within {RECOVERED_S:g} s": not late,
        f"heads back within {HEADS_S:g} s of a flush": not lost,
        f"at least {LEAST_FLIPS} bits flipped": flipped >= LEAST_FLIPS,
    }
    if "ttft_p95_ratio" in every:
        held[f"TTFT p95 at most {MOST_TTFT} x without Redis"] = every["ttft_p95_ratio"] <= MOST_TTFT
    by_fault = {name: one | figures_by_arm([r for r in rows if r["fault"] == name]) for name, one in courses.items()}
    return {"held": held, "all": every, "faults": by_fault, "flipped_bits": flipped, "bad": bad}


def figures_by_arm(rows: list[Row]) -> dict[str, Any]:
    """Return figures of the turns by arm, and the ratios of the arms' TTFTs."""
    found: dict[str, Any] = {}
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        if good := [row for row in mine if not row["error"]]:
            found[arm] = {
                "turns": len(mine),
                "moved": sum(row["has_moved"] for row in good),
                "errors": len(mine) - len(good),
                "wrong_texts": sum(not row["same_text"] for row in good),
                "redis_tokens": sum(row["tokens"]["redis"] for row in good),
                "ttft_ms": p50_p95([row["ttft_ms"] for row in good]),
            }
    if len(found) == len(ARMS):
        found["ttft_p95_ratio"] = ratio(*(found[arm]["ttft_ms"]["p95"] for arm in ARMS))
    return found


def measure(run: Run) -> dict[str, Any]:
    asked = run.arguments
    with serve("alone", SMALL, ready_timeout_s=READY_S) as alone:
        scripts = asyncio.run(reference(alone, asked.scripts, run))
    with ExitStack() as stack:
        stores, fleets = Stores(stack), dict[str, FleetProcesses]()
        for arm in asked.arms:
            (run.directory / arm).mkdir()
            fleets[arm] = stack.enter_context(
                fleet_processes(
                    run.directory / arm, *REPLICAS, settings_of=stores.way if arm == "redis" else None,
                    directory_options=("--appendonly", "yes"),
                )
            )  # fmt: skip
        if "without" in fleets:
            fleets["without"].redis.stop()
            fleets["without"].kv.stop()
        found = asyncio.run(play(run, stores, fleets, scripts))
    return {"settings": SMALL, "clients": asked.clients, "hold_s": asked.hold_s, **found}


EXPERIMENT = Experiment(
    name="fleet_faults", about=__doc__, measure=measure, show=show, arms=ARMS,
    options=asks(turns=3000, clients=3, scripts=40, hold_s=10.0),
    quick=Quick({"turns": 105, "scripts": 6, "hold_s": 2.0, "arms": ["redis"]}),
)  # fmt: skip
