"""Tests the asyncio client against real engine processes that run a scripted engine."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reprise.engine.process.client
from reprise.engine.messages import Head, Output, Progress, SessionRequest, TokenLogprob, progress_output
from reprise.engine.process.child import MALLOC, engine_environment
from reprise.engine.process.client import (
    EngineClient,
    EngineFailed,
    EngineLost,
    EngineTimeout,
    EngineUnavailable,
    OutputStream,
)
from tests.engine.scripted_engine import MODEL, REPORT, TIMINGS, adopt, config, head, output, submit

ROOT = Path(__file__).parents[3]
PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "scripted_engine.py"))

Start = Callable[..., EngineClient]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts clients on the scripted engine; stops them afterwards."""
    clients: list[EngineClient] = []

    async def start(model: str = "", *, ready: bool = True, **changes: float) -> EngineClient:
        limits = {"start_timeout_s": 20.0, "hang_timeout_s": 20.0, **changes}
        clients.append(EngineClient(config=config(model), command=PROGRAM, **limits))
        await clients[-1].start()
        if ready:
            await clients[-1].wait_ready()
        return clients[-1]

    yield start
    await asyncio.gather(*(client.stop() for client in clients))


async def until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - any condition at all
            await asyncio.sleep(0.01)


async def read(stream: OutputStream) -> list[Output]:
    async with asyncio.timeout(20):
        return [one async for one in stream]


def tokens(outputs: list[Output], choice: int = 0) -> list[int]:
    return [token_id for one in outputs if one.choice == choice for token_id in one.token_ids]


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_outputs_of_all_choices_arrive_in_order(start: Start) -> None:
    client = await start()
    assert client.state == "ready"
    assert client.model == MODEL
    outputs = await read(await client.submit(submit("a", num_choices=3)))
    for choice in range(3):
        mine = [one for one in outputs if one.choice == choice]
        assert tokens(mine, choice) == [t + 1000 * choice for t in (5, 6, 7, 5, 6, 7)]
        assert mine[0].report == REPORT
        assert mine[-1].finish_reason == "length"
        assert mine[-1].timings == TIMINGS
        assert [one.finish_reason for one in mine[:-1]] == [None] * (len(mine) - 1)


async def test_a_rejection_is_an_output(start: Start) -> None:
    client = await start()
    (only,) = await read(await client.submit(submit("a", script="reject")))
    assert (only.finish_reason, only.error) == ("error", "too long")


async def test_many_streams_at_once_lose_and_mix_nothing(start: Start) -> None:
    client = await start("fast")

    async def one(i: int) -> None:
        stream = await client.submit(submit(f"r{i}", token_ids=(i, i + 1), max_tokens=100, num_choices=2))
        outputs = await read(stream)
        for choice in range(2):
            assert tokens(outputs, choice) == [i + 1000 * choice, i + 1 + 1000 * choice] * 50

    await asyncio.gather(*(one(i) for i in range(40)))
    assert client._streams == {}


async def test_a_stream_of_which_nothing_is_to_come_ends_at_once_and_is_not_kept(start: Start) -> None:
    client = await start()
    request = submit("a", num_choices=1)
    request.resume.append(None)
    assert await read(await client.submit(request)) == []
    assert client._streams == {}


async def test_ids_in_use_are_refused(start: Start) -> None:
    client = await start()
    stream = await client.submit(submit("a", max_tokens=10**6))
    with pytest.raises(ValueError, match="in use"):
        await client.submit(submit("a"))
    await stream.aclose()


