"""Tests the engine's side of the wire: the loop over an in-process socket, and the life of the real process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from reprise.engine.lifeline import FRAME_LENGTH
from reprise.engine.messages import (
    WIRE_VERSION,
    Abort,
    Adopt,
    Finish,
    FinishAll,
    FromEngine,
    Head,
    Launch,
    Output,
    Outputs,
    Ready,
    Refused,
    SessionReply,
    SessionRequest,
    Shutdown,
    Stats,
    ToEngine,
    decode_from_engine,
    decode_launch,
    decode_to_engine,
    encode,
)
from reprise.engine.process.loop import EngineLoop
from tests.engine.scripted_engine import ScriptedEngine, adopt, config, head, submit

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "scripted_engine.py"))


class Peer:
    """The app's end of the socket, blocking."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.setsockopt(zmq.LINGER, 0)

    def post(self, *messages: ToEngine) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def receive(self) -> FromEngine:
        return decode_from_engine(self.socket.recv())

    def collect(self, done: Callable[[list[Output]], bool]) -> list[Output]:
        """All outputs until they are `done`."""
        outputs: list[Output] = []
        while not done(outputs):
            message = self.receive()
            if isinstance(message, Outputs):
                outputs += message.outputs
        return outputs

    def finished(self, *request_ids: str) -> list[Output]:
        """All outputs of these requests until each has one finished choice."""
        wanted = set(request_ids)
        outputs = self.collect(lambda seen: wanted <= {o.request_id for o in seen if o.finish_reason})
        return [o for o in outputs if o.request_id in wanted]

    def replies(self, count: int) -> list[SessionReply]:
        """The next so many answers to questions about sessions."""
        found: list[SessionReply] = []
        while len(found) < count:
            if isinstance(message := self.receive(), SessionReply):
                found.append(message)
        return found

    def stats(self) -> Stats:
        """The next heartbeat."""
        while not isinstance(message := self.receive(), Stats):
            pass
        return message


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(step_s=0.001)


class Running:
    """An EngineLoop on a thread."""

    def __init__(self, engine: ScriptedEngine, socket: "zmq.Socket[bytes]") -> None:
        self._status: int | BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(EngineLoop(engine=engine, socket=socket),), daemon=True)
        self._thread.start()

    def _run(self, loop: EngineLoop) -> None:
        try:
            self._status = loop.run()
        except BaseException as error:
            self._status = error

    def join(self) -> int | BaseException | None:
        """Return what `run` returned or raised; None when it still runs after 10 s."""
        self._thread.join(10)
        return self._status


Start = Callable[[], Running]


@pytest.fixture
def sockets() -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as app, context.socket(zmq.PAIR) as inside:
        for socket in (app, inside):
            socket.set_hwm(100)
            socket.setsockopt(zmq.LINGER, 0)
        inside.setsockopt(zmq.SNDTIMEO, 200)
        app.bind("inproc://engine")
        inside.connect("inproc://engine")
        yield app, inside


@pytest.fixture
def peer(sockets: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]) -> Peer:
    return Peer(sockets[0])


@pytest.fixture
def start(engine: ScriptedEngine, sockets: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]) -> Iterator[Start]:
    """Starts the loop; what is posted before is there at its first look."""
    started: list[Running] = []

    def start() -> Running:
        started.append(Running(engine, sockets[1]))
        return started[-1]

    yield start
    with contextlib.suppress(zmq.Again):
        sockets[0].send(encode(Shutdown()), zmq.NOBLOCK)
    for one in started:
        one.join()


def tokens(outputs: list[Output], choice: int = 0) -> list[int]:
    return [token_id for o in outputs if o.choice == choice for token_id in o.token_ids]


def test_everything_that_waits_is_taken_before_the_next_step(peer: Peer, start: Start) -> None:
    peer.post(*(submit(f"r{i}", max_tokens=1) for i in range(50)), Abort("r7"))
    running = start()
    first = peer.finished("r0")
    assert [o.request_id for o in first] == ["r0"]
    message = peer.stats()
    assert message.steps == 1  # all 49 in one batch, sent as one frame before this heartbeat
    assert message.running == 0
    assert message.aborted == 1
    peer.post(Shutdown())
    assert running.join() == 0


