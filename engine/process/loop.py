"""Runs the engine process (`python -m reprise.engine.process.loop`), which `reprise.engine.process.client` starts and
supervises.

One thread loops: it drains the inbox, runs one step of the engine, sends the outputs, and about once a second a
heartbeat. A second thread waits for the app to die. Nothing here imports torch; `reprise.engine.build.engine` does,
once the process is connected.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from threading import Timer
from typing import Protocol

import msgspec
import zmq

from reprise.engine.config import EngineConfig
from reprise.engine.lifeline import die_with_parent, read_frame
from reprise.engine.messages import (
    WIRE_VERSION,
    Abort,
    Adopt,
    Finish,
    FinishAll,
    FromEngine,
    Head,
    Launch,
    ModelInfo,
    Output,
    Outputs,
    Ready,
    Refused,
    SessionReply,
    SessionRequest,
    Shutdown,
    Starting,
    Stats,
    Submit,
    ToEngine,
    decode_launch,
    decode_to_engine,
    encode,
    error_output,
)
from reprise.engine.process.collector import Collector

HIGH_WATER_MARK = 1_000  # frames per direction; a full socket makes its sender wait, nothing is dropped
SEND_TIMEOUT_MS = 30_000  # an app that reads nothing for that long is as good as dead
LINGER_MS = 2_000  # time for the last messages to be sent
POLL_MS = 200
MOVING_POLL_MS = 25  # poll interval while bytes move between the tiers, here or in another rank
ASKED_POLL_MS = 2  # poll interval while a session request waits: a turn that moves here waits for its answer
HEARTBEAT_S = 1.0
EARLY_HEARTBEAT_S = 0.1  # least time between those before long steps, which tell what runs
CLOSE_S = 10.0  # time for saving what is left at the end; the rest is lost
MAX_FAILURES = 3  # most failed steps in a row

log = logging.getLogger(__name__)


class StepEngine(Protocol):
    """The engine that this process drives, from one thread. `now` is the monotonic clock in seconds."""

    model: ModelInfo

    @property
    def bell(self) -> int | None:
        """A file descriptor that becomes readable when a transfer has ended and `poll` should be called. None: there is
        none, and only `is_moving` says when to call `poll`."""
        ...

    def accept(self, request: Submit, now: float) -> list[Output]:
        """Queue a request. Returns outputs that exist at once, such as a rejection (finish_reason `error`)."""
        ...

    def abort(self, request_id: str) -> None: ...

    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None: ...

    def finish_all(self, now: float) -> list[Output]: ...

    def sessions(self, request: SessionRequest, now: float) -> list[SessionReply]:
        """Carry out a request about sessions. Returns the answers that exist at once, to this request or to earlier
        ones. `poll` returns the others."""
        ...

    def adopt(self, request: Adopt, now: float) -> list[SessionReply]:
        """Take over a session of another replica. Returns the answer if it exists at once; otherwise `poll` returns
        it."""
        ...

    def take_heads(self) -> list[Head]:
        """Return the heads that have changed since `take_heads` was last called. (A head is the record by which another
        replica can take over a session.) Called in every turn of the loop."""
        ...

    def poll(self, now: float) -> list[SessionReply]:
        """Note which transfers of KV have ended, start those that are due, and return answers to session requests that
        have become ready. Called in every turn of the loop, so it is cheap."""
        ...

    def has_work(self) -> bool:
        """Return whether `step` is to be called again."""
        ...

    def is_moving(self) -> bool:
        """Return whether bytes move between the tiers, so that `poll` should be called soon even if `bell` is not
        readable."""
        ...

    def step(self, now: float, before_long: Callable[[], None]) -> list[Output]:
        """Run one batch, or wait a moment for the transfers if nothing can run yet. If this raises, the loop calls
        `fail_all`. before_long: called after scheduling and before computing, if the step is long and some request runs
        in it for the first time."""
        ...

    def progress(self, now: float) -> list[Output]:
        """Return outputs for clients that want to know how far their prompts are read, ten times a second at most.
        Called in every turn of the loop."""
        ...

    def is_fatal(self, error: Exception) -> bool:
        """Return whether an exception that a method has raised means that nothing can work any more, so that only a new
        process helps."""
        ...

    def fail_all(self, message: str) -> list[Output]:
        """End every request, running or waiting, with finish_reason `error`; afterwards there is no work."""
        ...

    def idle(self, now: float) -> None:
        """Do the work that is due about once a second, between steps."""
        ...

    def stats(self) -> Stats: ...

    def close(self) -> None:
        """Save what is not saved yet, and close files and threads. No other call follows."""
        ...


Builder = Callable[[EngineConfig, Callable[[], None]], StepEngine | Refused]
"""Makes an engine. If that takes long, it calls its second argument every now and then, so that the app does not take
the process for hanging."""


class EngineLoop:
    """A loop that carries messages between the app and the engine, in the process's main thread. The socket is a PAIR
    with a send timeout."""

    def __init__(self, *, engine: StepEngine, socket: "zmq.Socket[bytes]") -> None:
        self._engine = engine
        self._socket = socket
        self._collector = Collector()
        self._failures = 0
        self._unanswered: set[str] = set()  # session requests
        self._heartbeat_s = float("-inf")  # time of the last heartbeat
        self._early_s = float("-inf")  # time of the last one before a long step
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if engine.bell is not None:
            self._poller.register(engine.bell, zmq.POLLIN)

    def run(self) -> int:
        """Run the loop until the app sends Shutdown or the engine fails for good. Returns the exit status: 0 after
        Shutdown, 1 after MAX_FAILURES failures in a row. Raises zmq.Again when the app has stopped reading, and
        whatever `fail_all` raises."""
        shutdown = False
        while not shutdown and self._failures < MAX_FAILURES:
            outputs: list[Output] = []
            for message in self._inbox():
                if isinstance(message, Shutdown):
                    shutdown = True
                    break
                if isinstance(message, SessionRequest | Adopt):
                    self._unanswered.add(message.request_id)
                    self._reply(self._sessions(message))
                else:
                    outputs += self._apply(message)
            if not shutdown and self._engine.has_work():
                self._tell(self._progress())  # before the step, which takes seconds if a prompt is long
                outputs += self._step()
            self._tell(outputs)  # first, so that no token waits for what `_poll` does after a step
            self._tell(self._poll())
            self._beat()
        return 0 if shutdown else 1

    def _inbox(self) -> Iterator[ToEngine]:
        """Yield all messages that have arrived. Waits a while if there is nothing else to do."""
        if not self._engine.has_work() and not self._poller.poll(self._patience_ms()):
            return
        for _ in range(2 * HIGH_WATER_MARK):  # all that can be under way; a flood must not starve the steps
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield decode_to_engine(frame)
            except msgspec.DecodeError as error:
                log.warning("dropped a message of %d bytes that is none of ours: %s", len(frame), error)

    def _patience_ms(self) -> int:
        if self._unanswered:
            return ASKED_POLL_MS
        return MOVING_POLL_MS if self._engine.is_moving() else POLL_MS

    def _apply(self, message: Submit | Abort | Finish | FinishAll) -> list[Output]:
        try:
            match message:
                case Submit():
                    return self._accept(message)
                case Abort():
                    self._engine.abort(message.request_id)
                case Finish():
                    self._engine.finish(message.request_id, message.choice, message.keep_tokens)
                case FinishAll():
                    return self._engine.finish_all(time.monotonic())
        except Exception as error:
            return self._fail(error)
        return []

    def _accept(self, request: Submit) -> list[Output]:
        """Queue a request. If the engine raises for it, only this request fails."""
        try:
            return self._engine.accept(request, time.monotonic())
        except Exception as error:
            log.exception("submit of request %s failed", request.request_id)
            request_id, message = request.request_id, _describe(error)
            failed = [
                error_output(request_id, index, "internal_error", message) for index in range(request.num_choices)
            ]
            return failed + self._apply(Abort(request_id))

    def _sessions(self, request: SessionRequest | Adopt) -> list[SessionReply]:
        """Answer a request about sessions. If the engine raises for it, the reply says so, and no other request
        fails."""
        try:
            if isinstance(request, Adopt):
                return self._engine.adopt(request, time.monotonic())
            return self._engine.sessions(request, time.monotonic())
        except Exception as error:
            log.exception("session request %s failed", request.request_id)
            failed = f"the engine failed on this request ({type(error).__name__})"
            return [SessionReply(request_id=request.request_id, sessions=[], error_code="unavailable", error=failed)]

    def _poll(self) -> list[Output]:
        try:
            self._reply(self._engine.poll(time.monotonic()))
        except zmq.Again:
            raise
        except Exception as error:
            self._unanswered.clear()  # answers may have been lost with it
            return self._fail(error)
        return []

    def _tell(self, outputs: list[Output]) -> None:
        """Send heads of sessions, then outputs, so that the head of a turn arrives before the turn's end."""
        for head in self._engine.take_heads():
            self._send(head)
        if outputs:
            self._send(Outputs(outputs))

    def _reply(self, replies: list[SessionReply]) -> None:
        for reply in replies:
            self._unanswered.discard(reply.request_id)
            self._send(reply)

    def _progress(self) -> list[Output]:
        try:
            return self._engine.progress(time.monotonic())
        except Exception as error:
            return self._fail(error)

    def _step(self) -> list[Output]:
        try:
            outputs = self._engine.step(time.monotonic(), self._beat_before_long)
        except zmq.Again:  # the app does not read the heartbeat before it
            raise
        except Exception as error:  # MemoryError and torch's out-of-memory errors among them
            return self._fail(error)
        self._failures = 0
        return outputs

    def _fail(self, error: Exception) -> list[Output]:
        self._failures = MAX_FAILURES if self._engine.is_fatal(error) else self._failures + 1
        log.error("the engine failed (%d of %d in a row)", self._failures, MAX_FAILURES, exc_info=error)
        return self._engine.fail_all(_describe(error))

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._heartbeat_s < HEARTBEAT_S:
            return
        self._heartbeat_s = now
        self._engine.idle(now)
        if not self._engine.has_work():
            self._collector.idle(now)
        self._send(self._engine.stats())

    def _beat_before_long(self) -> None:
        now = time.monotonic()
        if now - self._early_s >= EARLY_HEARTBEAT_S:
            self._early_s = now
            self._send(self._engine.stats())

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))