async def test_a_slow_consumer_keeps_one_output_per_choice_and_holds_nobody_up(start: Start) -> None:
    client = await start("fast")
    slow = await client.submit(submit("slow", token_ids=tuple(range(10)), max_tokens=3000, num_choices=2))
    first = await anext(slow)
    quick = await read(await client.submit(submit("quick", max_tokens=500)))
    assert len(tokens(quick)) == 500
    await until(lambda: slow.finished)
    rest = await read(slow)
    assert len(rest) <= 2  # a choice each, however many steps that were
    assert tokens([first, *rest], 0) == list(range(10)) * 300
    assert tokens([first, *rest], 1) == list(range(1000, 1010)) * 300
    assert [one.finish_reason for one in rest] == ["length", "length"]
    assert {one.choice for one in [first, *rest] if one.report is not None} == {0, 1}


async def test_aclose_aborts_an_unfinished_request_and_only_that(start: Start) -> None:
    client = await start()
    stream = await client.submit(submit("a", max_tokens=10**6))
    other = await client.submit(submit("b", max_tokens=50))
    async with contextlib.aclosing(stream):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert len(tokens(await read(other))) == 50
    await other.aclose()  # it is over: nothing to abort
    await until(lambda: client.stats is not None and client.stats.aborted == 1 and client.stats.running == 0)


async def test_abort_wakes_a_waiting_consumer(start: Start) -> None:
    client = await start()
    stream = await client.submit(submit("a", script="hang"))
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0.05)
    client.abort("a")
    client.abort("unknown")
    assert await reader == []
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)  # it would not leave when asked


async def test_finish_ends_one_choice_and_the_engine_hears_what_to_keep(start: Start) -> None:
    client = await start()
    stream = await client.submit(submit("a", max_tokens=300, num_choices=2))
    seen: list[Output] = []
    async for one in stream:
        if one.choice == 1:
            assert not [late for late in seen if late.choice == 1]  # nothing of it after finish()
            client.finish("a", 1, 1)
            client.finish("a", 1, 0)  # the second time is ignored
        seen.append(one)
    assert len(tokens(seen, 0)) == 300
    assert tokens(seen, 1)[:1] == [1005]
    last = await client.submit(submit("b", max_tokens=10**6))
    await anext(last)
    client.finish("b", 0, 1)
    assert await read(last) == []
    await until(lambda: client.stats is not None and client.stats.miss_tokens == {"a/1": 1, "b/0": 1})
    assert client._streams == {}


async def test_finish_all_ends_every_stream_with_length(start: Start) -> None:
    client = await start()
    streams = [await client.submit(submit(f"r{i}", max_tokens=10**6)) for i in range(4)]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await asyncio.sleep(0.1)
    client.finish_all()
    for outputs in await asyncio.gather(*readers):
        assert outputs[-1].finish_reason == "length"


async def test_kill_9_during_streams(start: Start) -> None:
    client = await start()
    streams = [await client.submit(submit(f"r{i}", max_tokens=10**6)) for i in range(8)]
    for stream in streams:
        await anext(stream)
    killed = client.pid
    assert killed is not None
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    os.kill(killed, signal.SIGKILL)
    ends = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineLost] * 8
    assert "SIGKILL" in str(ends[0])
    assert client.state == "restarting"
    with pytest.raises(EngineUnavailable) as refusal:
        await client.submit(submit("early"))
    assert 1 <= refusal.value.retry_after_s < 30
    for stream in streams:
        await stream.aclose()  # no abort for the next engine
    await client.wait_ready()
    assert client.restarts == 1
    assert client.pid not in (None, killed)
    assert tokens(await read(await client.submit(submit("r0")))) == [5, 6, 7, 5, 6, 7]
    await until(lambda: client.stats is not None)
    assert client.stats is not None
    assert client.stats.aborted == 0


async def test_what_was_said_before_the_end_is_delivered(start: Start) -> None:
    client = await start()
    stream = await client.submit(submit("a", max_tokens=10**6))
    first = await anext(stream)
    await asyncio.sleep(0.05)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.state == "restarting" and stream.finished)
    rest = await anext(stream)
    assert len(tokens([first, rest])) > 3
    with pytest.raises(EngineLost):
        await anext(stream)


