"""Answers whose replica dies between the last token and the last frame, and answers that only some may resume."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from reprise.engine.messages import Progress
from reprise.fleet.identify import conversation_of, read_body
from reprise.fleet.keys import SessionName
from tests.app.fakes import Running, until
from tests.fleet.small_fleet import CHAT, SmallFleet, chat, small_fleet
from tests.redis_servers import RedisServer, redis_server

WAIT_S = 100.0  # for what takes milliseconds on a quiet machine
SAID = "Hello there, how are you today?"


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as server:
        yield server


async def streamed(fleet: SmallFleet, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]], bool]:
    """Return the text of an answer, its events, and whether it came to its end."""
    answer = await fleet.gateways[0].post(CHAT, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ())]
    return "".join(pieces), events, lines[-1] == "[DONE]"


class Dying:
    """Has the first replica that commits die then: its connections break before it can say that the answer is over."""

    def __init__(self, fleet: SmallFleet, *, commits_first: bool) -> None:
        self.victim = ""
        self._fleet, self._commits_first = fleet, commits_first
        self._dies = asyncio.Event()
        for name, running in fleet.replicas.items():
            running.app.state.hooks.commit = self._commit(name, running.app.state.hooks.commit)

    def _commit(self, name: str, commit: Any) -> Any:
        async def die_or_commit(*values: Any, **fields: Any) -> None:
            if self.victim and self.victim != name:
                await commit(*values, **fields)
                return
            self.victim = name
            if self._commits_first:
                await commit(*values, **fields)
            self._dies.set()
            await asyncio.Event().wait()

        return die_or_commit

    async def run(self) -> None:
        await self._dies.wait()
        replicas = self._fleet.parts[0].parts.replicas
        replicas.of(self.victim).abort_all("it was killed")
        replicas.lost(self.victim)


@pytest.mark.parametrize("commits_first", [False, True])
async def test_an_answer_that_is_over_but_for_its_last_frame_is_finished_and_committed(redis, tmp_path, commits_first):
    async with small_fleet(redis, tmp_path, "a", "b") as fleet:
        dying = Dying(fleet, commits_first=commits_first)
        body = chat(stream_options={"include_usage": True})
        (text, events, is_whole), _ = await asyncio.gather(streamed(fleet, body), dying.run())
        assert (text, is_whole) == (SAID, True)
        (reason,) = {choice["finish_reason"] for event in events for choice in event["choices"]} - {None}
        (usage,) = (event["usage"] for event in events if event.get("usage"))
        victim = fleet.replicas[dying.victim].engine
        (other,) = (name for name in fleet.replicas if name != dying.victim)
        first = victim.submitted[0]
        assert (reason, usage["prompt_tokens"]) == ("stop", len(first.token_ids))
        (asked,) = fleet.replicas[other].engine.submitted
        assert asked.resume == [None], "there is nothing left to generate"

        record = await fleet.watcher.look(
            SessionName("local", first.session_id), fingerprint=fleet.replicas[other].engine.model.fingerprint
        )
        assert record is not None
        assert (record.home, record.turn) == (other, 1 + commits_first)
        said = [*body["messages"], {"role": "assistant", "content": text}, {"role": "user", "content": "And you?"}]
        following = chat() | {"messages": said}
        found = await fleet.watcher.find(
            "local",
            conversation_of(read_body(json.dumps(following).encode())).answers,
            fingerprint=fleet.replicas[other].engine.model.fingerprint,
        )
        assert found is not None
        assert found.session_id == first.session_id
        await streamed(fleet, following)
        going_on = fleet.replicas[other].engine.submitted[1]
        assert going_on.token_ids[: len(first.token_ids)] == first.token_ids
        assert going_on.session_id == first.session_id


def set_exact(running: Running, is_exact: bool) -> None:
    readiness = running.app.state.readiness
    readiness.model = msgspec.structs.replace(readiness.model, exact=is_exact)


@pytest.mark.parametrize("is_exact", [False, True])
async def test_an_answer_goes_on_only_where_it_is_computed_alike(redis, tmp_path, is_exact):
    async with small_fleet(redis, tmp_path, "a", "b", "c") as fleet:
        engines = {name: running.engine for name, running in fleet.replicas.items()}
        for engine in engines.values():
            engine.script.step_s = 0.2
        for running in fleet.replicas.values():
            set_exact(running, is_exact)
        answering = asyncio.create_task(streamed(fleet, chat()))
        await until(lambda: [name for name, engine in engines.items() if engine.streams], WAIT_S)
        (first,) = [name for name, engine in engines.items() if engine.streams]
        alike, unlike = (name for name in engines if name != first)
        set_exact(fleet.replicas[unlike], not is_exact)
        relayed = fleet.parts[0].parts.held
        await until(lambda: relayed.held > len(json.dumps(chat())) + 300 or answering.done(), WAIT_S)
        assert not answering.done(), "the answer was over before its replica died"
        engines[first].state = "restarting"
        engines[first].streams[0].lose()
        text, _, is_whole = await answering
        assert (text, is_whole) == (SAID, True)
        assert engines[alike].submitted
        assert not engines[unlike].submitted


async def test_a_gateway_passes_on_how_far_a_prompt_is_read(redis, tmp_path):
    async with small_fleet(redis, tmp_path, "a") as fleet:
        told = [Progress(prompt_tokens=9, read_tokens=n, cached_tokens=0, ahead=0, left_ms=5.0) for n in (0, 5)]
        fleet.replicas["a"].engine.script.progress = told
        text, events, is_whole = await streamed(fleet, chat(stream_options={"include_progress": True}))
        assert (text, is_whole) == (SAID, True)
        found = [event["x_progress"] for event in events if "x_progress" in event]
        assert found == [msgspec.structs.asdict(one) for one in told]
