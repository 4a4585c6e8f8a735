"""Starts the engine, watches it, restarts it, and gives every request a stream of its outputs.

Imports no torch. Everything here belongs to one event loop and must not be called from another thread.
"""

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import zmq
import zmq.asyncio

from reprise.engine.config import EngineConfig
from reprise.engine.messages import (
    Abort,
    Adopt,
    Finish,
    FinishAll,
    Head,
    ModelInfo,
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
    decode_from_engine,
)
from reprise.engine.process.child import EngineChild, to_stderr
from reprise.engine.process.loop import CLOSE_S
from reprise.engine.process.stream import EngineLost, OutputStream

__all__ = [
    "EngineClient",
    "EngineFailed",
    "EngineLost",
    "EngineState",
    "EngineTimeout",
    "EngineUnavailable",
    "OutputStream",
]

ENGINE_COMMAND = (sys.executable, "-m", "reprise.engine.process.loop")
MAX_BACKLOG = 1_000  # messages that wait for an engine that does not read
MAX_QUICK_FAILURES = 5  # most failures of an engine that was never ready; one that was ready is restarted for ever
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 60.0
OTHER_MODEL = "the model's files have changed since the server started: restart the server to serve them"
HEALTHY_S = 60.0  # an engine that was ready for that long makes earlier failures forgotten
TICK_S = 1.0
DRAIN_S = 0.2  # when we see an engine dead, its last messages may still be on their way
STOP_S = CLOSE_S + 5.0
SESSIONS_TIMEOUT_S = 30.0
MAX_QUESTIONS = 256  # most unanswered questions about sessions

log = logging.getLogger(__name__)


class EngineFailed(Exception):
    """The engine does not run and will not come back by itself."""


class EngineUnavailable(Exception):
    """The engine takes no requests right now."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineTimeout(Exception):
    """The engine runs but has not answered in time. It may still carry out the request."""


class EngineState(StrEnum):
    """The state of the engine. It goes stopped -> loading -> ready -> restarting -> ready ..., and becomes failed only
    if trying again is of no use."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class _End(NamedTuple):
    """A record of how one engine process ended."""

    reason: str  # "the engine ..."
    output: str  # the last lines it wrote
    refusal: str | None
    healthy: bool  # whether it had been ready for HEALTHY_S