async def test_a_hanging_engine_is_killed_and_replaced(start: Start) -> None:
    client = await start(hang_timeout_s=1.5)
    hanging = client.pid
    stream = await client.submit(submit("a", script="hang"))
    with pytest.raises(EngineLost, match="no sign of life"):
        await read(stream)
    assert hanging is not None
    await client.wait_ready()
    assert not alive(hanging)
    assert tokens(await read(await client.submit(submit("b")))) == [5, 6, 7, 5, 6, 7]


async def test_neither_idleness_nor_a_stall_of_the_app_is_taken_for_a_hanging_engine(start: Start) -> None:
    client = await start(hang_timeout_s=1.5)
    await asyncio.sleep(1.8)
    time.sleep(1.8)  # noqa: ASYNC251 - the event loop of the app stands still
    await asyncio.sleep(0.5)
    assert (client.state, client.restarts) == ("ready", 0)


async def test_a_load_that_hangs_is_started_again(start: Start, tmp_path: Path) -> None:
    client = await start(f"hang {tmp_path}/once", ready=False, start_timeout_s=1.5)
    assert client.state == "loading"
    with pytest.raises(EngineUnavailable, match="loading"):
        await client.submit(submit("a"))
    await client.wait_ready()
    assert client.restarts == 1


async def test_a_load_that_is_slow_and_says_so_is_waited_for(start: Start) -> None:
    client = await start("slow", start_timeout_s=2.0)  # takes 4 s after the start of a process
    assert (client.state, client.restarts) == ("ready", 0)


async def test_a_crash_while_loading_is_tried_again(start: Start, tmp_path: Path) -> None:
    client = await start(f"crash {tmp_path}/once")
    assert (client.state, client.restarts, client.failure) == ("ready", 1, None)


async def test_a_refused_model_is_not_tried_again(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    client = await start("refuse", ready=False)
    with pytest.raises(EngineFailed, match="no such architecture"):
        await client.wait_ready()
    assert (client.state, client.failure, client.restarts) == ("failed", "no such architecture", 0)
    assert caplog.messages == []  # the caller that waits for it is told, and tells
    assert client.pid is None
    with pytest.raises(EngineUnavailable, match="failed"):
        await client.submit(submit("a"))


async def test_quick_failures_end_in_failed_with_the_engines_last_lines(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reprise.engine.process.client, "FIRST_BACKOFF_S", 0.01)
    client = await start("crash", ready=False)
    with pytest.raises(EngineFailed):
        await client.wait_ready()
    assert client.restarts == 4
    assert client.failure is not None
    assert "5 times in a row" in client.failure
    assert client.failure.endswith("RuntimeError: crashed while loading")
    assert capsys.readouterr().err.count("RuntimeError: crashed while loading") == 5  # passed through


async def test_a_minute_of_health_forgets_the_failures_before(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reprise.engine.process.client, "HEALTHY_S", 0.0)
    monkeypatch.setattr(reprise.engine.process.client, "MAX_QUICK_FAILURES", 2)
    client = await start()
    for restarts in (1, 2, 3):
        stream = await client.submit(submit("a", script="exit"))
        with pytest.raises(EngineLost, match="exited with status 7"):
            await read(stream)
        await client.wait_ready()
        assert client.restarts == restarts


async def test_an_engine_that_was_ready_is_tried_for_ever_with_growing_pauses(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reprise.engine.process.client, "FIRST_BACKOFF_S", 0.1)
    monkeypatch.setattr(reprise.engine.process.client, "MAX_BACKOFF_S", 0.5)
    client = await start()
    for restarts in range(1, 7):
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda restarts=restarts: client.restarts == restarts)
        await client.wait_ready()
    assert tokens(await read(await client.submit(submit("a")))) == [5, 6, 7, 5, 6, 7]
    pauses = [message.rpartition(" in ")[2] for message in caplog.messages if "killed by SIGKILL" in message]
    assert pauses == ["0.1 s", "0.2 s", "0.4 s", "0.5 s", "0.5 s", "0.5 s"]


