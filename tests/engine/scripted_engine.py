"""A StepEngine without a model, and a program that serves it: `python scripted_engine.py [load script]`.

Every choice echoes the prompt for max_tokens tokens, one per step, each token plus 1000 times the choice. The session
id of a request is a script that tells the engine what to do with it.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import reprise.engine.process.loop
from reprise.engine.config import (
    CacheConfig,
    EngineConfig,
    ExperimentConfig,
    ModelConfig,
    SchedulerConfig,
    SelectorConfig,
    WeightsConfig,
)
from reprise.engine.messages import (
    Adopt,
    Head,
    ModelInfo,
    Output,
    Refused,
    SessionInfo,
    SessionReply,
    SessionRequest,
    Stats,
    Submit,
    Timings,
    TokensBySource,
)
from reprise.engine.process.loop import StepEngine
from reprise.scheduler.sequence import SamplingParams

REPORT = TokensBySource(
    prompt_tokens=3,
    history_tokens=0,
    hbm_tokens=0,
    dram_tokens=0,
    disk_tokens=0,
    truncated_tokens=0,
    shifted_tokens=0,
    miss_reasons={"new": 3},
)
TIMINGS = Timings(queue_ms=0.0, load_ms=0.0, prefill_ms=1.0, decode_ms=1.0, saved_ms=0.0)
MODEL = ModelInfo(
    name="scripted",
    path="",
    architecture="none",
    parameters=0,
    dtype="float32",
    device="cpu",
    attention_backend="none",
    max_context=1024,
    vocab_size=1000,
    eos_token_ids=(0,),
    logit_error=0.0,
    logit_tolerance=1e-3,
    exact=False,
    exactness="not asked for",
    decouplable=True,
    rope_layers=0,
    layers=0,
    kv_bytes_per_token=0,
    hbm_bytes_per_token=0,
    hbm_tokens=0,
    block_size=32,
    page_size=32,
    fingerprint="",
    warnings=(),
)


def config(model: str = "") -> EngineConfig:
    """`model` is the load script: see `build`."""
    return EngineConfig(
        model=ModelConfig(
            source=model, max_context=0, dtype="float32", tensor_parallel=1, weights="auto", exact="auto"
        ),
        cache=CacheConfig(
            mode="prefix",
            policy="lru",
            ttl_s=60.0,
            max_sessions=10,
            hbm_tokens=0,
            dram_bytes=0,
            disk_bytes=0,
            disk_dir="",
            disk_min_free_bytes=0,
            verify_rate=0.0,
            truncation="auto",
            block_scorer="oldest",
            recall=False,
            codec="raw",
            codec_budget=0.001,
            hbm_dtype="auto",
            larger_than_hbm=False,
            redis_urls=(),
            redis_bytes=0,
        ),
        scheduler=SchedulerConfig(
            policy="fcfs",
            patience=8.0,
            itl_target_s=0.0,
            max_seqs=8,
            max_queued=8,
            draft_tokens=7,
        ),
        experiment=ExperimentConfig(
            hbm_high_water=1.0,
            hbm_low_water=0.85,
            scores=False,
            window=0,
            chunked_prefill=True,
            truncation_mode="decoupled",
            truncation_ratio=0.5,
            read_buffer_layers=-1,
            sync_save=False,
            staging_bytes=0,
            dram_gbps=0.0,
            disk_gbps=0.0,
            io_deadline_s=5.0,
        ),
        device="cpu",
        threads=1,
        step_tokens=0,
        tenant_secret=b"secret",
        selector=SelectorConfig(name="none", min_context=2048, share=0.1),
        weights=WeightsConfig(offload="none", hbm_layers=0),
    )


def submit(
    request_id: str,
    *,
    script: str = "",
    token_ids: tuple[int, ...] = (5, 6, 7),
    max_tokens: int = 6,
    num_choices: int = 1,
    logprobs: int | None = None,
) -> Submit:
    sampling = SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        seed=0,
        max_tokens=max_tokens,
        min_tokens=0,
        stop_token_ids=(),
        ignore_eos=False,
        logprobs=logprobs,
    )
    return Submit(
        request_id=request_id,
        session_id=script,
        tenant="",
        cache_salt="",
        token_ids=list(token_ids),
        num_choices=num_choices,
        sampling=sampling,
    )


def session_info(session_id: str, **changes: Any) -> SessionInfo:
    info = SessionInfo(
        session_id=session_id,
        cache_salt="",
        tokens=100,
        truncated_tokens=0,
        blocks={"hbm": 3, "dram": 2},
        bytes={"hbm": 3000, "dram": 2000},
        last_used_s=1000.0,
        expires_s=2000.0,
        pinned=False,
        running=False,
    )
    return msgspec.structs.replace(info, **changes)


def output(
    request_id: str,
    choice: int,
    token_ids: list[int],
    *,
    finish_reason: str | None = None,
    first: bool = False,
    error: str | None = None,
) -> Output:
    return Output(
        request_id=request_id,
        choice=choice,
        token_ids=token_ids,
        logprobs=None,
        finish_reason=finish_reason,
        report=REPORT if first else None,
        timings=None if finish_reason is None else TIMINGS,
        error=error,
        error_code=None if error is None else "internal_error",
    )


def head(session_id: str, *, tenant: str = "", turn: int = 1, head: bytes = b"head") -> Head:
    return Head(tenant=tenant, salt="", session_id=session_id, turn=turn, redis_tokens=0, head=head)


def adopt(request_id: str, session_id: str, *, head: bytes = b"head") -> Adopt:
    return Adopt(request_id=request_id, tenant="", salt="", session_id=session_id, head=head)


class LostDevice(Exception):
    """A fault of the device after which nothing works."""


class ScriptedEngine:
    def __init__(self, *, step_s: float, closing: str = "") -> None:
        self.model = MODEL
        self.idle_calls = 0
        self.closed = False
        self.polls_to_delete = 3  # a `delete` is answered by the poll after as many
        self.heads: list[Head] = []  # returned by the next call of `take_heads`
        self._deleting: list[SessionRequest] = []
        self._closing = closing
        self._step_s = step_s
        self._running: dict[tuple[str, int], tuple[Submit, int]] = {}  # choice of a request -> tokens so far
        self._steps = 0
        self._aborted = 0
        self.progress_error: Exception | None = None
        self._finished: dict[str, int] = {}  # "request/choice" -> keep_tokens

    def accept(self, request: Submit, now: float) -> list[Output]:
        if request.session_id == "reject":
            return [output(request.request_id, 0, [], finish_reason="error", error="too long")]
        for choice in range(request.num_choices):
            self._running[request.request_id, choice] = (request, 0)
        if request.session_id == "choke":
            raise ValueError("submit choked")
        return []

    def progress(self, now: float) -> list[Output]:
        if self.progress_error is not None:
            error, self.progress_error = self.progress_error, None
            raise error
        return []

    def abort(self, request_id: str) -> None:
        self._aborted += 1
        self._running = {key: value for key, value in self._running.items() if key[0] != request_id}

    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None:
        del self._running[request_id, choice]
        self._finished[f"{request_id}/{choice}"] = keep_tokens

    def finish_all(self, now: float) -> list[Output]:
        return self._end_all("length", None)

    @staticmethod
    def is_fatal(error: Exception) -> bool:
        return isinstance(error, LostDevice)

    def fail_all(self, message: str) -> list[Output]:
        return self._end_all("error", message)

    def sessions(self, request: SessionRequest, now: float) -> list[SessionReply]:
        """The session id is a script: `choke` raises, `silent` is never answered, `exit` leaves."""
        match request.session_id:
            case "choke":
                raise ValueError("sessions choked")
            case "silent":
                return []
            case "exit":
                os._exit(7)
        if request.action == "delete":
            self._deleting.append(request)
            return []
        changes = {"pinned": request.pinned} if request.pinned is not None else {}
        return [
            SessionReply(request_id=request.request_id, sessions=[session_info(request.session_id or "s", **changes)])
        ]

    def adopt(self, request: Adopt, now: float) -> list[SessionReply]:
        """Takes over every session, and says at once that its head has changed."""
        self.heads.append(head(request.session_id, tenant=request.tenant, head=request.head))
        return [SessionReply(request_id=request.request_id, sessions=[session_info(request.session_id)])]

    def take_heads(self) -> list[Head]:
        heads, self.heads = self.heads, []
        return heads

    def poll(self, now: float) -> list[SessionReply]:
        if not self._deleting:
            return []
        self.polls_to_delete -= 1
        if self.polls_to_delete > 0:
            return []
        ready, self._deleting = self._deleting, []
        if any(request.session_id == "poll chokes" for request in ready):
            raise ValueError("poll choked")
        return [SessionReply(request_id=request.request_id, sessions=[]) for request in ready]

    def has_work(self) -> bool:
        return bool(self._running or self._deleting)

    bell: int | None = None

    def is_moving(self) -> bool:
        return False

    def step(self, now: float, before_long: Callable[[], None]) -> list[Output]:
        if any(request.session_id == "long prompt" for request, _ in self._running.values()):
            before_long()
        time.sleep(self._step_s)
        self._steps += 1
        outputs = [output("nobody", 0, [1])]
        for (request_id, choice), (request, done) in list(self._running.items()):
            match request.session_id:
                case "raise":
                    raise RuntimeError("step failed")
                case "lose device":
                    raise LostDevice
                case "no memory":
                    raise MemoryError
                case "exit":
                    print("leaving on purpose", file=sys.stderr)
                    os._exit(7)
                case "hang":
                    time.sleep(3600)
                case "say bytes":
                    os.write(2, b"caf\xc3\xa9 \xff no newline")
            token_id = request.token_ids[done % len(request.token_ids)] + 1000 * choice
            last = done + 1 == request.sampling.max_tokens
            outputs.append(
                output(request_id, choice, [token_id], first=done == 0, finish_reason="length" if last else None)
            )
            if last:
                del self._running[request_id, choice]
            else:
                self._running[request_id, choice] = (request, done + 1)
        return outputs

    def idle(self, now: float) -> None:
        self.idle_calls += 1

    def stats(self) -> Stats:
        """`miss_tokens` carries what the tests want to know and has no gauge: keep_tokens per finished choice."""
        return Stats(
            running=len(self._running),
            waiting=0,
            sessions=0,
            leases=0,
            hbm_pages_total=0,
            hbm_pages_free=0,
            hbm_pages_cached=0,
            steps=self._steps,
            step_seconds=0.0,
            prompt_tokens={},
            generated_tokens=0,
            drafted_tokens={},
            miss_tokens=self._finished,
            evicted_blocks=0,
            preemptions=0,
            aborted=self._aborted,
        )

    def close(self) -> None:
        self.closed = True
        match self._closing:
            case "hang":
                time.sleep(3600)
            case "raise":
                raise OSError("disk full")
        print("saved everything", file=sys.stderr)

    def _end_all(self, finish_reason: str, error: str | None) -> list[Output]:
        ended = [output(*key, [], finish_reason=finish_reason, error=error) for key in self._running]
        self._running.clear()
        return ended


def build(config: EngineConfig, go_on: Callable[[], None]) -> StepEngine | Refused:
    """Do what the first word of the model's name says; with a path after it, it happens until that file exists, but
    for `refuse-while`, which is while it exists."""
    script, _, path = config.model.source.partition(" ")
    if script == "refuse-while":
        return Refused("no memory for it") if Path(path).exists() else ScriptedEngine(step_s=0.002)
    if path and Path(path).exists():
        script = ""
    elif path:
        Path(path).touch()
    match script:
        case "refuse":
            return Refused("no such architecture")
        case "crash":
            raise RuntimeError("crashed while loading")
        case "hang":
            time.sleep(3600)
        case "slow":
            for _ in range(16):
                time.sleep(0.25)
                go_on()
        case "fast":
            return ScriptedEngine(step_s=0.0)
        case "hang-at-close":
            return ScriptedEngine(step_s=0.002, closing="hang")
        case "raise-at-close":
            return ScriptedEngine(step_s=0.002, closing="raise")
    return ScriptedEngine(step_s=0.002)


if __name__ == "__main__":
    reprise.engine.process.loop.CLOSE_S = 0.5
    reprise.engine.process.loop.HEARTBEAT_S = 0.2  # the tests wait for heartbeats often
    sys.exit(reprise.engine.process.loop.run(build))