def test_outputs_of_one_step_are_one_frame(peer: Peer, start: Start) -> None:
    peer.post(*(submit(f"r{i}", max_tokens=2) for i in range(3)))
    running = start()
    frames = [m for m in (peer.receive() for _ in range(3)) if isinstance(m, Outputs)]
    assert [[o.request_id for o in frame.outputs] for frame in frames] == [["nobody", "r0", "r1", "r2"]] * 2
    peer.post(Shutdown())
    assert running.join() == 0


def test_nobodys_token_waits_for_what_is_put_in_order_behind_its_step(
    engine: ScriptedEngine, peer: Peer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, poll, waited = threading.Event(), engine.poll, list[bool]()

    def slow(now: float) -> list[SessionReply]:
        if engine.stats().steps:
            waited.append(received.wait(5))
        return poll(now)

    monkeypatch.setattr(engine, "poll", slow)
    peer.post(submit("r", max_tokens=1))
    running = start()
    peer.finished("r")
    received.set()
    peer.post(Shutdown())
    assert running.join() == 0
    assert waited
    assert all(waited)


def test_finish_and_finish_all(peer: Peer, start: Start) -> None:
    start()
    peer.post(submit("stop", max_tokens=10**6), submit("drain", max_tokens=10**6))
    peer.collect(lambda seen: len(seen) > 10)
    peer.post(Finish("stop", 0, 4), FinishAll())
    ends = [o for o in peer.finished("drain") if o.finish_reason]
    assert [(o.request_id, o.finish_reason) for o in ends] == [("drain", "length")]
    assert peer.stats().miss_tokens == {"stop/0": 4}


def question(request_id: str, action: str = "get", session_id: str = "s") -> SessionRequest:
    return SessionRequest(request_id=request_id, tenant="t", action=action, session_id=session_id)


def test_sessions_are_answered_at_once_or_when_the_engine_is_done(
    peer: Peer, start: Start, engine: ScriptedEngine
) -> None:
    engine.polls_to_delete = 5
    peer.post(submit("a", max_tokens=10**6), question("gone", "delete"), question("here"))
    start()
    here, gone = peer.replies(2)
    assert (here.request_id, [info.session_id for info in here.sessions]) == ("here", ["s"])
    assert (gone.request_id, gone.error_code) == ("gone", None)
    assert engine.polls_to_delete <= 0
    assert peer.collect(lambda seen: any(one.request_id == "a" for one in seen))  # the answer under way goes on


def test_heads_go_ahead_of_the_outputs_of_their_step(engine: ScriptedEngine, peer: Peer, start: Start) -> None:
    engine.heads.append(head("s", turn=3))
    peer.post(submit("r", max_tokens=1))
    start()
    assert peer.receive() == head("s", turn=3)
    assert isinstance(peer.receive(), Outputs)


def test_an_adoption_is_answered_like_a_question_about_sessions(peer: Peer, start: Start) -> None:
    peer.post(adopt("q", "s", head=b"left elsewhere"))
    start()
    reply = peer.receive()
    assert isinstance(reply, SessionReply)
    assert (reply.request_id, reply.error_code, reply.sessions[0].session_id) == ("q", None, "s")
    assert peer.receive() == head("s", head=b"left elsewhere")


@pytest.mark.parametrize("data", [b"", b"\0" * 1000, bytes(range(256)) * 8])
def test_heads_and_adoptions_pass_the_wire_unchanged(data: bytes) -> None:
    sent = Head(tenant="t", salt="pepper", session_id="s/1", turn=7, redis_tokens=96, head=data)
    assert decode_from_engine(encode(sent)) == sent
    taken = Adopt(request_id="q", tenant="t", salt="pepper", session_id="s/1", head=data)
    assert decode_to_engine(encode(taken)) == taken


def test_a_question_the_engine_chokes_on_fails_alone(
    peer: Peer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    peer.post(submit("a", max_tokens=20), question("q", session_id="choke"))
    (reply,) = peer.replies(1)
    assert (reply.error_code, reply.sessions) == ("unavailable", [])
    assert "ValueError" in (reply.error or "")
    assert "choked" not in (reply.error or "")
    assert "sessions choked" in caplog.text
    assert tokens(peer.finished("a"))[-1:] == [6]


def test_a_poll_that_fails_is_a_failure_of_the_engine(peer: Peer, start: Start) -> None:
    start()
    peer.post(submit("a", max_tokens=10**6), question("q", "delete", "poll chokes"))
    assert [one.error_code for one in peer.finished("a") if one.finish_reason] == ["internal_error"]
    peer.post(submit("b"))
    assert tokens(peer.finished("b")) == [5, 6, 7, 5, 6, 7]


def test_bytes_that_are_no_message_are_dropped(peer: Peer, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start()
    for frame in (b"", b"\xc1", msgspec.msgpack.encode({"type": "reboot"}), msgspec.msgpack.encode({"type": "submit"})):
        peer.socket.send(frame)
    peer.post(submit("after"))
    assert tokens(peer.finished("after")) == [5, 6, 7, 5, 6, 7]
    assert len([r for r in caplog.records if "dropped" in r.message]) == 4


def test_a_failed_step_fails_what_runs_and_nothing_else(
    peer: Peer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    peer.post(submit("a", max_tokens=10**6), submit("b", script="raise"))
    ends = [o for o in peer.finished("a", "b") if o.finish_reason]
    assert {(o.request_id, o.finish_reason, o.error_code) for o in ends} == {
        ("a", "error", "internal_error"),
        ("b", "error", "internal_error"),
    }
    assert all(
        "RuntimeError" in o.error and "step failed" not in o.error for o in ends
    )  # the text is for the log alone
    assert "step failed" in caplog.text
    peer.post(submit("c"))
    assert tokens(peer.finished("c")) == [5, 6, 7, 5, 6, 7]


def test_a_success_between_failures_starts_the_count_again(peer: Peer, start: Start) -> None:
    start()
    for i in range(4):
        peer.post(submit(f"bad{i}", script="no memory"))
        assert peer.finished(f"bad{i}")[-1].finish_reason == "error"
        peer.post(submit(f"good{i}"))
        assert peer.finished(f"good{i}")[-1].finish_reason == "length"


def test_three_failures_in_a_row_end_the_loop_after_the_last_error_is_sent(peer: Peer, start: Start) -> None:
    running = start()
    for i in range(3):
        peer.post(submit(f"bad{i}", script="raise"))
        assert peer.finished(f"bad{i}")[-1].finish_reason == "error"
    assert running.join() == 1


def test_a_lost_device_ends_the_loop_at_once(peer: Peer, start: Start) -> None:
    running = start()
    peer.post(submit("bad", script="lose device"))
    assert peer.finished("bad")[-1].finish_reason == "error"
    assert running.join() == 1


def test_a_request_that_the_engine_chokes_on_fails_alone(peer: Peer, start: Start) -> None:
    start()
    peer.post(submit("fine", max_tokens=200), *(submit(f"odd{i}", script="choke", num_choices=2) for i in range(4)))
    outputs = peer.finished("fine", *(f"odd{i}" for i in range(4)))
    odd = [(o.request_id, o.choice, o.finish_reason) for o in outputs if o.request_id.startswith("odd")]
    assert odd == [(f"odd{i}", choice, "error") for i in range(4) for choice in range(2)]
    assert len(tokens([o for o in outputs if o.request_id == "fine"])) == 200
    assert peer.stats().running == 0


def test_a_failure_outside_a_step_fails_what_runs(peer: Peer, start: Start) -> None:
    start()
    peer.post(submit("a", max_tokens=10**6), Finish("unknown", 0, 0))  # the scripted engine raises KeyError
    assert peer.finished("a")[-1].finish_reason == "error"
    peer.post(submit("b"))
    assert peer.finished("b")[-1].finish_reason == "length"


def test_progress_that_cannot_be_told_fails_what_runs(engine: ScriptedEngine, peer: Peer, start: Start) -> None:
    start()
    engine.progress_error = RuntimeError("no progress")
    peer.post(submit("a", max_tokens=10**6))
    assert peer.finished("a")[-1].finish_reason == "error"
    peer.post(submit("b"))
    assert peer.finished("b")[-1].finish_reason == "length"


def test_heartbeat_idle_or_busy(engine: ScriptedEngine, peer: Peer, start: Start) -> None:
    start()
    start_s = time.monotonic()
    peer.stats()
    peer.stats()
    assert engine.idle_calls == 2
    peer.post(submit("long", max_tokens=10**6))
    assert peer.stats().running == 1
    assert engine.idle_calls == 3  # housekeeping goes on under load, or nothing would ever expire
    assert 1.5 < time.monotonic() - start_s < 6


def test_before_a_long_step_it_is_told_what_runs(peer: Peer, start: Start) -> None:
    peer.post(submit("r", script="long prompt", max_tokens=1))
    start()
    told = peer.receive()
    assert isinstance(told, Stats), "not only when the step is over"
    assert told.running == 1
    assert isinstance(peer.receive(), Outputs)


def test_an_app_that_does_not_read_ends_the_loop(peer: Peer, start: Start) -> None:
    peer.post(submit("endless", max_tokens=10**6))
    assert isinstance(start().join(), zmq.Again)


def test_an_app_that_does_not_read_before_a_long_step_is_no_failure_of_the_engine(
    engine: ScriptedEngine, start: Start, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: EngineLoop) -> None:
        raise zmq.Again

    monkeypatch.setattr(EngineLoop, "_beat_before_long", refuse)
    peer.post(submit("r", script="long prompt"))
    assert isinstance(start().join(), zmq.Again)


class Spawned:
    """The real process with the app's ends of its pipe and its socket."""

    def __init__(self, directory: Path, model: str = "", wire_version: int = WIRE_VERSION) -> None:
        self.context = zmq.Context()
        endpoint = f"ipc://{directory}/s"
        self.peer = Peer(self.context.socket(zmq.PAIR))
        self.peer.socket.bind(endpoint)
        self.process = subprocess.Popen(
            PROGRAM,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        launch = encode(Launch(wire_version=wire_version, endpoint=endpoint, config=config(model)))
        self.process.stdin.write(FRAME_LENGTH.pack(len(launch)) + launch)
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stderr.close()
        self.context.destroy(linger=0)


@pytest.fixture
def spawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Spawned]]:
    spawned: list[Spawned] = []

    def spawn(**kwargs: object) -> Spawned:
        spawned.append(Spawned(tmp_path_factory.mktemp("e"), **kwargs))
        return spawned[-1]

    yield spawn
    for one in spawned:
        one.close()


def test_ready_then_shutdown_with_status_0_and_signals_ignored(spawn: Callable[..., Spawned]) -> None:
    engine = spawn()
    ready = engine.peer.receive()
    assert isinstance(ready, Ready)
    assert ready.model.name == "scripted"
    engine.process.send_signal(signal.SIGTERM)
    engine.process.send_signal(signal.SIGINT)
    engine.peer.post(submit("a"))
    assert tokens(engine.peer.finished("a")) == [5, 6, 7, 5, 6, 7]
    engine.peer.post(Shutdown())
    assert engine.process.wait(10) == 0
    assert b"saved everything" in engine.process.stderr.read()


@pytest.mark.parametrize(
    ("script", "says"), [("hang-at-close", b"not all was saved"), ("raise-at-close", b"could not save all")]
)
def test_an_engine_that_cannot_save_leaves_all_the_same(
    spawn: Callable[..., Spawned], script: str, says: bytes
) -> None:
    engine = spawn(model=script)
    engine.peer.receive()
    engine.peer.post(Shutdown())
    assert engine.process.wait(10) == 0
    assert says in engine.process.stderr.read()


def test_refusal(spawn: Callable[..., Spawned]) -> None:
    engine = spawn(model="refuse")
    assert engine.peer.receive() == Refused("no such architecture")
    assert engine.process.wait(10) == 0


def test_a_crash_while_loading_leaves_a_traceback_and_status_1(spawn: Callable[..., Spawned]) -> None:
    engine = spawn(model="crash")
    assert engine.process.wait(10) == 1
    assert b"RuntimeError: crashed while loading" in engine.process.stderr.read()


def test_another_wire_version_is_refused(spawn: Callable[..., Spawned]) -> None:
    engine = spawn(wire_version=WIRE_VERSION + 1)
    assert isinstance(engine.peer.receive(), Refused)
    assert engine.process.wait(10) == 0


def test_stdin_without_a_launch_ends_the_process() -> None:
    done = subprocess.run(PROGRAM, input=b"\0\0\0\5abc", env=ENVIRONMENT, capture_output=True, timeout=10, check=False)
    assert done.returncode == 1
    assert b"EOFError" in done.stderr


@pytest.mark.parametrize("script", ["", "hang"], ids=["serving", "loading"])
def test_the_end_of_stdin_ends_the_process(spawn: Callable[..., Spawned], script: str, tmp_path: Path) -> None:
    loading = tmp_path / "loading"
    engine = spawn(model=f"{script} {loading}")
    wait_for(loading.exists)
    if not script:
        engine.peer.receive()
        engine.peer.post(submit("a", script="hang"))  # inside a step that does not return
        time.sleep(0.1)
    engine.process.stdin.close()
    assert engine.process.wait(5) == 1


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_neither_side_imports_torch() -> None:
    code = (
        "import sys, reprise.engine.process.loop, reprise.engine.process.client; "
        "assert not {'torch', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=30)


def test_launch_carries_the_whole_config() -> None:
    launch = Launch(wire_version=1, endpoint="ipc://x", config=config("m"))
    assert decode_launch(encode(launch)) == launch


def test_while_something_moves_nobody_waits_for_the_inbox(
    sockets: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion, or a turn on its way to disk, is gone on with when it has ended; with nothing under way the loop
    sleeps until a message comes."""
    monkeypatch.setattr("reprise.engine.process.loop.POLL_MS", 600_000)
    polled = threading.Semaphore(0)

    class Moving(ScriptedEngine):
        left = 5

        def poll(self, now: float) -> list[SessionReply]:
            self.left -= 1
            polled.release()
            return super().poll(now)

        def is_moving(self) -> bool:
            return self.left > 0

    running = Running(Moving(step_s=0.001), sockets[1])
    for _ in range(5):
        assert polled.acquire(timeout=10)
    assert not polled.acquire(timeout=0.2)
    Peer(sockets[0]).post(Shutdown())
    assert running.join() == 0


def test_the_bell_of_an_engine_ends_the_wait_for_the_inbox(
    sockets: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A written block goes on to Redis at once: until it is there, it dies with its server."""
    monkeypatch.setattr("reprise.engine.process.loop.POLL_MS", 600_000)
    polled = threading.Semaphore(0)
    listens, rings = os.pipe()

    class Belled(ScriptedEngine):
        bell = listens

        def poll(self, now: float) -> list[SessionReply]:
            polled.release()
            return super().poll(now)

    running = Running(Belled(step_s=0.001), sockets[1])
    assert not polled.acquire(timeout=0.2)
    os.write(rings, b"\0")
    assert polled.acquire(timeout=10)
    os.read(listens, 1)
    Peer(sockets[0]).post(Shutdown())
    assert running.join() == 0
    os.close(listens)
    os.close(rings)


def test_nobody_waits_for_the_inbox_while_an_adoption_has_no_answer(
    sockets: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading headers moves nothing between the tiers; yet the first token of a turn waits for them."""
    monkeypatch.setattr("reprise.engine.process.loop.POLL_MS", 600_000)

    class Adopting(ScriptedEngine):
        asked = ""
        polls_left = 3

        def adopt(self, request: Adopt, now: float) -> list[SessionReply]:
            self.asked = request.request_id
            return []

        def poll(self, now: float) -> list[SessionReply]:
            if not self.asked:
                return []
            self.polls_left -= 1
            if self.polls_left:
                return []
            request_id, self.asked = self.asked, ""
            return [SessionReply(request_id=request_id, sessions=[])]

    running = Running(Adopting(step_s=0.001), sockets[1])
    peer = Peer(sockets[0])
    peer.post(adopt("moved", "s"))
    [reply] = peer.replies(1)
    assert (reply.request_id, reply.error_code) == ("moved", None)
    peer.post(Shutdown())
    assert running.join() == 0