async def test_a_model_that_was_served_and_is_refused_for_a_while_is_tried_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reprise.engine.process.client, "FIRST_BACKOFF_S", 0.01)
    shortage = tmp_path / "shortage"
    client = await start(f"refuse-while {shortage}")
    shortage.touch()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.restarts >= 3)
    shortage.unlink()
    await client.wait_ready()
    assert client.failure is None
    assert "refused: no memory for it" in caplog.text


async def test_a_program_that_cannot_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reprise.engine.process.client, "FIRST_BACKOFF_S", 0.001)
    client = EngineClient(config=config(), command=("/no/such/program",), start_timeout_s=5, hang_timeout_s=5)
    await client.start()
    with pytest.raises(EngineFailed, match="could not be started"):
        await client.wait_ready()
    await client.stop()


async def test_failed_steps_fail_requests_and_three_in_a_row_the_engine(start: Start) -> None:
    client = await start()
    pid = client.pid
    for i in range(3):
        (end,) = await read(await client.submit(submit(f"bad{i}", script="raise")))
        assert (end.finish_reason, end.error_code) == ("error", "internal_error")
        if i == 1:
            assert tokens(await read(await client.submit(submit("good")))) == [5, 6, 7, 5, 6, 7]
            assert client.pid == pid
    for i in range(3, 5):
        await read(await client.submit(submit(f"bad{i}", script="raise")))
    await until(lambda: client.restarts == 1 and client.state == "ready")
    assert client.pid != pid