def _describe(error: Exception) -> str:
    # The text of an exception may hold paths or prompts: it belongs in the log, not in an answer.
    return f"the engine failed while running this request ({type(error).__name__})"


def run(build: Builder) -> int:
    """Run the whole life of the process. Reads from stdin what to load, and returns the exit status. Takes over the
    signals and stdin of the process."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the app decides when to stop; it sends Shutdown, or SIGKILL
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    launch = decode_launch(read_frame(sys.stdin.fileno()))
    die_with_parent(sys.stdin.fileno())
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(HIGH_WATER_MARK)
        socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.connect(launch.endpoint)
        try:
            return _serve(build, launch, socket)
        except zmq.Again:
            log.critical("the app has read nothing for %d s: leaving", SEND_TIMEOUT_MS // 1000)
        except Exception:
            log.critical("the engine process cannot go on", exc_info=True)
        return 1


def _serve(build: Builder, launch: Launch, socket: "zmq.Socket[bytes]") -> int:
    if launch.wire_version != WIRE_VERSION:
        engine: StepEngine | Refused = Refused("the program was updated while it ran: restart the server")
    else:
        engine = build(launch.config, lambda: socket.send(encode(Starting())))
    if isinstance(engine, Refused):
        socket.send(encode(engine))
        return 0
    socket.send(encode(Ready(engine.model)))
    status = EngineLoop(engine=engine, socket=socket).run()
    if status == 0:  # an engine that has failed must not write to disk any more
        _close(engine)
    return status


def _close(engine: StepEngine) -> None:
    """Close the engine within CLOSE_S, on this thread, to which its files belong. If it hangs, the process is ended."""
    watchdog = Timer(CLOSE_S, _give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        engine.close()
    except Exception:
        log.exception("the engine could not save all it had")
    finally:
        watchdog.cancel()


def _give_up() -> None:
    log.error("not all was saved within %g s: leaving", CLOSE_S)
    logging.shutdown()
    os._exit(0)


def _build(config: EngineConfig, go_on: Callable[[], None]) -> StepEngine | Refused:
    gc.disable()  # it takes a fifth of the time of all imports, and what they make stays
    from reprise.engine.build.engine import build_engine
    from reprise.engine.model.loading import ModelRefused

    try:
        return build_engine(config, go_on)
    except ModelRefused as refusal:
        return Refused(str(refusal))
    finally:
        gc.enable()


if __name__ == "__main__":
    status = run(_build)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # skips taking down an interpreter with torch in it, which costs a second