class EngineClient:
    """Keeps one engine process alive and talks to it, for the app, in its event loop.

    start_timeout_s: the longest silence of an engine that loads a model. hang_timeout_s: the longest silence of an
    engine that is ready; it must be more than a second, since heartbeats are a second apart, and more than the longest
    step takes. After a longer silence the process is killed and started again. echo: called with what the engine
    process writes to its stdout and stderr.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        start_timeout_s: float,
        hang_timeout_s: float,
        command: Sequence[str] = ENGINE_COMMAND,
        echo: Callable[[str], object] = to_stderr,
    ) -> None:
        self.state = EngineState.STOPPED
        self.failure: str | None = None  # why, in state failed
        self.model: ModelInfo | None = None  # model of the last engine that was ready
        self.stats: Stats | None = None  # the last heartbeat of this engine
        self.restarts = 0
        self.on_head: Callable[[Head], object] | None = None
        """Called with every head that the engine sends (a record by which another replica can take over a session),
        ahead of the output that the head belongs to. Must not block."""
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._command = command
        self._echo = echo
        self._state_changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._child: EngineChild | None = None
        self._streams: dict[str, OutputStream] = {}
        self._questions: dict[str, asyncio.Future[SessionReply]] = {}  # request id -> its reply
        self._load_s = 5.0  # how long a start takes: a guess at first, then what the last one took
        self._started_s = math.inf  # time at which this engine was started
        self._ready_s = math.inf  # time at which it became ready
        self._backoff_s = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Spawn the engine and supervise it in the background. Returns at once. Raises RuntimeError the second time."""
        if self._supervisor is not None:
            raise RuntimeError("an EngineClient starts once")
        self._enter(EngineState.LOADING)
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def stop(self) -> None:
        """Ask the engine to leave, and kill it after STOP_S. Streams of requests that still run raise EngineLost.
        Idempotent."""
        before = self.state
        self._enter(EngineState.STOPPED)
        if self._supervisor is None:
            return
        if before is EngineState.READY:
            self._post(Shutdown())
        if before in (EngineState.READY, EngineState.STOPPED):  # what is still loading does not listen
            await asyncio.wait([self._supervisor], timeout=STOP_S)
        self._supervisor.cancel()
        await asyncio.wait([self._supervisor])

    async def wait_ready(self) -> None:
        """Wait until the engine takes requests. Raises EngineFailed if it never will (refused, failed, stopped)."""
        while self.state is not EngineState.READY:
            if self.state in (EngineState.FAILED, EngineState.STOPPED):
                raise EngineFailed(self.failure or "the engine is stopped")
            await self._state_changed.wait()

    async def submit(self, request: Submit) -> OutputStream:
        """Post a request. Returns the stream of its outputs. Raises EngineUnavailable in any state but ready,
        ValueError for a request id that is in use. Never use an id twice: outputs of an aborted request may still be on
        their way."""
        child = self._ready_child()
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        stream = OutputStream(request, abort=self.abort)
        if not stream.finished:
            self._streams[request.request_id] = stream
        child.post(request)
        return stream

    async def sessions(self, request: SessionRequest | Adopt, *, timeout_s: float = SESSIONS_TIMEOUT_S) -> SessionReply:
        """Ask the engine about sessions, or to adopt one. Raises EngineUnavailable as `submit` does, ValueError for a
        request id that is in use, EngineTimeout, and EngineLost if the engine dies meanwhile."""
        child = self._ready_child()
        if len(self._questions) >= MAX_QUESTIONS:
            raise EngineUnavailable("too many questions about sessions are open", retry_after_s=1.0)
        if request.request_id in self._questions:
            raise ValueError(f"request id {request.request_id!r} is in use")
        answer: asyncio.Future[SessionReply] = asyncio.get_running_loop().create_future()
        self._questions[request.request_id] = answer
        child.post(request)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise EngineTimeout(f"no reply within {timeout_s:g} s") from None
        finally:
            self._questions.pop(request.request_id, None)

    def _ready_child(self) -> EngineChild:
        """Return the engine process if it takes messages. Raises EngineUnavailable."""
        if self.state is not EngineState.READY or self._child is None:
            raise EngineUnavailable(f"the engine is {self.state}", retry_after_s=self._retry_after_s())
        if self._child.backlog >= MAX_BACKLOG:
            raise EngineUnavailable("the engine is not keeping up", retry_after_s=1.0)
        return self._child

    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None:
        """End one choice, keeping its first `keep_tokens` generated tokens. Its later tokens that have arrived are
        dropped."""
        stream = self._streams.get(request_id)
        if stream is None or not stream.is_open(choice):
            return  # over already
        stream.finish(choice)
        self._forget_finished(stream)
        self._post(Finish(request_id, choice, keep_tokens))

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends too. Unknown ids are ignored."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.end(lost=None)
            self._post(Abort(request_id))

    def finish_all(self) -> None:
        """End every request with finish_reason `length`; the streams get their last outputs."""
        self._post(FinishAll())

    def _post(self, message: ToEngine) -> None:
        if self._child is not None:
            self._child.post(message)

    def _enter(self, state: EngineState) -> None:
        self.state = state
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def _fail(self, message: str) -> None:
        if self.model is not None:  # else `wait_ready` raises, and its caller reports it
            log.error("the engine is given up: %s", message)
        self.failure = message
        self._enter(EngineState.FAILED)

    def _retry_after_s(self) -> float:
        match self.state:
            case EngineState.LOADING | EngineState.RESTARTING:
                return max(1.0, self._load_s + self._backoff_s)
            case _:
                return 60.0

    def _forget_finished(self, stream: OutputStream) -> None:
        if stream.finished:
            self._streams.pop(stream.request_id, None)

    async def _supervise(self) -> None:
        try:
            with zmq.asyncio.Context() as context:
                await self._keep_alive(context)
        except Exception as error:
            log.exception("the supervisor of the engine failed")
            self._fail(f"the supervisor of the engine failed: {error}")

    async def _keep_alive(self, context: zmq.asyncio.Context) -> None:
        """Run one engine after the other, with growing pauses, until `stop`. An engine that was never ready is given up
        when it refuses or fails too often. One that was ready is not: its machine has changed since (it has no memory,
        or its disk does not answer) and may change again."""
        failures = 0
        while True:
            end = await self._live(context)
            if self.state is EngineState.STOPPED:
                return
            if end.refusal is not None and (self.model is None or end.refusal == OTHER_MODEL):
                self._fail(end.refusal)
                return
            failures = 1 if end.healthy else failures + 1
            if self.model is None and failures >= MAX_QUICK_FAILURES:
                self._fail(f"the engine {end.reason}, {failures} times in a row\n{end.output}".rstrip())
                return
            self._backoff_s = min(FIRST_BACKOFF_S * 2 ** min(failures - 1, 16), MAX_BACKOFF_S)
            reason = end.reason if end.refusal is None else f"refused: {end.refusal}"
            log.error("the engine %s; the next one starts in %.1f s", reason, self._backoff_s)
            self.restarts += 1
            self._enter(EngineState.RESTARTING)
            await asyncio.sleep(self._backoff_s)

    async def _live(self, context: zmq.asyncio.Context) -> _End:
        """Run one engine process, from its start to its end, and return how it ended."""
        clock = asyncio.get_running_loop().time
        self._started_s, self._ready_s = clock(), math.inf
        try:
            child = await EngineChild.spawn(
                command=self._command, config=self._config, context=context, echo=self._echo
            )
        except (OSError, zmq.ZMQError) as error:
            return _End(reason=f"could not be started: {error}", output="", refusal=None, healthy=False)
        self._child = child
        receiver = asyncio.create_task(self._receive(child), name="engine-receiver")
        reason, refusal, healthy = "was stopped", None, False
        try:
            reason = await self._watch(child, receiver)
            healthy = clock() - self._ready_s >= HEALTHY_S
            child.kill()
            if self.state is EngineState.READY:
                self._enter(EngineState.RESTARTING)
            if self.state is not EngineState.STOPPED or self._streams:
                await asyncio.wait([receiver], timeout=DRAIN_S)
            if receiver.done() and receiver.exception() is None:
                refusal = receiver.result()
        finally:
            self._child = self.stats = None
            for stream in self._streams.values():
                stream.end(lost=f"the engine {reason} while this request ran")
            self._streams.clear()
            for answer in self._questions.values():
                if not answer.done():
                    answer.set_exception(EngineLost(f"the engine {reason} before it replied"))
            receiver.cancel()
            await child.close()
        return _End(reason=reason, output=child.tail, refusal=refusal, healthy=healthy)

    async def _watch(self, child: EngineChild, receiver: "asyncio.Task[str]") -> str:
        """Wait until the engine is dead, has refused, or is to be killed. Returns how it ended."""
        clock = asyncio.get_running_loop().time
        exited = asyncio.create_task(child.exited.wait())
        try:
            while not exited.done():
                if receiver.done():
                    return "refused" if receiver.exception() is None else "lost its connection"
                limit_s = self._hang_timeout_s if self.state is EngineState.READY else self._start_timeout_s
                silent_s = clock() - child.heard_s
                if silent_s < limit_s:
                    timeout_s = min(TICK_S, limit_s - silent_s)
                    await asyncio.wait([exited, receiver], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                    continue
                # Perhaps this process was stopped or busy: read what has come in meanwhile before judging.
                await asyncio.wait([exited], timeout=DRAIN_S)
                if clock() - child.heard_s >= limit_s and not exited.done():
                    return f"gave no sign of life for {limit_s:g} s and was killed"
            return child.describe_exit()
        finally:
            exited.cancel()

    async def _receive(self, child: EngineChild) -> str:
        """Hand out the engine's messages. Returns only when it refuses, with the reason."""
        while True:
            frame = await child.receive()
            try:
                message = decode_from_engine(frame)
                if isinstance(message, Refused):
                    return message.message
                if isinstance(message, Ready) and self._is_another_model(message.model):
                    return OTHER_MODEL
                self._handle(child, message)
            except Exception:  # one bad message must not cut the others off
                log.exception("dropped a message of %d bytes from the engine", len(frame))
            await asyncio.sleep(0)  # a frame that is there already is received without yielding: let the streams run

    def _is_another_model(self, model: ModelInfo) -> bool:
        """Return whether a restarted engine has loaded other weights than the app has a tokenizer and transcripts
        for."""
        return self.model is not None and model.fingerprint != self.model.fingerprint

    def _handle(self, child: EngineChild, message: Starting | Ready | Outputs | SessionReply | Head | Stats) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:
                        stream.push(output)
                        self._forget_finished(stream)
            case SessionReply(request_id=request_id):
                answer = self._questions.get(request_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Head():
                if self.on_head is not None:
                    self.on_head(message)
            case Stats():
                self.stats = message
            case Starting():
                pass  # any message is a sign of life, which `receive` has noted
            case Ready(model):
                if self.state in (EngineState.LOADING, EngineState.RESTARTING) and not child.exited.is_set():
                    self._ready_s = asyncio.get_running_loop().time()
                    self._load_s = self._ready_s - self._started_s
                    self.model = model
                    self._enter(EngineState.READY)