async def test_output_of_the_engine_is_passed_on_whatever_its_bytes(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await start()
    await read(await client.submit(submit("a", script="say bytes", max_tokens=1)))
    await client.stop()
    assert "café � no newline" in capsys.readouterr().err


async def test_the_socket_is_private_and_its_file_gone_once_connected(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client = await start("hang", ready=False)
    await until(lambda: client.pid)
    (directory,) = os.listdir(tmp_path)
    assert os.stat(tmp_path / directory).st_mode & 0o777 == 0o700
    assert os.listdir(tmp_path / directory) == ["engine"]
    await client.stop()
    assert os.listdir(tmp_path) == []
    client = await start()
    assert os.listdir(tmp_path) == []
    assert tokens(await read(await client.submit(submit("a")))) == [5, 6, 7, 5, 6, 7]


async def test_stop_ends_streams_and_process(start: Start) -> None:
    client = await start()
    pid = client.pid
    stream = await client.submit(submit("a", max_tokens=10**6))
    await anext(stream)
    await asyncio.gather(client.stop(), client.stop())
    assert pid is not None
    assert not alive(pid)
    assert (client.state, client.pid, client.restarts) == ("stopped", None, 0)
    with pytest.raises(EngineLost):
        await read(stream)
    with pytest.raises(EngineUnavailable):
        await client.submit(submit("b"))
    with pytest.raises(EngineFailed):
        await client.wait_ready()
    await client.stop()
    with pytest.raises(RuntimeError):
        await client.start()


async def test_stop_kills_what_does_not_leave(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reprise.engine.process.client, "STOP_S", 0.2)
    client = await start()
    pid = client.pid
    await client.submit(submit("a", script="hang"))
    await asyncio.sleep(0.1)
    await client.stop()
    assert pid is not None
    assert not alive(pid)


@pytest.mark.parametrize("model", ["hang", "crash", "refuse"])
async def test_stop_at_any_moment_of_a_start(start: Start, model: str) -> None:
    for delay_s in (0.0, 0.005, 0.1, 0.4):
        client = await start(model, ready=False)
        await asyncio.sleep(delay_s)
        pid = client.pid
        await client.stop()
        assert (client.state, client.pid) == ("stopped", None)
        assert pid is None or not alive(pid)


async def test_stop_while_a_dead_engine_is_tidied_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await start()
    child = client._child
    assert child is not None
    monkeypatch.setattr(child, "connection_lost", lambda exc: None)  # another process holds its output open
    child.kill()
    await until(lambda: client._child is None)
    await client.stop()
    assert (client.state, child._socket.closed, child._transport.is_closing()) == ("stopped", True, True)


async def test_stop_before_start() -> None:
    client = EngineClient(config=config(), command=PROGRAM, start_timeout_s=5, hang_timeout_s=5)
    await client.stop()
    assert client.state == "stopped"


def question(request_id: str, session_id: str, action: str = "get") -> SessionRequest:
    return SessionRequest(request_id=request_id, tenant="t", action=action, session_id=session_id)


async def test_questions_about_sessions_are_answered_each_with_its_own(start: Start) -> None:
    client = await start()
    stream = await client.submit(submit("a", max_tokens=10**6))
    names = [f"s{i}" for i in range(20)]
    replies = await asyncio.gather(*(client.sessions(question(f"q-{name}", name)) for name in names))
    assert [reply.sessions[0].session_id for reply in replies] == names
    deleted = await client.sessions(question("d", "s", "delete"))  # the engine answers it later
    assert (deleted.request_id, deleted.error_code) == ("d", None)
    assert client._questions == {}
    await stream.aclose()


async def test_an_adoption_is_answered_and_heads_are_handed_on(start: Start) -> None:
    client = await start()
    heads: list[Head] = []
    client.on_head = heads.append
    reply = await client.sessions(adopt("q", "s", head=b"left elsewhere"))
    assert reply.sessions[0].session_id == "s"
    await until(lambda: heads)
    assert heads == [head("s", head=b"left elsewhere")]


async def test_a_question_without_an_answer_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await start()
    with pytest.raises(EngineTimeout):
        await client.sessions(question("q", "silent"), timeout_s=0.1)
    waiting = asyncio.create_task(client.sessions(question("r", "silent")))
    await until(lambda: client._questions)
    with pytest.raises(ValueError, match="in use"):
        await client.sessions(question("r", "s"))
    monkeypatch.setattr(reprise.engine.process.client, "MAX_QUESTIONS", 1)
    with pytest.raises(EngineUnavailable, match="too many"):
        await client.sessions(question("s", "s"))
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineLost):
        await waiting
    with pytest.raises(EngineUnavailable):
        await client.sessions(question("t", "s"))
    assert client._questions == {}


async def test_the_last_report_of_a_choice_counts() -> None:
    """A cut in the middle of an answer changes what the first one said."""
    cut = msgspec.structs.replace(REPORT, truncated_tokens=9)
    stream = OutputStream(submit("a"), abort=lambda request_id: None)
    stream.push(output("a", 0, [1], first=True))
    stream.push(msgspec.structs.replace(output("a", 0, [2], finish_reason="length"), report=cut))
    (merged,) = await read(stream)
    assert (merged.token_ids, merged.report) == ([1, 2], cut)


async def test_progress_that_was_not_read_is_replaced_by_what_follows() -> None:
    told = [
        progress_output("a", 0, Progress(prompt_tokens=9, read_tokens=n, cached_tokens=0, ahead=0, left_ms=None))
        for n in range(3)
    ]
    stream = OutputStream(submit("a"), abort=lambda request_id: None)
    for one in told:
        stream.push(one)
    assert await anext(stream) == told[-1]
    stream.push(told[-1])
    stream.push(output("a", 0, [1], first=True, finish_reason="length"))
    (last,) = await read(stream)
    assert (last.token_ids, last.report, last.progress) == ([1], REPORT, None)


async def test_an_engine_that_does_not_read_gets_no_more_work(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reprise.engine.process.client, "MAX_BACKLOG", 0)
    client = await start()
    with pytest.raises(EngineUnavailable, match="keeping up"):
        await client.submit(submit("a"))


APP = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from reprise.engine.process.client import EngineClient
from tests.engine.scripted_engine import config

async def main():
    client = EngineClient(config=config(), command=(sys.executable, sys.argv[2]), start_timeout_s=20, hang_timeout_s=20)
    await client.start()
    await client.wait_ready()
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_an_app_that_is_killed_takes_the_engine_along() -> None:
    with subprocess.Popen([sys.executable, "-c", APP, str(ROOT), PROGRAM[1]], stdout=subprocess.PIPE) as app:
        assert app.stdout is not None
        pid = int(app.stdout.readline())
        assert alive(pid)
        app.kill()
    deadline = time.monotonic() + 5
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_environment_of_the_engine() -> None:
    base = {"HOME": "/h", "REPRISE_SERVER__API_KEYS": "secret", "MALLOC_TOP_PAD_": "1", "PYTHONPATH": "/extra"}
    environment = engine_environment(config(), base)
    assert environment["HOME"] == "/h"
    assert "REPRISE_SERVER__API_KEYS" not in environment
    assert environment["MALLOC_TOP_PAD_"] == "1"  # the operator's word
    assert environment["MALLOC_MMAP_THRESHOLD_"] == MALLOC["MALLOC_MMAP_THRESHOLD_"] == str(4 * 2**30)
    assert "GLIBC_TUNABLES" not in environment, "huge pages by malloc cost a turn that grows 85 ms"
    assert environment["PYTHONPATH"] == f"{ROOT}{os.pathsep}/extra"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["USE_HUB_KERNELS"] == "NO"
    assert environment["GOMP_SPINCOUNT"] == "10000"


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")])
def test_how_threads_wait_is_the_operators_choice(name: str, value: str) -> None:
    environment = engine_environment(config(), {name: value})
    assert environment[name] == value
    assert environment.get("GOMP_SPINCOUNT") == ("7" if name == "GOMP_SPINCOUNT" else None)


@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=30),
    logprobs=st.booleans(),
    report=st.booleans(),
)
async def test_reading_at_any_pace_gives_the_same_tokens(
    steps: list[tuple[int, int, bool]], logprobs: bool, report: bool
) -> None:
    """Each step pushes so many tokens of a choice; the consumer takes an output after some of the steps."""
    stream = OutputStream(submit("a", num_choices=3), abort=lambda request_id: None)
    sent: dict[int, list[int]] = {0: [], 1: [], 2: []}
    taken: list[Output] = []

    def push(choice: int, count: int, finish_reason: str | None) -> None:
        ids = list(range(len(sent[choice]), len(sent[choice]) + count))
        one = output("a", choice, ids, first=report and not sent[choice], finish_reason=finish_reason)
        values = [TokenLogprob(logprob=-float(i), top=[]) for i in ids]
        stream.push(msgspec.structs.replace(one, logprobs=values if logprobs and ids else None))
        sent[choice] += ids

    for choice, count, take in steps:
        push(choice, count, None)
        if take:
            taken.append(await anext(stream))
    for choice in range(3):
        push(choice, 1, "stop")
        stream.push(output("a", choice, [-1]))  # comes after its end: dropped
    taken += [one async for one in stream]
    for choice in range(3):
        mine = [one for one in taken if one.choice == choice]
        assert tokens(mine, choice) == sent[choice]
        got = [value.logprob for one in mine for value in one.logprobs or []]
        assert got == ([-float(i) for i in sent[choice]] if logprobs else [])
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[0].report == (REPORT if report else None)
        assert mine[-1].timings == TIMINGS


async def test_an_engine_that_comes_back_with_other_weights_is_not_served(start: Start) -> None:
    client = await start()
    assert client.model is not None
    assert client.pid is not None
    client.model = msgspec.structs.replace(client.model, fingerprint="00" * 16)
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.state == "failed")
    assert client.failure is not None
    assert "have changed" in client.failure
